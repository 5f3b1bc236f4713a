"""The only place where masks are applied, and the statistics over rows and segments that build on them.

A masked slot may hold anything, NaN and inf included. It is replaced by 0 *before* any arithmetic (``where`` on the
input): a ``where`` on the result would keep the value clean but let NaN through in the gradient.

Segments are groups or trajectories. Ids are arbitrary integers in any order; they are mapped to 0..N-1 so that the
number of segments is static, and rows that must not count go to one extra dump segment N.
"""

from collections.abc import Mapping

import chex
import jax
import jax.numpy as jnp
from jax import lax

from sdjax.losses.types import COUNT_EPS, TokenSum


def as_bool(x) -> jax.Array:
    """Mask or flag of any numeric dtype as bool."""
    return jnp.asarray(x).astype(bool)


def as_floats(*arrays) -> tuple[jax.Array, ...]:
    """Arrays in one common dtype of at least float32: half precision is too coarse for log-probabilities.

    Integers and flags take the dtype of the floats beside them, or the default float if there is none.
    """
    floats = [x for x in arrays if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
    dtype = jnp.result_type(*floats, jnp.float32) if floats else jnp.result_type(float)
    return tuple(jnp.asarray(x, dtype) for x in arrays)


def masked(x, mask) -> jax.Array:
    """x where the mask is set, else 0. Neither value nor gradient of a masked slot survives."""
    return jnp.where(mask, x, jnp.zeros((), jnp.result_type(x)))


def masked_sum(x, mask, axis=None) -> jax.Array:
    """Sum of x over the masked-in slots."""
    return jnp.sum(masked(x, mask), axis=axis)


def masked_count(mask, axis=None, dtype=jnp.float32) -> jax.Array:
    """Number of masked-in slots as a float."""
    return jnp.sum(mask, axis=axis, dtype=dtype)


def masked_mean(x, mask, axis=None) -> jax.Array:
    """Mean of x over the masked-in slots, 0 if there is none. The second pass removes the rounding of the first."""
    x = masked(x, mask)
    n = jnp.maximum(masked_count(mask, axis=axis, dtype=x.dtype), 1)
    first = jnp.sum(x, axis=axis) / n
    wide = first if axis is None else jnp.expand_dims(first, axis)
    return first + masked_sum(x - wide, mask, axis=axis) / n


def masked_var(x, mask, axis=None, ddof: int = 0) -> jax.Array:
    """Variance of x over the masked-in slots with denominator n - ddof, 0 where that is not positive."""
    x = masked(x, mask)
    mean = masked_mean(x, mask, axis=axis)
    wide = mean if axis is None else jnp.expand_dims(mean, axis)
    n = masked_count(mask, axis=axis, dtype=x.dtype) - ddof
    total = masked_sum(jnp.square(x - wide), mask, axis=axis)
    return jnp.where(n > 0, total / jnp.maximum(n, 1), 0)


def masked_max(x, mask) -> jax.Array:
    """Maximum over the masked-in slots, 0 if there is none."""
    return jnp.where(jnp.any(mask), jnp.max(jnp.where(mask, x, -jnp.inf)), 0)


def lower_median(x, mask, axis=None) -> jax.Array:
    """Element (n - 1) // 2 of the sorted masked-in values, 0 if there is none."""
    if axis is None:
        x, mask, axis = jnp.ravel(x), jnp.ravel(mask), 0
    ordered = jnp.sort(jnp.where(mask, x, jnp.inf), axis=axis)
    n = jnp.sum(mask, axis=axis, keepdims=True)
    middle = jnp.take_along_axis(ordered, jnp.maximum(n - 1, 0) // 2, axis=axis)
    return jnp.squeeze(jnp.where(n > 0, middle, 0), axis=axis)


def token_sum(x_NL, mask_NL, sums: Mapping[str, jax.Array], **others: jax.Array) -> TokenSum:
    """TokenSum of a per-token loss.

    Args:
      x_NL: `[N, L]` loss per token.
      mask_NL: `[N, L]` bool, valid tokens.
      sums: per-token values whose sums become metrics under ``<name>_sum``.
      **others: finished scalar metrics under their own name.
    """
    metrics = {f"{name}_sum": masked_sum(value, mask_NL).astype(x_NL.dtype) for name, value in sums.items()}
    metrics |= {name: jnp.asarray(value, x_NL.dtype) for name, value in others.items()}
    return TokenSum(
        total=masked_sum(x_NL, mask_NL),
        count=masked_count(mask_NL, dtype=x_NL.dtype),
        metrics=lax.stop_gradient(metrics),
    )


def token_mean(x_NL, mask_NL) -> jax.Array:
    """Agg(x) = sum(m x) / (sum(m) + 1e-8) over the rows given [off, methods 3.6]."""
    x_NL = masked(x_NL, mask_NL)
    return jnp.sum(x_NL) / (masked_count(mask_NL, dtype=x_NL.dtype) + COUNT_EPS)


def micro_token_mean(x_NL, mask_NL, *, rows: int) -> jax.Array:
    """The released aggregation (``agg = "micro"``, D2): the mean over consecutive chunks of their token means.

    A chunk has `rows` rows, the last one may be short; a chunk without tokens counts as 0.
    """
    missing = -x_NL.shape[0] % rows
    x, mask = (jnp.pad(y, ((0, missing), (0, 0))).reshape(-1, rows * y.shape[1]) for y in (x_NL, mask_NL))
    return jnp.mean(jax.vmap(token_mean)(x, mask))


def gap(a_NL, b_NL, mask_NL) -> jax.Array:
    """a - b per valid token; 0 on masked slots and where either side is not finite (counted by `nonfinite_tokens`)."""
    keep = mask_NL & jnp.isfinite(a_NL) & jnp.isfinite(b_NL)
    return masked(a_NL, keep) - masked(b_NL, keep)


def nonfinite_tokens(mask_NL, *arrays) -> jax.Array:
    """Number of valid tokens where any of the arrays is not finite. Anything but 0 is a bug upstream."""
    bad = jnp.zeros(mask_NL.shape, bool)
    for x in arrays:
        bad |= ~jnp.isfinite(x)
    return jnp.sum(bad & mask_NL)


def poison(loss_NL, lS_NL, mask_NL, *arrays) -> jax.Array:
    """Makes loss and gradient NaN on valid tokens where an input is not finite.

    Clamps would turn such an input into an ordinary number and hide the bug; the update must be skipped instead.
    """
    bad = jnp.zeros(mask_NL.shape, bool)
    for x in (lS_NL, *arrays):
        bad |= ~jnp.isfinite(x)
    bad &= mask_NL
    # Both factors are 0 on sound tokens, so that their gradient is 0 * 0 and not 0 * NaN.
    return loss_NL + masked(lS_NL, bad) * jnp.where(bad, jnp.nan, 0).astype(loss_NL.dtype)


# --- segments -------------------------------------------------------------------------------------------------------


def segment_ids(ids_N, ok_N) -> jax.Array:
    """Arbitrary integer ids -> `[N]` segments in 0..N-1 (with holes); rows with ok = False get the dump segment N."""
    chex.assert_rank([ids_N, ok_N], 1)
    chex.assert_equal_shape([ids_N, ok_N])
    ids_N = jnp.asarray(ids_N)
    # The first place of an id among the sorted ids names it, without counting the distinct ones.
    return jnp.where(ok_N, jnp.searchsorted(jnp.sort(ids_N), ids_N), ids_N.shape[0])


def segment_sum(x_N, seg_N) -> jax.Array:
    """Sum of x per segment, `[N + 1]`; index it with `seg_N` to hand the value back to the rows."""
    return jax.ops.segment_sum(x_N, seg_N, num_segments=seg_N.shape[0] + 1)


def segment_count(seg_N, dtype=jnp.float32) -> jax.Array:
    """Rows per segment, `[N + 1]`."""
    return segment_sum(jnp.ones(seg_N.shape, dtype), seg_N)


def segment_mean(x_N, seg_N) -> jax.Array:
    """Mean of x per segment, `[N + 1]`, 0 for an empty one. Two passes, as `masked_mean`."""
    n = jnp.maximum(segment_count(seg_N, x_N.dtype), 1)
    first = segment_sum(x_N, seg_N) / n
    return first + segment_sum(x_N - first[seg_N], seg_N) / n


def segment_min(x_N, seg_N) -> jax.Array:
    """Minimum of x per segment, `[N + 1]`; empty segments hold the identity of min."""
    return jax.ops.segment_min(x_N, seg_N, num_segments=seg_N.shape[0] + 1)


def segment_std(x_N, seg_N, ddof: int = 0) -> jax.Array:
    """Standard deviation of x per segment, `[N + 1]`, 0 where n <= ddof.

    x is shifted by its segment's minimum first: equal values then give exactly 0, whatever their size.
    """
    y_N = x_N - segment_min(x_N, seg_N)[seg_N]
    n = segment_count(seg_N, x_N.dtype) - ddof
    total = segment_sum(jnp.square(y_N - segment_mean(y_N, seg_N)[seg_N]), seg_N)
    return jnp.where(n > 0, jnp.sqrt(total / jnp.maximum(n, 1)), 0)


def first_in_segment(key_N, seg_N) -> jax.Array:
    """`[N]` bool: the row with the smallest key of its segment (ties: the first row). The dump segment has one too."""
    rows_N = jnp.arange(seg_N.shape[0])
    smallest_N = key_N == segment_min(key_N, seg_N)[seg_N]
    row_N = jnp.where(smallest_N, rows_N, seg_N.shape[0])
    return segment_min(row_N, seg_N)[seg_N] == rows_N
