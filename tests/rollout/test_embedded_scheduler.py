"""Slot placement, prefill planning and request checks, without a model."""

import asyncio

import numpy as np
import pytest

from sdjax.errors import EngineError
from sdjax.rollout.engine import Request, SamplingParams
from sdjax.rollout.scheduler import Job, SlotTable, check_request, completion, plan_prefill, round_up


def make_job(prompt, *, seed=0, budget=4, temperature=1.0):
    prompt = np.asarray(prompt, np.int32)
    loop = asyncio.new_event_loop()
    future = loop.create_future()
    loop.close()
    return Job(Request(prompt, seed, SamplingParams(temperature, budget)), prompt, future)


def test_first_come_first_served_into_the_lowest_free_slot():
    table = SlotTable(2)
    jobs = [make_job([1]), make_job([2, 2]), make_job([3, 3, 3])]
    table.waiting.extend(jobs)
    assert [slot for slot, _ in table.admit()] == [0, 1]
    assert table.active == 2 and list(table.waiting) == [jobs[2]]
    assert table.admit() == []
    assert table.release(1) is jobs[1]
    assert table.admit() == [(1, jobs[2])]
    assert table.position_S.tolist() == [0, 2]
    assert table.outstanding() == [jobs[0], jobs[2]]


def test_columns_follow_the_tokens_drawn():
    table = SlotTable(1)
    table.waiting.append(make_job([5, 6, 7], seed=9, budget=4, temperature=0.5))
    table.admit()
    table.record(0, [11], [-1.0])
    assert (table.last_S[0], table.position_S[0], table.drawn_S[0]) == (11, 3, 1)
    table.record(0, [12, 13], [-2.0, -3.0])
    assert (table.last_S[0], table.position_S[0], table.drawn_S[0]) == (13, 5, 3)
    assert (table.seed_S[0], table.budget_S[0], table.temperature_S[0]) == (9, 4, 0.5)
    done = completion(table.release(0), frozenset({13}), version=3)
    assert done.tokens.tolist() == [11, 12, 13] and done.logps.tolist() == [-1, -2, -3]
    assert (done.finish, done.weight_version) == ("stop", 3)
    assert done.tokens.dtype == np.int32 and done.logps.dtype == np.float32
    assert not table.busy and not table.active_S.any()


def test_cancelled_jobs_leave_slots_and_queue():
    table = SlotTable(1)
    jobs = [make_job([1]), make_job([2]), make_job([3])]
    table.waiting.extend(jobs)
    table.admit()
    jobs[0].future = jobs[1].future = _Done()
    assert table.drop_cancelled() == 2
    assert table.admit() == [(0, jobs[2])]


class _Done:
    def done(self):
        return True


def test_identical_prompts_share_one_prefill_row():
    placed = list(enumerate([make_job([1, 2]), make_job([3]), make_job([1, 2]), make_job([1, 2])]))
    (batch,) = plan_prefill(placed, slots=8, rows=[2, 4], buckets=[4, 8])
    assert batch.tokens_PT.tolist() == [[1, 2, 0, 0], [3, 0, 0, 0]]
    assert batch.length_P.tolist() == [2, 1]
    pairs = dict(zip(batch.slot_A[: len(batch.jobs)].tolist(), batch.source_A[: len(batch.jobs)].tolist()))
    assert pairs == {0: 0, 2: 0, 3: 0, 1: 1}


def test_prompts_are_batched_by_bucket_and_padded_to_few_sizes():
    lengths = [3, 9, 4, 5, 1, 2, 3, 4, 2, 1, 4]  # bucket 4: nine prompts, bucket 8: one, bucket 16: one
    placed = [(slot, make_job(np.arange(length) + slot)) for slot, length in enumerate(lengths)]
    batches = plan_prefill(placed, slots=16, rows=[2, 8], buckets=[4, 8, 16])
    assert [batch.tokens_PT.shape for batch in batches] == [(8, 4), (2, 4), (2, 8), (2, 16)]
    seen = [int(slot) for batch in batches for slot in batch.slot_A[: len(batch.jobs)]]
    assert sorted(seen) == list(range(len(lengths)))
    for batch in batches:
        for a, job in enumerate(batch.jobs):
            row = batch.source_A[a]
            assert batch.tokens_PT[row, : batch.length_P[row]].tolist() == job.prompt.tolist()


@pytest.mark.parametrize(
    ("prompts", "shapes"), [(1, [2]), (3, [2, 2]), (4, [2, 2]), (5, [2, 2, 2]), (6, [8]), (8, [8]), (11, [8, 2, 2])]
)
def test_no_prefill_batch_is_more_than_a_quarter_padding(prompts, shapes):
    placed = [(slot, make_job([slot])) for slot in range(prompts)]
    batches = plan_prefill(placed, slots=16, rows=[2, 8], buckets=[4])
    assert [len(batch.length_P) for batch in batches] == shapes


def test_round_up():
    assert [round_up(size, [4, 8]) for size in (1, 4, 5, 8)] == [4, 4, 8, 8]


@pytest.mark.parametrize(
    ("prompt", "change", "found"),
    [
        ([], {}, r"shape \(0,\)"),
        ([[1, 2]], {}, r"shape \(1, 2\)"),
        ([1.0, 2.0], {}, "float64"),
        ([1, 50], {}, "token id 50; the model has ids 0 to 49"),
        ([-1, 3], {}, "token id -1"),
        ([1] * 7, {}, r"7 prompt tokens \+ 4 new tokens = 11 exceed the engine's max_length of 10"),
        ([1], {"budget": 0}, "max_new_tokens is 0"),
        ([1], {"temperature": -1.0}, "temperature is -1.0"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"seed": -3}, "seed -3"),
        ([1], {"seed": 2**32}, "seed 4294967296"),
    ],
)
def test_bad_requests_are_named(prompt, change, found):
    values = {"seed": 0, "temperature": 1.0, "budget": 4} | change
    request = Request(
        np.asarray(prompt), values["seed"], SamplingParams(values["temperature"], values["budget"]), name="game-1/2"
    )
    with pytest.raises(EngineError, match=found) as caught:
        check_request(request, vocab_size=50, max_length=10)
    assert "game-1/2" in str(caught.value) and caught.value.fix


def test_a_request_that_just_fits_is_accepted():
    prompt = check_request(Request(np.arange(6), 0, SamplingParams(0.0, 4)), vocab_size=50, max_length=10)
    assert prompt.dtype == np.int32 and prompt.tolist() == [0, 1, 2, 3, 4, 5]
