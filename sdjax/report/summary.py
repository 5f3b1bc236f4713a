"""Turns loaded runs into the rows of the report's tables.

A comparison is refused, with its reason, where it would mix panels or unequal sets of steps; the runs are still shown.
"""

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sdjax.report import stats
from sdjax.report.records import EXCLUDED_PHASES, LOST, NET_PHASES, Evaluation, Run

BASELINE = "grpo"
STUDY_STEPS = 100  # updates of a run of the study


@dataclasses.dataclass(frozen=True)
class FinalRow:
    """Final evaluation of one run; scores in percent or points. ``note`` says why numbers are missing."""

    run: Run
    seeds: int
    episodes: int
    failed: int
    mean: float = math.nan
    sd: float = math.nan
    se: float = math.nan
    difference: stats.Difference | None = None
    rank: int | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class CurveRow:
    """Steadiness of one validation curve; scores in percent or points."""

    run: Run
    validations: int
    auc: float = math.nan
    peak: float = math.nan
    peak_step: int = 0
    last: float = math.nan
    last_step: int = 0
    drop: float = math.nan
    floor: stats.NoiseFloor | None = None
    low: tuple[stats.LowRun, ...] = ()
    rank: int | None = None
    note: str = ""

    @property
    def collapses(self) -> list[stats.LowRun]:
        return [low for low in self.low if low.collapsed]

    @property
    def verdict(self) -> str:
        """Sentence on the drop, never stronger than the noise floor allows."""
        if self.floor is None:
            return ""
        parts = []
        for low in self.collapses:
            parts.append(f"collapsed, steps {low.start}–{low.end}, {'' if low.recovered else 'not '}recovered")
        if self.drop >= stats.FELL_POINTS:
            parts.append(f"fell {self.drop:.1f} points")
        if self.drop > self.floor.q999:
            parts.append("drop beyond the 99.9 % floor")
        elif self.drop > self.floor.q95:
            parts.append("drop beyond the 95 % floor")
        else:
            parts.append("drop within noise")
        return "; ".join(parts)


@dataclasses.dataclass(frozen=True)
class BudgetRow:
    """One run at one horizon of its baseline.

    Attributes:
      horizon: the step of the baseline that gives the budget.
      budget_s: net seconds of the baseline up to there.
      at_horizon, auc: score at the horizon, and AUC up to it (of the last validation before it, if the run is shorter).
      step, score: the latest validation within the budget.
      baseline_score: the baseline's score at the horizon.
      ratio, ratio_step: net time of the run / net time of the baseline, both after this many updates.
    """

    run: Run
    baseline: Run | None = None
    horizon: int | None = None
    budget_s: float = math.nan
    at_horizon: float = math.nan
    auc: float = math.nan
    step: int | None = None
    score: float = math.nan
    baseline_score: float = math.nan
    ratio: float = math.nan
    ratio_step: int | None = None
    note: str = ""


def settings(runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    """Runs by (environment, model), in order of appearance."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault(run.setting, []).append(run)
    return groups


def baseline_of(run: Run, runs: Sequence[Run]) -> Run | None:
    """The `grpo` run of the same setting, the one with the same training seed if there are several."""
    candidates = [other for other in runs if other.setting == run.setting and other.method == BASELINE]
    if run in candidates:
        return run
    same_seed = [other for other in candidates if other.seed == run.seed]
    return (same_seed or candidates or [None])[0]


def final_rows(runs: Sequence[Run]) -> list[FinalRow]:
    """Mean, sample SD over rollout seeds, clustered standard error and paired difference to the baseline."""
    rows = [_final_row(run, baseline_of(run, runs)) for run in runs]
    return _rank(rows, "mean", lambda run: (run.final_panels, tuple(run.final_seeds), run.steps_done))


def _final_row(run: Run, baseline: Run | None) -> FinalRow:
    if not run.final:
        return FinalRow(run, 0, 0, 0, note="not run")
    counts = (len(run.final_seeds), len(run.final), sum(episode.failed for episode in run.final))
    if len(run.final_panels) > 1:
        return FinalRow(run, *counts, note=f"refused: mixes panels {short_hashes(run.final_panels)}")
    good = [episode for episode in run.final if not episode.failed]
    if not good:
        return FinalRow(run, *counts, note="every episode failed")
    by_seed: dict[int, list[float]] = {}
    for episode in good:
        by_seed.setdefault(episode.rollout_seed, []).append(episode.value)
    per_seed = [sum(values) / len(values) for values in by_seed.values()]
    row = FinalRow(
        run,
        *counts,
        mean=sum(per_seed) / len(per_seed),
        sd=stats.sample_sd(per_seed),
        se=stats.clustered_standard_error([one.value for one in good], [one.task for one in good]),
    )
    if baseline is None or baseline is run or not baseline.final:
        return row
    if baseline.final_panels != run.final_panels:
        note = (
            f"no difference: panel {short_hashes(run.final_panels)}, baseline has {short_hashes(baseline.final_panels)}"
        )
        return dataclasses.replace(row, note=note)
    return dataclasses.replace(row, difference=stats.paired_difference(pairs(run), pairs(baseline)))


def pairs(run: Run) -> dict[tuple[str, int], float]:
    return {(one.task, one.rollout_seed): one.value for one in run.final if not one.failed}


def curve_rows(runs: Sequence[Run]) -> list[CurveRow]:
    """`curve_row` of every run, ranked by AUC inside a setting."""
    rows = [curve_row(run) for run in runs]
    return _rank(rows, "auc", lambda run: (run.validation_panels, tuple(run.validation_steps)))


def curve_row(run: Run) -> CurveRow:
    """AUC, peak-to-final with its noise floor, and low stretches of one validation curve."""
    if not run.validations:
        return CurveRow(run, 0, note="not run")
    if len(run.validation_panels) > 1:
        return CurveRow(run, len(run.validations), note=f"refused: mixes panels {short_hashes(run.validation_panels)}")
    steps, values = run.validation_steps, run.validation_values
    if len(steps) < 2:
        return CurveRow(
            run, 1, peak=values[0], peak_step=steps[0], last=values[0], last_step=steps[0], note="one point"
        )
    tasks = max(validation.episodes for validation in run.validations)
    floor = stats.noise_floor(tasks, stats.flat_rate(values), len(values)) if tasks else None
    peak = max(range(len(values)), key=values.__getitem__)
    return CurveRow(
        run,
        len(steps),
        auc=stats.auc(steps, values),
        peak=values[peak],
        peak_step=steps[peak],
        last=values[-1],
        last_step=steps[-1],
        drop=stats.peak_to_final(values),
        floor=floor,
        low=tuple(stats.low_runs(steps, values, floor.q999)) if floor else (),
        note="" if floor else "panel size unknown: no noise floor",
    )


def horizons(baseline: Run | None) -> list[int]:
    """Steps of the baseline that give a budget: the study's 100 updates if it went beyond, and its last validation."""
    if baseline is None or not baseline.validations:
        return []
    steps = baseline.validation_steps
    return sorted({step for step in (STUDY_STEPS, steps[-1]) if step in steps and step <= steps[-1]})


def budget_rows(runs: Sequence[Run]) -> list[BudgetRow]:
    """Every run at every horizon of its baseline, horizon by horizon in each setting. Empty without a baseline."""
    rows = []
    for group in settings(runs).values():
        baselines = {run: baseline_of(run, runs) for run in group}
        steps = sorted({step for baseline in baselines.values() for step in horizons(baseline)})
        for horizon in steps or [None]:
            rows += [_budget_row(run, baselines[run], horizon) for run in group]
    return rows if any(run.method == BASELINE for run in runs) else []


def _budget_row(run: Run, baseline: Run | None, horizon: int | None) -> BudgetRow:
    if baseline is None:
        return BudgetRow(run, note="no GRPO run in this setting")
    for one in (run, baseline):
        if not one.validations or not one.steps_done:
            return BudgetRow(run, baseline, horizon, note=f"{one.label}: not run")
        if any(math.isnan(net) for net in one.validation_net):
            return BudgetRow(run, baseline, horizon, note=f"{one.label}: a validation without net time")
        if one.validation_net != sorted(one.validation_net):
            return BudgetRow(run, baseline, horizon, note=f"{one.label}: its net time runs backwards")
    if run.validation_panels != baseline.validation_panels or len(run.validation_panels) > 1:
        panels = f"panel {short_hashes(run.validation_panels)}, GRPO has {short_hashes(baseline.validation_panels)}"
        return BudgetRow(run, baseline, horizon, note=f"refused: {panels}")
    if horizon not in baseline.validation_steps:
        return BudgetRow(run, baseline, horizon, note=f"its GRPO run has no validation at step {horizon}")
    last = baseline.validations[baseline.validation_steps.index(horizon)]
    before = [validation for validation in run.validations if validation.step <= last.step]
    inside = [v for v in run.validations if v.step == 0 or v.net_s <= last.net_s]
    if not before or not inside:
        return BudgetRow(run, baseline, horizon, last.net_s, note="no validation within the budget")
    step, score = stats.within_budget(run.validation_steps, run.validation_values, run.validation_net, last.net_s)
    common = min(run.steps_done, last.step)
    curve = [v.step for v in before], [v.value for v in before]
    return BudgetRow(
        run,
        baseline,
        horizon,
        last.net_s,
        before[-1].value if before[-1].step == last.step else math.nan,
        stats.auc(*curve) if len(before) > 1 else math.nan,
        step,
        score,
        last.value,
        stats.time_ratio(run.net_seconds(common), baseline.net_seconds(common)) if common else math.nan,
        common,
        "" if common == last.step else f"{run.steps_done} steps, budget of {last.step}",
    )


def ledger_seconds(run: Run) -> dict[str, float]:
    """Seconds per category (net phases, excluded phases, lost to restarts); from metrics if there is no ledger."""
    totals: dict[str, float] = {}
    for phase in run.ledger:
        totals[phase.booked] = totals.get(phase.booked, 0.0) + phase.seconds
    if not run.ledger:
        columns = {phase: run.metrics.get(f"time/{phase}_s", {}) for phase in (*NET_PHASES, *EXCLUDED_PHASES)}
        totals = {phase: sum(values.values()) for phase, values in columns.items() if values}
    known = (*NET_PHASES, *EXCLUDED_PHASES, LOST)
    return {name: totals[name] for name in [*known, *sorted(totals.keys() - set(known))] if name in totals}


def device_hours(runs: Sequence[Run]) -> dict[str, float]:
    """Device-hours over runs: "training" (net), "validation", "saving", "other" (start-up, compilation), "lost"."""
    totals: dict[str, float] = dict.fromkeys(("training", "validation", "saving", "other", "lost"), 0.0)
    names: dict[str, str] = dict.fromkeys(NET_PHASES, "training")
    names |= {"validation": "validation", "save": "saving", LOST: "lost"}
    for run in runs:
        for phase, seconds in ledger_seconds(run).items():
            totals[names.get(phase, "other")] += seconds * run.devices / 3600
    return totals


def net_of(seconds: Mapping[str, float]) -> float:
    """Net training seconds: the sum of the net phases alone."""
    return sum(value for phase, value in seconds.items() if phase in NET_PHASES)


@dataclasses.dataclass(frozen=True)
class DecodingRow:
    """Two evaluations of one checkpoint that differ in decoding, and whether the gap is more than noise."""

    run: Run
    step: int
    first: str
    first_score: float
    second: str
    second_score: float
    gap: stats.Difference | None
    note: str = ""

    @property
    def flagged(self) -> bool:
        return self.gap is not None and self.gap.conclusive


def decoding_rows(runs: Sequence[Run]) -> list[DecodingRow]:
    """Greedy against sampled scores of the last validated checkpoint, paired by task with a bootstrap over tasks.

    Compares every two evaluations of it at different temperatures: the usual validation, a further one, and the final
    evaluation if it was made after as many updates. A gap beyond its 95 % interval is flagged: a score that holds
    under one decoding only. Flagged rows come first, the largest gap at the top.
    """
    rows = []
    for run in runs:
        looks = list(run.looks)
        if run.final and run.validations and run.steps_done == run.validations[-1].step:
            temperature = run.sampling.get("final", {}).get("temperature")
            looks.append(
                Evaluation("final evaluation", run.steps_done, temperature, _task_means(run), run.final_panels)
            )
        for first, second in itertools.combinations(looks, 2):
            if first.temperature is None or second.temperature is None or first.temperature == second.temperature:
                continue
            if second.temperature < first.temperature:
                first, second = second, first
            rows.append(_decoding_row(run, first, second))
    return sorted(rows, key=lambda row: (not row.flagged, -abs(row.gap.mean) if row.gap else 0.0))


def _decoding_row(run: Run, cold: Evaluation, warm: Evaluation) -> DecodingRow:
    names = [one.name + ("" if one.name.startswith("greedy") else f", T {one.temperature:g}") for one in (cold, warm)]
    means = [sum(one.values.values()) / len(one.values) for one in (cold, warm)]
    gap, note = None, ""
    if cold.panels == warm.panels and len(cold.panels) == 1:
        sides = [{(task, 0): value for task, value in one.values.items()} for one in (warm, cold)]
        gap = stats.paired_difference(*sides)
    else:
        note = "refused: the panels differ"
    return DecodingRow(run, cold.step, names[0], means[0], names[1], means[1], gap, note)


def _task_means(run: Run) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for episode in run.final:
        if not episode.failed:
            values.setdefault(episode.task, []).append(episode.value)
    return {task: sum(found) / len(found) for task, found in values.items()}


def comparison_warnings(runs: Sequence[Run]) -> list[str]:
    """What makes runs of one setting unfit for comparison: different panels, unequal validation steps."""
    found = []
    for group in settings(runs).values():
        by_kind = {
            "validation": {run.label: run.validation_panels for run in group if run.validations},
            "final evaluation": {run.label: run.final_panels for run in group if run.final},
        }
        for name, panels in by_kind.items():
            if len(set(panels.values())) > 1:
                listed = "; ".join(f"{label}: {short_hashes(value)}" for label, value in panels.items())
                found.append(f"{group[0].setting_name}: {name} panels differ ({listed}). They are not compared.")
        steps = {run.label: run.validation_steps for run in group if run.validations}
        devices = {run.label: run.devices for run in group if run.steps_done}
        if len(set(devices.values())) > 1:
            listed = "; ".join(f"{label}: {count}" for label, count in devices.items())
            found.append(f"{group[0].setting_name}: devices differ ({listed}); time ratios compare wall time.")
        if len(set(map(tuple, steps.values()))) > 1:
            listed = "; ".join(f"{label}: {len(value)} up to step {value[-1]}" for label, value in steps.items())
            found.append(f"{group[0].setting_name}: validation steps differ ({listed}). No ranks are given.")
        missing = [run.label for run in group if not run.validations or not (run.final or run.state == "log")]
        if missing:
            found.append(f"{group[0].setting_name}: not run, in part or in whole: {', '.join(missing)}.")
    return found


def verdicts(finals: Sequence[FinalRow], budgets: Sequence[BudgetRow]) -> list[str]:
    """One sentence per compared run, claiming no more than interval and ledger say."""
    last = {row.run: row for row in budgets}  # of several horizons the last one
    sentences = []
    for row in finals:
        cost = _cost_words(last.get(row.run))
        start = f"{row.run.setting_name}: {row.run.label}"
        if row.difference is not None:
            diff = row.difference
            mean, low, high = (signed(value) for value in (diff.mean, diff.low, diff.high))
            reading = difference_words(diff, "these two training runs")
            sentences.append(
                f"{start} minus GRPO is {mean} points in the final evaluation "
                f"(95 % interval {low} to {high}, {diff.tasks} tasks): {reading}{'. ' + cost if cost else ''}."
            )
        elif cost and not row.run.final and row.run.method != BASELINE:
            sentences.append(f"{start}, without a final evaluation. {cost}, each a single validation.")
    return sentences


def difference_words(diff: stats.Difference, scope: str) -> str:
    """What a difference with an interval may be called."""
    if not diff.conclusive:
        return "no difference shown" if diff.includes_zero else f"too few tasks ({diff.tasks}) to show a difference"
    return f"{'higher' if diff.mean > 0 else 'lower'} for {scope}"


def signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


def _cost_words(budget: BudgetRow | None) -> str:
    if budget is None or math.isnan(budget.ratio) or budget.step is None:
        return ""
    return (
        f"Net time {budget.ratio:.2f} × GRPO's at step {budget.ratio_step}; within GRPO's net time it "
        f"had {budget.score:.1f} % (step {budget.step}) against {budget.baseline_score:.1f} %"
    )


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Dotted keys of a nested JSON object with values as text."""
    if isinstance(value, Mapping) and value:
        return {k: v for key in value for k, v in flatten(value[key], f"{prefix}.{key}" if prefix else key).items()}
    return {prefix: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}


def facts(run: Run) -> dict[str, str]:
    """Provenance of one run: its own record, and what can be derived from its files."""
    derived = {
        "state": run.state,
        "source": run.source,
        "path": str(run.path.name),
        "config sha256": _config_hash(run),
        "training seed": "unknown" if run.seed is None else str(run.seed),
        "updates": str(run.steps_done),
        "starts": str(run.attempts),
        "devices": str(run.devices),
        "validation panel": short_hashes(run.validation_panels, 16),
        "final panel": short_hashes(run.final_panels, 16),
    }
    for name, parameters in run.sampling.items():
        derived[f"{name} sampling"] = ", ".join(f"{k} {v}" for k, v in parameters.items()) or "not recorded"
    if run.state == "failed":
        derived["failure"] = " · ".join(str(run.failure.get(key, "")) for key in ("boundary", "message", "fix"))
    return derived | flatten(run.provenance) if run.provenance else derived | {"provenance.json": "missing"}


def _config_hash(run: Run) -> str:
    text = json.dumps(run.config, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16] if run.config else "no config"


def split_facts(tables: Sequence[Mapping[str, str]]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Splits facts of several runs into equal ones and different ones (one value per run, "–" if absent)."""
    keys = list(dict.fromkeys(key for table in tables for key in table))
    columns = {key: [table.get(key, "–") for table in tables] for key in keys}
    same = {key: values[0] for key, values in columns.items() if len(set(values)) == 1}
    return same, {key: values for key, values in columns.items() if key not in same}


def _rank(rows: list, key: str, signature) -> list:
    """Adds ranks inside each setting where every run has a value and all have one panel and one set of steps."""
    ranked = {}
    for group in settings([row.run for row in rows]).values():
        members = [row for row in rows if row.run.setting == group[0].setting]
        comparable = len({signature(row.run) for row in members}) == 1
        if len(members) > 1 and comparable and not any(math.isnan(getattr(row, key)) for row in members):
            positions = stats.ranks([round(getattr(row, key), 2) for row in members])
            ranked |= {id(row.run): position for row, position in zip(members, positions, strict=True)}
    return [dataclasses.replace(row, rank=ranked.get(id(row.run))) for row in rows]


def short_hashes(panels: frozenset[str], length: int = 12) -> str:
    return ", ".join(sorted(panel[:length] for panel in panels)) or "none"
