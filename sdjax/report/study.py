"""Methods against settings: cells, ranks, aggregates, wins and losses, cost, and time budgets of a whole study.

A setting is an (environment, model) pair. A cell is what one method reached in one setting: the mean over its training
runs there, which is one run in the study itself. Settings whose panels differ are left out of every aggregate, and no
rank is given over unequal sets of settings. A run that is shorter than others of its setting, or validated at other
steps, is shown but not aggregated.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from sdjax.report import stats, summary
from sdjax.report.records import ENV_NAMES, METHOD_NAMES, Run, method_order, setting_order

Setting = tuple[str, str]

DRAWS = 2_000  # of the aggregates' bootstrap; the paired differences use more


@dataclasses.dataclass(frozen=True)
class Cell:
    """One method in one setting. Scores in percent or points, NaN where nothing was measured.

    Attributes:
      runs: training runs, in the order of their labels.
      mean, sd: final evaluation, and its sample SD over rollout seeds (of the only run).
      auc, drop, last: of the validation curves.
      collapsed: a run of the cell collapsed.
      ratio: net time / net time of the baseline at the last common step.
      difference: paired final difference to the baseline's cell, None if there is none.
      note: why a number is missing.
      partial: how its runs fall short of the longest run of the setting; such a cell takes part in no aggregate.
    """

    method: str
    setting: Setting
    runs: tuple[Run, ...]
    mean: float = math.nan
    sd: float = math.nan
    episodes: int = 0
    failed: int = 0
    auc: float = math.nan
    drop: float = math.nan
    last: float = math.nan
    collapsed: bool = False
    ratio: float = math.nan
    difference: stats.Difference | None = None
    note: str = ""
    partial: str = ""

    @property
    def scored(self) -> bool:
        """It has a final mean that may be aggregated."""
        return not math.isnan(self.mean) and not self.partial

    @property
    def drawn(self) -> bool:
        """It has a curve that may be aggregated."""
        return not math.isnan(self.auc) and not self.partial


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number with the 95 % interval of a bootstrap over tasks inside each setting."""

    value: float
    low: float = math.nan
    high: float = math.nan


@dataclasses.dataclass(frozen=True)
class MethodRow:
    """One method over the settings it covers.

    Attributes:
      covered, of: settings with a value that may be aggregated, and how many there are.
      final, auc, drop: equal-weight means over them, with ranks (None over unequal sets).
      iqm, improvement: interquartile mean over (setting, rollout seed) scores; probability of improvement over GRPO.
      ratio: mean of the paired time ratios, over ``ratio_settings`` settings.
    """

    method: str
    covered: int
    of: int
    curves: int
    final: float = math.nan
    final_rank: int | None = None
    auc: float = math.nan
    auc_rank: int | None = None
    drop: float = math.nan
    drop_rank: int | None = None
    iqm: Estimate | None = None
    improvement: Estimate | None = None
    ratio: float = math.nan
    ratio_settings: int = 0


@dataclasses.dataclass(frozen=True)
class Record:
    """Wins, losses and ties of one method against GRPO.

    Attributes:
      outcomes: setting -> (difference in points, "win", "loss" or "tie", beyond the interval).
      mean: mean of the differences.
    """

    method: str
    outcomes: Mapping[Setting, tuple[float, str, bool]]
    mean: float

    def count(self, outcome: str, *, beyond: bool = False) -> int:
        return sum(kind == outcome and (sure or not beyond) for _, kind, sure in self.outcomes.values())

    @property
    def misleading(self) -> bool:
        """More wins than losses, yet a lower mean: counting wins hides large losses."""
        return self.count("win") > self.count("loss") and self.mean < 0


@dataclasses.dataclass(frozen=True)
class Study:
    """All cells. ``refused``: settings with unequal panels, and why; they take part in no aggregate."""

    methods: tuple[str, ...]
    settings: tuple[Setting, ...]
    cells: Mapping[tuple[str, Setting], Cell]
    refused: Mapping[Setting, str]

    @property
    def is_grid(self) -> bool:
        return len(self.settings) > 1 and len(self.methods) > 1

    @property
    def usable(self) -> list[Setting]:
        return [setting for setting in self.settings if setting not in self.refused]

    def cell(self, method: str, setting: Setting) -> Cell:
        return self.cells.get((method, setting)) or Cell(method, setting, (), note="not run")


def setting_name(setting: Setting) -> str:
    return f"{ENV_NAMES.get(setting[0], setting[0])} / {setting[1]}"


def method_name(method: str) -> str:
    return METHOD_NAMES.get(method, method)


def build(
    finals: Sequence[summary.FinalRow], curves: Sequence[summary.CurveRow], budgets: Sequence[summary.BudgetRow]
) -> Study:
    """Cells from the rows of the runs, methods in the order of `METHOD_NAMES` with the baseline first."""
    runs = [row.run for row in finals]
    methods = sorted(dict.fromkeys(run.method for run in runs), key=method_order)
    settings = tuple(sorted(dict.fromkeys(run.setting for run in runs), key=setting_order))
    final_of, curve_of = {row.run: row for row in finals}, {row.run: row for row in curves}
    budget_of = {row.run: row for row in budgets}  # of several horizons the last
    members: dict[tuple[str, Setting], list[Run]] = {}
    for run in runs:
        members.setdefault((run.method, run.setting), []).append(run)
    refused = {setting: text for setting in settings if (text := _unequal_panels(setting, members))}
    longest: dict[Setting, Run] = {}
    for run in runs:
        longest[run.setting] = max(longest.get(run.setting, run), run, key=lambda r: (r.steps_done, len(r.validations)))
    cells = {}
    for key, group in members.items():
        baseline = members.get((summary.BASELINE, key[1]), [])
        rows = [final_of[run] for run in group], [curve_of[run] for run in group]
        cell = _cell(group, *rows, [budget_of[run] for run in group if run in budget_of], baseline)
        cells[key] = dataclasses.replace(cell, partial=_shortfall(group, longest[key[1]]))
    return Study(tuple(methods), settings, cells, refused)


def _unequal_panels(setting: Setting, members: Mapping[tuple[str, Setting], Sequence[Run]]) -> str:
    found = []
    for kind, of in (("final", lambda r: r.final_panels), ("validation", lambda r: r.validation_panels)):
        panels = {run.label: of(run) for key, group in members.items() if key[1] == setting for run in group if of(run)}
        if len(set(panels.values())) > 1 or any(len(panel) > 1 for panel in panels.values()):
            listed = "; ".join(f"{label}: {summary.short_hashes(value)}" for label, value in panels.items())
            found.append(f"{kind} panels differ ({listed})")
    return "; ".join(found)


def _shortfall(runs: Sequence[Run], longest: Run) -> str:
    for run in runs:
        if run.steps_done < longest.steps_done:
            return f"{run.steps_done} of {longest.steps_done} updates"
        if run.validations and run.validation_steps != longest.validation_steps:
            return f"{len(run.validations)} validations, {longest.label} has {len(longest.validations)}"
    return ""


def _cell(
    runs: Sequence[Run],
    finals: Sequence[summary.FinalRow],
    curves: Sequence[summary.CurveRow],
    budgets: Sequence[summary.BudgetRow],
    baseline: Sequence[Run],
) -> Cell:
    notes = [row.note for row in (*finals, *curves) if row.note]
    difference = finals[0].difference
    if len(runs) > 1 or len(baseline) > 1:
        # Several training runs: one value per (task, rollout seed), the mean over the runs that have it.
        difference = None
        if baseline and runs[0].method != summary.BASELINE:
            difference = stats.paired_difference(_pooled(runs), _pooled(baseline))
    return Cell(
        method=runs[0].method,
        setting=runs[0].setting,
        runs=tuple(runs),
        mean=_mean([row.mean for row in finals]),
        sd=finals[0].sd if len(runs) == 1 else math.nan,
        episodes=sum(row.episodes for row in finals),
        failed=sum(row.failed for row in finals),
        auc=_mean([row.auc for row in curves]),
        drop=_mean([row.drop for row in curves]),
        last=_mean([row.last for row in curves]),
        collapsed=any(row.collapses for row in curves),
        ratio=_mean([row.ratio for row in budgets]) if budgets else math.nan,
        difference=difference,
        note=notes[0] if notes else "",
    )


def _pooled(runs: Sequence[Run]) -> dict[tuple[str, int], float]:
    values: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        for key, value in summary.pairs(run).items():
            values.setdefault(key, []).append(value)
    return {key: sum(found) / len(found) for key, found in values.items()}


def _mean(values: Sequence[float]) -> float:
    """Mean, NaN if one is missing: a mean over fewer runs than shown would mislead."""
    return sum(values) / len(values) if values else math.nan


def method_rows(study: Study) -> list[MethodRow]:
    """Aggregates of each method, ranked among the methods that cover every usable setting."""
    settings = study.usable
    draws = _Draws(study)
    rows = []
    for method in study.methods:
        cells = {setting: study.cell(method, setting) for setting in settings}
        final = {setting: cell.mean for setting, cell in cells.items() if cell.scored}
        curve = {setting: cell for setting, cell in cells.items() if cell.drawn}
        ratios = [cell.ratio for cell in cells.values() if not math.isnan(cell.ratio)]
        rows.append(
            MethodRow(
                method,
                covered=len(final),
                of=len(study.settings),
                curves=len(curve),
                final=_mean(list(final.values())),
                auc=_mean([cell.auc for cell in curve.values()]),
                drop=_mean([cell.drop for cell in curve.values()]),
                iqm=draws.iqm(method, list(final)),
                improvement=draws.improvement(method, list(final)),
                ratio=_mean(ratios),
                ratio_settings=len(ratios),
            )
        )
    return _ranked(rows, len(settings))


def _ranked(rows: Sequence[MethodRow], settings: int) -> list[MethodRow]:
    ranks: dict[str, dict[str, int]] = {}
    for name, covered, descending in (("final", "covered", True), ("auc", "curves", True), ("drop", "curves", False)):
        full = [row for row in rows if settings and getattr(row, covered) == settings]
        if len(full) > 1:
            values = [round(getattr(row, name), 2) for row in full]
            for row, rank in zip(full, stats.ranks(values, descending=descending), strict=True):
                ranks.setdefault(row.method, {})[f"{name}_rank"] = rank
    return [dataclasses.replace(row, **ranks.get(row.method, {})) for row in rows]


class _Draws:
    """Scores per rollout seed of every cell, and their bootstrap: tasks are drawn inside each setting, and all methods
    of a setting get the same tasks."""

    def __init__(self, study: Study):
        self._points: dict[tuple[str, Setting], np.ndarray] = {}
        self._draws: dict[tuple[str, Setting], np.ndarray] = {}
        for (method, setting), cell in study.cells.items():
            if setting in study.refused or not cell.scored:
                continue
            sums, numbers = _task_matrix(cell.runs)
            with np.errstate(invalid="ignore"):
                self._points[method, setting] = sums.sum(axis=0) / numbers.sum(axis=0)
            # One seed per setting: panels of equal size would otherwise draw alike in all settings.
            seed = study.settings.index(setting)
            self._draws[method, setting] = stats.resample(sums, numbers, draws=DRAWS, seed=seed)

    def iqm(self, method: str, settings: Sequence[Setting]) -> Estimate | None:
        if not settings:
            return None
        point = stats.iqm(np.concatenate([self._points[method, setting] for setting in settings]))
        draws = stats.iqm_rows(np.concatenate([self._draws[method, setting] for setting in settings], axis=1))
        return _estimate(point, draws)

    def improvement(self, method: str, settings: Sequence[Setting]) -> Estimate | None:
        """Mean over settings of the probability of improvement over the baseline."""
        keys = [((method, s), (summary.BASELINE, s)) for s in settings if (summary.BASELINE, s) in self._points]
        if method == summary.BASELINE or not keys:
            return None
        point = np.mean([stats.probability_of_improvement(self._points[a], self._points[b]) for a, b in keys])
        draws = np.mean([stats.improvement_rows(self._draws[a], self._draws[b]) for a, b in keys], axis=0)
        return _estimate(float(point), draws)


def _estimate(point: float, draws: np.ndarray) -> Estimate:
    low, high = stats.interval(draws) if np.isfinite(draws).all() else (math.nan, math.nan)
    return Estimate(point, low, high)


def _task_matrix(runs: Sequence[Run]) -> tuple[np.ndarray, np.ndarray]:
    """``[tasks, columns]`` sums and counts of the scored episodes, one column per (run, rollout seed)."""
    columns = {(number, seed): None for number, run in enumerate(runs) for seed in run.final_seeds}
    column = {key: index for index, key in enumerate(columns)}
    tasks = {task: index for index, task in enumerate(sorted({e.task for run in runs for e in run.final}))}
    sums, numbers = np.zeros((len(tasks), len(column))), np.zeros((len(tasks), len(column)))
    for number, run in enumerate(runs):
        for episode in run.final:
            if not episode.failed:
                sums[tasks[episode.task], column[number, episode.rollout_seed]] += episode.value
                numbers[tasks[episode.task], column[number, episode.rollout_seed]] += 1
    return sums, numbers


def records(study: Study) -> list[Record]:
    """Wins, losses and ties per method: a tie is equality of the final means after rounding to two decimals [our]."""
    found = []
    for method in study.methods:
        outcomes: dict[Setting, tuple[float, str, bool]] = {}
        for setting in study.usable:
            cell, base = study.cell(method, setting), study.cell(summary.BASELINE, setting)
            if method == summary.BASELINE or not cell.scored or not base.scored:
                continue
            points = round(round(cell.mean, 2) - round(base.mean, 2), 2)
            outcome = "tie" if points == 0 else "win" if points > 0 else "loss"
            beyond = cell.difference is not None and cell.difference.conclusive
            outcomes[setting] = (points, outcome, beyond)
        if outcomes:
            found.append(Record(method, outcomes, _mean([points for points, _, _ in outcomes.values()])))
    return found


@dataclasses.dataclass(frozen=True)
class Costlier:
    """Pairs of a method and a setting with a known time ratio; of the costlier ones, how the final score compares."""

    pairs: int
    costlier: int
    lower: int
    tied: int
    higher: int
    unscored: int


def costlier(study: Study) -> Costlier:
    """Counts the pairs that took more net time than GRPO, and of these the lower, tied and higher final scores."""
    outcomes = {record.method: record.outcomes for record in records(study)}
    pairs = [
        cell
        for cell in study.cells.values()
        if cell.method != summary.BASELINE and not math.isnan(cell.ratio) and cell.setting not in study.refused
    ]
    slow = [cell for cell in pairs if cell.ratio > 1]
    kinds = [outcomes.get(cell.method, {}).get(cell.setting, (0.0, "", False))[1] for cell in slow]
    counts = [kinds.count(kind) for kind in ("loss", "tie", "win", "")]
    return Costlier(len(pairs), len(slow), *counts)
