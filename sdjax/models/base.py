"""What the rest of sdjax sees of a language model: pure functions over a parameter pytree.

Trainer, engine and evaluation hold a ``Model`` (hashable, so it can be a static jit argument) and a parameter pytree,
and never learn which family they run. Dimension suffixes: ``_B`` packed rows, ``_S`` cache rows, ``_T`` tokens of a
row, ``_D`` hidden size, ``_V`` vocabulary, ``_X`` any leading dimensions.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from sdjax.models.config import ModelConfig

# A nested dict of arrays. Arrays of the repeated layers are stacked: their first axis is the layer.
Params = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens seen so far, float, ``[layers, rows, length, kv_heads, head_dim]``.

    Axis 1 of every leaf is the row. A position that was never written holds zeros (finite, always masked). A family
    whose layers remember a row in another form adds leaves (``qwen3_5.HybridCache``). See also ``by_layer``.
    """

    k: Any
    v: Any

    @property
    def rows(self) -> int:
        return self.k.shape[1]

    @property
    def length(self) -> int:
        return self.k.shape[2]

    def take(self, row_N: jax.Array) -> "Cache":
        """Returns a cache made of the rows ``row_N`` (int [N]; a row may be taken several times)."""
        return jax.tree.map(lambda x: jnp.take(x, row_N, axis=1), self)

    def by_layer(self) -> "Cache":
        """The form that ``Model.decode`` takes: each leaf is a tuple of arrays, one for each layer, rows first."""
        return jax.tree.map(tuple, self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prefix:
    """Tokens that come before everything in a packed row and were processed already.

    cache: one row for each packed row. length_B: how many of its positions count, int, at least 1.
    """

    cache: Cache
    length_B: jax.Array


@dataclass(frozen=True)
class Model(ABC):
    """A decoder. ``compute_dtype`` is the dtype of matrix products; norms, RoPE, softmax and logits are float32.

    attention: ``"xla"`` or ``"cudnn"`` (see ``sdjax.models.attention``).
    mesh: devices that the parameters are spread over; the compiler cannot divide a hand-written kernel itself, so the
    layers that call one do it over this mesh (None: one device).
    scan_layers: ``hidden`` as a loop over the layers, compiled once. Written out, layer by layer, it needs no copies of
    what the loop reads and keeps for the derivative, and several times as long to compile.
    shares_prefixes: whether ``hidden`` takes a ``prefix``. stacks: the parameters with a layer axis.
    """

    config: ModelConfig
    compute_dtype: Any = "float32"
    attention: str = "xla"
    mesh: Mesh | None = None
    scan_layers: bool = True
    shares_prefixes: ClassVar[bool] = False
    stacks: ClassVar[tuple[str, ...]] = ("layers",)

    def __post_init__(self):
        object.__setattr__(self, "compute_dtype", jnp.dtype(self.compute_dtype))

    @abstractmethod
    def init(self, key: jax.Array, dtype: Any = jnp.float32) -> Params:
        """Returns random parameters of ``dtype``."""

    @abstractmethod
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
        """Returns the states before the head, ``[B, T, D]`` in the compute dtype.

        position_BT: position of each token inside its own sequence (RoPE). segment_BT: a token attends to earlier
        tokens of its row with an equal segment, which must lie in one piece; 0 is padding, whose token ids are never
        looked up. remat: see ``sharding.checkpoint_layer``. prefix: what every token of a
        packed row attends to besides; the positions then go on behind it.
        """

    @abstractmethod
    def logits(self, params: Params, hidden_XD: jax.Array) -> jax.Array:
        """Returns float32 logits ``[..., V]`` for any leading dimensions.

        They are the states times ``embedding.head_weight`` in every family: training multiplies by it on its own.
        """

    @abstractmethod
    def init_cache(self, rows: int, length: int, dtype: Any = None) -> Cache:
        """Returns an empty cache of ``rows`` sequences of at most ``length`` tokens (dtype: the compute dtype)."""

    @abstractmethod
    def prefill(
        self, params: Params, tokens_ST: jax.Array, length_S: jax.Array, dtype: Any = None
    ) -> tuple[jax.Array, Cache]:
        """Processes new sequences; returns their states ``[S, T, D]`` and a cache of T positions and ``dtype``.

        Row s is its first ``length_S[s]`` tokens. Other tokens and rows of length 0 leave everything else as it is;
        their states are meaningless but finite. dtype None: the compute dtype.
        """

    @abstractmethod
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
        """Processes one more token of each of the first S rows; returns their states ``[S, D]`` and the cache.

        params: as ``unstack`` returns them; cache: ``by_layer``, with at least S rows. position_S: number of tokens
        that the row has seen, at least 1. A row that is not active leaves the cache as it is; its state is meaningless
        but finite. A token past the end of the cache is dropped: the caller keeps ``position < length``.
        context: static upper bound on ``position + 1`` over all rows; no more of the cache need be read.
        """

    def unstack(self, params: Params) -> Params:
        """The parameters as ``decode`` reads them: matrices in the compute dtype, a tuple of layers for each stack.

        A program copies the part of a stacked array that it hands to a matrix product; decoding waits for memory only.
        """

        def cast(x: jax.Array) -> jax.Array:
            # Vectors are norms and gates: they are small, and all arithmetic with them is in float32.
            return x.astype(self.compute_dtype) if x.ndim > 1 else x

        def layers(stack: Params) -> tuple[Params, ...]:
            return tuple(
                jax.tree.map(lambda x: cast(x[i]), stack)  # noqa: B023
                for i in range(len(jax.tree.leaves(stack)[0]))
            )

        return {name: layers(x) if name in self.stacks else cast(x) for name, x in params.items()}

    def stack(self, params: Params) -> Params:
        """Undoes ``unstack``, except for the dtypes."""
        return {
            name: jax.tree.map(lambda *x: jnp.stack(x), *value) if name in self.stacks else value
            for name, value in params.items()
        }

    @abstractmethod
    def logical_axes(self) -> dict[str, Any]:
        """Returns a pytree like the parameters whose leaves are tuples of logical axis names.

        Names: "vocab", "embed", "heads", "kv_heads", "mlp", "layers", or None for an axis that is never sharded.
        """

    def axis_sizes(self) -> dict[str, dict[str, int]]:
        """For each logical axis the numbers of config.json that a mesh axis has to divide (heads, not channels)."""
        c = self.config
        return {
            "embed": {"hidden_size": c.hidden_size},
            "heads": {"num_attention_heads": c.heads},
            "kv_heads": {"num_key_value_heads": c.kv_heads},
            "mlp": {"intermediate_size": c.intermediate_size},
        }

    def shapes(self) -> dict[str, Any]:
        """Returns the parameter pytree as ``jax.ShapeDtypeStruct`` leaves, without allocating anything."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def num_params(self) -> int:
        return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(self.shapes()))


def masked_logits(logits_XV: jax.Array, sampling_mask_V: jax.Array) -> jax.Array:
    """Gives ids that no tokenizer produces (padding rows of the embedding) a very low logit.

    sampling_mask_V: bool, True on ids that exist. Finite instead of -inf, also after a division by a temperature, so
    that entropies and gradients stay finite; the probability underflows to exactly 0. Sampler and trainer must both
    call this, or their log-probs differ.
    """
    return jnp.where(sampling_mask_V, logits_XV, -1e30)
