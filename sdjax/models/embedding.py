"""Token embedding and vocabulary head, the same in every family."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from sdjax import sharding
from sdjax.models.base import Params


def embed(
    params: Params, tokens_XT: jax.Array, valid_XT: jax.Array, dtype: Any, *, mesh: Mesh | None = None
) -> jax.Array:
    """Returns ``[..., T, D]`` in ``dtype``; a valid id outside the vocabulary gives NaN.

    Padding enters as zeros and stays finite in every layer, whatever its id or its embedding row holds.
    mesh: devices that the parameters and the rows (first axis) are divided over.
    """
    tokens = jnp.where(valid_XT, tokens_XT, 0)
    if mesh is not None and not sharding.divides_rows(mesh, len(tokens)):
        mesh = None
    if mesh is not None:
        # Each device looks its part of D up for the rows of all, and rows are exchanged for parts of D afterwards:
        # left to itself, the compiler would gather the whole embedding.
        tokens = sharding.constrain(mesh, tokens, "data")
    x = jnp.take(params["embedding"], tokens, axis=0, mode="fill", fill_value=jnp.nan).astype(dtype)
    if mesh is not None:
        x = sharding.constrain(mesh, x, "data", *[None] * (x.ndim - 2), "fsdp")
        x = sharding.divide_rows(mesh, x)
    return jnp.where(valid_XT[..., None], x, 0)


def head_weight(params: Params) -> jax.Array:
    """Returns the head ``[V, D]``: the embedding where ``params`` has none of its own."""
    return params["head"] if "head" in params else params["embedding"]


def head_logits(params: Params, hidden_XD: jax.Array) -> jax.Array:
    """Returns float32 logits ``[..., V]``."""
    return jnp.einsum(
        "...d,vd->...v",
        hidden_XD,
        head_weight(params).astype(hidden_XD.dtype),
        precision=jax.lax.Precision.HIGHEST if hidden_XD.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
