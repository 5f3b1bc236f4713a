"""The implementations of the gated delta rule by name: the place for device-specific kernels.

The name is part of the model, chosen by its maker, so what runs is never a silent fallback. ``"xla"`` runs everywhere;
it is the CPU's and the oracle of all others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax

from sdjax.errors import ModelError
from sdjax.models.delta_rule import associative_recurrence, chunked_delta_rule, delta_step


@dataclass(frozen=True)
class DeltaKernels:
    """rule: packed rows, ``delta_rule.chunked_delta_rule``, differentiable in all float arguments. step: one token of
    each row, ``delta_rule.delta_step``, never differentiated. Both take their arguments by position."""

    rule: Callable[..., tuple[jax.Array, jax.Array]]
    step: Callable[..., tuple[jax.Array, jax.Array]]


_KERNELS = {
    "xla": DeltaKernels(chunked_delta_rule, delta_step),
    "xla_associative": DeltaKernels(partial(chunked_delta_rule, recurrence=associative_recurrence), delta_step),
}


def delta_kernels(name: str) -> DeltaKernels:
    """Returns the implementation ``name``; raises ModelError naming those that exist."""
    if name not in _KERNELS:
        raise ModelError(f"there is no delta rule {name!r}.", f"use one of {', '.join(sorted(_KERNELS))}.")
    return _KERNELS[name]
