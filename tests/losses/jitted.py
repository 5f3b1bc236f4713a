"""`losses`, jitted: one compilation per kernel and shape costs less than one per operation."""

import inspect
from types import SimpleNamespace
from typing import Any

import jax

from sdjax import losses as _losses

_STATIC = {
    *("adaptive", "calibration", "gate", "gate_norm", "granularity", "norm_std", "rho", "rows", "stats", "window"),
}


def _jit(function):
    static = sorted(_STATIC & inspect.signature(function).parameters.keys())
    return jax.jit(function, static_argnames=static)


losses: Any = SimpleNamespace(
    **{name: _jit(getattr(_losses, name)) for name in _losses.__all__ if inspect.isfunction(getattr(_losses, name))}
)
