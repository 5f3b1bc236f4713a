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

from sdjax import sharding
from sdjax.errors import ModelError
from sdjax.models.attention import decode_attention, packed_attention
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

    state: Any
    tails: Tails


class Block(nnx.Module):
    """One layer; the mixer is GatedDeltaNet or GatedAttention."""

    def __init__(self, c: Qwen35Config, kind: str, rngs: nnx.Rngs):
        self.mixer_norm = CenteredNorm(c.hidden_size, c.rms_eps, None)
        self.mixer = GatedDeltaNet(c, rngs) if kind == LINEAR else GatedAttention(c, rngs)
        self.mlp_norm = CenteredNorm(c.hidden_size, c.rms_eps, None)
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
    stacks = tuple(_STACKS.values())

    def __post_init__(self):
        super().__post_init__()
        delta_kernels(self.delta_rule)

    @property
    def _kernels(self) -> DeltaKernels:
        return delta_kernels(self.delta_rule, self.mesh)

    def _block(self, kind: str, layer_params: Params) -> Block:
        return nnx.merge(_block_definition(self.config, kind)[0], layer_params)

    def _whole_block(self, kind: str, layer_params: Params) -> Block:
        """The block where its parameters are divided over the mesh, as in all passes but decoding."""
        axes = _block_definition(self.config, kind)[1]
        return self._block(kind, sharding.whole_layer(self.mesh, axes, layer_params, self.compute_dtype))

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

    def _written_out(self, layers: dict[str, Callable[..., Any]], carry: Any, params: Params) -> Any:
        """The same without a loop."""
        seen = dict.fromkeys(_STACKS, 0)
        for kind in self.config.layer_types:
            number = seen[kind]
            carry, _ = layers[kind](carry, (number, jax.tree.map(lambda x: x[number], params[_STACKS[kind]])))  # noqa: B023
            seen[kind] += 1
        return carry

    def _final_norm(self, params: Params, x_XD: jax.Array) -> jax.Array:
        return rms_norm(x_XD, 1.0 + params["final_norm"].astype(jnp.float32), self.config.rms_eps)

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
        if prefix is not None:
            raise ModelError("Qwen3.5 cannot start packed rows behind a shared prefix.", "ask model.shares_prefixes.")
        rope = rope_table(self.config, position_BT)

        def linear(x_BTD, numbered):
            block = self._whole_block(LINEAR, numbered[1])
            assert isinstance(block.mixer, GatedDeltaNet)
            x_BTD = x_BTD + block.mixer(block.mixer_norm(x_BTD), segment_BT, self._kernels)
            return sharding.divide_rows(self.mesh, block.feed_forward(x_BTD)), None

        def full(x_BTD, numbered):
            block = self._whole_block(FULL, numbered[1])
            assert isinstance(block.mixer, GatedAttention)
            q, k, v, gate = block.mixer.qkv_gate(block.mixer_norm(x_BTD), rope)
            o = packed_attention(q, k, v, segment_BT, implementation=self.attention, mesh=self.mesh)
            x_BTD = x_BTD + block.mixer.out(o, gate)
            return sharding.divide_rows(self.mesh, block.feed_forward(x_BTD)), None

        layers = {LINEAR: linear, FULL: full}
        layers = {kind: sharding.checkpoint_layer(layer, self.mesh, remat=remat) for kind, layer in layers.items()}
        x_BTD = embed(params, tokens_BT, segment_BT != 0, self.compute_dtype, mesh=self.mesh)
        through = self._scan if self.scan_layers else self._written_out
        return self._final_norm(params, through(layers, x_BTD, params))

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

    def prefill(
        self, params: Params, tokens_ST: jax.Array, length_S: jax.Array, dtype: Any = None
    ) -> tuple[jax.Array, Cache]:
        rows, length = tokens_ST.shape
        position_ST = jnp.broadcast_to(jnp.arange(length), tokens_ST.shape)
        valid_ST = position_ST < length_S[:, None]
        rope = rope_table(self.config, position_ST)
        dtype = dtype or self.compute_dtype
        # Nothing lies in the cache yet, so the tokens attend to each other as packed rows do, by the faster kernel.
        segment_ST = valid_ST.astype(jnp.int32)

        def linear(carry, numbered):
            (x_STD, cache), (number, layer_params) = carry, numbered
            block = self._whole_block(LINEAR, layer_params)
            assert isinstance(block.mixer, GatedDeltaNet)
            old = cache.state, cache.tails
            state, tails = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), old)
            y, state, tails = block.mixer.extend(block.mixer_norm(x_STD), state, tails, length_S, self._kernels)
            # The whole cache is carried and updated in place; as a scanned output it would be copied once more.
            state, tails = jax.tree.map(lambda x, y: x.at[number].set(y), old, (state, tails))
            cache = dataclasses.replace(cache, state=state, tails=tails)
            return (sharding.divide_rows(self.mesh, block.feed_forward(x_STD + y)), cache), None

        def full(carry, numbered):
            (x_STD, cache), (number, layer_params) = carry, numbered
            block = self._whole_block(FULL, layer_params)
            assert isinstance(block.mixer, GatedAttention)
            q, k, v, gate = block.mixer.qkv_gate(block.mixer_norm(x_STD), rope)
            o = packed_attention(q, k, v, segment_ST, implementation=self.attention, mesh=self.mesh)
            x_STD = x_STD + block.mixer.out(o, gate)
            k, v = (jnp.where(valid_ST[..., None, None], x, 0).astype(dtype) for x in (k, v))
            cache = dataclasses.replace(cache, k=cache.k.at[number].set(k), v=cache.v.at[number].set(v))
            return (sharding.divide_rows(self.mesh, block.feed_forward(x_STD)), cache), None

        x_STD = embed(params, tokens_ST, valid_ST, self.compute_dtype, mesh=self.mesh)
        carry = (x_STD, self.init_cache(rows, length, dtype))
        x_STD, cache = self._scan({LINEAR: linear, FULL: full}, carry, params)
        return self._final_norm(params, x_STD), cache

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
        assert isinstance(cache, HybridCache)
        rows, length_S = len(token_S), active_S.astype(jnp.int32)
        rope = rope_table(self.config, position_S[:, None])
        x_S1D = embed(params, token_S[:, None], active_S[:, None], self.compute_dtype)
        written: dict[str, list] = {LINEAR: [], FULL: []}
        for kind in self.config.layer_types:
            number = len(written[kind])
            block = self._block(kind, params[_STACKS[kind]][number])
            x, mixer = block.mixer_norm(x_S1D), block.mixer
            if isinstance(mixer, GatedDeltaNet):
                whole = cache.state[number], Tails(*(tail[number] for tail in cache.tails))
                state, tails = jax.tree.map(lambda x: x[:rows], whole)
                y, state, tails = mixer.extend(x, state, tails, length_S, self._kernels)
                written[kind].append(jax.tree.map(lambda x, y: x.at[:rows].set(y), whole, (state, tails)))
            else:
                q, k, v, gate = mixer.qkv_gate(x, rope)
                o, *kv = decode_attention(
                    q, k, v, cache.k[number], cache.v[number], position_S, active_S, context=context,
                    implementation=self.attention, mesh=self.mesh,
                )  # fmt: skip
                y = mixer.out(o, gate)
                written[kind].append(tuple(kv))
            x_S1D = block.feed_forward(x_S1D + y)
        (state, tails), (k, v) = zip(*written[LINEAR]), zip(*written[FULL])
        after = HybridCache(k=k, v=v, state=state, tails=Tails(*zip(*tails)))
        return self._final_norm(params, x_S1D[:, 0]), after

    def axis_sizes(self) -> dict[str, dict[str, int]]:
        c, sizes = self.config, super().axis_sizes()
        linear = {"linear_num_key_heads": c.linear_key_heads, "linear_num_value_heads": c.linear_value_heads}
        return sizes | {"heads": sizes["heads"] | linear}

    def logical_axes(self) -> dict[str, Any]:
        def layers(kind: str) -> dict[str, Any]:
            axes = _block_definition(self.config, kind)[1]
            return jax.tree.map(lambda axes: ("layers", *axes), axes, is_leaf=lambda x: isinstance(x, tuple))

        stacks = {name: layers(kind) for kind, name in _STACKS.items()}
        axes = {"embedding": ("vocab", "embed"), **stacks, "final_norm": (None,)}
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
