"""The gated delta rule in plain XLA: over packed rows in chunks, and one token at a time.

Each value head keeps a state S [key_dim, value_dim] and does with every token, for decay ``e^g`` and strength ``beta``:

    S <- e^g S;   d = beta (v - S^T k);   S <- S + k d^T;   o = S^T q

Inside a chunk this is a triangular system; between chunks only S is carried ("Gated Delta Networks", arXiv 2412.06464;
"Parallelizing Linear Transformers with the Delta Rule", arXiv 2406.06484). Dimension suffixes: ``_H`` value heads,
``_J`` key heads (H a multiple of J), ``_K`` key size, ``_E`` value size, ``_N`` chunks, ``_C`` tokens of a chunk.
Gates, decays, the inverse and the state are float32; other operands keep the dtype of ``v`` and accumulate in float32.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK = 64
_NORM_EPS = 1e-6

# (W, U, K, decay, state) -> (values, states before each chunk, last state); see ``scan_recurrence``.
Recurrence = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Product with a float32 result. float32 operands are not rounded, as in ``dense.matmul``."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b.astype(a.dtype), precision=precision, preferred_element_type=jnp.float32)


def _unit(x_XK: jax.Array) -> jax.Array:
    """Each vector divided by its length, in float32."""
    x = x_XK.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _NORM_EPS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def unit_lower_inverse(a_XCC: jax.Array, precision: jax.lax.Precision | None) -> jax.Array:
    """(I + A)^-1 for strictly lower triangular float32 ``A``; C a power of two.

    Inverts blocks of 2, 4, 8, ... rows, each from its two halves. That is as stable as forward substitution and made of
    products only; the shorter product (I - A)(I + A^2)(I + A^4)... cancels to garbage for correlated keys.
    """
    size = a_XCC.shape[-1]
    row, column = jnp.arange(size)[:, None], jnp.arange(size)[None]
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=a_XCC.dtype), a_XCC.shape)
    half = 1
    while half < size:
        below = (row // (2 * half) == column // (2 * half)) & (row // half != column // half)
        step = jnp.matmul(jnp.where(below, a_XCC, 0.0), inverse, precision=precision)
        inverse = inverse - jnp.matmul(inverse, step, precision=precision)
        half *= 2
    return inverse


def _inverse_forward(a_XCC, precision):
    inverse = unit_lower_inverse(a_XCC, precision)
    return inverse, inverse


def _inverse_backward(precision, inverse, cotangent):
    transposed = jnp.swapaxes(inverse, -1, -2)
    inner = jnp.matmul(cotangent, transposed, precision=precision)
    return (jnp.tril(-jnp.matmul(transposed, inner, precision=precision), -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


def scan_recurrence(w, u, k, decay, state) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Carries the state from chunk to chunk: X = U - W S, S <- decay S + K^T X.

    w, k: [B, H, N, C, K]; u: [B, H, N, C, E]; decay: [B, H, N]; state: [B, H, K, E], float32.
    Returns X [B, H, N, C, E], S before each chunk [B, H, N, K, E] (both in the dtype of ``w``) and the last S.
    """

    def step(carried, chunk):
        w_c, u_c, k_c, decay_c = chunk
        before = carried.astype(w.dtype)
        x = (u_c - _dot("bhck,bhke->bhce", w_c, before)).astype(w.dtype)
        carried = decay_c[..., None, None] * carried + _dot("bhck,bhce->bhke", k_c, x)
        return carried, (x, before)

    chunks = tuple(jnp.moveaxis(array, 2, 0) for array in (w, u, k, decay))
    last, (x, before) = jax.lax.scan(step, state, chunks)
    return jnp.moveaxis(x, 0, 2), jnp.moveaxis(before, 0, 2), last


def associative_recurrence(w, u, k, decay, state) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``scan_recurrence`` in logarithmic depth: composes the maps S -> M S + R of the chunks.

    More arithmetic, but twice as fast on an accelerator that a short loop body cannot fill.
    """
    key_size = w.shape[-1]
    m = decay[..., None, None] * jnp.eye(key_size) - _dot("bhnck,bhncl->bhnkl", k, w)
    r = _dot("bhnck,bhnce->bhnke", k, u.astype(w.dtype))
    r = r.at[:, :, 0].add(_dot("bhkl,bhle->bhke", m[:, :, 0], state))

    def compose(first, second):
        (m1, r1), (m2, r2) = first, second
        m2 = m2.astype(w.dtype)
        return _dot("...kl,...lm->...km", m2, m1), _dot("...kl,...le->...ke", m2, r1) + r2

    after = jax.lax.associative_scan(compose, (m, r), axis=2)[1]
    before = jnp.concatenate([state[:, :, None], after[:, :, :-1]], axis=2).astype(w.dtype)
    x = (u - _dot("bhnck,bhnke->bhnce", w, before)).astype(w.dtype)
    return x, before, after[:, :, -1]


class _Masks(NamedTuple):
    """Who sees whom, for heads to broadcast over. A state belongs to the segment of the token that wrote it last."""

    inside: jax.Array  # [B, 1, N, C, C] token i (first C) sees token j of its chunk
    reads: jax.Array  # [B, 1, N, C] token belongs to the segment of the incoming state
    writes: jax.Array  # [B, 1, N, C] token belongs to the segment of the outgoing state
    carries: jax.Array  # [B, 1, N] both are the same segment


def _masks(segment_BNC: jax.Array) -> _Masks:
    last = segment_BNC[..., -1]
    # The row's first chunk takes over the caller's state, which belongs to the row's first token.
    incoming = jnp.concatenate([segment_BNC[:, :1, 0], last[:, :-1]], axis=1)
    causal = jnp.tril(jnp.ones((segment_BNC.shape[-1],) * 2, bool))
    return _Masks(
        inside=(causal & (segment_BNC[..., :, None] == segment_BNC[..., None, :]))[:, None],
        reads=(segment_BNC == incoming[..., None])[:, None],
        writes=(segment_BNC == last[..., None])[:, None],
        carries=(last == incoming)[:, None],
    )


def _chunks(x_BT: jax.Array, size: int) -> jax.Array:
    """[B, T, ...] -> [B, N, C, ...], filled up with zeros."""
    filled = jnp.pad(x_BT, [(0, 0), (0, -x_BT.shape[1] % size)] + [(0, 0)] * (x_BT.ndim - 2))
    return filled.reshape(filled.shape[0], -1, size, *filled.shape[2:])


def chunked_delta_rule(
    q_BTJK: jax.Array,
    k_BTJK: jax.Array,
    v_BTHE: jax.Array,
    g_BTH: jax.Array,
    beta_BTH: jax.Array,
    segment_BT: jax.Array,
    state_BHKE: jax.Array | None = None,
    *,
    recurrence: Recurrence = scan_recurrence,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """The rule over packed rows; nothing crosses from one segment to another.

    q_BTJK, k_BTJK: normalised here, q also scaled by key_dim^-0.5. g_BTH, beta_BTH: float32; where both are 0 a token
    changes no state. segment_BT: int; a segment must lie in one piece. state_BHKE: float32 state before the first
    token, of that token's segment (None: zeros). chunk: a power of two.
    Returns (outputs [B, T, H, E] float32, state after the last token of each row [B, H, K, E] float32).
    """
    (B, T, J, K), (H, E), dtype = q_BTJK.shape, v_BTHE.shape[2:], v_BTHE.dtype
    size = min(chunk, 1 << (T - 1).bit_length())
    to_chunks = lambda x: jnp.moveaxis(_chunks(x, size), 3, 1)  # noqa: E731  [B, T, H, ...] -> [B, H, N, C, ...]
    to_values = lambda x: jnp.repeat(x, H // J, axis=1)  # noqa: E731  key heads -> value heads
    q, k, v = to_chunks(_unit(q_BTJK) * K**-0.5), to_chunks(_unit(k_BTJK)), to_chunks(v_BTHE)
    g, beta = to_chunks(g_BTH), to_chunks(beta_BTH)
    # Filling tokens continue the last segment; with beta = g = 0 they leave its state alone.
    filled = jnp.pad(segment_BT, ((0, 0), (0, -T % size)), mode="edge")
    masks = _masks(filled.reshape(B, -1, size))

    total = jnp.cumsum(g, axis=-1)
    decay = jnp.exp(jnp.where(masks.inside, total[..., :, None] - total[..., None, :], -jnp.inf))
    key_key = to_values(_dot("bjnck,bjndk->bjncd", k.astype(dtype), k.astype(dtype)))
    query_key = to_values(_dot("bjnck,bjndk->bjncd", q.astype(dtype), k.astype(dtype)))
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    inverse = jnp.asarray(unit_lower_inverse(jnp.tril(key_key * decay, -1) * beta[..., None], precision), dtype)
    q, k = to_values(q), to_values(k)
    since_start = jnp.exp(total) * masks.reads
    until_end = jnp.exp(total[..., -1:] - total) * masks.writes
    u = _dot("bhncd,bhnde->bhnce", inverse, v * beta[..., None])
    w = _dot("bhncd,bhndk->bhnck", inverse, k * (beta * since_start)[..., None])
    state = jnp.zeros((B, H, K, E), jnp.float32) if state_BHKE is None else state_BHKE
    x, before, last = recurrence(
        w.astype(dtype),
        u,
        (k * until_end[..., None]).astype(dtype),
        jnp.exp(total[..., -1]) * masks.carries,
        state,
    )
    out = _dot("bhnck,bhnke->bhnce", (q * since_start[..., None]).astype(dtype), before)
    out = out + _dot("bhncd,bhnde->bhnce", (query_key * decay).astype(dtype), x)
    return jnp.moveaxis(out, 1, 3).reshape(B, -1, H, E)[:, :T], last


def delta_step(
    q_SJK: jax.Array, k_SJK: jax.Array, v_SHE: jax.Array, g_SH: jax.Array, beta_SH: jax.Array, state_SHKE: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The rule for one token of each row. Arguments as in ``chunked_delta_rule``; all arithmetic is float32.

    Returns (outputs [S, H, E] float32, new state [S, H, K, E] float32). A row with beta = g = 0 keeps its state as it
    is, to the bit.
    """
    group = v_SHE.shape[1] // q_SJK.shape[1]
    q = jnp.repeat(_unit(q_SJK) * q_SJK.shape[-1] ** -0.5, group, axis=1)
    k = jnp.repeat(_unit(k_SJK), group, axis=1)
    state = state_SHKE * jnp.exp(g_SH)[..., None, None]
    # Sums of products instead of a matrix product: accelerators would round its float32 operands.
    known = jnp.sum(state * k[..., None], axis=2)
    delta = (v_SHE.astype(jnp.float32) - known) * beta_SH[..., None]
    state = state + k[..., None] * delta[..., None, :]
    return jnp.sum(state * q[..., None], axis=2), state
