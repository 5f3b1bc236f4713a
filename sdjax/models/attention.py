"""Grouped-query attention in the forms a decoder needs: over packed rows, behind a prefix, and over a cache.

There are two implementations. ``"xla"`` runs everywhere and is the oracle: float32 scores and softmax, queries in
chunks, so that score memory is linear in the row length and a chunk reads no key after its end. ``"cudnn"`` (Hopper,
bfloat16) takes cuDNN's ragged layout for packed rows, which skips the keys of other segments (``sdjax.models.cudnn``),
and a kernel of ours for decoding, which reads no position that a row has not reached (``sdjax.models.decode_kernel``).
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from sdjax.models import cudnn, decode_kernel
from sdjax.sharding import over_batch_and_heads

QUERY_CHUNK = 512
# Axes of arguments and results for ``sharding.over_batch_and_heads``.
PACKED_AXES = (["B-H-"] * 3 + ["B-"], ["B-H-"])
PREFIXED_AXES = (["B-H-"] * 3 + ["B-"] + ["B-H-"] * 2 + ["B"], ["B-H-"])


def _attend(q_BTHK: jax.Array, k_BSJK: jax.Array, v_BSJK: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """Softmax attention of H query heads over J key/value heads (H a multiple of J); every query must see a key."""
    B, T, H, K = q_BTHK.shape
    J = k_BSJK.shape[2]
    precision = jax.lax.Precision.HIGHEST if q_BTHK.dtype == jnp.float32 else None
    q = (q_BTHK * (K**-0.5)).astype(k_BSJK.dtype).reshape(B, T, J, H // J, K)
    score = jnp.einsum("btjgk,bsjk->bjgts", q, k_BSJK, precision=precision, preferred_element_type=jnp.float32)
    score = jnp.where(mask_BTS[:, None, None], score, jnp.finfo(jnp.float32).min)
    prob = jax.nn.softmax(score, axis=-1).astype(v_BSJK.dtype)
    out = jnp.einsum("bjgts,bsjk->btjgk", prob, v_BSJK, precision=precision, preferred_element_type=jnp.float32)
    return out.astype(q_BTHK.dtype).reshape(B, T, H, K)


def _attend_one(q_S1HK: jax.Array, k_SLJK: jax.Array, v_SLJK: jax.Array, mask_S1L: jax.Array) -> jax.Array:
    """``_attend`` for a single query per row, the case of decoding.

    Each query head is written into its own key/value head's place of a zero vector over all of them. That is J times
    the arithmetic of a step that waits for memory anyway, and the cache is read as it lies, without a transposed copy.
    """
    S, _, H, K = q_S1HK.shape
    L, J = k_SLJK.shape[1:3]
    precision = jax.lax.Precision.HIGHEST if q_S1HK.dtype == jnp.float32 else None
    own_HJ1 = (jnp.arange(H)[:, None] // (H // J) == jnp.arange(J))[..., None]
    q_SHJK = jnp.where(own_HJ1, (q_S1HK[:, 0] * (K**-0.5)).astype(k_SLJK.dtype)[:, :, None], 0)
    dot = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    score_SHL = dot("shx,slx->shl", q_SHJK.reshape(S, H, J * K), k_SLJK.reshape(S, L, J * K))
    score_SHL = jnp.where(mask_S1L, score_SHL, jnp.finfo(jnp.float32).min)
    prob_SHL = jax.nn.softmax(score_SHL, axis=-1).astype(v_SLJK.dtype)
    out_SHJK = dot("shl,slx->shx", prob_SHL, v_SLJK.reshape(S, L, J * K)).reshape(S, H, J, K)
    return jnp.where(own_HJ1, out_SHJK, 0).sum(axis=2)[:, None].astype(q_S1HK.dtype)


def _chunks(total: int) -> list[tuple[int, int]]:
    return [(i, min(i + QUERY_CHUNK, total)) for i in range(0, total, QUERY_CHUNK)]


def packed_attention(
    q_BTHK: jax.Array,
    k_BTJK: jax.Array,
    v_BTJK: jax.Array,
    segment_BT: jax.Array,
    *,
    implementation: str = "xla",
    mesh: Mesh | None = None,
) -> jax.Array:
    """Causal attention inside equal segments of packed rows.

    q_BTHK: [B, T, heads, head_dim]; k_BTJK, v_BTJK: [B, T, kv_heads, head_dim]; segment_BT: int. A segment must lie in
    one piece, in order; with ``"cudnn"`` at most ``cudnn.MAX_SEGMENTS`` of them in a row, padding included. mesh: the
    devices that share the rows and heads, for ``"cudnn"``. Returns [B, T, heads, head_dim].
    """
    if implementation == "cudnn":
        kernel = over_batch_and_heads(cudnn.packed_attention, mesh, *PACKED_AXES)
        return kernel(q_BTHK, k_BTJK, v_BTJK, segment_BT)
    empty = k_BTJK[:, :0]
    return _packed_xla(q_BTHK, k_BTJK, v_BTJK, segment_BT, empty, empty, jnp.zeros(len(empty), jnp.int32))


def prefixed_attention(
    q_BTHK: jax.Array,
    k_BTJK: jax.Array,
    v_BTJK: jax.Array,
    segment_BT: jax.Array,
    k_BPJK: jax.Array,
    v_BPJK: jax.Array,
    length_B: jax.Array,
    *,
    implementation: str = "xla",
    mesh: Mesh | None = None,
) -> jax.Array:
    """``packed_attention`` whose tokens also attend to the first ``length_B`` (at least 1) keys of their row's prefix.

    k_BPJK, v_BPJK: [B, P, kv_heads, head_dim]. With ``"cudnn"`` there is no gradient.
    """
    k_BPJK, v_BPJK = k_BPJK.astype(k_BTJK.dtype), v_BPJK.astype(v_BTJK.dtype)
    if implementation == "cudnn":
        kernel = over_batch_and_heads(cudnn.prefixed_attention, mesh, *PREFIXED_AXES)
        return kernel(q_BTHK, k_BTJK, v_BTJK, segment_BT, k_BPJK, v_BPJK, length_B)
    return _packed_xla(q_BTHK, k_BTJK, v_BTJK, segment_BT, k_BPJK, v_BPJK, length_B)


def _packed_xla(q_BTHK, k_BTJK, v_BTJK, segment_BT, k_BPJK, v_BPJK, length_B) -> jax.Array:
    chunks = _chunks(q_BTHK.shape[1])
    before_BP = jnp.arange(k_BPJK.shape[1])[None] < length_B[:, None]

    def chunk(begin: int, end: int, q, k, v, segment):
        causal = jnp.arange(end)[None, :] <= jnp.arange(begin, end)[:, None]
        mask = causal[None] & (segment[:, begin:end, None] == segment[:, None, :end])
        if k_BPJK.shape[1]:
            seen = jnp.broadcast_to(before_BP[:, None], (len(mask), end - begin, before_BP.shape[1]))
            mask = jnp.concatenate([seen, mask], axis=2)
            k, v = (jnp.concatenate([p, x[:, :end]], axis=1) for p, x in ((k_BPJK, k), (v_BPJK, v)))
            return _attend(q[:, begin:end], k, v, mask)
        return _attend(q[:, begin:end], k[:, :end], v[:, :end], mask)

    outs = []
    for begin, end in chunks:
        run = functools.partial(chunk, begin, end)
        # Without this the backward pass would keep the probabilities of every chunk of every layer.
        run = jax.checkpoint(run) if len(chunks) > 1 else run
        outs.append(run(q_BTHK, k_BTJK, v_BTJK, segment_BT))
    return jnp.concatenate(outs, axis=1) if len(outs) > 1 else outs[0]


def decode_attention(
    q_S1HK: jax.Array,
    new_k_S1JK: jax.Array,
    new_v_S1JK: jax.Array,
    k_RLJK: jax.Array,
    v_RLJK: jax.Array,
    position_S: jax.Array,
    active_S: jax.Array,
    *,
    context: int | None = None,
    implementation: str = "xla",
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Writes one new key and value of each of the first S rows into the cache, and attends up to them.

    k_RLJK, v_RLJK: cache of R >= S rows and L positions. A row that is not active, and a position past the end, write
    nothing. context: static bound on ``position + 1``. Returns (outputs [S, 1, H, K], k, v).
    """
    if implementation == "cudnn":
        row = "B---"  # a cache is never divided by heads
        kernel = over_batch_and_heads(decode_kernel.decode_attention, mesh, [row] * 5 + ["B"] * 2, [row] * 3)
        return kernel(q_S1HK, new_k_S1JK, new_v_S1JK, k_RLJK, v_RLJK, position_S, active_S)
    rows, length = len(position_S), k_RLJK.shape[1]
    # The scatter drops an index past the end.
    place = (jnp.arange(rows), jnp.where(active_S, position_S, length))
    k_RLJK = k_RLJK.at[place].set(new_k_S1JK[:, 0].astype(k_RLJK.dtype), mode="drop")
    v_RLJK = v_RLJK.at[place].set(new_v_S1JK[:, 0].astype(v_RLJK.dtype), mode="drop")
    k, v = k_RLJK[:rows, :context], v_RLJK[:rows, :context]
    o = _attend_one(q_S1HK, k, v, jnp.arange(k.shape[1])[None, None] <= position_S[:, None, None])
    return o, k_RLJK, v_RLJK
