"""Host side of continuous batching: who waits, who sits in which slot, and what the next device call looks like.

Pure Python and numpy, so that every decision (first come first served, lowest free slot first, identical prompts
prefilled once, shapes rounded up to a few sizes) can be tested without a model. Decisions depend on the requests alone,
never on clocks, which keeps a resumed run equal to an uninterrupted one.
"""

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sdjax.errors import EngineError
from sdjax.rollout.engine import Completion, Request


@dataclass(eq=False)
class Job:
    """A request on its way: ``future`` resolves to its Completion; tokens and logps grow chunk by chunk."""

    request: Request
    prompt: np.ndarray  # [P] int32
    future: asyncio.Future
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)

    @property
    def budget(self) -> int:
        return self.request.sampling.max_new_tokens

    @property
    def label(self) -> str:
        return request_label(self.request)


@dataclass(frozen=True)
class PrefillBatch:
    """One prefill call. U unique prompts, A admitted jobs; job a gets the cache row of prompt ``source_A[a]``.

    tokens_PT: [rows, bucket] int32, right-padded with 0; rows >= U are empty (length 0).
    length_P: [rows] int32. source_A, slot_A: [slots] int32, of which the first ``len(jobs)`` entries count.
    """

    jobs: list[Job]
    tokens_PT: np.ndarray
    length_P: np.ndarray
    source_A: np.ndarray
    slot_A: np.ndarray


class SlotTable:
    """Slots of the decode batch as numpy columns, plus the queue of waiting jobs.

    Columns (all [S]): last (token drawn last, not yet in the cache), position (its position), drawn (tokens drawn),
    budget, seed, temperature, active.
    """

    def __init__(self, slots: int):
        self.waiting: deque[Job] = deque()
        self.jobs: list[Job | None] = [None] * slots
        self.last_S = np.zeros(slots, np.int32)
        self.position_S = np.zeros(slots, np.int32)
        self.drawn_S = np.zeros(slots, np.int32)
        self.budget_S = np.zeros(slots, np.int32)
        self.seed_S = np.zeros(slots, np.uint32)
        self.temperature_S = np.ones(slots, np.float32)
        self.active_S = np.zeros(slots, bool)
        self._free = list(range(slots))  # a heap: the lowest slot first, so that placement never depends on history

    @property
    def slots(self) -> int:
        return len(self.jobs)

    @property
    def active(self) -> int:
        return self.slots - len(self._free)

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or self.active > 0

    def columns(self) -> tuple[np.ndarray, ...]:
        """All columns, in the order of ``embedded_steps.Slots``."""
        return (
            self.last_S,
            self.position_S,
            self.drawn_S,
            self.budget_S,
            self.seed_S,
            self.temperature_S,
            self.active_S,
        )

    def outstanding(self) -> list[Job]:
        return [job for job in self.jobs if job is not None] + list(self.waiting)

    def admit(self) -> list[tuple[int, Job]]:
        """Moves waiting jobs into free slots, first come first served. Returns (slot, job) pairs."""
        placed = []
        while self.waiting and self._free:
            job = self.waiting.popleft()
            slot = heapq.heappop(self._free)
            self.jobs[slot] = job
            self.last_S[slot] = 0
            self.position_S[slot] = len(job.prompt) - 1
            self.drawn_S[slot] = 0
            self.budget_S[slot] = job.budget
            self.seed_S[slot] = job.request.seed
            self.temperature_S[slot] = job.request.sampling.temperature
            self.active_S[slot] = True
            placed.append((slot, job))
        return placed

    def record(self, slot: int, tokens: Sequence[int], logps: Sequence[float]) -> None:
        """Appends tokens drawn for ``slot``."""
        job = self.jobs[slot]
        assert job is not None
        job.tokens.extend(tokens)
        job.logps.extend(logps)
        self.last_S[slot] = tokens[-1]
        self.position_S[slot] += len(tokens)
        self.drawn_S[slot] += len(tokens)

    def release(self, slot: int) -> Job:
        """Empties ``slot`` and returns the job that sat there."""
        job = self.jobs[slot]
        assert job is not None
        self.jobs[slot] = None
        self.active_S[slot] = False
        heapq.heappush(self._free, slot)
        return job

    def drop_cancelled(self) -> int:
        """Removes jobs whose awaiter is gone. Returns how many."""
        gone = [slot for slot, job in enumerate(self.jobs) if job is not None and job.future.done()]
        for slot in gone:
            self.release(slot)
        waiting = deque(job for job in self.waiting if not job.future.done())
        dropped = len(gone) + len(self.waiting) - len(waiting)
        self.waiting = waiting
        return dropped


def completion(job: Job, stop_ids: frozenset[int], version: int) -> Completion:
    """The finished job as a Completion; "stop" when its last token is a stop id, else "length"."""
    return Completion(
        tokens=np.asarray(job.tokens, np.int32),
        logps=np.asarray(job.logps, np.float32),
        finish="stop" if job.tokens[-1] in stop_ids else "length",
        weight_version=version,
    )


def plan_prefill(
    placed: Iterable[tuple[int, Job]], *, slots: int, rows: Sequence[int], buckets: Sequence[int]
) -> list[PrefillBatch]:
    """Groups newly placed jobs into prefill calls.

    Identical prompts share one row. Prompts are batched with others of the same bucket, in order of arrival, and each
    batch is padded to one of the sizes in ``rows``. ``rows`` and ``buckets`` are ascending; the last bucket must hold
    every prompt.
    """
    by_bucket: dict[int, dict[bytes, list[tuple[int, Job]]]] = {}
    for slot, job in placed:
        bucket = round_up(len(job.prompt), buckets)
        by_bucket.setdefault(bucket, {}).setdefault(job.prompt.tobytes(), []).append((slot, job))
    batches = []
    for bucket in sorted(by_bucket):
        families = list(by_bucket[bucket].values())
        while families:
            # Padding is computed like any other row: a batch that would be more than a quarter empty is cut in two.
            left = len(families)
            size = next((r for r in rows if 4 * left >= 3 * r and r >= left), None)
            size = size or max((r for r in rows if r <= left), default=rows[0])
            batches.append(_prefill_batch(families[:size], slots, rows, bucket))
            families = families[size:]
    return batches


def _prefill_batch(families: list[list[tuple[int, Job]]], slots: int, rows: Sequence[int], bucket: int) -> PrefillBatch:
    padded = round_up(len(families), rows)
    tokens_PT = np.zeros((padded, bucket), np.int32)
    length_P = np.zeros(padded, np.int32)
    source_A = np.zeros(slots, np.int32)
    slot_A = np.zeros(slots, np.int32)
    jobs: list[Job] = []
    for row, family in enumerate(families):
        prompt = family[0][1].prompt
        tokens_PT[row, : len(prompt)] = prompt
        length_P[row] = len(prompt)
        for slot, job in family:
            source_A[len(jobs)] = row
            slot_A[len(jobs)] = slot
            jobs.append(job)
    return PrefillBatch(jobs, tokens_PT, length_P, source_A, slot_A)


def request_label(request: Request) -> str:
    return f"request {request.name!r}" if request.name else "request"


def round_up(size: int, sizes: Sequence[int]) -> int:
    """The smallest of the ascending ``sizes`` that is at least ``size``."""
    return next(candidate for candidate in sizes if candidate >= size)


def check_request(request: Request, *, vocab_size: int, max_length: int) -> np.ndarray:
    """Returns the prompt as [P] int32.

    Raises:
      EngineError: the prompt is empty, too long for the engine or holds ids outside the vocabulary; a sampling
        parameter or the seed is out of range.
    """
    label = request_label(request)
    prompt = np.asarray(request.prompt)
    if prompt.ndim != 1 or prompt.size == 0 or not np.issubdtype(prompt.dtype, np.integer):
        raise EngineError(
            f"{label}: the prompt has shape {prompt.shape} and type {prompt.dtype}, not [P] integers with P >= 1.",
            "render the prompt to token ids before asking for a completion.",
        )
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= vocab_size:
        raise EngineError(
            f"{label}: the prompt holds token id {low if low < 0 else high}; the model has ids 0 to {vocab_size - 1}.",
            "use the tokenizer of this model's checkpoint.",
        )
    sampling = request.sampling
    if sampling.max_new_tokens < 1:
        raise EngineError(f"{label}: max_new_tokens is {sampling.max_new_tokens}.", "ask for at least one token.")
    if prompt.size + sampling.max_new_tokens > max_length:
        raise EngineError(
            f"{label}: {prompt.size} prompt tokens + {sampling.max_new_tokens} new tokens = "
            f"{prompt.size + sampling.max_new_tokens} exceed the engine's max_length of {max_length}.",
            "shorten the prompt, lower max_new_tokens or raise the engine's max_length.",
        )
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise EngineError(f"{label}: the temperature is {sampling.temperature}.", "use 0 (greedy) or more.")
    if not 0 <= request.seed < 2**32:
        raise EngineError(f"{label}: the seed {request.seed} is outside 0 to 2^32 - 1.", "use sdjax.seeds.derive_seed.")
    return prompt.astype(np.int32)
