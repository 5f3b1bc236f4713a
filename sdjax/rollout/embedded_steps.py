"""Device side of the embedded engine: the jitted calls that prefill prompts, draw tokens and move cache rows.

All state that decides *what* is computed lives on the host (``scheduler.SlotTable``) and is passed in with each call;
the device keeps the cache alone. Shapes are static: one compilation for each (rows, bucket) of prompts and one for each
context length in use. The cache is any pytree whose leaves are [layers, rows, ...], so a family with recurrent state
needs no change here.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sdjax.models.base import Cache, Model, Params, masked_logits


class Slots(NamedTuple):
    """Columns of the slot table as the device sees them, each [S] (see ``scheduler.SlotTable``)."""

    last_S: Any
    position_S: Any
    drawn_S: Any
    budget_S: Any
    seed_S: Any
    temperature_S: Any
    active_S: Any


class Chunk(NamedTuple):
    """What one decode call drew. Slot s drew its first ``count_S[s]`` entries; the rest is 0."""

    tokens_SC: Any
    logps_SC: Any
    count_S: Any
    active_S: Any  # still unfinished
    steps: Any


def draw(logits_SV, seed_S, drawn_S, temperature_S, mask_V):
    """Draws one token per row.

    The noise is a function of (seed, number of tokens drawn before) alone, so a draw depends neither on the slot nor
    on its batch mates. Gumbel-max over float32 logits / temperature is an exact draw from their softmax.

    Returns:
      token_S int32 and logp_S float32 = log softmax(masked logits / temperature)[token], in nats; temperature 0 takes
      the largest logit and reports log softmax(masked logits).
    """
    greedy_S = temperature_S == 0
    scaled_SV = masked_logits(logits_SV.astype(jnp.float32), mask_V) / jnp.where(greedy_S, 1.0, temperature_S)[:, None]

    def noise(seed, drawn):
        # One hash with (seed, drawn) as its key, instead of key() and fold_in(): half the time to compile and to run.
        key = jax.random.wrap_key_data(jnp.stack([seed, drawn.astype(jnp.uint32)]), impl="threefry2x32")
        return jax.random.gumbel(key, scaled_SV.shape[1:], jnp.float32)

    noise_SV = jax.vmap(noise)(seed_S, drawn_S)
    token_S = jnp.argmax(jnp.where(greedy_S[:, None], scaled_SV, scaled_SV + noise_SV), axis=-1).astype(jnp.int32)
    chosen_S = jnp.take_along_axis(scaled_SV, token_S[:, None], axis=-1)[:, 0]
    return token_S, chosen_S - jax.nn.logsumexp(scaled_SV, axis=-1)


def engine_params(model: Model, params: Params, mesh: Mesh | None) -> Params:
    """The parameters as the engine keeps them (``Model.unstack``); on a mesh every device gets all of them.

    So each device computes its own slots on its own, without gathering weights for every token. That is the size of the
    model in the compute dtype on every device, whatever the mesh: 18 GB for 9 billion parameters in bfloat16.
    """
    params = _unstack(model, params)
    # A program of its own, so that parameters are cast before they are gathered.
    return params if mesh is None else _gather(params, NamedSharding(mesh, PartitionSpec()))


@partial(jax.jit, static_argnames="model")
def _unstack(model: Model, params: Params) -> Params:
    return model.unstack(params)


@partial(jax.jit, static_argnames="whole")
def _gather(params: Params, whole: NamedSharding) -> Params:
    return jax.lax.with_sharding_constraint(params, whole)


@partial(jax.jit, static_argnames=("model", "rows", "length", "dtype", "sharding"))
def new_cache(model: Model, rows: int, length: int, dtype, sharding: NamedSharding | None) -> Cache:
    """An empty cache for ``rows`` sequences of up to ``length`` tokens, by layer."""
    return _constrain(model.init_cache(rows, length, dtype).by_layer(), sharding)


@partial(jax.jit, static_argnames=("model", "dtype", "sharding"), donate_argnames=("cache",))
def prefill(
    model: Model, params: Params, cache: Cache, tokens_PT, length_P, source_A, slot_A, count, seed_A, temperature_A,
    mask_V, *, dtype, sharding: NamedSharding | None,
):  # fmt: skip
    """Runs P prompts once, copies row ``source_A[a]`` into slot ``slot_A[a]`` for a < count and draws first tokens.

    Returns (cache, token_A, logp_A); entries a >= count mean nothing.
    """
    hidden_PTD, fresh = model.prefill(model.stack(params), tokens_PT, length_P, dtype)
    last_P = jnp.maximum(length_P - 1, 0)
    hidden_PD = jnp.take_along_axis(hidden_PTD, last_P[:, None, None], axis=1)[:, 0]
    logits_PV = model.logits(params, hidden_PD)
    token_A, logp_A = draw(logits_PV[source_A], seed_A, jnp.zeros_like(source_A), temperature_A, mask_V)
    # A slot past the end is dropped.
    slots = jax.tree.leaves(cache)[0].shape[0]
    slot_A = jnp.where(jnp.arange(len(slot_A)) < count, slot_A, slots)

    def put(target, source):
        rows = source[source_A].astype(target.dtype)
        window = tuple(slice(size) for size in rows.shape[1:])  # a prompt's cache is shorter than the slot's
        return target.at[(slot_A, *window)].set(rows, mode="drop")

    return _constrain(jax.tree.map(put, cache, fresh.by_layer()), sharding), token_A, logp_A


@partial(jax.jit, static_argnames=("model", "steps", "context", "sharding"), donate_argnames=("cache",))
def decode(
    model: Model, params: Params, cache: Cache, slots: Slots, stop_K, mask_V, enough, *, steps: int,
    context: int, sharding: NamedSharding | None,
) -> tuple[Cache, Chunk]:  # fmt: skip
    """Draws up to ``steps`` tokens for every active slot; ends early once ``enough`` slots have finished.

    stop_K: [K] int32 stop ids (K may be 0). A slot finishes at a stop id or when its budget is spent, and changes
    nothing from then on. Columns may be shorter than the cache: only that many leading slots are computed then.
    context: static bound on the cache positions in use, ``steps`` more tokens included.
    """
    slots = Slots(*(jnp.asarray(column) for column in slots))
    size = slots.last_S.shape[0]
    started = jnp.sum(slots.active_S)

    def unfinished(carry):
        _, now, chunk = carry
        left = jnp.sum(now.active_S)
        return (chunk.steps < steps) & (left > 0) & (started - left < enough)

    def step(carry):
        cache, now, chunk = carry
        hidden_SD, cache = model.decode(params, cache, now.last_S, now.position_S, now.active_S, context=context)
        logits_SV = model.logits(params, hidden_SD)
        token_S, logp_S = draw(logits_SV, now.seed_S, now.drawn_S, now.temperature_S, mask_V)
        one_S = now.active_S.astype(jnp.int32)
        stopped_S = jnp.any(token_S[:, None] == stop_K[None, :], axis=-1)
        active_S = now.active_S & ~stopped_S & (now.drawn_S + 1 < now.budget_S)
        chunk = Chunk(
            tokens_SC=chunk.tokens_SC.at[:, chunk.steps].set(jnp.where(now.active_S, token_S, 0)),
            logps_SC=chunk.logps_SC.at[:, chunk.steps].set(jnp.where(now.active_S, logp_S, 0.0)),
            count_S=chunk.count_S + one_S,
            active_S=active_S,
            steps=chunk.steps + 1,
        )
        now = now._replace(
            last_S=jnp.where(now.active_S, token_S, now.last_S),
            position_S=now.position_S + one_S,
            drawn_S=now.drawn_S + one_S,
            active_S=active_S,
        )
        return cache, now, chunk

    empty = Chunk(
        tokens_SC=jnp.zeros((size, steps), jnp.int32),
        logps_SC=jnp.zeros((size, steps), jnp.float32),
        count_S=jnp.zeros(size, jnp.int32),
        active_S=slots.active_S,
        steps=jnp.int32(0),
    )
    cache, _, chunk = jax.lax.while_loop(unfinished, step, (cache, slots, empty))
    return _constrain(cache, sharding), chunk


def rows_sharding(mesh: jax.sharding.Mesh, rows: int) -> NamedSharding | None:
    """Cache rows spread over all mesh axes but 'tensor', or None where their product does not divide ``rows``."""
    axes = tuple(axis for axis in mesh.axis_names if axis != "tensor")
    parts = 1
    for axis in axes:
        parts *= mesh.shape[axis]
    return NamedSharding(mesh, PartitionSpec(axes)) if rows % parts == 0 else None


def _constrain(cache: Cache, sharding: NamedSharding | None) -> Cache:
    return cache if sharding is None else jax.lax.with_sharding_constraint(cache, sharding)
