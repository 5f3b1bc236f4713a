"""The gated delta rule as kernels for NVIDIA GPUs: over packed rows in chunks, and one token at a time.

Three kernels forwards (``delta_pallas_chunks.prepare``, the recurrence, ``output``) and three backwards. What is kept
for the derivative: the inputs, and for each chunk W, K, T, X and the state before it. Dimension suffixes as in
``sdjax.models.delta_rule``, which is the definition.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from sdjax.models import delta_pallas_chunks as chunks
from sdjax.models.delta_pallas_launch import CHUNK, DEFAULT, Tuning, block, call, check_sizes
from sdjax.models.delta_pallas_recurrence import run_backward, run_forward
from sdjax.sharding import KERNEL

_NORM_EPS = 1e-6


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _rule(q_BNCJK, k_BNCJK, v_BNCHE, g_BNCH, beta_BNCH, segment_BT, state_BHKE, tuning: Tuning):
    return _forward(q_BNCJK, k_BNCJK, v_BNCHE, g_BNCH, beta_BNCH, segment_BT, state_BHKE, tuning)[0]


def _forward(q, k, v, g, beta, segment, state, tuning):
    w, u, written, decay, inverse = chunks.prepare(k, v, g, beta, segment, tuning)
    x, before, last = run_forward(w, u, written, decay, state, tuning)
    out = chunks.output(q, k, g, segment, before, x, tuning)
    keep = functools.partial(checkpoint_name, name=KERNEL)
    out, w, written, decay, inverse, x, before = map(keep, (out, w, written, decay, inverse, x, before))
    return (out, last), (q, k, v, g, beta, segment, w, written, decay, inverse, x, before)


def _backward(tuning, saved, cotangents):
    q, k, v, g, beta, segment, w, written, decay, inverse, x, before = saved
    dout, dlast = cotangents
    dx, dbefore, dq, dk, dtotal = chunks.output_backward(q, k, g, segment, before, x, dout, tuning)
    du, after, dstate = run_backward(w, written, decay, dx, dbefore, dlast, tuning)
    dk, dv, dg, dbeta = chunks.prepare_backward(
        k, v, g, beta, segment, inverse, w, before, x, after, du, dk, dtotal, tuning
    )
    group = v.shape[3] // k.shape[3]
    if group > 1:
        # Value heads that share a key head add up.
        dq, dk = (x.reshape(*k.shape[:4], group, -1).sum(axis=4, dtype=jnp.float32).astype(x.dtype) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta, None, dstate


_rule.defvjp(_forward, _backward)


def pallas_delta_rule(
    q_BTJK: jax.Array,
    k_BTJK: jax.Array,
    v_BTHE: jax.Array,
    g_BTH: jax.Array,
    beta_BTH: jax.Array,
    segment_BT: jax.Array,
    state_BHKE: jax.Array | None = None,
    *,
    tuning: Tuning = DEFAULT,
) -> tuple[jax.Array, jax.Array]:
    """``delta_rule.chunked_delta_rule`` as kernels, with derivatives; same arguments, results and rounding rules.

    Unlike there the inputs of the recurrence and what derivatives hand over are rounded to the dtype of ``v``.

    Raises:
      ModelError: head sizes that the kernels lack.
    """
    (B, T, _, K), (H, E), dtype = q_BTJK.shape, v_BTHE.shape[2:], v_BTHE.dtype
    check_sizes(K, E, tuning.interpret)

    def to_chunks(x_BT: jax.Array) -> jax.Array:
        filled = jnp.pad(x_BT, [(0, 0), (0, -T % CHUNK)] + [(0, 0)] * (x_BT.ndim - 2))
        return filled.reshape(B, -1, CHUNK, *x_BT.shape[2:])

    # Filling tokens continue the last segment; with beta = g = 0 they leave its state alone.
    segment = jnp.pad(segment_BT.astype(jnp.int32), ((0, 0), (0, -T % CHUNK)), mode="edge")
    gates = to_chunks(g_BTH.astype(jnp.float32)), to_chunks(beta_BTH.astype(jnp.float32))
    state = jnp.zeros((B, H, K, E), jnp.float32) if state_BHKE is None else state_BHKE
    q, k, v = (to_chunks(x.astype(dtype)) for x in (q_BTJK, k_BTJK, v_BTHE))
    rule: Any = _rule  # the type of a custom_vjp says nothing of its results
    out, last = rule(q, k, v, *gates, segment, state, tuning)
    return out.reshape(B, -1, H, E)[:, :T], last


def _step_kernel(q, k, v, g, beta, state, out, state_out):
    """Refs: q, k [K]; v, out [V]; g, beta [H]; state, state_out [K, V]."""
    head = pl.program_id(1)

    def unit(ref):
        x_K = ref[...].astype(jnp.float32)
        return x_K * jax.lax.rsqrt(jnp.sum(x_K * x_K) + _NORM_EPS)

    q_K, k_K = unit(q) * q.shape[0] ** -0.5, unit(k)
    state_KV = state[...] * jnp.exp(g[head])
    known_V = jnp.sum(state_KV * k_K[:, None], axis=0)
    delta_V = (v[...].astype(jnp.float32) - known_V) * beta[head]
    state_KV = state_KV + k_K[:, None] * delta_V[None]
    out[...] = jnp.sum(state_KV * q_K[:, None], axis=0)
    state_out[...] = state_KV


def pallas_delta_step(
    q_SJK: jax.Array,
    k_SJK: jax.Array,
    v_SHE: jax.Array,
    g_SH: jax.Array,
    beta_SH: jax.Array,
    state_SHKE: jax.Array,
    *,
    tuning: Tuning = DEFAULT,
) -> tuple[jax.Array, jax.Array]:
    """``delta_rule.delta_step`` as a kernel that reads the state once and writes it once, in place where the caller
    donates it; same arguments, results and promise to rows with beta = g = 0.

    Raises:
      ModelError: head sizes that the kernel lacks.
    """
    (S, H, K, E), J, launch = state_SHKE.shape, q_SJK.shape[1], tuning.step
    check_sizes(K, E, tuning.interpret)
    V, group = block(launch.columns, E), H // J
    key = pl.BlockSpec((None, None, K), lambda s, h, v: (s, h // group, 0))
    value = pl.BlockSpec((None, None, V), lambda s, h, v: (s, h, v))
    gate = pl.BlockSpec((None, H), lambda s, h, v: (s, 0))
    state = pl.BlockSpec((None, None, K, V), lambda s, h, v: (s, h, 0, v))
    out, after = call(
        _step_kernel,
        "delta_step",
        launch,
        tuning.interpret,
        grid=(S, H, E // V),
        inputs=[
            (q_SJK, key),
            (k_SJK, key),
            (v_SHE, value),
            (g_SH.astype(jnp.float32), gate),
            (beta_SH.astype(jnp.float32), gate),
            (state_SHKE, state),
        ],
        outputs=[
            (jax.ShapeDtypeStruct(v_SHE.shape, jnp.float32), value),
            (jax.ShapeDtypeStruct(state_SHKE.shape, jnp.float32), state),
        ],
        aliases={5: 1},
    )
    return out, after
