"""Token embedding and vocabulary head, the same in every family."""

from typing import Any

import jax
import jax.numpy as jnp

from sdjax.models.base import Params


def embed(params: Params, tokens_XT: jax.Array, valid_XT: jax.Array, dtype: Any) -> jax.Array:
    """Returns ``[..., T, D]`` in ``dtype``; a valid id outside the vocabulary gives NaN.

    Padding enters as zeros and stays finite in every layer, whatever its id or its embedding row holds.
    """
    tokens = jnp.where(valid_XT, tokens_XT, 0)
    x = jnp.take(params["embedding"], tokens, axis=0, mode="fill", fill_value=jnp.nan)
    return jnp.where(valid_XT[..., None], x, 0).astype(dtype)


def head_logits(params: Params, hidden_XD: jax.Array) -> jax.Array:
    """Returns float32 logits ``[..., V]``; the head is the embedding where ``params`` has none of its own."""
    head_VD = params["head"] if "head" in params else params["embedding"]
    return jnp.einsum(
        "...d,vd->...v",
        hidden_XD,
        head_VD.astype(hidden_XD.dtype),
        precision=jax.lax.Precision.HIGHEST if hidden_XD.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
