"""Formulas of the evaluation protocol: curves, noise floors, final scores and cost.

Everything is a pure function of arrays. Scores V are in percent unless stated otherwise, steps are completed updates,
times are net seconds. Formulas marked [our] reconstruct statistics whose exact definition the study (arXiv 2610.19789)
does not publish.
"""

import dataclasses
import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from sdjax.errors import DataError

Vector = Sequence[float] | np.ndarray

FELL_POINTS = 20.0  # the study's threshold for "fell"
LOW_SHARE = 0.25  # a validation is low at or below this share of the running peak
LOW_PEAK_POINTS = 10.0  # a running peak below this is too small to have fallen from
LOW_LENGTH = 3  # consecutive low validations that make a collapse
FEWEST_TASKS = 10  # below it a bootstrap over tasks is far too narrow [our]
RECOVERED_SHARE = 0.75  # share of the earlier peak that counts as recovered


def auc(steps: Vector, values: Vector) -> float:
    """Mean height of a validation curve: ``trapezoid(V, s) / (s_last - s_first)``, in the unit of V [our].

    With validations at 0, 5, ..., 100 this is the study's area under the curve divided by 100.

    Raises:
      DataError: fewer than two validations, or steps that do not increase.
    """
    steps_, values_ = _curve(steps, values)
    if len(steps_) < 2:
        raise DataError("the area under one validation is not defined.", "validate at two steps at least.")
    return float(np.trapezoid(values_, steps_) / (steps_[-1] - steps_[0]))


def peak_to_final(values: Vector) -> float:
    """``max_s V(s) - V(S)`` with S the last *validation* (not the final evaluation), in points [our]."""
    values_ = np.asarray(values, float)
    return float(values_.max() - values_[-1])


def fell(values: Vector, threshold: float = FELL_POINTS) -> bool:
    """True if the curve ends at least ``threshold`` points below its peak."""
    return peak_to_final(values) >= threshold


@dataclasses.dataclass(frozen=True)
class LowRun:
    """A stretch of consecutive low validations.

    Attributes:
      start, end: first and last low step.
      length: number of low validations.
      peak: running peak before the stretch, percent.
      depth: peak minus the lowest score inside the stretch, points.
      recovered: a later validation reached 75 % of that peak.
    """

    start: int
    end: int
    length: int
    peak: float
    depth: float
    recovered: bool

    @property
    def collapsed(self) -> bool:
        return self.length >= LOW_LENGTH


def low_mask(values: Vector, floor: float) -> np.ndarray:
    """``[S]`` bool: V(s) <= 0.25 P(s), P(s) >= 10 points and P(s) - V(s) > floor, P(s) the running peak up to s."""
    values_ = np.asarray(values, float)
    peaks = np.maximum.accumulate(values_)
    return (values_ <= LOW_SHARE * peaks) & (peaks >= LOW_PEAK_POINTS) & (peaks - values_ > floor)


def low_runs(steps: Vector, values: Vector, floor: float) -> list[LowRun]:
    """All stretches of low validations, shortest included; ``LowRun.collapsed`` says which count as a collapse.

    Args:
      steps, values: ``[S]`` validation steps and scores in percent.
      floor: the 99.9 % noise floor of the panel in points, see `noise_floor`.
    """
    steps_, values_ = _curve(steps, values)
    low = np.concatenate([[False], low_mask(values_, floor), [False]]).astype(int)
    starts, stops = np.flatnonzero(np.diff(low) == 1), np.flatnonzero(np.diff(low) == -1)
    runs = []
    for start, stop in zip(starts, stops, strict=True):
        peak = float(values_[:start].max())  # a first validation is its own peak and never low, so start >= 1
        runs.append(
            LowRun(
                start=int(steps_[start]),
                end=int(steps_[stop - 1]),
                length=int(stop - start),
                peak=peak,
                depth=float(peak - values_[start:stop].min()),
                recovered=bool((values_[stop:] >= RECOVERED_SHARE * peak).any()),
            )
        )
    return runs


@dataclasses.dataclass(frozen=True)
class NoiseFloor:
    """Peak-to-final drop of a curve that is truly flat, in points: mean, 95 % and 99.9 % quantile."""

    mean: float
    q95: float
    q999: float


@functools.lru_cache(maxsize=4096)
def noise_floor(tasks: int, rate: float, validations: int = 21, draws: int = 200_000) -> NoiseFloor:
    """Drop that evaluation noise alone produces on a panel of ``tasks`` tasks with true success ``rate`` (0..1).

    ``x ~ Binomial(tasks, rate) / tasks``, independent per validation; drop = ``100 (max_s x_s - x_S)``. Real panels are
    *less* noisy where tasks and greedy decoding are fixed, and a score in [0, 1] never varies more than a success of
    the same mean, so this is an upper bound. Seeded: equal arguments give equal values.

    Raises:
      DataError: an empty panel, no validation, or a rate outside 0..1.
    """
    if tasks < 1 or validations < 1 or not 0 <= rate <= 1:
        raise DataError(
            f"no noise floor for {tasks} tasks, {validations} validations and rate {rate}.",
            "give at least one task and one validation, and a rate between 0 and 1.",
        )
    scores = np.random.default_rng(0).binomial(tasks, rate, (draws, validations))
    drops = 100.0 * (scores.max(axis=1) - scores[:, -1]) / tasks
    q95, q999 = np.quantile(drops, [0.95, 0.999])
    return NoiseFloor(float(drops.mean()), float(q95), float(q999))


def flat_rate(values: Vector) -> float:
    """Rate (0..1) of the flat curve that a drop is tested against: midway between peak and last validation [our].

    Rounded to 0.05, so that the runs of a study share their simulations; the floor moves by less than 0.3 points.
    """
    values_ = np.asarray(values, float)
    middle = float(np.clip((values_.max() + values_[-1]) / 200.0, 0.0, 1.0))
    return float(np.clip(round(20 * middle) / 20, 0.05, 0.95)) if 0 < middle < 1 else middle


def sample_sd(values: Vector) -> float:
    """Sample standard deviation (ddof 1); NaN for fewer than two values."""
    values_ = np.asarray(values, float)
    return float(values_.std(ddof=1)) if len(values_) > 1 else math.nan


def standard_error(values: Vector) -> float:
    """``sample_sd / sqrt(n)`` of independent values; NaN for fewer than two."""
    return sample_sd(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def clustered_standard_error(values: Vector, clusters: Sequence[Hashable]) -> float:
    """Standard error of the mean when episodes of one task are not independent (Miller, arXiv 2411.00640).

    ``sqrt( C / (C - 1) * sum_c ( sum_{j in c} (x_j - mean) )^2 ) / n`` over C clusters and n values. With one value per
    cluster it equals ``sample_sd / sqrt(n)``. NaN for fewer than two clusters.

    Raises:
      DataError: values and clusters of unequal length.
    """
    values_ = np.asarray(values, float)
    if len(values_) != len(clusters):
        raise DataError(f"{len(values_)} values for {len(clusters)} clusters.", "give one cluster per value.")
    index = {key: number for number, key in enumerate(dict.fromkeys(clusters))}
    if len(index) < 2:
        return math.nan
    ids = np.array([index[key] for key in clusters])
    sums = np.bincount(ids, weights=values_ - values_.mean(), minlength=len(index))
    return float(math.sqrt(len(index) / (len(index) - 1) * np.sum(sums**2)) / len(values_))


@dataclasses.dataclass(frozen=True)
class Difference:
    """Paired difference (method minus baseline) with a 95 % bootstrap interval, in points, over ``tasks`` tasks."""

    mean: float
    low: float
    high: float
    tasks: int

    @property
    def includes_zero(self) -> bool:
        return self.low <= 0.0 <= self.high

    @property
    def conclusive(self) -> bool:
        """Zero is outside the interval, and there are enough tasks for a bootstrap interval to mean something."""
        return not self.includes_zero and self.tasks >= FEWEST_TASKS


@functools.lru_cache(maxsize=8)
def task_counts(tasks: int, draws: int, seed: int) -> np.ndarray:
    """``[draws, tasks]``: how often each task is in each bootstrap draw of ``tasks`` tasks with replacement.

    Seeded, and shared by all that is compared on one panel, so that differences between methods stay paired.
    """
    rng = np.random.default_rng(seed)
    counts = np.empty((draws, tasks), np.uint16)
    for start in range(0, draws, 500):  # bounded memory on panels of thousands of tasks
        rows = min(500, draws - start)
        flat = rng.integers(0, tasks, (rows, tasks)) + tasks * np.arange(rows)[:, None]
        counts[start : start + rows] = np.bincount(flat.ravel(), minlength=rows * tasks).reshape(rows, tasks)
    return counts


def resample(sums: np.ndarray, numbers: np.ndarray, *, draws: int, seed: int) -> np.ndarray:
    """Means of resampled tasks: ``sum_t c_t sums_t / sum_t c_t numbers_t`` for each draw's counts c.

    Args:
      sums, numbers: ``[T, C]``, per task and column the sum of its values and how many there are.

    Returns:
      ``[draws, C]``, NaN where a draw has no value.
    """
    counts = task_counts(len(sums), draws, seed)
    out = np.empty((draws, sums.shape[1]))
    with np.errstate(invalid="ignore"):
        for start in range(0, draws, 500):
            part = counts[start : start + 500].astype(float)
            out[start : start + 500] = (part @ sums) / (part @ numbers)
    return out


def interval(means: np.ndarray) -> tuple[float, float]:
    """The 2.5 % and 97.5 % quantiles of bootstrap draws."""
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def paired_difference(
    values: Mapping[tuple[Any, Any], float],
    baseline: Mapping[tuple[Any, Any], float],
    *,
    draws: int | None = None,
    seed: int = 0,
) -> Difference | None:
    """Difference over the (task, rollout seed) pairs that both sides have, bootstrapped over *tasks*.

    Rollout seeds of one task stay together: resampling seeds alone would ignore the choice of tasks. With d_t the sum
    and n_t the number of paired differences of task t, each draw picks T tasks with replacement and takes
    ``sum d / sum n``. Returns None for fewer than two common tasks. By default 10,000 draws, 2,000 over more than 1,000
    tasks, whose interval is narrow.
    """
    pairs: dict[Hashable, list[float]] = {}
    for key in sorted(values.keys() & baseline.keys(), key=str):
        pairs.setdefault(key[0], []).append(values[key] - baseline[key])
    if len(pairs) < 2:
        return None
    draws = draws or (10_000 if len(pairs) <= 1_000 else 2_000)
    sums = np.array([[sum(items)] for items in pairs.values()])
    numbers = np.array([[float(len(items))] for items in pairs.values()])
    low, high = interval(resample(sums, numbers, draws=draws, seed=seed))
    return Difference(float(sums.sum() / numbers.sum()), low, high, len(pairs))


def iqm(values: Vector) -> float:
    """Interquartile mean: the mean without the lowest and the highest quarter, ``floor(n / 4)`` values on each side.

    As in rliable (Agarwal et al., arXiv 2108.13264), over all (setting, rollout seed) scores at once.
    """
    return float(iqm_rows(np.asarray(values, float).reshape(1, -1))[0])


def iqm_rows(values: np.ndarray) -> np.ndarray:
    """`iqm` of each row of ``[D, n]``."""
    ordered = np.sort(values, axis=1)
    cut = values.shape[1] // 4
    return ordered[:, cut : values.shape[1] - cut].mean(axis=1)


def probability_of_improvement(values: Vector, baseline: Vector) -> float:
    """``mean over pairs of 1[x > y] + 0.5 * 1[x = y]`` of one setting: scores of one side against those of the other.

    As in rliable, where it is averaged over settings. 0.5 means that neither side is better.
    """
    return float(improvement_rows(np.asarray(values, float)[None], np.asarray(baseline, float)[None])[0])


def improvement_rows(values: np.ndarray, baseline: np.ndarray) -> np.ndarray:
    """`probability_of_improvement` of each row of ``[D, n]`` and ``[D, m]``."""
    x, y = values[:, :, None], baseline[:, None, :]
    return ((x > y) + 0.5 * (x == y)).mean(axis=(1, 2))


def within_budget(steps: Vector, values: Vector, net_seconds: Vector, budget: float) -> tuple[int, float]:
    """The latest validation whose cumulative net time is within ``budget`` seconds (step 0 always is).

    Args:
      steps, values, net_seconds: ``[S]`` validation steps, scores, and cumulative net training time at each.

    Returns:
      (step, score).

    Raises:
      DataError: no validation lies within the budget, which means that step 0 was not validated.
    """
    steps_, values_ = _curve(steps, values)
    inside = [i for i, net in enumerate(net_seconds) if net <= budget or steps_[i] == 0]
    if not inside:
        raise DataError("no validation within the time budget.", "validate at step 0 too.")
    return int(steps_[inside[-1]]), float(values_[inside[-1]])


def time_ratio(net: float, baseline_net: float) -> float:
    """Net training time of a method divided by that of the baseline at the same step."""
    if not baseline_net > 0:
        raise DataError(f"the baseline's net time is {baseline_net} s.", "check its cost/net_s metric.")
    return net / baseline_net


def ranks(values: Vector, *, descending: bool = True) -> list[int]:
    """Competition ranks from 1; equal values share the better rank."""
    sign = 1 if descending else -1
    return [1 + sum(sign * other > sign * value for other in values) for value in values]


def _curve(steps: Vector, values: Vector) -> tuple[np.ndarray, np.ndarray]:
    steps_, values_ = np.asarray(steps, float), np.asarray(values, float)
    if steps_.shape != values_.shape or steps_.ndim != 1 or not len(steps_) or not (np.diff(steps_) > 0).all():
        raise DataError(
            f"a curve with steps of shape {steps_.shape} and scores of shape {values_.shape}.",
            "give one score per step, in increasing order of steps.",
        )
    return steps_, values_
