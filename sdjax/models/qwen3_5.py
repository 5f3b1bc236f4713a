"""The Qwen3.5 text decoder: Gated DeltaNet layers and gated full-attention layers in a repeating pattern.

Each kind of layer is one Flax block whose parameters are stacked over the layers of that kind. The model is a scan over
the periods of the pattern, with an inner scan over each run of equal layers, so that compile time does not grow with
depth. Segments of packed rows are kept apart in the convolutions, in the recurrent state and in attention.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sdjax.errors import ModelError
from sdjax.models.attention import cached_attention, packed_attention
from sdjax.models.base import Cache, Model, Params, Prefix
from sdjax.models.delta_kernels import DeltaKernels, delta_kernels
from sdjax.models.dense import MLP, rms_norm, rope_table
from sdjax.models.embedding import embed, head_logits
from sdjax.models.gated_attention import CenteredNorm, GatedAttention
from sdjax.models.gated_delta_net import GatedDeltaNet, Tails
from sdjax.models.qwen3_5_config import FULL, LINEAR, Qwen35Config
from sdjax.models.tensors import Tensor

# Where the layers of each kind are in the parameter tree.
_STACKS = {LINEAR: "linear_layers", FULL: "full_layers"}
# Rounding these to half precision would change how long a state lives.
_FLOAT32 = ("A_log", "dt_bias")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HybridCache(Cache):
    """Keys and values of the attention layers, and what the Gated DeltaNet layers know of the tokens seen so far.

    state: float32 ``[linear layers, rows, value_heads, key_dim, value_dim]``. tails: last inputs of the convolutions,
    ``[linear layers, rows, conv_kernel - 1, channels]``. Unlike keys and values these cannot be taken back to an
    earlier position.
    """

    state: jax.Array
    tails: Tails


class Block(nnx.Module):
    """One layer; the mixer is GatedDeltaNet or GatedAttention."""

    def __init__(self, c: Qwen35Config, kind: str, rngs: nnx.Rngs):
        self.mixer_norm = CenteredNorm(c.hidden_size, c.rms_eps, "embed")
        self.mixer = GatedDeltaNet(c, rngs) if kind == LINEAR else GatedAttention(c, rngs)
        self.mlp_norm = CenteredNorm(c.hidden_size, c.rms_eps, "embed")
        self.mlp = MLP(c, rngs)

    def feed_forward(self, x_XD: jax.Array) -> jax.Array:
        return x_XD + self.mlp(self.mlp_norm(x_XD))


@functools.cache
def _block_definition(config: Qwen35Config, kind: str) -> tuple[Any, dict[str, Any]]:
    """Returns the block's graph definition and the logical axes of its parameters (a nested dict)."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Block(config, kind, nnx.Rngs(0))))
    axes = jax.tree.map(
        lambda variable: variable.get_metadata()["axes"], state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    return graph, nnx.to_pure_dict(axes)


@functools.partial(jax.jit, static_argnames=("c", "dtype"))
def _init(c: Qwen35Config, key: jax.Array, dtype: Any) -> Params:
    key_embedding, key_head, *keys = jax.random.split(key, 2 + len(_STACKS))

    def layers(kind: str, key: jax.Array) -> Params:
        one = lambda k: nnx.to_pure_dict(nnx.state(Block(c, kind, nnx.Rngs(params=k)), nnx.Param))  # noqa: E731
        return jax.vmap(one)(jax.random.split(key, len(c.numbers(kind))))

    shape = (c.vocab_size, c.hidden_size)
    params: Params = {
        "embedding": c.initializer_range * jax.random.normal(key_embedding, shape),
        **{_STACKS[kind]: layers(kind, key) for kind, key in zip(_STACKS, keys, strict=True)},
        "final_norm": jnp.zeros((c.hidden_size,)),
    }
    if not c.tie_embeddings:
        params["head"] = c.initializer_range * jax.random.normal(key_head, shape)
    return jax.tree.map_with_path(lambda path, x: x if path[-1].key in _FLOAT32 else x.astype(dtype), params)


@dataclass(frozen=True)
class Qwen35Model(Model):
    """The text part of Qwen3.5.

    Parameters: ``embedding`` [V, D], ``linear_layers`` and ``full_layers`` (each leaf [layers of the kind, ...]),
    ``final_norm`` [D] and, unless the embedding is tied, ``head`` [V, D]. A_log and dt_bias are always made float32.
    delta_rule: name of the delta rule's implementation (see ``sdjax.models.delta_kernels``).
    """

    config: Qwen35Config
    delta_rule: str = "xla"

    def __post_init__(self):
        super().__post_init__()
        delta_kernels(self.delta_rule)

    @property
    def _kernels(self) -> DeltaKernels:
        return delta_kernels(self.delta_rule)

    def _block(self, kind: str, layer_params: Params) -> Block:
        return nnx.merge(_block_definition(self.config, kind)[0], layer_params)

    def init(self, key: jax.Array, dtype: Any = jnp.float32) -> Params:
        return _init(self.config, key, jnp.dtype(dtype))

    def _scan(self, layers: dict[str, Callable[..., Any]], carry: Any, params: Params) -> Any:
        """Calls ``layers[kind](carry, (number, parameters))`` for each layer; number counts layers of that kind."""
        c = self.config
        stacks = {}
        for kind, name in _STACKS.items():
            numbered = (jnp.arange(len(c.numbers(kind))), params[name])
            stacks[kind] = jax.tree.map(lambda x: x.reshape(c.layers // c.period, -1, *x.shape[1:]), numbered)

        def period(carry, stacks):
            for kind, begin, end in c.runs():
                run = jax.tree.map(lambda x: x[begin:end], stacks[kind])  # noqa: B023
                carry, _ = jax.lax.scan(layers[kind], carry, run)
            return carry, None

        return jax.lax.scan(period, carry, stacks)[0]

    def _final_norm(self, params: Params, x_XD: jax.Array) -> jax.Array:
        return rms_norm(x_XD, 1.0 + params["final_norm"].astype(jnp.float32), self.config.rms_eps)

    def hidden(
        self,
        params: Params,
        tokens_BT: jax.Array,
        position_BT: jax.Array,
        segment_BT: jax.Array,
        *,
        remat: bool = False,
        prefix: Prefix | None = None,
    ) -> jax.Array:
        if prefix is not None:
            raise ModelError("Qwen3.5 cannot start packed rows behind a shared prefix.", "ask model.shares_prefixes.")
        rope = rope_table(self.config, position_BT)

        def linear(x_BTD, numbered):
            block = self._block(LINEAR, numbered[1])
            assert isinstance(block.mixer, GatedDeltaNet)
            x_BTD = x_BTD + block.mixer(block.mixer_norm(x_BTD), segment_BT, self._kernels)
            return block.feed_forward(x_BTD), None

        def full(x_BTD, numbered):
            block = self._block(FULL, numbered[1])
            assert isinstance(block.mixer, GatedAttention)
            q, k, v, gate = block.mixer.qkv_gate(block.mixer_norm(x_BTD), rope)
            o = packed_attention(q, k, v, segment_BT, implementation=self.attention)
            x_BTD = x_BTD + block.mixer.out(o, gate)
            return block.feed_forward(x_BTD), None

        layers = {LINEAR: linear, FULL: full}
        if remat:
            layers = {kind: jax.checkpoint(layer) for kind, layer in layers.items()}
        x_BTD = embed(params, tokens_BT, segment_BT != 0, self.compute_dtype)
        return self._final_norm(params, self._scan(layers, x_BTD, params))

    def logits(self, params: Params, hidden_XD: jax.Array) -> jax.Array:
        return head_logits(params, hidden_XD)

    def init_cache(self, rows: int, length: int, dtype: Any = None) -> HybridCache:
        """As in the base class; ``dtype`` is that of keys, values and convolution tails, states are float32."""
        c = self.config
        linear, dtype = len(c.numbers(LINEAR)), self.compute_dtype if dtype is None else dtype
        kv = (len(c.numbers(FULL)), rows, length, c.kv_heads, c.head_dim)
        keys, values = c.linear_key_heads * c.linear_key_dim, c.linear_value_heads * c.linear_value_dim
        state = (linear, rows, c.linear_value_heads, c.linear_key_dim, c.linear_value_dim)
        tail = lambda channels: jnp.zeros((linear, rows, c.conv_kernel - 1, channels), dtype)  # noqa: E731
        return HybridCache(
            k=jnp.zeros(kv, dtype),
            v=jnp.zeros(kv, dtype),
            state=jnp.zeros(state, jnp.float32),
            tails=Tails(tail(keys), tail(keys), tail(values)),
        )

    def extend(
        self,
        params: Params,
        cache: Cache,
        tokens_ST: jax.Array,
        start_S: jax.Array,
        length_S: jax.Array,
        *,
        context: int | None = None,
    ) -> tuple[jax.Array, Cache]:
        def attend(q, k, v, cache, number, position_ST):
            k = jax.lax.dynamic_index_in_dim(cache.k, number, keepdims=False)[:, :context]
            v = jax.lax.dynamic_index_in_dim(cache.v, number, keepdims=False)[:, :context]
            return cached_attention(q, k, v, position_ST)

        return self._extend(params, cache, tokens_ST, start_S, length_S, attend)

    def prefill(
        self, params: Params, tokens_ST: jax.Array, length_S: jax.Array, dtype: Any = None
    ) -> tuple[jax.Array, Cache]:
        # Nothing lies in the cache yet, so the tokens attend to each other as packed rows do, by the faster kernel.
        segment_ST = (jnp.arange(tokens_ST.shape[1]) < length_S[:, None]).astype(jnp.int32)

        def attend(q, k, v, cache, number, position_ST):
            return packed_attention(q, k, v, segment_ST, implementation=self.attention)

        rows, length = tokens_ST.shape
        empty = self.init_cache(rows, length, dtype)
        return self._extend(params, empty, tokens_ST, jnp.zeros_like(length_S), length_S, attend)

    def _extend(
        self,
        params: Params,
        cache: Cache,
        tokens_ST: jax.Array,
        start_S: jax.Array,
        length_S: jax.Array,
        attend: Callable[..., jax.Array],
    ) -> tuple[jax.Array, Cache]:
        """``extend`` with ``attend(q, k, v, cache with the new tokens, layer in it, positions)`` as attention."""
        assert isinstance(cache, HybridCache)
        rows, new = tokens_ST.shape
        position_ST = start_S[:, None] + jnp.arange(new)
        valid_ST = jnp.arange(new) < length_S[:, None]
        # An index past the end is dropped by the scatter below, so an invalid token writes nothing.
        write_ST = jnp.where(valid_ST, position_ST, cache.length)
        row_S1 = jnp.arange(rows)[:, None]
        rope = rope_table(self.config, position_ST)
        # A new sequence must not continue what the row's last one left behind.
        fresh_S = (start_S == 0) & (length_S > 0)

        def linear(carry, numbered):
            (x_STD, cache), (number, layer_params) = carry, numbered
            block = self._block(LINEAR, layer_params)
            assert isinstance(block.mixer, GatedDeltaNet)
            old = jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), (cache.state, cache.tails)
            )
            state, tails = jax.tree.map(lambda x: jnp.where(fresh_S.reshape(-1, *[1] * (x.ndim - 1)), 0, x), old)
            y, *seen = block.mixer.extend(block.mixer_norm(x_STD), state, tails, length_S, self._kernels)
            # The whole cache is carried and updated in place; as a scanned input it would be copied every step.
            state, tails = jax.tree.map(lambda x, y: x.at[number].set(y), (cache.state, cache.tails), tuple(seen))
            cache = dataclasses.replace(cache, state=state, tails=tails)
            return (block.feed_forward(x_STD + y), cache), None

        def full(carry, numbered):
            (x_STD, cache), (number, layer_params) = carry, numbered
            block = self._block(FULL, layer_params)
            assert isinstance(block.mixer, GatedAttention)
            q, k, v, gate = block.mixer.qkv_gate(block.mixer_norm(x_STD), rope)
            cache = dataclasses.replace(
                cache,
                k=cache.k.at[number, row_S1, write_ST].set(k.astype(cache.k.dtype), mode="drop"),
                v=cache.v.at[number, row_S1, write_ST].set(v.astype(cache.v.dtype), mode="drop"),
            )
            x_STD = x_STD + block.mixer.out(attend(q, k, v, cache, number, position_ST), gate)
            return (block.feed_forward(x_STD), cache), None

        x_STD = embed(params, tokens_ST, valid_ST, self.compute_dtype)
        x_STD, cache = self._scan({LINEAR: linear, FULL: full}, (x_STD, cache), params)
        return self._final_norm(params, x_STD), cache

    def logical_axes(self) -> dict[str, Any]:
        def layers(kind: str) -> dict[str, Any]:
            axes = _block_definition(self.config, kind)[1]
            return jax.tree.map(lambda axes: ("layers", *axes), axes, is_leaf=lambda x: isinstance(x, tuple))

        stacks = {name: layers(kind) for kind, name in _STACKS.items()}
        axes = {"embedding": ("vocab", "embed"), **stacks, "final_norm": ("embed",)}
        return axes if self.config.tie_embeddings else axes | {"head": ("vocab", "embed")}


def tensors(config: Qwen35Config) -> list[Tensor]:
    """Returns every tensor of a Qwen3.5 text model. Its kernels are [out, in], ours [in, out].

    The prefix is "model.language_model." in a vision-language checkpoint and "model." in a text-only one.
    """
    found = [
        Tensor("{prefix}embed_tokens.weight", ("embedding",)),
        Tensor("{prefix}norm.weight", ("final_norm",)),
    ]
    if not config.tie_embeddings:
        found.append(Tensor("lm_head.weight", ("head",)))
    for kind, stack in _STACKS.items():
        mixer = "linear_attn" if kind == LINEAR else "self_attn"
        numbers = config.numbers(kind)

        def add(name: str, *path: str, **layout: Any) -> None:
            name = "{prefix}layers.{layer}." + name
            found.append(Tensor(name, (stack, *path), layers=numbers, **layout))  # noqa: B023

        add("input_layernorm.weight", "mixer_norm", "weight")
        add("post_attention_layernorm.weight", "mlp_norm", "weight")
        for name in ("gate", "up", "down"):
            add(f"mlp.{name}_proj.weight", "mlp", name, "kernel", transpose=True)
        if kind == FULL:
            for name in ("q", "k", "v", "o"):
                add(f"{mixer}.{name}_proj.weight", "mixer", name, "kernel", transpose=True)
            for name in ("q_norm", "k_norm"):
                add(f"{mixer}.{name}.weight", "mixer", name, "weight")
            continue
        for name in ("q", "k", "v"):
            add(f"{mixer}.in_proj_qkv.weight", "mixer", name, "kernel", transpose=True)
            add(f"{mixer}.conv1d.weight", "mixer", f"conv_{name}", transpose=True, unit_axis=1)
        for name in ("z", "b", "a"):
            add(f"{mixer}.in_proj_{name}.weight", "mixer", name, "kernel", transpose=True)
        add(f"{mixer}.out_proj.weight", "mixer", "out", "kernel", transpose=True)
        add(f"{mixer}.norm.weight", "mixer", "norm")
        for name in _FLOAT32:
            add(f"{mixer}.{name}", "mixer", name, float32=True)
    return found
