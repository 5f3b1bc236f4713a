"""Attention of one new token per row over its cache, as a kernel: each row is read up to its own position.

The new key and value are written into the cache by the same kernel, in place. One program handles one row and one
key/value head with its group of query heads; softmax runs over blocks of keys, in float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from sdjax.errors import ModelError

BLOCK = 64  # keys read at a time
_BLOCK_BYTES = 2**15  # of keys at a time: with values, and the next of both, 128 KiB of shared memory
_MIN_GROUP = 16  # smallest side of a matrix product on tensor cores; a smaller group of query heads is filled up


def _kernel(q, new_k, new_v, position, active, k, v, out, k_out, v_out, *, block: int):
    """Refs: q [G, K] (scaled), new_k and new_v [K], position and active [1], k and v [L, K] (k_out, v_out alias)."""
    length = jnp.where(active[0] > 0, position[0], 0)
    q_GK, own_k, own_v = q[...], new_k[...], new_v[...]
    own_G = jnp.sum(q_GK.astype(jnp.float32) * own_k.astype(jnp.float32)[None], axis=1)
    total_GK = jnp.broadcast_to(own_v.astype(jnp.float32)[None], q_GK.shape)

    def step(i, carry):
        top_G, weight_G, total_GK = carry
        span = pl.ds(i * block, block)
        seen = i * block + jnp.arange(block) < length
        k_BK = triton.load(k.at[span, :], mask=seen[:, None], other=0)
        v_BK = triton.load(v.at[span, :], mask=seen[:, None], other=0)
        score_GB = jnp.where(seen[None], triton.dot(q_GK, k_BK.T), -jnp.inf)
        new_top_G = jnp.maximum(top_G, jnp.max(score_GB, axis=1))
        shrink_G = jnp.exp(top_G - new_top_G)
        share_GB = jnp.exp(score_GB - new_top_G[:, None])
        total_GK = total_GK * shrink_G[:, None] + triton.dot(share_GB.astype(v_BK.dtype), v_BK)
        return new_top_G, weight_G * shrink_G + jnp.sum(share_GB, axis=1), total_GK

    # The new token itself is the first key, so that the maximum is finite from the start.
    start = (own_G, jnp.ones_like(own_G), total_GK)
    _, weight_G, total_GK = jax.lax.fori_loop(0, pl.cdiv(length, block), step, start)
    out[...] = (total_GK / weight_G[:, None]).astype(out.dtype)
    # No key at this place was read above: it is beyond ``length``.
    place, written = pl.ds(position[0], 1), (active[0] > 0) & (position[0] < k.shape[0])
    triton.store(k_out.at[place, :], own_k[None], mask=jnp.broadcast_to(written, (1, own_k.shape[0])))
    triton.store(v_out.at[place, :], own_v[None], mask=jnp.broadcast_to(written, (1, own_v.shape[0])))


@functools.partial(jax.jit, static_argnames=("block", "warps", "stages", "interpret"))
def decode_attention(
    q_S1HK: jax.Array,
    new_k_S1JK: jax.Array,
    new_v_S1JK: jax.Array,
    k_RLJK: jax.Array,
    v_RLJK: jax.Array,
    position_S: jax.Array,
    active_S: jax.Array,
    *,
    block: int = BLOCK,
    warps: int = 4,
    stages: int = 2,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``sdjax.models.attention.decode_attention``. Raises ModelError for heads that the kernel lacks."""
    S, _, H, K = q_S1HK.shape
    if K & (K - 1) and not interpret:
        raise ModelError(
            f"the kernel of decoding takes heads of 16, 32, 64, ... channels, not {K}.", 'use model.attention = "xla".'
        )
    length, J = k_RLJK.shape[1:3]
    group = max(_MIN_GROUP, pl.next_power_of_2(H // J))
    dtype = k_RLJK.dtype
    block = min(block, max(_MIN_GROUP, _BLOCK_BYTES // (K * dtype.itemsize)))
    q_SJGK = (q_S1HK[:, 0] * (K**-0.5)).astype(dtype).reshape(S, J, H // J, K)
    q_SJGK = jnp.pad(q_SJGK, ((0, 0), (0, 0), (0, group - H // J), (0, 0)))
    new_k_SJK, new_v_SJK = new_k_S1JK[:, 0].astype(dtype), new_v_S1JK[:, 0].astype(dtype)

    queries = pl.BlockSpec((None, None, group, K), lambda s, j: (s, j, 0, 0))
    one = pl.BlockSpec((None, None, K), lambda s, j: (s, j, 0))
    scalar = pl.BlockSpec((1,), lambda s, j: (s,))
    cache = pl.BlockSpec((None, length, None, K), lambda s, j: (s, 0, j, 0))
    function: Any = pl.pallas_call(
        functools.partial(_kernel, block=block),
        grid=(S, J),
        in_specs=[queries, one, one, scalar, scalar, cache, cache],
        out_specs=[queries, cache, cache],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q_SJGK, k_RLJK, v_RLJK)],
        input_output_aliases={5: 1, 6: 2},
        interpret=interpret,
        name="decode_attention",
        compiler_params=None if interpret else triton.CompilerParams(num_warps=warps, num_stages=stages),
    )
    out_SJGK, k_RLJK, v_RLJK = function(
        q_SJGK, new_k_SJK, new_v_SJK, position_S.astype(jnp.int32), active_S.astype(jnp.int32), k_RLJK, v_RLJK
    )
    out_S1HK = out_SJGK[:, :, : H // J].reshape(S, 1, H, K).astype(q_S1HK.dtype)
    return out_S1HK, k_RLJK, v_RLJK
