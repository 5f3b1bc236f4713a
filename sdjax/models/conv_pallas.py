"""The short convolutions of Gated DeltaNet over packed rows, as kernels for NVIDIA GPUs.

One kernel forwards, two backwards: the first undoes the activation, which it computes again, the second the sum over
taps. Each reads its tokens and the few before or after them. One program handles some tokens and channels of a row.
"""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from sdjax.models.delta_pallas_launch import Tuning, block, call
from sdjax.sharding import KERNEL

TOKENS = 64  # of a program
_NO_SEGMENT = -(2**31)


class _Row:
    """A program's window on the tokens of a row: loads them ``shift`` places later or earlier."""

    def __init__(self, segment, length: int):
        self._segment, self._length = segment, length
        self._first = pl.program_id(1) * TOKENS
        self.own = pl.ds(self._first, TOKENS)

    def _place(self, shift: int) -> tuple[jax.Array, jax.Array]:
        at = self._first + shift + jnp.arange(TOKENS)
        return jnp.clip(at, 0, self._length - 1), (at >= 0) & (at < self._length)

    def segment(self, shift: int) -> jax.Array:
        at, inside = self._place(shift)
        return jnp.where(inside, self._segment[at], _NO_SEGMENT)

    def load(self, ref, shift: int) -> jax.Array:
        at, inside = self._place(shift)
        return jnp.where(inside[:, None], ref[at, :].astype(jnp.float32), 0.0)


def _taps(row: _Row, x, kernel, sign: int):
    """Yields (tap's place, tap [C], tokens [T, C] that it meets) for the tokens before (-1) or after (1) each one."""
    own, taps = row.segment(0), kernel.shape[0]
    for away in range(taps):
        tokens = row.load(x, sign * away)
        if away:
            tokens = jnp.where((row.segment(sign * away) == own)[:, None], tokens, 0.0)
        yield taps - 1 - away, kernel[taps - 1 - away, :].astype(jnp.float32), tokens


def _sum(terms: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, terms)


def _forward_kernel(x, kernel, segment, out):
    """Refs: x, out [T, C]; kernel [L, C]; segment [T]."""
    row = _Row(segment, x.shape[0])
    total = _sum(tokens * tap[None] for _, tap, tokens in _taps(row, x, kernel, -1))
    out[row.own, :] = (total * jax.nn.sigmoid(total)).astype(out.dtype)


def _total_kernel(x, kernel, segment, dout, dtotal_out, dkernel_out):
    """Refs as in the forward kernel; dtotal_out [T, C]: cotangent before the activation; dkernel_out [1, L, C]: this
    program's share of the kernel's."""
    row = _Row(segment, x.shape[0])
    seen = list(_taps(row, x, kernel, -1))
    total = _sum(tokens * tap[None] for _, tap, tokens in seen)
    gate = jax.nn.sigmoid(total)
    dtotal = row.load(dout, 0) * gate * (1.0 + total * (1.0 - gate))
    dtotal_out[row.own, :] = dtotal.astype(dtotal_out.dtype)
    for place, _, tokens in seen:
        dkernel_out[0, place, :] = jnp.sum(dtotal * tokens, axis=0)


def _input_kernel(dtotal, kernel, segment, dx_out):
    """Refs as above: hands the cotangent of each token's sum back to the tokens that it was made of."""
    row = _Row(segment, dtotal.shape[0])
    dx = _sum(tokens * tap[None] for _, tap, tokens in _taps(row, dtotal, kernel, 1))
    dx_out[row.own, :] = dx.astype(dx_out.dtype)


def _specs(x_BTC: jax.Array, kernel_LC: jax.Array, columns: int):
    """Grid and block specs of (row, kernel, segment)."""
    B, T, C = x_BTC.shape
    grid = (C // columns, T // TOKENS, B)
    row = pl.BlockSpec((None, T, columns), lambda c, t, b: (b, 0, c))
    kernel = pl.BlockSpec((kernel_LC.shape[0], columns), lambda c, t, b: (0, c))
    segment = pl.BlockSpec((None, T), lambda c, t, b: (b, 0))
    return grid, row, kernel, segment


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _conv(x_BTC: jax.Array, kernel_LC: jax.Array, segment_BT: jax.Array, tuning: Tuning) -> jax.Array:
    return _forward(x_BTC, kernel_LC, segment_BT, tuning)[0]


def _forward(x_BTC, kernel_LC, segment_BT, tuning):
    columns = block(tuning.conv.columns, x_BTC.shape[2])
    grid, row, kernel, segment = _specs(x_BTC, kernel_LC, columns)
    (out,) = call(
        _forward_kernel, "short_conv", tuning.conv, tuning.interpret, grid=grid,
        inputs=[(x_BTC, row), (kernel_LC, kernel), (segment_BT, segment)],
        outputs=[(jax.ShapeDtypeStruct(x_BTC.shape, x_BTC.dtype), row)],
    )  # fmt: skip
    return checkpoint_name(out, KERNEL), (x_BTC, kernel_LC, segment_BT)


def _backward(tuning, saved, dout_BTC):
    x_BTC, kernel_LC, segment_BT = saved
    columns = block(tuning.conv.columns, x_BTC.shape[2])
    grid, row, kernel, segment = _specs(x_BTC, kernel_LC, columns)
    (L, C), (B, parts) = kernel_LC.shape, (x_BTC.shape[0], grid[1])
    share = pl.BlockSpec((None, 1, L, columns), lambda c, t, b: (b, t, 0, c))
    row_array = jax.ShapeDtypeStruct(x_BTC.shape, x_BTC.dtype)
    dtotal_BTC, dkernel = call(
        _total_kernel, "short_conv_total", tuning.conv, tuning.interpret, grid=grid,
        inputs=[(x_BTC, row), (kernel_LC, kernel), (segment_BT, segment), (dout_BTC, row)],
        outputs=[(row_array, row), (jax.ShapeDtypeStruct((B, parts, L, C), jnp.float32), share)],
    )  # fmt: skip
    (dx_BTC,) = call(
        _input_kernel, "short_conv_input", tuning.conv, tuning.interpret, grid=grid,
        inputs=[(dtotal_BTC, row), (kernel_LC, kernel), (segment_BT, segment)],
        outputs=[(row_array, row)],
    )  # fmt: skip
    return dx_BTC, dkernel.sum(axis=(0, 1)).astype(kernel_LC.dtype), None


_conv.defvjp(_forward, _backward)


def pallas_conv(x_BTC: jax.Array, kernel_LC: jax.Array, segment_BT: jax.Array, *, tuning: Tuning) -> jax.Array:
    """``short_conv.packed_conv``; same arguments, results and rounding."""
    length = x_BTC.shape[1]
    more = -length % TOKENS
    x_BTC = jnp.pad(x_BTC, ((0, 0), (0, more), (0, 0)))
    segment_BT = jnp.pad(segment_BT.astype(jnp.int32), ((0, 0), (0, more)), constant_values=_NO_SEGMENT)
    conv: Any = _conv  # the type of a custom_vjp says nothing of its result
    return conv(x_BTC, kernel_LC, segment_BT, tuning)[:, :length]
