"""Statistics of the report against golden curves, committed values and properties."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdjax.errors import DataError
from sdjax.report import stats

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "methods_v1.npz"
ALFWORLD_FLOOR = 22.9
STEPS = list(range(0, 105, 5))
# A run that collapses at step 45 and is back at 75, and the same run ending at the floor.
RECOVERED = [10.0, 17, 24, 34, 41, 38, 46, 48, 60, 1, 1.3, 3.4, 4.3, 2.1, 1, 62, 62, 67, 64, 71, 70]
DEAD = [*RECOVERED[:15], 1.3, 2.4, 1.6, 1.0, 2.0, 1.8]


def test_auc_is_the_mean_height():
    assert stats.auc([0, 5, 10], [0.0, 10.0, 40.0]) == pytest.approx((25 + 125) / 10)
    assert stats.auc(STEPS, [42.0] * 21) == pytest.approx(42.0)
    with pytest.raises(DataError, match="one validation"):
        stats.auc([0], [1.0])
    with pytest.raises(DataError, match="increasing order"):
        stats.auc([5, 0], [1.0, 2.0])


def test_peak_to_final_and_fell():
    assert stats.peak_to_final([10.0, 60.0, 45.0]) == 15.0
    assert not stats.fell([10.0, 60.0, 40.1])
    assert stats.fell([10.0, 60.0, 40.0])


def test_a_collapse_that_recovers_and_one_that_does_not():
    (low,) = stats.low_runs(STEPS, RECOVERED, ALFWORLD_FLOOR)
    assert low == stats.LowRun(start=45, end=70, length=6, peak=60.0, depth=59.0, recovered=True)
    assert low.collapsed
    (dead,) = stats.low_runs(STEPS, DEAD, ALFWORLD_FLOOR)
    assert (dead.start, dead.end, dead.length, dead.recovered) == (45, 100, 12, False)


def test_two_low_validations_are_no_collapse_and_small_peaks_do_not_count():
    (low,) = stats.low_runs([0, 5, 10, 15], [60.0, 1.0, 1.0, 60.0], ALFWORLD_FLOOR)
    assert not low.collapsed
    assert stats.low_runs(STEPS[:6], [0.0, 9.9, 0, 0, 0, 0], floor=5.0) == []  # peak below 10 points
    assert stats.low_runs(STEPS[:6], [0.0, 20.0, 1, 1, 1, 1], ALFWORLD_FLOOR) == []  # within the noise floor


@pytest.mark.parametrize(
    ("tasks", "rate", "mean", "q95", "q999"),
    [(140, 0.60, 7.7, 15.7, 22.9), (140, 0.85, 5.4, 10.7, 16.4), (128, 0.50, 8.3, 16.4, 24.2)],
)
def test_noise_floor_of_the_small_panels(tasks, rate, mean, q95, q999):
    floor = stats.noise_floor(tasks, rate)
    assert (floor.mean, floor.q95, floor.q999) == pytest.approx((mean, q95, q999), abs=0.06)


def test_noise_floor_is_the_binomial_law():
    """Against the exact law: P(d <= c) = sum_j f(j) F(j + c)^(k - 1)."""
    n, p, k = 12, 0.3, 5
    pmf = np.array([math.comb(n, j) * p**j * (1 - p) ** (n - j) for j in range(n + 1)])
    cdf = np.cumsum(pmf)
    within = np.array([sum(pmf[j] * cdf[min(n, j + c)] ** (k - 1) for j in range(n + 1)) for c in range(n + 1)])
    floor = stats.noise_floor(n, p, k)
    assert floor.mean == pytest.approx(100 / n * (1 - within).sum(), rel=0.01)
    assert floor.q95 == pytest.approx(100 / n * int(np.argmax(within >= 0.95)))
    assert stats.noise_floor(n, p, 1).q999 == 0.0
    with pytest.raises(DataError, match="at least one task"):
        stats.noise_floor(0, 0.5)


def test_flat_rate_lies_between_peak_and_final():
    assert stats.flat_rate([10.0, 80.0, 40.0]) == 0.6
    assert stats.flat_rate([0.0, 0.0]) == 0.0
    assert stats.flat_rate([100.0]) == 1.0
    assert stats.flat_rate([1.0, 1.0]) == 0.05


def test_sample_sd_divides_by_n_minus_one():
    assert stats.sample_sd([1.0, 2.0, 3.0, 4.0]) == pytest.approx(math.sqrt(5 / 3))
    assert math.isnan(stats.sample_sd([1.0]))


def test_clustered_standard_error_by_hand():
    # Mean 0.5; task sums of deviations: a +1, b -1. sqrt(2/1 * 2) / 4 = 0.5: two tasks, not four observations.
    assert stats.clustered_standard_error([1, 1, 0, 0], ["a", "a", "b", "b"]) == pytest.approx(0.5)
    assert math.isnan(stats.clustered_standard_error([1, 0], ["a", "a"]))
    with pytest.raises(DataError, match="one cluster per value"):
        stats.clustered_standard_error([1.0], [])


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=30))
def test_clusters_of_one_give_the_usual_standard_error(values):
    clustered = stats.clustered_standard_error(values, list(range(len(values))))
    assert clustered == pytest.approx(stats.standard_error(values), rel=1e-6, abs=1e-9)


@given(st.lists(st.floats(0, 100), min_size=2, max_size=21), st.floats(0, 30))
def test_curve_properties(values, floor):
    steps = [5 * k for k in range(len(values))]
    assert min(values) - 1e-9 <= stats.auc(steps, values) <= max(values) + 1e-9
    assert stats.peak_to_final(values) >= 0
    mask = stats.low_mask(values, floor)
    runs = stats.low_runs(steps, values, floor)
    assert sum(run.length for run in runs) == mask.sum()
    assert all(run.depth > floor and run.peak >= stats.LOW_PEAK_POINTS for run in runs)


def test_paired_difference_resamples_tasks():
    # Eight seeds of each of two tasks: the interval must stay as wide as two tasks allow.
    values = {(task, seed): 100.0 if task == "a" else 0.0 for task in "ab" for seed in range(8)}
    zero = dict.fromkeys(values, 0.0)
    difference = stats.paired_difference(values, zero)
    assert difference is not None
    assert (difference.mean, difference.low, difference.high, difference.tasks) == (50.0, 0.0, 100.0, 2)
    assert difference.includes_zero
    assert stats.paired_difference(values, zero) == difference  # seeded
    assert stats.paired_difference(values, {("c", 0): 1.0}) is None


def test_two_tasks_conclude_nothing():
    values = {(task, 0): 50.0 for task in "ab"}
    few = stats.paired_difference(values, dict.fromkeys(values, 0.0))
    assert few is not None and not few.includes_zero and not few.conclusive
    values = {(task, 0): 50.0 for task in "abcdefghij"}
    enough = stats.paired_difference(values, dict.fromkeys(values, 0.0))
    assert enough is not None and enough.conclusive


def test_paired_difference_uses_common_pairs_only():
    mine = {("a", 0): 10.0, ("b", 0): 10.0, ("c", 0): 1000.0}
    base = {("a", 0): 0.0, ("b", 0): 0.0, ("d", 0): -1000.0}
    difference = stats.paired_difference(mine, base)
    assert difference is not None
    assert (difference.mean, difference.low, difference.high) == (10.0, 10.0, 10.0)


# Scores in [0, 1] of 8 runs in 12 settings and what rliable 1.2.0 makes of them (aggregate_iqm of each;
# probability_of_improvement of the first over the second). Setting 2 is full of ties.
RLIABLE = json.loads((Path(__file__).parent / "data" / "rliable.json").read_text())


def test_iqm_and_improvement_agree_with_rliable():
    x, y = np.array(RLIABLE["x"]), np.array(RLIABLE["y"])
    assert stats.iqm(x.ravel()) == pytest.approx(RLIABLE["iqm_x"], rel=1e-12)
    assert stats.iqm(y.ravel()) == pytest.approx(RLIABLE["iqm_y"], rel=1e-12)
    found = np.mean([stats.probability_of_improvement(x[:, k], y[:, k]) for k in range(12)])
    assert found == pytest.approx(RLIABLE["improvement"], rel=1e-12)


def test_iqm_by_hand():
    assert stats.iqm([1.0, 2, 3, 4, 5, 6, 7]) == 4.0  # one value is cut on each side
    assert stats.iqm([0.0, 0, 10, 20, 1000, 5]) == pytest.approx((0 + 10 + 20 + 5) / 4)
    assert stats.iqm([3.0]) == 3.0


@given(st.lists(st.floats(0, 100), min_size=1, max_size=9), st.lists(st.floats(0, 100), min_size=1, max_size=9))
def test_improvement_is_antisymmetric(x, y):
    forth, back = stats.probability_of_improvement(x, y), stats.probability_of_improvement(y, x)
    assert forth + back == pytest.approx(1.0)
    assert stats.probability_of_improvement(x, x) == pytest.approx(0.5)
    assert min(x) - 1e-9 <= stats.iqm(x) <= max(x) + 1e-9


def test_resampling_draws_whole_panels_and_is_shared():
    counts = stats.task_counts(7, 600, 3)
    assert counts.shape == (600, 7) and (counts.sum(axis=1) == 7).all()
    sums, numbers = np.arange(14.0).reshape(7, 2), np.ones((7, 2))
    means = stats.resample(sums, numbers, draws=600, seed=3)
    assert means[5] == pytest.approx(counts[5] @ sums / 7)
    assert np.isnan(stats.resample(0 * sums, 0 * numbers, draws=3, seed=0)).all()


def test_bootstrap_interval_has_the_known_width():
    """Independent tasks: the interval is about 1.96 standard errors on each side."""
    rng = np.random.default_rng(1)
    values = {(task, 0): float(value) for task, value in enumerate(rng.normal(5, 10, 400))}
    difference = stats.paired_difference(values, dict.fromkeys(values, 0.0))
    assert difference is not None
    half = 1.96 * stats.standard_error(list(values.values()))
    assert (difference.high - difference.low) / 2 == pytest.approx(half, rel=0.05)


def test_budget_and_ratio():
    steps, values, net = [0, 5, 10, 15], [1.0, 20.0, 30.0, 40.0], [0.0, 50.0, 100.0, 150.0]
    assert stats.within_budget(steps, values, net, 100.0) == (10, 30.0)
    assert stats.within_budget(steps, values, net, 99.9) == (5, 20.0)
    assert stats.within_budget(steps, values, net, -1.0) == (0, 1.0)  # step 0 always is
    with pytest.raises(DataError, match="step 0"):
        stats.within_budget([5], [1.0], [10.0], 1.0)
    assert stats.time_ratio(3.0, 2.0) == 1.5
    with pytest.raises(DataError, match="cost/net_s"):
        stats.time_ratio(1.0, 0.0)


def test_ranks_share_the_better_place():
    assert stats.ranks([3.0, 5.0, 5.0, 1.0]) == [3, 1, 1, 4]
    assert stats.ranks([3.0, 5.0], descending=False) == [1, 2]


@pytest.mark.shared
@pytest.mark.skipif(not GOLDEN.exists(), reason="golden values are not here")
def test_golden_protocol():
    data = np.load(GOLDEN)
    steps = data["protocol/in/steps"]
    for name in ("grpo", "method", "fallen", "dead"):
        values = data[f"protocol/in/{name}"]
        want = {key: data[f"protocol/out/{key}/{name}"].item() for key in ("auc", "drop", "fell", "longest_low")}
        low = stats.low_runs(steps, values, ALFWORLD_FLOOR)
        collapses = [run for run in low if run.collapsed]
        assert stats.auc(steps, values) == pytest.approx(want["auc"], rel=1e-12)
        assert stats.peak_to_final(values) == pytest.approx(want["drop"], rel=1e-12)
        assert stats.fell(values) == want["fell"]
        assert max([run.length for run in low], default=0) == want["longest_low"]
        assert bool(collapses) == data[f"protocol/out/collapsed/{name}"].item()
        recovered = bool(collapses) and all(run.recovered for run in collapses)
        assert recovered == data[f"protocol/out/recovered/{name}"].item()
    net = {name: np.concatenate([[0.0], np.cumsum(data[f"protocol/in/net_{name}"])]) for name in ("grpo", "method")}
    step, score = stats.within_budget(steps, data["protocol/in/method"], net["method"][steps], net["grpo"][-1])
    assert step == data["protocol/out/budget/step"].item()
    assert score == pytest.approx(data["protocol/out/budget/score"].item(), rel=1e-12)
    ratio = stats.time_ratio(net["method"][-1], net["grpo"][-1])
    assert ratio == pytest.approx(data["protocol/out/budget/time_ratio"].item(), rel=1e-12)
