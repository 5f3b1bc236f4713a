"""Attention of Qwen3.5's full-attention layers: gated output, norms per head, RoPE on a part of each head."""

import jax
import jax.numpy as jnp
from flax import nnx

from sdjax.models.dense import Projection, apply_rope, rms_norm
from sdjax.models.qwen3_5_config import Qwen35Config


class CenteredNorm(nnx.Module):
    """RMSNorm whose weight is the distance of the scale from 1."""

    def __init__(self, size: int, eps: float, axis: str | None):
        self.eps = eps
        self.weight = nnx.Param(jnp.zeros((size,)), axes=(axis,))

    def __call__(self, x_XD: jax.Array) -> jax.Array:
        return rms_norm(x_XD, 1.0 + self.weight[...].astype(jnp.float32), self.eps)


def apply_partial_rope(x_XTHK: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the leading dimensions that ``rope`` covers; the rest of each head knows no position."""
    rotated = 2 * rope[0].shape[-1]
    return jnp.concatenate([apply_rope(x_XTHK[..., :rotated], rope), x_XTHK[..., rotated:]], axis=-1)


class GatedAttention(nnx.Module):
    """``q`` projects to a query and a gate for each head, side by side as in the checkpoint."""

    def __init__(self, c: Qwen35Config, rngs: nnx.Rngs):
        q, kv, std = c.heads * c.head_dim, c.kv_heads * c.head_dim, c.initializer_range
        self.config = c
        self.q = Projection(("embed", "heads"), c.hidden_size, 2 * q, std, False, rngs)
        self.k = Projection(("embed", "kv_heads"), c.hidden_size, kv, std, False, rngs)
        self.v = Projection(("embed", "kv_heads"), c.hidden_size, kv, std, False, rngs)
        self.o = Projection(("heads", "embed"), q, c.hidden_size, std, False, rngs)
        self.q_norm = CenteredNorm(c.head_dim, c.rms_eps, None)
        self.k_norm = CenteredNorm(c.head_dim, c.rms_eps, None)

    def qkv_gate(
        self, x_XTD: jax.Array, rope: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Returns q, k (both rotated), v and the gate: [..., T, heads or kv_heads, head_dim]."""
        c, lead = self.config, x_XTD.shape[:-1]
        q, gate = jnp.split(self.q(x_XTD).reshape(*lead, c.heads, 2 * c.head_dim), 2, axis=-1)
        k = self.k(x_XTD).reshape(*lead, c.kv_heads, c.head_dim)
        v = self.v(x_XTD).reshape(*lead, c.kv_heads, c.head_dim)
        return apply_partial_rope(self.q_norm(q), rope), apply_partial_rope(self.k_norm(k), rope), v, gate

    def out(self, o_XTHK: jax.Array, gate_XTHK: jax.Array) -> jax.Array:
        o = o_XTHK * jax.nn.sigmoid(gate_XTHK.astype(jnp.float32)).astype(o_XTHK.dtype)
        return self.o(o.reshape(*o.shape[:-2], -1))
