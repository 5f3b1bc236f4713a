"""The implementations of the gated delta rule by name: the place for device-specific kernels.

The name is part of the model, chosen by its maker, so what runs is never a silent fallback. ``"xla"`` runs everywhere;
it is the CPU's and the oracle of all others. ``"pallas"`` are kernels for NVIDIA GPUs, ``"pallas_recurrence"`` is XLA
with only the recurrence over chunks as a kernel; with ``_interpret`` behind the name they run on a CPU, for tests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from sdjax.errors import ConfigError, ModelError
from sdjax.models.conv_pallas import pallas_conv
from sdjax.models.delta_pallas import pallas_delta_rule, pallas_delta_step
from sdjax.models.delta_pallas_launch import Tuning
from sdjax.models.delta_pallas_recurrence import pallas_recurrence
from sdjax.models.delta_rule import associative_recurrence, chunked_delta_rule, delta_step
from sdjax.models.short_conv import packed_conv
from sdjax.sharding import over_batch_and_heads


@dataclass(frozen=True)
class DeltaKernels:
    """rule: packed rows, ``delta_rule.chunked_delta_rule``, differentiable in all float arguments. step: one token of
    each row, ``delta_rule.delta_step``, never differentiated. conv: the convolutions before the rule over packed rows,
    ``short_conv.packed_conv``, differentiable. All take their arguments by position."""

    rule: Callable[..., tuple[jax.Array, jax.Array]]
    step: Callable[..., tuple[jax.Array, jax.Array]]
    conv: Callable[..., jax.Array]


_XLA = {
    "xla": DeltaKernels(chunked_delta_rule, delta_step, packed_conv),
    "xla_associative": DeltaKernels(
        partial(chunked_delta_rule, recurrence=associative_recurrence), delta_step, packed_conv
    ),
}


def pallas_kernels(tuning: Tuning, *, only_recurrence: bool = False) -> DeltaKernels:
    """Returns the kernels with other launches than the default."""
    rule, conv = partial(pallas_delta_rule, tuning=tuning), partial(pallas_conv, tuning=tuning)
    if only_recurrence:
        rule, conv = partial(chunked_delta_rule, recurrence=partial(pallas_recurrence, tuning=tuning)), packed_conv
    return DeltaKernels(rule, partial(pallas_delta_step, tuning=tuning), conv)


_PALLAS = {
    name + suffix: pallas_kernels(Tuning(interpret=bool(suffix)), only_recurrence=only_recurrence)
    for name, only_recurrence in (("pallas", False), ("pallas_recurrence", True))
    for suffix in ("", "_interpret")
}


def delta_kernels(name: str, mesh: Mesh | None = None) -> DeltaKernels:
    """Returns the implementation ``name``, divided over the mesh where the compiler cannot do that itself.

    Raises:
      ModelError: no such implementation; names those that exist.
    """
    if name in _XLA:
        return _XLA[name]
    if name not in _PALLAS:
        raise ModelError(f"there is no delta rule {name!r}.", f"use one of {', '.join(sorted(_XLA | _PALLAS))}.")
    kernels = _PALLAS[name]
    return DeltaKernels(
        over_batch_and_heads(
            kernels.rule, mesh, ("B-H-", "B-H-", "B-H-", "B-H", "B-H", "B-", "BH--"), ("B-H-", "BH--")
        ),
        over_batch_and_heads(kernels.step, mesh, ("BH-", "BH-", "BH-", "BH", "BH", "BH--"), ("BH-", "BH--")),
        over_batch_and_heads(kernels.conv, mesh, ("B-H", "-H", "B-"), ("B-H",)),
    )


def resolve(delta_rule: str, compute_dtype: str) -> str:
    """Which implementation runs: ``"auto"`` is the Pallas kernels where they are faster, else XLA.

    Raises:
      ConfigError: kernels were asked for where they cannot run.
    """
    backend = jax.default_backend()
    if delta_rule in ("pallas", "pallas_recurrence") and backend != "gpu":
        raise ConfigError(
            f"model.delta_rule = {delta_rule!r}, but the backend is {backend}.",
            'use model.delta_rule = "auto" or "xla".',
        )
    if delta_rule != "auto":
        return delta_rule
    if backend != "gpu" or jnp.dtype(compute_dtype) != jnp.bfloat16:
        return "xla"
    hopper = float(getattr(jax.local_devices()[0], "compute_capability", "0")) >= 9.0
    return "pallas" if hopper else "xla"
