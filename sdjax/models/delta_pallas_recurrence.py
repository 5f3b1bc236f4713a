"""The state of the gated delta rule from chunk to chunk, as one kernel that serves both directions.

A program keeps the state of one head and a few value columns in registers and walks over the chunks. Forwards it is
``delta_rule.scan_recurrence``: X = U - W S, S <- decay S + K^T X. The derivative is the same walk from the last chunk
to the first, with W and K exchanged, other signs and one more term:

    dU = dX + K G,   G <- decay G - W^T dU + dS      (G: cotangent of the state after the chunk)

Dimension suffixes as in ``sdjax.models.delta_rule``.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from sdjax.models.delta_pallas_launch import DEFAULT, Tuning, block, call, check_sizes


def _forward_kernel(w, u, k, decay, state, x_out, before_out, last_out, *, dot):
    """Refs: w, k [N, C, K]; u, x_out [N, C, V]; decay [N]; state, last_out [K, V]; before_out [N, K, V]."""

    def chunk(n, state_KV):
        before_KV = state_KV.astype(w.dtype)
        before_out[n] = before_KV
        x_CV = (u[n].astype(jnp.float32) - dot(w[n], before_KV)).astype(w.dtype)
        x_out[n] = x_CV
        return state_KV * decay[n] + dot(k[n].T, x_CV)

    last_out[...] = jax.lax.fori_loop(0, w.shape[0], chunk, state[...])


def _backward_kernel(k, dx, w, decay, dlast, dbefore, du_out, after_out, dstate_out, *, dot):
    """Refs like those of the forward kernel; dbefore: cotangent of the states before the chunks [N, K, V]."""
    chunks = k.shape[0]

    def chunk(i, after_KV):
        n = chunks - 1 - i
        rounded_KV = after_KV.astype(k.dtype)
        after_out[n] = rounded_KV
        du_CV = (dx[n].astype(jnp.float32) + dot(k[n], rounded_KV)).astype(k.dtype)
        du_out[n] = du_CV
        return after_KV * decay[n] - dot(w[n].T, du_CV) + dbefore[n].astype(jnp.float32)

    dstate_out[...] = jax.lax.fori_loop(0, chunks, chunk, dlast[...])


def _walk(kernel, name, launch, tuning, a, b, c, decay, state, *more):
    """a, c: [B, H, N, C, K]; b: [B, H, N, C, E]; more: [B, H, N, K, E]."""
    (B, H, N, C, K), E, dtype = a.shape, b.shape[-1], a.dtype
    V = block(launch.columns, E)

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda v, h, b: (b, h) + (0,) * len(shape))

    def part(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape, V), lambda v, h, b: (b, h) + (0,) * len(shape) + (v,))

    return call(
        functools.partial(kernel, dot=tuning.dot),
        name,
        launch,
        tuning.interpret,
        grid=(E // V, H, B),
        inputs=[
            (a, whole(N, C, K)),
            (b, part(N, C)),
            (c, whole(N, C, K)),
            (decay, whole(N)),
            (state, part(K)),
            *((x, part(N, K)) for x in more),
        ],
        outputs=[
            (jax.ShapeDtypeStruct((B, H, N, C, E), dtype), part(N, C)),
            (jax.ShapeDtypeStruct((B, H, N, K, E), dtype), part(N, K)),
            (jax.ShapeDtypeStruct((B, H, K, E), jnp.float32), part(K)),
        ],
    )


def run_forward(w, u, k, decay, state, tuning: Tuning) -> list[jax.Array]:
    """Returns X, the states before the chunks and the last state: see ``delta_rule.scan_recurrence``."""
    return _walk(_forward_kernel, "delta_recurrence", tuning.recurrence, tuning, w, u.astype(w.dtype), k, decay, state)


def run_backward(w, k, decay, dx, dbefore, dlast, tuning: Tuning) -> list[jax.Array]:
    """Returns dU, the cotangents of the states after the chunks (both in the dtype of ``w``) and that of the first
    state (float32)."""
    name = "delta_recurrence_backward"
    return _walk(_backward_kernel, name, tuning.recurrence_backward, tuning, k, dx, w, decay, dlast, dbefore)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _recurrence(w, u, k, decay, state, tuning: Tuning):
    return tuple(run_forward(w, u, k, decay, state, tuning))


def _recurrence_forward(w, u, k, decay, state, tuning):
    x, before, last = run_forward(w, u, k, decay, state, tuning)
    # An empty array remembers the dtype of u.
    return (x, before, last), (w, k, decay, x, before, jnp.zeros((), u.dtype))


def _recurrence_backward(tuning, saved, cotangents):
    w, k, decay, x, before, u = saved
    dx, dbefore, dlast = cotangents
    du, after, dstate = run_backward(w, k, decay, dx, dbefore, dlast, tuning)
    product = functools.partial(
        jnp.einsum,
        preferred_element_type=jnp.float32,
        precision=jax.lax.Precision.HIGHEST if w.dtype == jnp.float32 else None,
    )
    dw = -product("bhnce,bhnke->bhnck", du, before).astype(w.dtype)
    dk = product("bhnce,bhnke->bhnck", x, after).astype(w.dtype)
    ddecay = jnp.sum(after.astype(jnp.float32) * before.astype(jnp.float32), axis=(-2, -1))
    return dw, du.astype(u.dtype), dk, ddecay, dstate


_recurrence.defvjp(_recurrence_forward, _recurrence_backward)


def pallas_recurrence(w, u, k, decay, state, *, tuning: Tuning = DEFAULT) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``delta_rule.scan_recurrence`` as a kernel, with derivatives. Raises ModelError for head sizes that it lacks."""
    check_sizes(w.shape[-1], u.shape[-1], tuning.interpret)
    return _recurrence(w, u, k, decay, state, tuning)
