"""cuDNN attention over packed rows: a row's segments are ragged sequences, and no key of another segment is read.

JAX offers the ragged layout only inside its private module, so this file is the one place that calls it. Two traps of
that interface, both silent: offsets are segment starts only (an end offset shifts every later row), and in JAX before
0.11 the offsets of grouped keys are wrong.
"""

from typing import Any

import jax
import jax.numpy as jnp

from sdjax.errors import ConfigError

MAX_SEGMENTS = 32  # of one packed row, padding included; the backward pass takes memory for each


def resolve(attention: str, compute_dtype: str) -> str:
    """Which implementation runs: ``"auto"`` is cuDNN where it can be used, else XLA.

    Raises:
      ConfigError: ``"cudnn"`` was asked for where it cannot be used.
    """
    missing = _missing(compute_dtype)
    if attention == "cudnn" and missing:
        raise ConfigError(f"model.attention = 'cudnn', but {missing}.", 'use model.attention = "auto" or "xla".')
    return ("xla" if missing else "cudnn") if attention == "auto" else attention


def _missing(compute_dtype: str) -> str:
    if jnp.dtype(compute_dtype) != jnp.bfloat16:
        return f"the compute dtype is {compute_dtype}, not bfloat16"
    if jax.default_backend() != "gpu":
        return f"the backend is {jax.default_backend()}"
    if jax.__version_info__ < (0, 11):
        return f"JAX {jax.__version__} gives grouped keys wrong offsets"
    if float(getattr(jax.local_devices()[0], "compute_capability", "0")) < 9.0:
        return "the accelerator is older than Hopper"
    return ""


def segment_layout(segment_BT: jax.Array, limit: int = MAX_SEGMENTS) -> tuple[jax.Array, jax.Array]:
    """Starts [B, limit + 1] and lengths [B, limit] of the runs of equal ids, filled with -1."""
    T = segment_BT.shape[1]
    first_BT = jnp.concatenate(
        [jnp.ones_like(segment_BT[:, :1], bool), segment_BT[:, 1:] != segment_BT[:, :-1]], axis=1
    )
    start = jax.vmap(lambda first_T: jnp.nonzero(first_T, size=limit + 1, fill_value=-1)[0])(first_BT)
    start = start.astype(jnp.int32)
    count_B1 = first_BT.sum(axis=1, keepdims=True)
    number = jnp.arange(limit)[None]
    end = jnp.where(number + 1 < count_B1, start[:, 1:], T)
    return start, jnp.where(number < count_B1, end - start[:, :-1], -1).astype(jnp.int32)


def packed_attention(q_BTHK: jax.Array, k_BTJK: jax.Array, v_BTJK: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """See ``sdjax.models.attention.packed_attention``."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    start, length = segment_layout(segment_BT)
    attend: Any = dot_product_attention  # its return type covers results that are not asked for here
    return attend(
        q_BTHK,
        k_BTJK,
        v_BTJK,
        q_seqlen=length,
        kv_seqlen=length,
        q_offsets=start,
        kv_offsets=start,
        scale=q_BTHK.shape[-1] ** -0.5,
        mask_type=MaskType.PADDING_CAUSAL,
    )


def prefixed_attention(q_BTHK, k_BTJK, v_BTJK, segment_BT, k_BPJK, v_BPJK, length_B) -> jax.Array:
    """See ``sdjax.models.attention.prefixed_attention``: own segment and prefix apart, joined by their normalisers."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    B, T, _, K = q_BTHK.shape
    start, length = segment_layout(segment_BT)
    attend: Any = dot_product_attention
    own, stat_MHT = attend(
        q_BTHK,
        k_BTJK,
        v_BTJK,
        q_seqlen=length,
        kv_seqlen=length,
        q_offsets=start,
        kv_offsets=start,
        scale=K**-0.5,
        mask_type=MaskType.PADDING_CAUSAL,
        return_residual=True,
    )
    before, stat_BHT = attend(
        q_BTHK,
        k_BPJK,
        v_BPJK,
        q_seqlen=jnp.full((B,), T, jnp.int32),
        kv_seqlen=length_B.astype(jnp.int32),
        scale=K**-0.5,
        mask_type=MaskType.PADDING,
        return_residual=True,
    )
    return merge(own, packed_statistics(stat_MHT, start, length, T), before, jnp.moveaxis(stat_BHT, 1, 2))


def packed_statistics(stat_MHT: jax.Array, start: jax.Array, length: jax.Array, T: int) -> jax.Array:
    """Log-normalisers [B, T, H] from cuDNN's layout: one row of T for each segment, all packed rows' in order."""
    count_B = (length >= 0).sum(axis=1)
    place_T = jnp.arange(T)
    number_BT = (place_T[None, :, None] >= jnp.where(start >= 0, start, T)[:, None, :-1]).sum(axis=2) - 1
    local_BT = place_T[None] - jnp.take_along_axis(start, number_BT, axis=1)
    segment_BT = number_BT + (jnp.cumsum(count_B) - count_B)[:, None]
    return stat_MHT[segment_BT, :, local_BT]


def merge(a_BTHK: jax.Array, log_a_BTH: jax.Array, b_BTHK: jax.Array, log_b_BTH: jax.Array) -> jax.Array:
    """Attention over the union of two sets of keys, from the outputs and log-normalisers over each."""
    weight = jax.nn.sigmoid(log_a_BTH - log_b_BTH)[..., None]
    joined = weight * a_BTHK.astype(jnp.float32) + (1 - weight) * b_BTHK.astype(jnp.float32)
    return joined.astype(a_BTHK.dtype)
