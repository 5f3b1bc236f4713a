"""Packing keeps every token, keeps rows apart and is undone exactly by gather and scatter."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdjax.errors import DataError
from sdjax.train.packing import Sequences, Shape, pack

LENGTH, SLOTS, ROWS = 40, 16, 2
SHAPE = Shape(ROWS, LENGTH, SLOTS, 3)


@st.composite
def row_lists(draw):
    sizes = draw(st.lists(st.tuples(st.integers(1, 24), st.integers(0, 16)), min_size=1, max_size=12))
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    prompts = [rng.integers(1, 99, p).astype(np.int32) for p, _ in sizes]
    responses = [rng.integers(1, 99, r).astype(np.int32) for _, r in sizes]
    return prompts, responses


@given(row_lists())
@settings(max_examples=60, deadline=None)
def test_every_row_is_found_again(rows):
    prompts, responses = rows
    packed = pack(Sequences(prompts, responses), range(len(prompts)), SHAPE)
    seen = {}
    for p in packed:
        assert p.tokens_BT.shape == (ROWS, LENGTH) and p.target_BM.shape == (ROWS, SLOTS)
        for b in range(ROWS):
            assert p.segment_BT[b].max() <= SHAPE.segments
            for segment in range(1, p.segment_BT[b].max() + 1):
                where = np.flatnonzero(p.segment_BT[b] == segment)
                np.testing.assert_array_equal(where, np.arange(where[0], where[0] + len(where)))
                np.testing.assert_array_equal(p.position_BT[b, where], np.arange(len(where)))
                slots = np.flatnonzero(p.mask_BM[b] & np.isin(p.source_BM[b], where))
                row = int(p.row_BM[b, slots[0]])
                seen[row] = p.tokens_BT[b, where]
                # The hidden state at ``source`` sees everything before the target and not the target itself.
                np.testing.assert_array_equal(p.tokens_BT[b, p.source_BM[b, slots] + 1], p.target_BM[b, slots])
                np.testing.assert_array_equal(p.column_BM[b, slots], np.arange(len(slots)))
    expected = {i for i, r in enumerate(responses) if len(r)}  # a row without a response has nothing to score
    assert set(seen) == expected
    for row, tokens in seen.items():
        np.testing.assert_array_equal(tokens, np.concatenate([prompts[row], responses[row]]))


@given(row_lists())
@settings(max_examples=30, deadline=None)
def test_gather_then_scatter_is_the_identity(rows):
    prompts, responses = rows
    values = np.random.default_rng(0).normal(size=(len(prompts), SLOTS)).astype(np.float32)
    out = np.full_like(values, np.nan)
    for p in pack(Sequences(prompts, responses), range(len(prompts)), SHAPE):
        p.scatter(p.gather(values), out)
    for i, response in enumerate(responses):
        np.testing.assert_array_equal(out[i, : len(response)], values[i, : len(response)])
        assert np.isnan(out[i, len(response) :]).all()


def test_unused_slots_never_read_poisoned_values():
    values = np.full((1, SLOTS), np.nan, np.float32)
    values[0, :2] = 1.0
    (p,) = pack(Sequences([np.ones(3, np.int32)], [np.ones(2, np.int32)]), [0], SHAPE)
    assert np.isfinite(p.gather(values)).all() and p.gather(values).sum() == 2.0


@pytest.mark.parametrize(("prompt", "response"), [(30, 11), (2, 17), (0, 3)])
def test_a_row_that_does_not_fit_names_the_limit(prompt, response):
    with pytest.raises(DataError, match="packed row holds 40 tokens and 16 response tokens"):
        pack(Sequences([np.ones(prompt, np.int32)], [np.ones(response, np.int32)]), [0], SHAPE)
