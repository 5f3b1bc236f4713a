"""The dense decoder family: Llama, Qwen2 and Qwen3.

One Flax block is defined once; its parameters are stacked over the layers and the block is scanned, so that compile
time does not grow with depth. Modules are split into pure state: the public methods take a plain dict of arrays.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sdjax import sharding
from sdjax.models.attention import decode_attention, packed_attention, prefixed_attention
from sdjax.models.base import Cache, Model, Params, Prefix
from sdjax.models.config import ModelConfig, rope_frequencies
from sdjax.models.embedding import embed, head_logits
from sdjax.models.tensors import Tensor


def matmul(x_XI: jax.Array, w_IO: jax.Array) -> jax.Array:
    """Product in the dtype of ``x``. float32 means float32: accelerators would otherwise round the operands."""
    precision = jax.lax.Precision.HIGHEST if x_XI.dtype == jnp.float32 else None
    return jnp.matmul(x_XI, w_IO.astype(x_XI.dtype), precision=precision)


def rope_table(config: ModelConfig, position_XT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns float32 (cos, sin), each ``[..., T, 1, head_dim / 2]``, to broadcast over heads."""
    angle = position_XT.astype(jnp.float32)[..., None] * jnp.asarray(rope_frequencies(config), jnp.float32)
    return jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]


def apply_rope(x_XTHK: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates (first half, second half) pairs of each head; computed in float32, returned in the dtype of ``x``."""
    cos, sin = rope
    first, second = jnp.split(x_XTHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_XTHK.dtype)


def rms_norm(x_XD: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm in float32, returned in the dtype of ``x``."""
    x = x_XD.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (x * scale_D.astype(jnp.float32)).astype(x_XD.dtype)


class RMSNorm(nnx.Module):
    def __init__(self, size: int, eps: float, axis: str | None):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((size,)), axes=(axis,))

    def __call__(self, x_XD: jax.Array) -> jax.Array:
        return rms_norm(x_XD, self.scale[...], self.eps)


class Projection(nnx.Module):
    """``x @ kernel (+ bias)``; kernel [in, out]."""

    def __init__(self, axes: tuple[str, str], n_in: int, n_out: int, std: float, bias: bool, rngs: nnx.Rngs):
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), (n_in, n_out)), axes=axes)
        self.bias = nnx.Param(jnp.zeros((n_out,)), axes=(axes[1],)) if bias else None

    def __call__(self, x_XI: jax.Array) -> jax.Array:
        out = matmul(x_XI, self.kernel[...])
        return out if self.bias is None else out + self.bias[...].astype(out.dtype)


class Attention(nnx.Module):
    def __init__(self, c: ModelConfig, rngs: nnx.Rngs):
        q, kv, std = c.heads * c.head_dim, c.kv_heads * c.head_dim, c.initializer_range
        self.config = c
        self.q = Projection(("embed", "heads"), c.hidden_size, q, std, c.qkv_bias, rngs)
        self.k = Projection(("embed", "kv_heads"), c.hidden_size, kv, std, c.qkv_bias, rngs)
        self.v = Projection(("embed", "kv_heads"), c.hidden_size, kv, std, c.qkv_bias, rngs)
        self.o = Projection(("heads", "embed"), q, c.hidden_size, std, c.o_bias, rngs)
        self.q_norm = RMSNorm(c.head_dim, c.rms_eps, None) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_eps, None) if c.qk_norm else None

    def qkv(self, x_XTD: jax.Array, rope: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns q [..., T, heads, head_dim] and k, v [..., T, kv_heads, head_dim], rotated."""
        c, lead = self.config, x_XTD.shape[:-1]
        q = self.q(x_XTD).reshape(*lead, c.heads, c.head_dim)
        k = self.k(x_XTD).reshape(*lead, c.kv_heads, c.head_dim)
        v = self.v(x_XTD).reshape(*lead, c.kv_heads, c.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return apply_rope(q, rope), apply_rope(k, rope), v

    def out(self, o_XTHK: jax.Array) -> jax.Array:
        return self.o(o_XTHK.reshape(*o_XTHK.shape[:-2], -1))


class MLP(nnx.Module):
    def __init__(self, c: ModelConfig, rngs: nnx.Rngs):
        std = c.initializer_range
        self.gate = Projection(("embed", "mlp"), c.hidden_size, c.intermediate_size, std, False, rngs)
        self.up = Projection(("embed", "mlp"), c.hidden_size, c.intermediate_size, std, False, rngs)
        self.down = Projection(("mlp", "embed"), c.intermediate_size, c.hidden_size, std, False, rngs)

    def __call__(self, x_XD: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x_XD)) * self.up(x_XD))


class Block(nnx.Module):
    def __init__(self, c: ModelConfig, rngs: nnx.Rngs):
        self.attn_norm = RMSNorm(c.hidden_size, c.rms_eps, None)
        self.attn = Attention(c, rngs)
        self.mlp_norm = RMSNorm(c.hidden_size, c.rms_eps, None)
        self.mlp = MLP(c, rngs)

    def feed_forward(self, x_XD: jax.Array) -> jax.Array:
        return x_XD + self.mlp(self.mlp_norm(x_XD))


@functools.cache
def _block_definition(config: ModelConfig) -> tuple[Any, dict[str, Any]]:
    """Returns the block's graph definition and the logical axes of its parameters (a nested dict)."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Block(config, nnx.Rngs(0))))
    axes = jax.tree.map(
        lambda variable: variable.get_metadata()["axes"], state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    return graph, nnx.to_pure_dict(axes)


@functools.partial(jax.jit, static_argnames=("c", "dtype"))
def _init(c: ModelConfig, key: jax.Array, dtype: Any) -> Params:
    key_embedding, key_head, key_layers = jax.random.split(key, 3)

    def one_layer(layer_key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(Block(c, nnx.Rngs(params=layer_key)), nnx.Param))

    shape = (c.vocab_size, c.hidden_size)
    params: Params = {
        "embedding": c.initializer_range * jax.random.normal(key_embedding, shape),
        "layers": jax.vmap(one_layer)(jax.random.split(key_layers, c.layers)),
        "final_norm": jnp.ones((c.hidden_size,)),
    }
    if not c.tie_embeddings:
        params["head"] = c.initializer_range * jax.random.normal(key_head, shape)
    return jax.tree.map(lambda x: x.astype(dtype), params)


@dataclass(frozen=True)
class DenseModel(Model):
    """Llama, Qwen2 or Qwen3.

    Parameters: ``embedding`` [V, D], ``layers`` (each leaf [layers, ...]), ``final_norm`` [D] and, unless the embedding
    is tied, ``head`` [V, D].
    """

    shares_prefixes = True

    def _block(self, layer_params: Params) -> Block:
        return nnx.merge(_block_definition(self.config)[0], layer_params)

    def _whole_block(self, layer_params: Params) -> Block:
        """The block where its parameters are divided over the mesh, as in all passes but decoding."""
        axes = _block_definition(self.config)[1]
        return self._block(sharding.whole_layer(self.mesh, axes, layer_params, self.compute_dtype))

    def init(self, key: jax.Array, dtype: Any = jnp.float32) -> Params:
        return _init(self.config, key, jnp.dtype(dtype))

    def hidden(
        self,
        params: Params,
        tokens_BT: jax.Array,
        position_BT: jax.Array,
        segment_BT: jax.Array,
        *,
        remat: str = "none",
        prefix: Prefix | None = None,
    ) -> jax.Array:
        rope = rope_table(self.config, position_BT)

        def layer(x_BTD: jax.Array, scanned: tuple[Params, Cache | None]) -> tuple[jax.Array, None]:
            layer_params, before = scanned
            block = self._whole_block(layer_params)
            q, k, v = block.attn.qkv(block.attn_norm(x_BTD), rope)
            if prefix is None or before is None:
                o = packed_attention(q, k, v, segment_BT, implementation=self.attention, mesh=self.mesh)
            else:
                o = prefixed_attention(
                    q, k, v, segment_BT, before.k, before.v, prefix.length_B,
                    implementation=self.attention, mesh=self.mesh,
                )  # fmt: skip
            return sharding.divide_rows(self.mesh, block.feed_forward(x_BTD + block.attn.out(o))), None

        x_BTD = embed(params, tokens_BT, segment_BT != 0, self.compute_dtype, mesh=self.mesh)
        scanned = (params["layers"], None if prefix is None else prefix.cache)
        layer = sharding.checkpoint_layer(layer, self.mesh, remat=remat)
        if self.scan_layers:
            x_BTD, _ = jax.lax.scan(layer, x_BTD, scanned)
        else:
            for number in range(self.config.layers):
                x_BTD, _ = layer(x_BTD, jax.tree.map(lambda x: x[number], scanned))  # noqa: B023
        return rms_norm(x_BTD, params["final_norm"], self.config.rms_eps)

    def logits(self, params: Params, hidden_XD: jax.Array) -> jax.Array:
        return head_logits(params, hidden_XD)

    def init_cache(self, rows: int, length: int, dtype: Any = None) -> Cache:
        c = self.config
        shape = (c.layers, rows, length, c.kv_heads, c.head_dim)
        dtype = self.compute_dtype if dtype is None else dtype
        return Cache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))

    def prefill(
        self, params: Params, tokens_ST: jax.Array, length_S: jax.Array, dtype: Any = None
    ) -> tuple[jax.Array, Cache]:
        # Nothing lies in the cache yet, so the tokens attend to each other as packed rows do, by the faster kernel.
        position_ST = jnp.broadcast_to(jnp.arange(tokens_ST.shape[1]), tokens_ST.shape)
        valid_ST = position_ST < length_S[:, None]
        segment_ST = valid_ST.astype(jnp.int32)
        rope = rope_table(self.config, position_ST)

        def layer(x_STD: jax.Array, layer_params: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            block = self._whole_block(layer_params)
            q, k, v = block.attn.qkv(block.attn_norm(x_STD), rope)
            o = packed_attention(q, k, v, segment_ST, implementation=self.attention, mesh=self.mesh)
            k, v = (jnp.where(valid_ST[..., None, None], x, 0).astype(dtype or self.compute_dtype) for x in (k, v))
            return sharding.divide_rows(self.mesh, block.feed_forward(x_STD + block.attn.out(o))), (k, v)

        x_STD = embed(params, tokens_ST, valid_ST, self.compute_dtype, mesh=self.mesh)
        x_STD, (k, v) = jax.lax.scan(layer, x_STD, params["layers"])
        return rms_norm(x_STD, params["final_norm"], self.config.rms_eps), Cache(k=k, v=v)

    def decode(
        self,
        params: Params,
        cache: Cache,
        token_S: jax.Array,
        position_S: jax.Array,
        active_S: jax.Array,
        *,
        context: int | None = None,
    ) -> tuple[jax.Array, Cache]:
        rope = rope_table(self.config, position_S[:, None])
        x_S1D = embed(params, token_S[:, None], active_S[:, None], self.compute_dtype)
        written = []
        for layer_params, k, v in zip(params["layers"], cache.k, cache.v, strict=True):
            block = self._block(layer_params)
            q, new_k, new_v = block.attn.qkv(block.attn_norm(x_S1D), rope)
            o, k, v = decode_attention(
                q, new_k, new_v, k, v, position_S, active_S, context=context, implementation=self.attention,
                mesh=self.mesh,
            )  # fmt: skip
            x_S1D = block.feed_forward(x_S1D + block.attn.out(o))
            written.append((k, v))
        k, v = zip(*written)
        return rms_norm(x_S1D[:, 0], params["final_norm"], self.config.rms_eps), Cache(k=k, v=v)

    def logical_axes(self) -> dict[str, Any]:
        layers = jax.tree.map(
            lambda axes: ("layers", *axes), _block_definition(self.config)[1], is_leaf=lambda x: isinstance(x, tuple)
        )
        axes = {"embedding": ("vocab", "embed"), "layers": layers, "final_norm": (None,)}
        return axes if self.config.tie_embeddings else axes | {"head": ("vocab", "embed")}


def dense_tensors(config: ModelConfig) -> list[Tensor]:
    """Returns every tensor of a Llama, Qwen2 or Qwen3 checkpoint. Its kernels are [out, in], ours [in, out]."""
    layer = "model.layers.{layer}."
    tensors = [Tensor("model.embed_tokens.weight", ("embedding",)), Tensor("model.norm.weight", ("final_norm",))]
    if not config.tie_embeddings:
        tensors.append(Tensor("lm_head.weight", ("head",)))
    norms = {"input_layernorm": ("attn_norm",), "post_attention_layernorm": ("mlp_norm",)}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": ("attn", "q_norm"), "self_attn.k_norm": ("attn", "k_norm")}
    tensors += [Tensor(f"{layer}{name}.weight", ("layers", *path, "scale")) for name, path in norms.items()]
    bias = {"q": config.qkv_bias, "k": config.qkv_bias, "v": config.qkv_bias, "o": config.o_bias}
    for name in ("q", "k", "v", "o"):
        tensors.append(Tensor(f"{layer}self_attn.{name}_proj.weight", ("layers", "attn", name, "kernel"), True))
        if bias[name]:
            tensors.append(Tensor(f"{layer}self_attn.{name}_proj.bias", ("layers", "attn", name, "bias")))
    for name in ("gate", "up", "down"):
        tensors.append(Tensor(f"{layer}mlp.{name}_proj.weight", ("layers", "mlp", name, "kernel"), True))
    return tensors
