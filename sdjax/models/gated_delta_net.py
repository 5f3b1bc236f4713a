"""The token mixer of Qwen3.5's linear-attention layers: short convolutions, the gated delta rule, a gated norm."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from sdjax.models.delta_kernels import DeltaKernels
from sdjax.models.dense import Projection, rms_norm
from sdjax.models.qwen3_5_config import Qwen35Config
from sdjax.models.short_conv import next_tail, short_conv


class Tails(NamedTuple):
    """The last inputs of the three convolutions, ``[..., conv_kernel - 1, channels]`` each; zeros at a start. By layer:
    tuples of such arrays."""

    q: Any
    k: Any
    v: Any


class GatedDeltaNet(nnx.Module):
    """Gated DeltaNet. Projections and convolutions of q, k and v are separate arrays, so that heads can be sharded."""

    def __init__(self, c: Qwen35Config, rngs: nnx.Rngs):
        keys, values = c.linear_key_heads * c.linear_key_dim, c.linear_value_heads * c.linear_value_dim
        heads = c.linear_value_heads
        self.config = c

        def projection(size: int) -> Projection:
            return Projection(("embed", "heads"), c.hidden_size, size, c.initializer_range, False, rngs)

        def conv(channels: int) -> nnx.Param:
            # Weights of size initializer_range would all but silence a fresh layer.
            shape = (c.conv_kernel, channels)
            return nnx.Param(c.conv_kernel**-0.5 * jax.random.normal(rngs.params(), shape), axes=(None, "heads"))

        self.q, self.k, self.v, self.z = projection(keys), projection(keys), projection(values), projection(values)
        self.b, self.a = projection(heads), projection(heads)
        self.conv_q, self.conv_k, self.conv_v = conv(keys), conv(keys), conv(values)
        decay = jax.random.uniform(rngs.params(), (heads,), minval=0.01, maxval=16.0)
        self.A_log = nnx.Param(jnp.log(decay), axes=("heads",))
        self.dt_bias = nnx.Param(jnp.ones((heads,)), axes=("heads",))
        self.norm = nnx.Param(jnp.ones((c.linear_value_dim,)), axes=(None,))
        self.out = Projection(("heads", "embed"), values, c.hidden_size, c.initializer_range, False, rngs)

    def _heads(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Splits channels into heads."""
        c = self.config
        keys = (*q.shape[:-1], c.linear_key_heads, c.linear_key_dim)
        return q.reshape(keys), k.reshape(keys), v.reshape(*v.shape[:-1], c.linear_value_heads, c.linear_value_dim)

    def _gates(self, x_XTD: jax.Array, valid_XT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns float32 (g, beta) [..., T, value heads]; both are 0 where a token must change no state."""
        f32 = jnp.float32
        dt = jax.nn.softplus(self.a(x_XTD).astype(f32) + self.dt_bias[...].astype(f32))
        g = -jnp.exp(self.A_log[...].astype(f32)) * dt
        beta = jax.nn.sigmoid(self.b(x_XTD).astype(f32))
        return jnp.where(valid_XT[..., None], g, 0.0), jnp.where(valid_XT[..., None], beta, 0.0)

    def _output(self, o_XTHE: jax.Array, x_XTD: jax.Array) -> jax.Array:
        """Norm of each head, gate, output projection. Unlike in Mamba 2 the norm comes before the gate."""
        z = self.z(x_XTD).astype(jnp.float32).reshape(o_XTHE.shape)
        o = rms_norm(o_XTHE, self.norm[...], self.config.rms_eps) * jax.nn.silu(z)
        return self.out(o.reshape(*x_XTD.shape[:-1], -1).astype(x_XTD.dtype))

    def __call__(self, x_BTD: jax.Array, segment_BT: jax.Array, kernels: DeltaKernels) -> jax.Array:
        """Over packed rows."""

        taps = zip((self.q, self.k, self.v), (self.conv_q, self.conv_k, self.conv_v))
        mixed = (kernels.conv(projection(x_BTD), kernel[...], segment_BT) for projection, kernel in taps)
        g, beta = self._gates(x_BTD, segment_BT != 0)
        o, _ = kernels.rule(*self._heads(*mixed), g, beta, segment_BT)
        return self._output(o, x_BTD)

    def extend(
        self, x_STD: jax.Array, state_SHKE: jax.Array, tails: Tails, length_S: jax.Array, kernels: DeltaKernels
    ) -> tuple[jax.Array, jax.Array, Tails]:
        """Continues each row by its first ``length_S`` tokens; returns outputs, new states and new tails.

        A row of length 0 keeps state and tails exactly.
        """
        raw = Tails(self.q(x_STD), self.k(x_STD), self.v(x_STD))
        taps = (self.conv_q[...], self.conv_k[...], self.conv_v[...])
        q, k, v = self._heads(*(short_conv(x, tail, kernel) for x, tail, kernel in zip(raw, tails, taps)))
        tails = Tails(*(next_tail(x, tail, length_S) for x, tail in zip(raw, tails)))
        valid_ST = jnp.arange(x_STD.shape[1]) < length_S[:, None]
        g, beta = self._gates(x_STD, valid_ST)
        if x_STD.shape[1] == 1:
            o, state_SHKE = kernels.step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state_SHKE)
            o = o[:, None]
        else:
            o, state_SHKE = kernels.rule(q, k, v, g, beta, jnp.ones_like(valid_ST, jnp.int32), state_SHKE)
        return self._output(o, x_STD), state_SHKE, tails
