"""The embedded engine: continuous batching in this process, on the trainer's own parameters.

One asyncio task, started when a request arrives and gone when none is left, alternates between admitting requests into
free slots (prefill) and drawing a few tokens for all slots (decode). There is no barrier: a slot is refilled as soon as
its answer is complete. Before each device call the driver lets every ready coroutine run, so that episodes which were
answered together ask together again and are prefilled in one batch.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdjax.errors import EngineError
from sdjax.models.base import Cache, Model, Params
from sdjax.rollout import embedded_steps as steps
from sdjax.rollout import scheduler
from sdjax.rollout.engine import Completion, EngineStats, Request

# Event loop turns without a new request after which the coroutines are taken to be waiting. A coroutine needs one turn
# to wake up and another for each task or gather() it is wrapped in.
_QUIET_TURNS = 3


class EmbeddedEngine:
    """An ``Engine`` that runs ``model`` in this process.

    Log-probs are those of softmax(masked_logits(logits, sampling_mask_V) / temperature) over the full vocabulary, of
    the plain logits for temperature 0. Draws depend on (weights, prompt, seed, temperature) alone, up to float rounding
    of the batch shape. All calls must come from one event loop at a time; not thread-safe.

    Args:
      params: copied into the engine's own layout and the compute dtype, except for what has that already;
        ``update_weights`` must follow when the trainer donates them.
      stop_ids: every id that ends an answer (all eos ids of the generation config); included in the output.
      sampling_mask_V: bool [V], True on ids that may be drawn.
      slots: completions decoded at the same time.
      max_length: limit of prompt + new tokens of one request, the length of the cache.
      prefill_rows: prompts of one prefill call; few prompts use a quarter of it.
      prefill_buckets: prompt lengths that prefill calls are padded to; ``max_length`` is always one of them.
      decode_chunk: tokens drawn per device call; the host looks at the results in between.
      cache_dtype: of keys and values; default is the model's compute dtype.
      mesh: spreads the slots over all its axes but 'tensor' where these divide ``slots``; each device then holds all
        parameters in the compute dtype. A prefill stacks the layers for its time, which takes as much again.
      prepare: makes what the engine keeps from the trainer's parameters (default: ``embedded_steps.engine_params``).
      version: version of ``params``, recorded with each completion.

    Raises:
      EngineError: a size does not fit the model.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        *,
        stop_ids: Collection[int],
        sampling_mask_V: np.ndarray,
        slots: int = 64,
        max_length: int,
        prefill_rows: int = 16,
        prefill_buckets: Sequence[int] = (64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048),
        decode_chunk: int = 8,
        cache_dtype: Any = None,
        mesh: jax.sharding.Mesh | None = None,
        prepare: Callable[[Params], Params] | None = None,
        version: int = 0,
    ):
        _check_sizes(model, sampling_mask_V, stop_ids, slots, max_length, prefill_rows, decode_chunk)
        self.stats = EngineStats(extra={"prefill_calls": 0, "decode_calls": 0, "decode_slots": 0, "cancelled": 0})
        self._model = model
        self._version = version
        self._stop_ids = frozenset(int(i) for i in stop_ids)
        self._stop_K = jnp.asarray(sorted(self._stop_ids), jnp.int32)
        self._mask_V = jnp.asarray(sampling_mask_V, bool)
        self._max_length = max_length
        self._rows = sorted({max(1, prefill_rows // parts) for parts in (8, 4, 2, 1)})
        self._buckets = sorted({bucket for bucket in prefill_buckets if bucket < max_length} | {max_length})
        # A quarter of a mesh-wide cache would sit on a quarter of its devices.
        self._slot_sizes = sorted({slots if mesh is not None and mesh.size > 1 else max(1, slots // 4), slots})
        self._chunk = decode_chunk
        self._cache_dtype = jnp.dtype(model.compute_dtype if cache_dtype is None else cache_dtype)
        self._sharding = None if mesh is None else steps.rows_sharding(mesh, slots)
        self._shapes = _shapes(params)
        whole = mesh if self._sharding is not None else None
        self._prepare = prepare or (lambda params: steps.engine_params(model, params, whole))
        self._params = self._prepare(params)
        self._cache: Cache | None = None
        self._table = scheduler.SlotTable(slots)
        self._arrivals = 0
        self._driver: asyncio.Task | None = None
        self._closed = False

    async def generate(self, request: Request) -> Completion:
        """Draws one completion. A cancelled caller frees its slot at the next device call.

        Raises:
          EngineError: the request cannot be served (this request alone fails), the engine is closed, or a device call
            failed (then every request in flight fails).
        """
        if self._closed:
            raise EngineError("the engine is closed.", "make a new engine.")
        prompt = scheduler.check_request(request, vocab_size=self._model.config.vocab_size, max_length=self._max_length)
        self._check_params()
        loop = asyncio.get_running_loop()
        if self._driver is not None and not self._driver.done() and self._driver.get_loop() is not loop:
            raise EngineError("the engine is busy on another event loop.", "make one engine per event loop.")
        job = scheduler.Job(request, prompt, loop.create_future())
        self._table.waiting.append(job)
        self._arrivals += 1
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())
        return await job.future

    def update_weights(self, params: Params, version: int) -> None:
        """Takes ``params`` from the next device call on. Nothing computed with the old weights is kept.

        Raises:
          EngineError: requests are in flight, or shapes differ from those of the current weights.
        """
        self._drop_cancelled()
        if self._table.busy:
            raise EngineError(
                f"weights of version {version} arrived while {len(self._table.outstanding())} requests are in flight.",
                "await or cancel all completions before updating the weights.",
            )
        if _shapes(params) != self._shapes:
            raise EngineError(
                f"weights of version {version} differ in structure or shape from version {self._version}.",
                "make a new engine for another model.",
            )
        self.sleep()
        self._params = {}  # both together would be twice the model on every device
        self._params = self._prepare(params)
        self._version = version

    def sleep(self) -> None:
        """Frees the cache's memory until the next request.

        Raises:
          EngineError: requests are in flight.
        """
        self._drop_cancelled()
        if self._table.active:
            raise EngineError(
                f"the cache cannot be freed while {self._table.active} requests are in flight.",
                "await or cancel all completions first.",
            )
        self._cache = None

    def health(self) -> dict[str, Any]:
        """A snapshot for logs: state, version, occupancy and the cache's size in bytes."""
        devices = jax.tree.leaves(self._params)[0].devices()
        return {
            "ok": not self._closed,
            "engine": "embedded",
            "weight_version": self._version,
            "slots": self._table.slots,
            "active": self._table.active,
            "waiting": len(self._table.waiting),
            "max_length": self._max_length,
            "cache_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(self._cache)),
            "devices": [str(device) for device in sorted(devices, key=lambda device: device.id)],
        }

    def close(self) -> None:
        """Ends the engine; requests in flight fail with an EngineError. May be called twice."""
        self._closed = True
        if self._driver is not None and not self._driver.done():
            self._driver.cancel()
            self._abandon("the engine was closed.")
        self._cache = None

    # ---- the driver ----

    async def _drive(self) -> None:
        try:
            await self._settle()
            while self._table.busy:
                begin = time.perf_counter()
                self._drop_cancelled()
                self._prefill()
                self._decode()
                self.stats.seconds += time.perf_counter() - begin
                await self._settle()
        finally:
            # Whatever ended the driver, nobody may wait for it for ever.
            if self._table.busy:
                self._abandon(f"the engine stopped ({sys.exception()!r}).")

    def _drop_cancelled(self) -> None:
        self.stats.extra["cancelled"] += self._table.drop_cancelled()

    async def _settle(self) -> None:
        """Lets every ready coroutine run until none of them brings a new request."""
        quiet = 0
        while quiet < _QUIET_TURNS:
            before = self._arrivals
            await asyncio.sleep(0)
            quiet = quiet + 1 if self._arrivals == before else 0

    def _prefill(self) -> None:
        placed = self._table.admit()
        if not placed:
            return
        batches = scheduler.plan_prefill(placed, slots=self._table.slots, rows=self._rows, buckets=self._buckets)
        drawn = [self._launch_prefill(batch) for batch in batches]
        # One wait for all batches: they queue on the device meanwhile.
        for batch, (token_A, logp_A) in zip(batches, jax.device_get(drawn)):
            count = len(batch.jobs)
            self._check_finite(logp_A[:count])
            for slot, job, token, logp in zip(batch.slot_A, batch.jobs, token_A.tolist(), logp_A.tolist()):
                self._table.record(int(slot), [token], [logp])
                if token in self._stop_ids or job.budget == 1:
                    self._finish(int(slot))
            self.stats.prompt_tokens += sum(len(job.prompt) for job in batch.jobs)
            self.stats.prefill_tokens += int(batch.length_P.sum())
            self.stats.extra["prefill_calls"] += 1

    def _device_cache(self) -> Cache:
        if self._cache is not None:
            return self._cache
        return steps.new_cache(self._model, self._table.slots, self._max_length, self._cache_dtype, self._sharding)

    def _launch_prefill(self, batch: scheduler.PrefillBatch) -> tuple[jax.Array, jax.Array]:
        table = self._table
        self._cache, token_A, logp_A = steps.prefill(
            self._model, self._params, self._device_cache(), batch.tokens_PT, batch.length_P, batch.source_A,
            batch.slot_A, np.int32(len(batch.jobs)), table.seed_S[batch.slot_A], table.temperature_S[batch.slot_A],
            self._mask_V, dtype=self._cache_dtype, sharding=self._sharding,
        )  # fmt: skip
        return token_A, logp_A

    def _decode(self) -> None:
        table = self._table
        if not table.active:
            return
        started = table.active
        furthest = int(table.position_S[table.active_S].max())
        # Low slots fill first, so few requests sit together and the idle rest costs nothing.
        used = scheduler.round_up(int(np.flatnonzero(table.active_S)[-1]) + 1, self._slot_sizes)
        columns = steps.Slots(*(column[:used] for column in table.columns()))
        self._cache, chunk = steps.decode(
            self._model, self._params, self._device_cache(), columns, self._stop_K, self._mask_V,
            # A quarter of the slots done is worth a look at the queue; the others lose one dispatch.
            np.int32(max(1, -(-started // 4))), steps=self._chunk,
            context=scheduler.round_up(min(furthest + self._chunk, self._max_length), self._buckets),
            sharding=self._sharding,
        )  # fmt: skip
        chunk = jax.device_get(chunk)
        self.stats.decode_steps += int(chunk.steps)
        self.stats.extra["decode_calls"] += 1
        self.stats.extra["decode_slots"] += int(chunk.count_S.sum())
        self._check_finite(chunk.logps_SC)
        finished_S = table.active_S[:used] & ~chunk.active_S
        for slot in np.flatnonzero(table.active_S).tolist():
            count = chunk.count_S[slot]
            table.record(slot, chunk.tokens_SC[slot, :count].tolist(), chunk.logps_SC[slot, :count].tolist())
        for slot in np.flatnonzero(finished_S).tolist():
            self._finish(slot)

    def _finish(self, slot: int) -> None:
        job = self._table.release(slot)
        self.stats.decode_tokens += len(job.tokens)
        if not job.future.done():
            job.future.set_result(scheduler.completion(job, self._stop_ids, self._version))

    def _check_finite(self, logps: np.ndarray) -> None:
        if not np.all(np.isfinite(logps)):
            raise EngineError(
                f"weights of version {self._version} give log-probs that are not finite.",
                "look at the last updates: gradient norm, learning rate, skipped updates.",
            )

    def _check_params(self) -> None:
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(self._params)):
            raise EngineError(
                f"the weights of version {self._version} no longer exist (a trainer step donated their memory).",
                "call update_weights with the new parameters after every update.",
            )

    def _abandon(self, reason: str) -> None:
        """Fails every request in flight and forgets all state on the device."""
        jobs = self._table.outstanding()
        self._table = scheduler.SlotTable(self._table.slots)
        self._cache = None  # a failed call has consumed its donated buffer
        for job in jobs:
            if not job.future.done():
                error = EngineError(f"{job.label} was lost: {reason}", "ask again once the cause is removed.")
                error.__cause__ = sys.exception()
                job.future.set_exception(error)


def _shapes(params: Params) -> Any:
    return jax.tree.map(lambda leaf: tuple(leaf.shape), params)


def _check_sizes(
    model: Model,
    sampling_mask_V: np.ndarray,
    stop_ids: Collection[int],
    slots: int,
    max_length: int,
    prefill_rows: int,
    decode_chunk: int,
) -> None:
    vocab = model.config.vocab_size
    if np.shape(sampling_mask_V) != (vocab,) or not np.any(sampling_mask_V):
        raise EngineError(
            f"sampling_mask_V has shape {np.shape(sampling_mask_V)} and {int(np.sum(sampling_mask_V))} usable ids; "
            f"the model's vocabulary has {vocab}.",
            "take the mask from the tokenizer that was loaded with this model.",
        )
    if any(not 0 <= int(i) < vocab for i in stop_ids):
        raise EngineError(
            f"stop_ids {sorted(stop_ids)} are outside the model's vocabulary of {vocab}.",
            "use the tokenizer of this model's checkpoint.",
        )
    if not 2 <= max_length <= model.config.max_positions:
        raise EngineError(
            f"max_length is {max_length}; the model has {model.config.max_positions} positions.",
            "choose max_length = longest prompt + longest answer within the model's positions.",
        )
    for name, value in (("slots", slots), ("prefill_rows", prefill_rows), ("decode_chunk", decode_chunk)):
        if value < 1:
            raise EngineError(f"{name} is {value}.", "use a number of at least 1.")
