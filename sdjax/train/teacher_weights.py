"""Whose parameters the teacher scores with: those at the start of the step, their moving average, the initial ones."""

from typing import Any

import jax
import jax.numpy as jnp


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

    def current(self, params: Any, initial: Any) -> Any:
        """What scores: ``params`` are those of the student now, ``initial`` those of the reference policy."""
        return {"theta_old": params, "ema": self.average, "init": initial}[self.kind]

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
