"""The vocabulary head of training: what a loss sees of the logits, and its gradient, without ever keeping the logits.

Loss tokens are taken in chunks. While the logits of a chunk live, the derivative of the loss with respect to them is
formed and multiplied into the gradients of the states and of the head weight, so the backward pass has nothing left to
do but to scale the two. That needs a loss that is a sum over tokens. With z = logits / T, p = softmax(z), l = log p and
H the entropy of p, the derivative of a token's loss is

    dL/dlogits = (dL/dl (onehot - p) - dL/dH p (l + H)) / T,

where the two small derivatives come from the loss itself by automatic differentiation.

On a mesh the head is divided over the vocabulary. Each device of a data group has V / (fsdp tensor) rows of the weight
and sees the tokens of the whole group: states are gathered instead of weights, which are larger.

Suffixes: ``_B`` packed rows, ``_M`` loss slots of each, ``_N`` slots of one device, ``_C`` its slots of one chunk,
``_G`` slots of one chunk of all devices along fsdp, ``_K`` tokens picked for each slot, ``_D`` hidden size, ``_V``
vocabulary, ``_R`` rows of the weight on one device.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from sdjax import sharding
from sdjax.losses.masked import masked
from sdjax.models.base import masked_logits

# A matrix product is near its ceiling from here on, and float32 logits of 2,048 x 248,320 take 1.9 GiB.
CHUNK_TOKENS = 2048
_WEIGHT = PartitionSpec("tensor", "fsdp")  # as the parameters lie, see ``sharding.RULES``


class Stats(NamedTuple):
    """What a loss sees of the vocabulary; 0 in unused slots.

    logp: `[B, M]` log-probability of the picked token of each slot, or `[B, M, K]` of K tokens, nats. entropy: `[B, M]`
    of the whole distribution, nats. mask: `[B, M]` bool, slots in use.
    """

    logp: Array
    entropy: Array
    mask: Array


# (stats, slots, shared) -> (sum over the tokens, anything else); see ``Head.loss``.
Loss = Callable[[Stats, Any, Any], tuple[Array, Any]]


class _Axes(NamedTuple):
    """Mesh axes inside ``shard_map``. Collectives over no axis do nothing, so one device needs no other code."""

    data: tuple[str, ...] = ()
    fsdp: tuple[str, ...] = ()
    tensor: tuple[str, ...] = ()

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return self.tensor + self.fsdp


class _Rows(NamedTuple):
    """The part of the head on one device. weight_RD: in the compute dtype. allowed_R: ids that may be sampled.

    first: id of the first row. count: rows that are ids; behind them is padding.
    """

    weight_RD: Array
    allowed_R: Array
    first: Array
    count: Array


class _Chunk(NamedTuple):
    """Logits of one chunk and what is known of their distribution z = masked logits / temperature."""

    hidden_GD: Array
    raw_GR: Array
    lse_G: Array
    mean_G: Array
    entropy_G: Array
    logp_GK: Array


@dataclass(frozen=True)
class Head:
    """Settings of the head.

    temperature: divides the logits. mesh: devices that weight and rows are divided over (None: one device). tokens: at
    most so many slots make a chunk, counted over all devices that look at the same tokens.
    """

    temperature: float = 1.0
    mesh: Mesh | None = None
    tokens: int = CHUNK_TOKENS

    def score(self, weight_VD: Array, allowed_V: Array, hidden_BMD: Array, target_BM: Array, mask_BM: Array) -> Array:
        """Log-probabilities `[B, M]` of the targets in nats, 0 in unused slots. Not differentiable.

        Args:
          weight_VD: `[V, D]` head weight.
          allowed_V: `[V]` bool, see ``models.base.masked_logits``.
          hidden_BMD: `[B, M, D]` states that predict each slot's token; unused slots may hold anything.
          target_BM: `[B, M]` int ids.
          mask_BM: `[B, M]` bool, slots in use.
        """
        self._check(weight_VD, allowed_V, hidden_BMD, mask_BM)
        chex.assert_equal_shape([target_BM, mask_BM])

        def one(axes: _Axes, rows: _Rows, hidden_CD: Array, mask_C: Array, target_C: Array) -> Array:
            logp_GK = self._chunk(axes, rows, hidden_CD, target_C[:, None]).logp_GK
            return masked(_own(axes, logp_GK[:, 0], len(mask_C)), mask_C)

        return self._forward(one, weight_VD, allowed_V, hidden_BMD, mask_BM, target_BM)

    def top(
        self, weight_VD: Array, allowed_V: Array, hidden_BMD: Array, mask_BM: Array, *, k: int
    ) -> tuple[Array, Array]:
        """Ids and log-probabilities `[B, M, k]` of the k likeliest tokens, 0 in unused slots; see ``score``."""
        self._check(weight_VD, allowed_V, hidden_BMD, mask_BM)

        def one(axes: _Axes, rows: _Rows, hidden_CD: Array, mask_C: Array) -> tuple[Array, Array]:
            chunk = self._chunk(axes, rows, hidden_CD, jnp.zeros((len(mask_C), 1), jnp.int32))
            is_id_R = jnp.arange(len(rows.allowed_R)) < rows.count
            z_GR = jnp.where(is_id_R, self._scaled(chunk.raw_GR, rows.allowed_R), -jnp.inf)
            z, row = lax.top_k(z_GR, min(k, len(is_id_R)))
            # Devices stand in the order of their ids, so that equal values keep that order as on one device.
            z_GX, id_GX = (lax.all_gather(x, axes.vocabulary, axis=1, tiled=True) for x in (z, row + rows.first))
            z_Gk, place_Gk = lax.top_k(z_GX, k)
            ids_Gk = jnp.take_along_axis(id_GX, place_Gk, axis=1)
            results = (ids_Gk, z_Gk - chunk.lse_G[:, None])
            return jax.tree.map(lambda x: masked(_own(axes, x, len(mask_C)), mask_C[:, None]), results)

        return self._forward(one, weight_VD, allowed_V, hidden_BMD, mask_BM)

    def loss(
        self,
        function: Loss,
        weight_VD: Array,
        allowed_V: Array,
        hidden_BMD: Array,
        pick: Array,
        mask_BM: Array,
        slots: Any,
        shared: Any,
    ) -> tuple[Array, Any]:
        """``function(stats, slots, shared)`` with its gradient to weight and states formed in the same pass.

        Args:
          function: returns the loss, a sum over tokens in which each token stands alone, and anything else. It is
            called on all slots once, and on the slots of each chunk, `[1, C]`, for its derivative. It may not close
            over traced values.
          weight_VD, allowed_V, hidden_BMD, mask_BM: see ``score``.
          pick: int ids whose log-probabilities the loss sees, `[B, M]` or `[B, M, K]`.
          slots: pytree of arrays `[B, M, ...]` that go with the slots.
          shared: pytree of arrays for all slots.

        Returns:
          What the function returned. Only the loss can be differentiated, by weight and states alone; the gradient of
          the weight is added up in float32.
        """
        self._check(weight_VD, allowed_V, hidden_BMD, mask_BM)
        chex.assert_equal_shape_prefix([pick, mask_BM, *jax.tree.leaves(slots)], 2)
        return _loss(self, function, weight_VD, hidden_BMD, (allowed_V, pick, mask_BM, slots, shared))

    def _check(self, weight_VD: Array, allowed_V: Array, hidden_BMD: Array, mask_BM: Array) -> None:
        chex.assert_rank([weight_VD, allowed_V, hidden_BMD, mask_BM], [2, 1, 3, 2])
        chex.assert_equal_shape_prefix([weight_VD, allowed_V], 1)
        chex.assert_equal_shape_prefix([hidden_BMD, mask_BM], 2)
        chex.assert_equal_shape_suffix([weight_VD, hidden_BMD], 1)

    def _forward(
        self, one: Callable[..., Any], weight: Array, allowed: Array, hidden: Array, mask: Array, *slots: Array
    ) -> Any:
        """``one(axes, rows, hidden_CD, mask_C, *slots_C)`` on all chunks."""

        def local(axes: _Axes, weight: Array, allowed: Array, hidden: Array, mask: Array, slots: Any) -> Any:
            rows = _rows(axes, weight, allowed, hidden.dtype)
            inputs = (masked(hidden, mask[..., None]), mask, *slots)
            return _Tokens(axes, mask, self.tokens).scan(lambda _, x: (None, one(axes, rows, *x)), None, inputs)[1]

        divided = PartitionSpec(sharding.ROWS)
        return self._on_mesh(local, (divided, divided, divided), divided)(weight, allowed, hidden, mask, slots)

    def one_pass(
        self, function: Loss, weight_VD: Array, hidden_BMD: Array, rest: tuple[Any, ...]
    ) -> tuple[Stats, Array, Array]:
        """Stats, and the gradients of the loss to weight and states; ``rest`` as in ``_loss``."""
        allowed_V, pick, mask_BM, slots, shared = rest

        def local(axes: _Axes, weight: Array, allowed: Array, hidden: Array, pick: Array, mask: Array, slots, shared):
            rows = _rows(axes, weight, allowed, hidden.dtype)
            body = functools.partial(self._loss_chunk, axes, rows, function, shared)
            start = jnp.zeros(rows.weight_RD.shape, jnp.float32)
            inputs = (masked(hidden, mask[..., None]), pick, mask, slots)
            dweight, results = _Tokens(axes, mask, self.tokens).scan(body, start, inputs)
            return *results, _as_weight(axes, dweight, weight)

        divided = PartitionSpec(sharding.ROWS)
        inputs = (divided, divided, divided, divided, PartitionSpec())
        outputs = (divided, divided, divided, _WEIGHT)
        run = self._on_mesh(local, inputs, outputs)
        logp, entropy, dhidden, dweight = run(weight_VD, allowed_V, hidden_BMD, pick, mask_BM, slots, shared)
        return Stats(logp, entropy, mask_BM), dweight[: len(weight_VD)], dhidden

    def _loss_chunk(self, axes: _Axes, rows: _Rows, function: Loss, shared: Any, dweight_RD: Array, inputs: Any):
        """One chunk of ``one_pass``: adds to the gradient of the weight; returns logp, entropy, gradient of states."""
        hidden_CD, pick, mask_C, slots = inputs
        pick_CK = pick if pick.ndim == 2 else pick[:, None]
        chunk = self._chunk(axes, rows, hidden_CD, pick_CK)
        logp_CK, entropy_C = (_own(axes, x, len(mask_C)) for x in (chunk.logp_GK, chunk.entropy_G))
        logp, entropy_C = masked(logp_CK, mask_C[:, None]).reshape(pick.shape), masked(entropy_C, mask_C)

        def value(logp: Array, entropy_C: Array) -> Array:
            row = jax.tree.map(lambda x: x[None], (logp, entropy_C, mask_C, slots))
            return function(Stats(*row[:3]), row[3], shared)[0]

        dlogp, dentropy_C = jax.grad(value, (0, 1))(logp, entropy_C)
        # 0 in unused slots whatever the loss does there: their logits are those of a state of zeros.
        small = (masked(dlogp.reshape(pick_CK.shape), mask_C[:, None]), masked(dentropy_C, mask_C), pick_CK)
        dlogits_GR = self._dlogits(rows, chunk, *(lax.all_gather(x, axes.fsdp, tiled=True) for x in small))
        dhidden_GD = _dot("gr,rd->gd", dlogits_GR, rows.weight_RD)
        dhidden_CD = lax.psum_scatter(dhidden_GD, axes.fsdp, scatter_dimension=0, tiled=True)
        dhidden_CD = lax.psum(dhidden_CD, axes.tensor).astype(hidden_CD.dtype)
        return dweight_RD + _dot("gr,gd->rd", dlogits_GR, chunk.hidden_GD), (logp, entropy_C, dhidden_CD)

    def _scaled(self, raw: Array, allowed: Array) -> Array:
        return masked_logits(raw, allowed) / self.temperature

    def _chunk(self, axes: _Axes, rows: _Rows, hidden_CD: Array, pick_CK: Array) -> _Chunk:
        """The logits are read three times: for their maximum, for two sums, and for their derivative."""
        hidden_GD, pick_GK = (lax.all_gather(x, axes.fsdp, tiled=True) for x in (hidden_CD, pick_CK))
        raw_GR = _dot("gd,rd->gr", hidden_GD, rows.weight_RD)
        z_GR = self._scaled(raw_GR, rows.allowed_R)
        top_G = lax.pmax(z_GR.max(axis=-1), axes.vocabulary)
        below_GR = z_GR - top_G[:, None]
        exp_GR = jnp.exp(below_GR)
        row_GK = pick_GK - rows.first
        here_GK = (row_GK >= 0) & (row_GK < rows.count)
        row_GK = jnp.where(here_GK, row_GK, 0)
        # Taken from the raw logits: from z they would have to be written once more.
        picked_GK = self._scaled(jnp.take_along_axis(raw_GR, row_GK, axis=-1), rows.allowed_R[row_GK])
        sums = (exp_GR.sum(axis=-1), (exp_GR * below_GR).sum(axis=-1), jnp.where(here_GK, picked_GK, 0.0))
        total_G, weighted_G, z_GK, found_GK = lax.psum((*sums, here_GK.astype(jnp.int32)), axes.vocabulary)
        z_GK = jnp.where(found_GK == 1, z_GK, jnp.nan)  # an id outside the vocabulary must not look like one inside
        log_G, mean_G = jnp.log(total_G), weighted_G / total_G
        lse_G = top_G + log_G
        return _Chunk(hidden_GD, raw_GR, lse_G, top_G + mean_G, log_G - mean_G, z_GK - lse_G[:, None])

    def _dlogits(self, rows: _Rows, chunk: _Chunk, dlogp_GK: Array, dentropy_G: Array, pick_GK: Array) -> Array:
        """The derivative of the loss with respect to the raw logits, in the compute dtype."""
        z_GR = self._scaled(chunk.raw_GR, rows.allowed_R)
        p_GR = jnp.exp(z_GR - chunk.lse_G[:, None])
        dz_GR = -p_GR * (dlogp_GK.sum(axis=-1)[:, None] + dentropy_G[:, None] * (z_GR - chunk.mean_G[:, None]))
        # A comparison with every id becomes part of the same loop; a scatter would be a pass of its own.
        ids_R = jnp.where(rows.allowed_R, rows.first + jnp.arange(len(rows.allowed_R)), -1)
        for k in range(pick_GK.shape[1]):
            dz_GR += jnp.where(ids_R == pick_GK[:, k, None], dlogp_GK[:, k, None], 0.0)
        return (dz_GR / self.temperature).astype(chunk.hidden_GD.dtype)

    def _on_mesh(self, local: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
        """``local(axes, weight, allowed, *inputs)`` on each device, or on the only one."""
        mesh = self.mesh
        if mesh is None or mesh.size == 1:
            return functools.partial(local, _Axes())
        axes = _Axes(("data",), ("fsdp",), ("tensor",))
        run = jax.shard_map(
            functools.partial(local, axes),
            mesh=mesh,
            in_specs=(_WEIGHT, PartitionSpec("tensor"), *inputs),
            out_specs=outputs,
            check_vma=False,
        )

        def padded(weight_VD: Array, allowed_V: Array, *rest: Any) -> Any:
            # A vocabulary that does not divide over "tensor" lies whole on its devices, but is divided here.
            padding = -len(allowed_V) % mesh.shape["tensor"]
            return run(jnp.pad(weight_VD, ((0, padding), (0, 0))), jnp.pad(allowed_V, (0, padding)), *rest)

        return padded


# --- inside shard_map, or on one device ------------------------------------------------------------------------------


class _Tokens:
    """Slots of this device, those in use first, in chunks of one size."""

    def __init__(self, axes: _Axes, mask_BM: Array, group_tokens: int):
        self.shape = mask_BM.shape
        self.chunk = min(mask_BM.size, max(1, group_tokens // lax.axis_size(axes.fsdp)))
        self.order_N = jnp.argsort(~mask_BM.reshape(-1), stable=True)
        # All devices take part in what they do together in a chunk, so all of them have as many as the fullest.
        self.chunks = lax.pmax(-(-mask_BM.sum() // self.chunk), (*axes.data, *axes.fsdp, *axes.tensor))

    def scan(self, body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, inputs: Any) -> tuple[Any, Any]:
        """``lax.scan`` over chunks up to the last slot in use. Inputs and results are `[B, M, ...]`; 0 off the mask."""
        padding = -len(self.order_N) % self.chunk

        def ordered(x: Array) -> Array:
            x_N = x.reshape(-1, *x.shape[2:])[self.order_N]
            return jnp.pad(x_N, ((0, padding), *[(0, 0)] * (x_N.ndim - 1)))

        def step(i: Array, state: tuple[Any, Any]) -> tuple[Any, Any]:
            carry, results = state
            start = i * self.chunk
            carry, new = body(carry, jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, self.chunk), inputs_N))
            write = lambda x, y: lax.dynamic_update_slice_in_dim(x, y, start, 0)  # noqa: E731
            return carry, jax.tree.map(write, results, new)

        inputs_N = jax.tree.map(ordered, inputs)
        first = jax.eval_shape(lambda c, x: body(c, x)[1], carry, jax.tree.map(lambda x: x[: self.chunk], inputs_N))
        size = len(self.order_N) + padding
        results = jax.tree.map(lambda x: jnp.zeros((size, *x.shape[1:]), x.dtype), first)
        # The number of turns is known to the device alone; nothing is differentiated through this loop.
        carry, results = lax.fori_loop(0, self.chunks, step, (carry, results))
        place_N = jnp.argsort(self.order_N)
        return carry, jax.tree.map(lambda x: x[place_N].reshape(*self.shape, *x.shape[1:]), results)


def _rows(axes: _Axes, weight: Array, allowed: Array, dtype: Any) -> _Rows:
    """Exchanges parts of D, as the parameters lie, for rows."""
    share, own = lax.axis_size(axes.fsdp), lax.axis_index(axes.fsdp)
    size = -(-len(allowed) // share)
    padding = size * share - len(allowed)
    weight_RD = _exchange(axes, jnp.pad(weight.astype(dtype), ((0, padding), (0, 0))), 0, 1)
    allowed_R = lax.dynamic_slice_in_dim(jnp.pad(allowed, (0, padding)), own * size, size)
    first = lax.axis_index(axes.tensor) * len(allowed) + own * size
    return _Rows(weight_RD, allowed_R, first, jnp.clip(len(allowed) - own * size, 0, size))


def _as_weight(axes: _Axes, dweight_RD: Array, weight: Array) -> Array:
    """The gradient of the weight, added up over all tokens, as the weight lies."""
    dweight = _exchange(axes, dweight_RD, 1, 0)[: len(weight)]
    return lax.psum(dweight, axes.data).astype(weight.dtype)


def _exchange(axes: _Axes, x: Array, split: int, concat: int) -> Array:
    return lax.all_to_all(x, axes.fsdp, split, concat, tiled=True) if axes.fsdp else x


def _own(axes: _Axes, x_G: Array, size: int) -> Array:
    """The part of a gathered array that is this device's."""
    return lax.dynamic_slice_in_dim(x_G, lax.axis_index(axes.fsdp) * size, size)


def _dot(spec: str, a: Array, b: Array) -> Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


# --- the gradient ----------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss(head: Head, function: Loss, weight_VD: Array, hidden_BMD: Array, rest: tuple[Any, ...]) -> tuple[Array, Any]:
    """``Head.loss``; rest: (allowed_V, pick, mask_BM, slots, shared)."""
    return _loss_forward(head, function, weight_VD, hidden_BMD, rest)[0]


def _loss_forward(head: Head, function: Loss, weight_VD: Array, hidden_BMD: Array, rest: tuple[Any, ...]):
    stats, *gradients = head.one_pass(function, weight_VD, hidden_BMD, rest)
    return function(stats, *rest[3:]), gradients


def _loss_backward(head: Head, function: Loss, gradients: list[Array], cotangent: tuple[Array, Any]):
    return (*((cotangent[0] * x).astype(x.dtype) for x in gradients), None)


_loss.defvjp(_loss_forward, _loss_backward)
