"""Shared prefixes: every row is scored exactly once, and as if it had been scored alone."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdjax import sharding
from sdjax.config import TrainConfig
from sdjax.methods import registry
from sdjax.train.optimize import Optimizer
from sdjax.train.packing import Sequences, Shape
from sdjax.train.shared_prefix import divide
from sdjax.train.update import Updater
from tests.train.test_update import VOCAB, make_model

SHAPE = Shape(2, 24, 12, 5)


@st.composite
def shared_rows(draw):
    """Rows with one of four prefixes (one of them empty), and how long it is in each."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    prefixes = [rng.integers(1, VOCAB, n).astype(np.int32) for n in (0, 3, 5, 17)]
    prompts, responses, shared = [], [], []
    for kind in draw(st.lists(st.integers(0, 3), min_size=1, max_size=16)):
        prompts.append(np.concatenate([prefixes[kind], rng.integers(1, VOCAB, rng.integers(1, 9)).astype(np.int32)]))
        responses.append(rng.integers(1, VOCAB, rng.integers(1, 5)).astype(np.int32))
        shared.append(len(prefixes[kind]))
    return Sequences(prompts, responses), shared


@given(shared_rows())
@settings(max_examples=60, deadline=None)
def test_every_row_is_in_one_place_behind_its_own_prefix(drawn):
    sequences, shared = drawn
    blocks, rest = divide(sequences, shared, SHAPE, bucket=8)
    found = list(rest)
    for block in blocks:
        assert block.tokens_FP.shape[0] == SHAPE.B and block.tokens_FP.shape[1] % 8 == 0
        assert (block.length_F >= 1).all()
        for p, index_B in block.batches:
            for b, f in enumerate(index_B):
                rows = [int(r) for r in dict.fromkeys(p.row_BM[b, p.mask_BM[b]])]
                found += rows
                for number, row in enumerate(rows, start=1):
                    own = p.segment_BT[b] == number
                    before = block.tokens_FP[f, : block.length_F[f]]
                    whole = np.concatenate([sequences.prompts[row], sequences.responses[row]])
                    np.testing.assert_array_equal(np.concatenate([before, p.tokens_BT[b, own]]), whole)
                    np.testing.assert_array_equal(p.position_BT[b, own], np.arange(shared[row], len(whole)))
    assert sorted(found) == list(range(len(shared)))


@pytest.fixture(scope="module")
def optimizer():
    model = make_model()
    train = TrainConfig(pack_length=24, pack_rows=2, loss_slots=12, remat="none")
    method = registry.resolve("grpo", registry.config_class("grpo")(), "alfworld").build()
    updater = Updater(model, method, train, 1.0, np.ones(VOCAB, bool))
    return Optimizer(updater, train, sharding.make_mesh(1, 1, 1)), model.init(jax.random.key(1))


@given(shared_rows())
@settings(max_examples=15, deadline=None)
def test_scores_behind_a_prefix_are_the_plain_ones(optimizer, drawn):
    optimizer, params = optimizer
    sequences, shared = drawn
    shape = (len(shared), 5)
    plain = optimizer.score(params, sequences, shape, extra_tokens=24)
    once = optimizer.score(params, sequences, shape, extra_tokens=24, shared=shared)
    np.testing.assert_allclose(once, plain, atol=2e-5)
    assert (plain != 0).any()


def test_a_wrong_prefix_changes_the_scores(optimizer):
    optimizer, params = optimizer
    rng = np.random.default_rng(0)
    tails = [rng.integers(1, VOCAB, 6).astype(np.int32) for _ in range(4)]
    responses = [rng.integers(1, VOCAB, 4).astype(np.int32) for _ in range(4)]
    scores = []
    for seed in (1, 2):
        prefix = np.random.default_rng(seed).integers(1, VOCAB, 7).astype(np.int32)
        sequences = Sequences([np.concatenate([prefix, tail]) for tail in tails], responses)
        scores.append(optimizer.score(params, sequences, (4, 5), extra_tokens=24, shared=[7] * 4))
    assert np.abs(scores[0] - scores[1]).max() > 1e-3


def test_few_rows_are_left_to_the_plain_path():
    sequences = Sequences([np.arange(1, 20, dtype=np.int32)] * 2, [np.ones(1, np.int32)] * 2)
    blocks, rest = divide(sequences, [17, 17], SHAPE, bucket=8)
    assert blocks == [] and rest == [0, 1]
