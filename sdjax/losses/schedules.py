"""Schedules of the methods: plain functions of the global step, which counts from 1 and may be traced."""

import jax
import jax.numpy as jnp


def rlsd_lam(step, *, start: float = 0.5, warmdown: int = 100) -> jax.Array:
    """RLSD's share lam = start (1 - step / warmdown), 0 from step `warmdown` on [off, methods 6.1]."""
    share = jnp.asarray(step, jnp.result_type(float)) / warmdown
    return start * jnp.maximum(1 - share, 0)


def adrs_eta(step, *, eta: float = 0.02, first: int = 21, last: int = 70) -> jax.Array:
    """ADRS's strength eta_t: eta in the steps first..last (inclusive), else 0 [off, methods 6.5]."""
    step = jnp.asarray(step)
    return jnp.where((step >= first) & (step <= last), jnp.asarray(eta, jnp.result_type(float)), 0)
