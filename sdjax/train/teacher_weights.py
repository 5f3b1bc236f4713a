"""Whose parameters the teacher scores with: those at the start of the step, their moving average, the initial ones."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from sdjax import sharding


class Reference:
    """The initial parameters: the reference policy, and the frozen teacher of the kind ``init``.

    memory: where they wait. In host memory they cost the device nothing but the time to move them for each pass.
    """

    def __init__(self, params: Any, memory: Literal["device", "host"]):
        self._memory: Literal["device", "host"] = memory
        self.set(params)

    def set(self, params: Any) -> None:
        self._waiting = params if self._memory == "device" else sharding.to_memory(params, "host")

    def on_device(self) -> Any:
        """The parameters to compute with; from host memory a copy, which is to be dropped after use."""
        return self._waiting if self._memory == "device" else sharding.to_memory(self._waiting, "device")


class TeacherWeights:
    """kind: theta_old, ema or init. The average is phi <- decay phi + (1 - decay) theta, once per global step
    (methods.md, section 4); it is part of the checkpoints."""

    def __init__(self, kind: str, decay: float):
        self.kind, self.decay = kind, decay
        self.average: Any = None

    def start(self, params: Any) -> None:
        """Begins with the initial parameters."""
        if self.kind == "ema":
            self.average = _copy(params)

    def current(self, params: Any, reference: Reference) -> Any:
        """What scores: ``params`` are those of the student now."""
        return reference.on_device() if self.kind == "init" else {"theta_old": params, "ema": self.average}[self.kind]

    def update(self, params: Any) -> None:
        """Once per global step, after its last update."""
        if self.kind == "ema":
            self.average = _move(self.average, params, self.decay)

    def join(self, state: dict[str, Any]) -> dict[str, Any]:
        """The training state as it is saved."""
        return state if self.average is None else {**state, "ema": self.average}

    def split(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The training state without the average, which is taken over."""
        self.average = saved.get("ema")
        return {name: value for name, value in saved.items() if name != "ema"}


@jax.jit
def _copy(params: Any) -> Any:
    # In float32, because steps of 5 % of a small difference vanish in bfloat16.
    return jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)


@jax.jit
def _move(average: Any, params: Any, decay: float) -> Any:
    return jax.tree.map(lambda a, p: decay * a + (1 - decay) * p.astype(a.dtype), average, params)
