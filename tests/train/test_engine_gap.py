"""The gap between engine and trainer: what is measured, what stops a run, and which tokens get a weight."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from sdjax.config import RolloutConfig, TrainConfig
from sdjax.envs.base import Observation
from sdjax.errors import EngineError
from sdjax.methods.registry import config_class, resolve
from sdjax.rollout.engine import SamplingParams
from sdjax.rollout.episodes import Assignment, Trajectory, Turn
from sdjax.train import engine_gap
from sdjax.train.rows import Row, make_rows, rollout_metrics
from sdjax.train.update import Scales, token_loss

OLD = np.array([[-1.0, -2.0, -3.0], [-0.5, -0.5, 0.0], [-1.0, -1.0, -1.0], [0.0, 0.0, 0.0]], np.float32)
MASK = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 1], [0, 0, 0]], bool)


def row(logps, *, extra=False, group=0, number=0, tokens=None):
    response = np.arange(len(logps), dtype=np.int32) if tokens is None else np.asarray(tokens, np.int32)
    turn = Turn(
        np.zeros(2, np.int32), response, np.asarray(logps, np.float32), "stop", 0, Observation("", "", ()), "a", True,
        None, None,
    )  # fmt: skip
    assignment = Assignment("t", group, number, number, "train", 1)
    trajectory = Trajectory(assignment, "failed", 0.0, 0.0, (turn,), "", {}, 0, SamplingParams())
    return Row(trajectory, turn, 0, extra)


ROWS = [row([-1.0, -2.5, -3.0]), row([-0.5, -2.5]), row([-9.0, -9.0, -9.0], extra=True)]


def test_the_gap_is_that_of_all_tokens_drawn_under_the_plain_prompt():
    record = engine_gap.measure(ROWS, OLD, RolloutConfig(), 1)
    assert record["engine/logp_gap_abs_mean"] == pytest.approx(2.5 / 5)
    assert record["engine/logp_gap_abs_max"] == pytest.approx(2.0)
    k3 = [np.exp(d) - 1 - d for d in (0, 0.5, 0, 0, 2.0)]
    assert record["engine/kl_sample_train_k3"] == pytest.approx(np.mean(k3), rel=1e-5)


@pytest.mark.parametrize("bad", [-50.0, np.nan])
def test_a_large_or_undefined_gap_stops_the_run(bad):
    with pytest.raises(EngineError, match="step 3: engine and trainer"):
        engine_gap.measure([row([bad, -2.0, -3.0])], OLD, RolloutConfig(), 3)


def test_weights_are_off_by_default():
    assert engine_gap.weights(ROWS, OLD, MASK, TrainConfig()) == (None, {})


@pytest.mark.parametrize(("kind", "beyond"), [("truncate", 2.0), ("mask", 0.0)])
def test_weights_of_engine_rows_and_of_all_others(kind, beyond):
    weight, metrics = engine_gap.weights(ROWS, OLD, MASK, TrainConfig(mismatch=kind))
    assert weight is not None
    want = [[1, np.exp(0.5), 1], [1, beyond, 0], [1, 1, 1], [0, 0, 0]]
    np.testing.assert_allclose(weight, want, rtol=1e-6)
    assert metrics["engine/mismatch_bounded_frac"] == pytest.approx(1 / 8)


def test_a_weight_scales_the_surrogate_and_nothing_else():
    method = resolve("grpo", config_class("grpo")(), "alfworld").build()
    adv = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)
    student, mask = jnp.asarray(OLD[:2] + 0.3), jnp.ones((2, 3), bool)
    fields = {"old": OLD[:2], "reference": OLD[:2] - 0.1, "adv": adv}
    scales = Scales(1.0, 0.0, 0.0, 0.0)
    plain, _ = token_loss(method, TrainConfig(), student, fields, mask, scales)
    ones, _ = token_loss(method, TrainConfig(), student, fields | {"engine_weight": np.ones_like(adv)}, mask, scales)
    double, sums = token_loss(
        method, TrainConfig(), student, fields | {"engine_weight": np.full_like(adv, 2)}, mask, scales
    )
    assert float(plain) == float(ones) != 0
    assert float(double) == pytest.approx(2 * float(plain), rel=1e-6)
    assert float(sums["kl"]) > 0


@pytest.mark.parametrize(("logp", "cloned"), [(-5.0, 1.0), (-0.001, 0.0)])
def test_samples_that_are_identical_against_all_odds_are_seen(logp, cloned):
    trajectories = [row([logp] * 3, number=k).trajectory for k in range(4)]
    others = [row([logp] * 3, group=1, number=4 + k, tokens=[k, 0, 0]).trajectory for k in range(4)]
    rows = make_rows([*trajectories, *others])
    metrics = rollout_metrics([*trajectories, *others], rows, _Batch(len(rows)))
    assert (metrics["rollout/identical_groups"], metrics["rollout/cloned_groups"]) == (1.0, cloned)


@dataclasses.dataclass
class _Batch:
    """As much of a batch as the metrics read."""

    n: int

    def __post_init__(self):
        self.ok_N, self.score_N, self.adv_N = np.ones(self.n, bool), np.zeros(self.n), np.zeros(self.n)
