"""Mini-batches without a token of the auxiliary loss: skipped, counted, and without a trace in the parameters."""

import dataclasses

import jax
import numpy as np
import pytest

from sdjax import sharding
from sdjax.methods import registry
from sdjax.train.optimize import Optimizer
from sdjax.train.update import Updater
from tests.train.test_update import TRAIN, VOCAB, N, make_data, make_model


@pytest.fixture(scope="module")
def update():
    """Runs one global step of FA-SD in two mini-batches; ``feedback``: [rows] bool."""
    model, train = make_model(), dataclasses.replace(TRAIN, minibatch_rows=N // 2)
    method = registry.make("fa_sd")
    updater = Updater(model, method, train, 1.0, np.ones(VOCAB, bool))
    optimizer = Optimizer(updater, train, sharding.make_mesh(1, 1, 1))
    params = model.init(jax.random.key(0))
    batch, adv, sequences = make_data()

    def run(feedback, rows=N):
        given = dataclasses.replace(
            batch, views={"sibling": batch.views["skills"]}, context={"sibling": np.asarray(feedback)}
        )
        kept = dataclasses.replace(sequences, prompts=sequences.prompts[:rows], responses=sequences.responses[:rows])
        state, metrics = optimizer.update(
            updater.init(params), given, adv, kept, method.coefficients(1, 100), step=1, seed=0, learning_rate=1e-2
        )
        return jax.device_get(state["params"]), metrics, given

    run.params = jax.device_get(params)
    return run


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_without_feedback_nothing_moves(update):
    params, metrics, _ = update(np.zeros(N, bool))
    assert same(params, update.params)
    assert metrics["optim/updates"] == 0 and metrics["optim/empty_minibatches"] == 2
    assert metrics["train/loss_total"] == 0 and all(np.isfinite(v) for v in metrics.values())


def test_a_minibatch_without_feedback_is_skipped(update):
    first = np.arange(N) < N // 2
    params, metrics, given = update(first)
    assert metrics["optim/updates"] == 1 and metrics["optim/empty_minibatches"] == 1
    alone, _, _ = update(first, rows=N // 2)
    assert same(params, alone) and not same(params, update.params)
    tokens = given.mask_NL[first].sum()
    gap = (given.views["sibling"] - given.old_NL)[first][given.mask_NL[first]]
    assert metrics["method/feedback_mean"] == pytest.approx(1.0) and tokens == len(gap)
