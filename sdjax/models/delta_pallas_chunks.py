"""What the gated delta rule does inside its chunks, as two kernels and their derivatives.

``prepare`` turns keys, values and gates of a chunk into the operands of the recurrence over chunks, ``output`` reads
the result with the queries. One program handles one chunk of one value head and takes its inputs as they lie in the
row, so that nothing is transposed, repeated or normalised in memory. With the cumulated decay c, unit vectors k and q
(q scaled), D_ij = e^(c_i - c_j) for a token j that token i sees, else 0, e_i = e^(c_i) and f_i = e^(c_C - c_i) where
the token belongs to the incoming or outgoing state, else 0:

    T = (I + A)^-1, A_ij = beta_i (k_i . k_j) D_ij below the diagonal;  U = T (beta v);  W = T (beta e k);  K = f k
    o = (q e) S + P X, P_ij = (q_i . k_j) D_ij

Derivatives go back through T without another inverse: with Y = T^T dU and Z = T^T dW, dA = -(Y U^T + Z W^T) below the
diagonal. Cotangents of c are summed entry by entry of D: the shorter q . dq - v . dv is the difference of two large
numbers where decay is fast. Suffixes as in ``sdjax.models.delta_rule``, and ``_C``/``_D`` tokens of a chunk as
rows/columns.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from sdjax.models.delta_pallas_launch import CHUNK, Tuning, block, call

_NORM_EPS = 1e-6
_GRID_CHUNK = 1  # grid: heads, chunks, rows


class _Unit(NamedTuple):
    """Vectors [C, K], float32, divided by their lengths, and the reciprocal lengths [C]."""

    vector: jax.Array
    scale: jax.Array

    def cotangent(self, d_CK: jax.Array) -> jax.Array:
        """Cotangent of the vectors before they were divided."""
        along_C = jnp.sum(self.vector * d_CK, axis=1)
        return self.scale[:, None] * (d_CK - self.vector * along_C[:, None])


def _unit(ref) -> _Unit:
    x_CK = ref[...].astype(jnp.float32)
    scale_C = jax.lax.rsqrt(jnp.sum(x_CK * x_CK, axis=1) + _NORM_EPS)
    return _Unit(x_CK * scale_C[:, None], scale_C)


class _Decays(NamedTuple):
    """Everything that gates and segments say about a chunk."""

    total: jax.Array  # [C], c
    segment: jax.Array  # [C]
    since_start: jax.Array  # [C], e
    until_end: jax.Array  # [C], f
    whole: jax.Array  # scalar: what is left of the incoming state

    def inside(self) -> jax.Array:
        """D [C, C]. Made again wherever it is used: it costs less than the registers that would keep it."""
        row, column = _places()
        seen_CD = (column <= row) & (self.segment[:, None] == self.segment[None])
        return jnp.exp(jnp.where(seen_CD, self.total[:, None] - self.total[None], -jnp.inf))


def _places() -> tuple[jax.Array, jax.Array]:
    """Numbers of the tokens of a chunk, [C, 1] and [1, C]."""
    return jnp.arange(CHUNK)[:, None], jnp.arange(CHUNK)[None]


def _decays(g, segment) -> _Decays:
    """Refs: g [C]; segment [T] of the whole row."""
    chunk = pl.program_id(_GRID_CHUNK)
    row, column = _places()
    total_C = jnp.sum(jnp.where(column <= row, g[...][None], 0.0), axis=1)
    last = jnp.sum(jnp.where(jnp.arange(CHUNK) == CHUNK - 1, total_C, 0.0))
    own_C = segment[pl.ds(chunk * CHUNK, CHUNK)]
    # The row's first chunk takes over the caller's state, which belongs to the row's first token.
    incoming, outgoing = segment[jnp.maximum(chunk * CHUNK - 1, 0)], segment[chunk * CHUNK + CHUNK - 1]
    return _Decays(
        total=total_C,
        segment=own_C,
        since_start=jnp.where(own_C == incoming, jnp.exp(total_C), 0.0),
        until_end=jnp.where(own_C == outgoing, jnp.exp(last - total_C), 0.0),
        whole=jnp.where(outgoing == incoming, jnp.exp(last), 0.0),
    )


def _inverse(a_CD: jax.Array, dtype, dot) -> jax.Array:
    """(I + A)^-1 by block doubling: see ``delta_rule.unit_lower_inverse``."""
    row, column = _places()
    x_CD = jnp.where(row == column, 1.0, 0.0) - jnp.where(row // 2 == column // 2, a_CD, 0.0)
    # Half precision gains nothing from more than TF32: the result is rounded further.
    tf32 = dtype != jnp.float32
    half = 2
    while half < CHUNK:
        below = (row // (2 * half) == column // (2 * half)) & (row // half != column // half)
        step_CD = dot(jnp.where(below, a_CD, 0.0), x_CD, tf32=tf32)
        x_CD = x_CD - dot(x_CD, step_CD, tf32=tf32)
        half *= 2
    return x_CD


def _prepare_kernel(k, v, g, beta, segment, w_out, u_out, k_out, decay_out, inverse_out, *, columns: int, dot):
    """Refs: k [C, K]; v [C, E]; g, beta [C]; segment [T]; decay_out [N]; inverse_out [C, C]; others [C, K or E]."""
    dtype = v.dtype
    (row, column), d = _places(), _decays(g, segment)
    inside_CD = d.inside()  # before the products: after them it would wait for registers
    unit, beta_C = _unit(k), beta[...]
    k_CK = unit.vector.astype(dtype)
    a_CD = jnp.where(row > column, dot(k_CK, k_CK.T) * inside_CD, 0.0) * beta_C[:, None]
    k_out[...] = (unit.vector * d.until_end[:, None]).astype(dtype)
    decay_out[pl.program_id(_GRID_CHUNK)] = d.whole
    inverse_CD = _inverse(a_CD, dtype, dot)
    inverse_out[...] = inverse_CD.astype(dtype)
    # Read again: a cached load costs less than the registers that would keep the keys.
    k_CK = _unit(k).vector.astype(dtype)
    w_out[...] = dot((inverse_CD * (beta_C * d.since_start)[None]).astype(dtype), k_CK).astype(dtype)
    scaled_CD = (inverse_CD * beta_C[None]).astype(dtype)

    def some_values(i, _):
        place = pl.ds(i * columns, columns)
        u_out[:, place] = dot(scaled_CD, v[:, place]).astype(dtype)
        return 0

    jax.lax.fori_loop(0, v.shape[1] // columns, some_values, 0)


def _output_kernel(q, k, g, segment, before, x, out, *, columns: int, scale: float, dot):
    """Refs: q, k [C, K]; g [C]; segment [T]; before [K, E]; x, out [C, E]."""
    dtype = x.dtype
    d = _decays(g, segment)
    inside_CD = d.inside()
    q_CK = _unit(q).vector * scale
    seen_CD = (dot(q_CK.astype(dtype), _unit(k).vector.astype(dtype).T) * inside_CD).astype(dtype)
    q_CK = (q_CK * d.since_start[:, None]).astype(dtype)

    def some_values(i, _):
        place = pl.ds(i * columns, columns)
        out[:, place] = dot(q_CK, before[:, place]) + dot(seen_CD, x[:, place])
        return 0

    jax.lax.fori_loop(0, x.shape[1] // columns, some_values, 0)


def _output_backward_kernel(
    q, k, g, segment, before, x, dout, dx_out, dbefore_out, dq_out, dk_out, dtotal_out,
    *, columns: int, scale: float, dot,
):  # fmt: skip
    """Refs like those of ``_output_kernel``; dk_out: cotangent of the unit keys [C, K]; dtotal_out: of c [C]."""
    dtype = x.dtype
    d, q_CK = _decays(g, segment), _unit(q).vector * scale
    turned_DC = (dot(q_CK.astype(dtype), _unit(k).vector.astype(dtype).T) * d.inside()).astype(dtype).T
    reading_KC = (q_CK * d.since_start[:, None]).astype(dtype).T

    def some_values(i, carry):
        dread_CK, dseen_CD = carry
        place = pl.ds(i * columns, columns)
        dout_CV = dout[:, place].astype(dtype)
        dx_out[:, place] = dot(turned_DC, dout_CV).astype(dtype)
        dbefore_out[:, place] = dot(reading_KC, dout_CV).astype(dtype)
        return dread_CK + dot(dout_CV, before[:, place].T), dseen_CD + dot(dout_CV, x[:, place].T)

    zeros = jnp.zeros(q.shape, jnp.float32), jnp.zeros((CHUNK, CHUNK), jnp.float32)
    dread_CK, dseen_CD = jax.lax.fori_loop(0, x.shape[1] // columns, some_values, zeros)
    dproduct_CD = dseen_CD * d.inside()
    unit = _unit(q)  # read again, as in ``_prepare_kernel``
    q_CK, k_CK = (unit.vector * scale).astype(dtype), _unit(k).vector.astype(dtype)
    decayed_CD = dproduct_CD * dot(q_CK, k_CK.T)
    dread_CK = dread_CK * d.since_start[:, None]
    read_C = jnp.sum(dread_CK * unit.vector, axis=1) * scale
    dtotal_out[...] = jnp.sum(decayed_CD, axis=1) - jnp.sum(decayed_CD, axis=0) + read_C
    dproduct_CD = dproduct_CD.astype(dtype)
    dk_out[...] = dot(dproduct_CD.T, q_CK).astype(dtype)
    dq_out[...] = (unit.cotangent(dread_CK + dot(dproduct_CD, k_CK)) * scale).astype(dq_out.dtype)


def _prepare_backward_kernel(
    k, v, g, beta, segment, inverse, w, before, x, after, du, dk_more, dtotal_more,
    dk_out, dv_out, dg_out, dbeta_out, *, columns: int, keys: int, dot,
):  # fmt: skip
    """Refs like those of ``_prepare_kernel``; before, after: states before the chunk and cotangents of those after it
    [K, E]; du [C, E]; dk_more [C, K], dtotal_more [C]: what the output kernel adds to the cotangents of k and c."""
    (row, column), dtype, beta_C, blocks = _places(), v.dtype, beta[...], v.shape[1] // columns
    d, turned_DC = _decays(g, segment), inverse[...].T
    scale_C = _unit(k).scale

    def some_values(i, y_v_CD):
        place = pl.ds(i * columns, columns)
        y_CV = dot(turned_DC, du[:, place])
        dv_out[:, place] = (y_CV * beta_C[:, None]).astype(dtype)
        return y_v_CD + dot(y_CV.astype(dtype), v[:, place].T)

    y_v_CD = jax.lax.fori_loop(0, blocks, some_values, jnp.zeros((CHUNK, CHUNK), jnp.float32))
    # U^T = v^T (T beta)^T
    scaled_DC = (turned_DC.astype(jnp.float32) * beta_C[:, None]).astype(dtype)
    product_CD = dot(y_v_CD.astype(dtype), scaled_DC)
    from_v_C = jnp.sum(jnp.where(row == column, y_v_CD, 0.0), axis=1)

    # Keys by the part: everything at once does not fit into registers.
    parts = [pl.ds(i, keys) for i in range(0, k.shape[1], keys)]
    unit_part = lambda part: k[:, part].astype(jnp.float32) * scale_C[:, None]  # noqa: E731
    dk_parts, along_C, written_C, dwhole = [], jnp.zeros_like(beta_C), jnp.zeros_like(beta_C), jnp.float32(0)
    for part in parts:

        def some_states(i, carry, part=part):
            dw_CK, dwrite_CK, dwhole = carry
            place = pl.ds(i * columns, columns)
            before_KV, after_KV = before[part, place], after[part, place]
            return (
                dw_CK - dot(du[:, place], before_KV.T),
                dwrite_CK + dot(x[:, place], after_KV.T),
                dwhole + jnp.sum(before_KV.astype(jnp.float32) * after_KV.astype(jnp.float32)),
            )

        zeros = jnp.zeros((CHUNK, keys), jnp.float32)
        dw_CK, dwrite_CK, dwhole = jax.lax.fori_loop(0, blocks, some_states, (zeros, zeros, dwhole))
        z_CK = dot(turned_DC, dw_CK.astype(dtype))
        product_CD = product_CD + dot(z_CK.astype(dtype), w[:, part].T)
        along_C = along_C + jnp.sum(z_CK * unit_part(part), axis=1) * d.since_start
        written_C = written_C + jnp.sum(dwrite_CK * unit_part(part), axis=1) * d.until_end
        dk_parts.append(z_CK * (beta_C * d.since_start)[:, None] + dwrite_CK * d.until_end[:, None])

    k_CK = _unit(k).vector.astype(dtype)
    da_CD = jnp.where(row > column, -product_CD, 0.0) * d.inside()
    decayed_CD = da_CD * dot(k_CK, k_CK.T)
    from_a_C = jnp.sum(decayed_CD, axis=1)
    dbeta_out[...] = from_v_C + along_C + from_a_C
    dtotal_C = dtotal_more[...] + beta_C * (from_a_C + along_C) - written_C
    dtotal_C = dtotal_C - jnp.sum(decayed_CD * beta_C[:, None], axis=0)
    dlast = jnp.sum(written_C) + dwhole * d.whole
    dtotal_C = dtotal_C + jnp.where(jnp.arange(CHUNK) == CHUNK - 1, dlast, 0.0)
    dg_out[...] = jnp.sum(jnp.where(row >= column, dtotal_C[:, None], 0.0), axis=0)

    dproduct_CD = da_CD * beta_C[:, None]
    dproduct_CD = (dproduct_CD + dproduct_CD.T).astype(dtype)
    along_C = jnp.zeros_like(beta_C)
    for i, part in enumerate(parts):
        dk_CK = dot(dproduct_CD, unit_part(part).astype(dtype)) + dk_more[:, part].astype(jnp.float32)
        dk_parts[i] = dk_parts[i] + dk_CK
        along_C = along_C + jnp.sum(dk_parts[i] * unit_part(part), axis=1)
    for dk_CK, part in zip(dk_parts, parts, strict=True):
        dk_CK = dk_CK - unit_part(part) * along_C[:, None]
        dk_out[:, part] = (dk_CK * scale_C[:, None]).astype(dk_out.dtype)


class _Layout:
    """Shapes and block specs of one call. Rows are [B, N, C, heads, size], what kernels hand over [B, H, N, ...]."""

    def __init__(self, q_or_k_BNCJK: jax.Array, heads: int, value_dim: int, dtype):
        self.B, self.N, self.C, J, self.K = q_or_k_BNCJK.shape
        self.H, self.E, self.dtype = heads, value_dim, dtype
        self.grid = (heads, self.N, self.B)
        self._group = heads // J

    def key_heads(self) -> pl.BlockSpec:
        group = self._group
        return pl.BlockSpec((None, None, self.C, None, self.K), lambda h, n, b: (b, n, 0, h // group, 0))

    def heads(self, *size: int) -> pl.BlockSpec:
        zeros = (0,) * len(size)
        return pl.BlockSpec((None, None, self.C, None, *size), lambda h, n, b: (b, n, 0, h, *zeros))

    def tokens(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, self.N * self.C), lambda h, n, b: (b, 0))

    def chunks(self, *shape: int) -> pl.BlockSpec:
        zeros = (0,) * len(shape)
        return pl.BlockSpec((None, None, None, *shape), lambda h, n, b: (b, h, n, *zeros))

    def numbers(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, self.N), lambda h, n, b: (b, h, 0))

    def of_prepare(self, k, v, g, beta, segment) -> list[tuple[jax.Array, pl.BlockSpec]]:
        """What ``prepare`` reads, and its derivative too."""
        specs = self.key_heads(), self.heads(self.E), self.heads(), self.heads(), self.tokens()
        return list(zip((k, v, g, beta, segment), specs))

    def of_output(self, q, k, g, segment, before, x) -> list[tuple[jax.Array, pl.BlockSpec]]:
        """What ``output`` reads, and its derivative too."""
        keys, state = self.key_heads(), self.chunks(self.K, self.E)
        specs = keys, keys, self.heads(), self.tokens(), state, self.chunks(self.C, self.E)
        return list(zip((q, k, g, segment, before, x), specs))

    def row_array(self, *size: int, dtype=jnp.float32):
        """Array and block spec of an output that lies like the inputs."""
        return jax.ShapeDtypeStruct((self.B, self.N, self.C, self.H, *size), dtype), self.heads(*size)

    def chunk_array(self, *shape: int, dtype=None):
        shape_BHN = (self.B, self.H, self.N, *shape)
        return jax.ShapeDtypeStruct(shape_BHN, dtype or self.dtype), self.chunks(*shape)


def prepare(k_BNCJK, v_BNCHE, g_BNCH, beta_BNCH, segment_BT, tuning: Tuning) -> list[jax.Array]:
    """Returns W [B, H, N, C, K], U [B, H, N, C, E], K [B, H, N, C, K], decay [B, H, N] (float32), T [B, H, N, C, C]."""
    H, E = v_BNCHE.shape[3:]
    at = _Layout(k_BNCJK, H, E, v_BNCHE.dtype)
    return call(
        functools.partial(_prepare_kernel, columns=block(tuning.prepare.columns, E), dot=tuning.dot),
        "delta_prepare",
        tuning.prepare,
        tuning.interpret,
        grid=at.grid,
        inputs=at.of_prepare(k_BNCJK, v_BNCHE, g_BNCH, beta_BNCH, segment_BT),
        outputs=[
            at.chunk_array(at.C, at.K),
            at.chunk_array(at.C, E),
            at.chunk_array(at.C, at.K),
            (jax.ShapeDtypeStruct((at.B, H, at.N), jnp.float32), at.numbers()),
            at.chunk_array(at.C, at.C),
        ],
    )


def output(q_BNCJK, k_BNCJK, g_BNCH, segment_BT, before, x, tuning: Tuning) -> jax.Array:
    """Returns o [B, N, C, H, E], float32."""
    H, E = x.shape[1], x.shape[-1]
    at = _Layout(k_BNCJK, H, E, x.dtype)
    return call(
        functools.partial(_output_kernel, columns=block(tuning.output.columns, E), scale=at.K**-0.5, dot=tuning.dot),
        "delta_output",
        tuning.output,
        tuning.interpret,
        grid=at.grid,
        inputs=at.of_output(q_BNCJK, k_BNCJK, g_BNCH, segment_BT, before, x),
        outputs=[at.row_array(E)],
    )[0]


def output_backward(q_BNCJK, k_BNCJK, g_BNCH, segment_BT, before, x, dout_BNCHE, tuning: Tuning) -> list[jax.Array]:
    """Returns the cotangents of X and of the states, of q for each value head [B, N, C, H, K], of the unit keys
    [B, H, N, C, K], and of c [B, H, N, C] (float32)."""
    H, E = x.shape[1], x.shape[-1]
    at = _Layout(k_BNCJK, H, E, x.dtype)
    launch = tuning.output_backward
    return call(
        functools.partial(_output_backward_kernel, columns=block(launch.columns, E), scale=at.K**-0.5, dot=tuning.dot),
        "delta_output_backward",
        launch,
        tuning.interpret,
        grid=at.grid,
        inputs=[*at.of_output(q_BNCJK, k_BNCJK, g_BNCH, segment_BT, before, x), (dout_BNCHE, at.heads(E))],
        outputs=[
            at.chunk_array(at.C, E),
            at.chunk_array(at.K, E),
            at.row_array(at.K, dtype=q_BNCJK.dtype),
            at.chunk_array(at.C, at.K),
            at.chunk_array(at.C, dtype=jnp.float32),
        ],
    )


def prepare_backward(
    k_BNCJK, v_BNCHE, g_BNCH, beta_BNCH, segment_BT, inverse, w, before, x, after, du, dk, dtotal, tuning: Tuning
) -> list[jax.Array]:
    """dk, dtotal: as ``output_backward`` returns them. Returns the cotangents of k for each value head
    [B, N, C, H, K], of v, g and beta."""
    H, E = v_BNCHE.shape[3:]
    at = _Layout(k_BNCJK, H, E, v_BNCHE.dtype)
    launch = tuning.prepare_backward
    state, tokens_K, tokens_E = at.chunks(at.K, E), at.chunks(at.C, at.K), at.chunks(at.C, E)
    return call(
        functools.partial(
            _prepare_backward_kernel,
            columns=block(launch.columns, E),
            keys=block(launch.keys, at.K),
            dot=tuning.dot,
        ),
        "delta_prepare_backward",
        launch,
        tuning.interpret,
        grid=at.grid,
        inputs=[
            *at.of_prepare(k_BNCJK, v_BNCHE, g_BNCH, beta_BNCH, segment_BT),
            (inverse, at.chunks(at.C, at.C)),
            (w, tokens_K),
            (before, state),
            (x, tokens_E),
            (after, state),
            (du, tokens_E),
            (dk, tokens_K),
            (dtotal, at.chunks(at.C)),
        ],
        outputs=[
            at.row_array(at.K, dtype=k_BNCJK.dtype),
            at.row_array(E, dtype=v_BNCHE.dtype),
            at.row_array(),
            at.row_array(),
        ],
    )
