"""The short causal convolutions of Gated DeltaNet in plain XLA."""

import jax
import jax.numpy as jnp


def short_conv(
    x_BTC: jax.Array, tail_BRC: jax.Array, kernel_LC: jax.Array, segment_BT: jax.Array | None = None
) -> jax.Array:
    """Causal depthwise convolution over the last L = R + 1 tokens, then SiLU; computed in float32.

    tail_BRC: the R inputs before the first token. segment_BT: taps on another segment count as 0 (None: all count).
    """
    total, reach = x_BTC.shape[1], tail_BRC.shape[1]
    window = jnp.concatenate([tail_BRC.astype(x_BTC.dtype), x_BTC], axis=1).astype(jnp.float32)
    kernel = kernel_LC.astype(jnp.float32)
    out = jnp.zeros(x_BTC.shape, jnp.float32)
    for tap in range(reach + 1):
        seen = window[:, tap : tap + total]
        if segment_BT is not None and tap < reach:
            segment = jnp.pad(segment_BT, ((0, 0), (reach, 0)), constant_values=-1)[:, tap : tap + total]
            seen = jnp.where((segment == segment_BT)[..., None], seen, 0.0)
        out = out + seen * kernel[tap]
    return jax.nn.silu(out).astype(x_BTC.dtype)


def next_tail(x_STC: jax.Array, tail_SRC: jax.Array, length_S: jax.Array) -> jax.Array:
    """The R inputs before token ``length_S`` of each row, in the dtype of the tail."""
    window = jnp.concatenate([tail_SRC, x_STC.astype(tail_SRC.dtype)], axis=1)
    index_SR = length_S[:, None] + jnp.arange(tail_SRC.shape[1])
    return jnp.take_along_axis(window, index_SR[..., None], axis=1)


def packed_conv(x_BTC: jax.Array, kernel_LC: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """``short_conv`` of packed rows, which nothing precedes."""
    tail = jnp.zeros((x_BTC.shape[0], len(kernel_LC) - 1, x_BTC.shape[2]), x_BTC.dtype)
    return short_conv(x_BTC, tail, kernel_LC, segment_BT)
