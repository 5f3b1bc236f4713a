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
    whose layers remember a row in another form adds leaves (``qwen3_5.HybridCache``).
    """

    k: jax.Array
    v: jax.Array

    @property
    def rows(self) -> int:
        return self.k.shape[1]

    @property
    def length(self) -> int:
        return self.k.shape[2]

    def take(self, row_N: jax.Array) -> "Cache":
        """Returns a cache made of the rows ``row_N`` (int [N]; a row may be taken several times: a fork)."""
        return jax.tree.map(lambda x: jnp.take(x, row_N, axis=1), self)

    def put(self, row_N: jax.Array, source: "Cache") -> "Cache":
        """Writes the N rows of ``source`` (no longer than ours) into rows ``row_N``; others are dropped."""
        return jax.tree.map(
            lambda x, y: x.at[:, row_N, : y.shape[2]].set(y.astype(x.dtype), mode="drop"),
            self,
            source,
        )


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

    attention: kernel of packed rows, ``"xla"`` or ``"cudnn"`` (see ``sdjax.models.attention``).
    mesh: devices that the parameters are spread over; the compiler cannot divide a hand-written kernel itself, so the
    layers that call one do it over this mesh (None: one device).
    shares_prefixes: whether ``hidden`` takes a ``prefix``.
    """

    config: ModelConfig
    compute_dtype: Any = "float32"
    attention: str = "xla"
    mesh: Mesh | None = None
    shares_prefixes: ClassVar[bool] = False

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
        remat: bool = False,
        prefix: Prefix | None = None,
    ) -> jax.Array:
        """Returns the states before the head, ``[B, T, D]`` in the compute dtype.

        position_BT: position of each token inside its own sequence (RoPE). segment_BT: a token attends to earlier
        tokens of its row with an equal segment, which must lie in one piece; 0 is padding, whose token ids are never
        looked up. remat: recompute each layer in the backward pass instead of storing its activations. prefix: what
        every token of a packed row attends to besides; the positions then go on behind it.
        """

    @abstractmethod
    def logits(self, params: Params, hidden_XD: jax.Array) -> jax.Array:
        """Returns float32 logits ``[..., V]`` for any leading dimensions."""

    @abstractmethod
    def init_cache(self, rows: int, length: int, dtype: Any = None) -> Cache:
        """Returns an empty cache of ``rows`` sequences of at most ``length`` tokens (dtype: the compute dtype)."""

    @abstractmethod
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
        """Processes up to T new tokens of each row; returns their states ``[S, T, D]`` and the extended cache.

        Token t of row s has position ``start_S[s] + t`` and is valid while ``t < length_S[s]``. Valid tokens attend to
        the cache positions up to their own. Invalid tokens and rows of length 0 leave the cache and all other tokens as
        they are; their states are meaningless but finite. T = 1 is decoding; T > 1 with start 0 is prefill. Tokens past
        the end of the cache are dropped: the caller keeps ``start + length <= cache.length``. ``start_S`` is the number
        of tokens that the row has seen, or 0 for a new sequence, which forgets the row's old one.
        context: static upper bound on ``start + length`` over all rows; only that much of the cache is read.
        """

    def prefill(
        self, params: Params, tokens_ST: jax.Array, length_S: jax.Array, dtype: Any = None
    ) -> tuple[jax.Array, Cache]:
        """``extend`` of an empty cache of T positions and ``dtype``: row s is its first ``length_S[s]`` tokens."""
        rows, length = tokens_ST.shape
        empty = self.init_cache(rows, length, dtype)
        return self.extend(params, empty, tokens_ST, jnp.zeros_like(length_S), length_S)

    @abstractmethod
    def logical_axes(self) -> dict[str, Any]:
        """Returns a pytree like the parameters whose leaves are tuples of logical axis names.

        Names: "vocab", "embed", "heads", "kv_heads", "mlp", "layers", or None for an axis that is never sharded.
        """

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
