"""The published numbers of the study (arXiv 2610.19789) beside those of the runs at hand.

The numbers are data: ``experiments/reference/study_2610_19789.json``. Each names a measure; this module computes the
same measure from the runs, over the settings that they have, and says how many those are.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdjax.report import stats, summary
from sdjax.report.records import NET_PHASES
from sdjax.report.study import Cell, MethodRow, Record, Study, costlier, method_name

REFERENCE = Path(__file__).parents[2] / "experiments" / "reference" / "study_2610_19789.json"


@dataclasses.dataclass(frozen=True)
class Row:
    """One quantity: published, and ours (NaN if it was not run). ``note``: over what ours was computed."""

    quantity: str
    unit: str
    published: float
    ours: float
    note: str
    source: str


@dataclasses.dataclass(frozen=True)
class _Ours:
    """What the measures are computed from; methods and records by method."""

    study: Study
    methods: Mapping[str, MethodRow]
    records: Mapping[str, Record]
    curves: Sequence[summary.CurveRow]
    budgets: Sequence[summary.BudgetRow]

    def cells(self, fact: Mapping[str, Any]) -> list[Cell]:
        """Cells of the fact's method in its environment, of its size if it has one."""
        return [
            cell
            for (method, setting), cell in self.study.cells.items()
            if method == fact["method"] and setting[0] == fact["env"] and _is_size(setting[1], fact.get("size", ""))
        ]


def reference() -> dict[str, Any] | None:
    """The reference file, None where the package is installed without its experiments."""
    return json.loads(REFERENCE.read_text(encoding="utf-8")) if REFERENCE.exists() else None


def compare(
    study: Study,
    methods: Sequence[MethodRow],
    records: Sequence[Record],
    curves: Sequence[summary.CurveRow],
    budgets: Sequence[summary.BudgetRow],
) -> tuple[list[Row], str]:
    """One row per published number, and a sentence on the source ("" with no rows if the reference is not there)."""
    table = reference()
    if table is None:
        return [], ""
    by_method = {row.method: row for row in methods}, {record.method: record for record in records}
    ours = _Ours(study, *by_method, curves, budgets)
    rows = []
    for fact in table["facts"]:
        value, note = _MEASURES[fact["measure"]](ours, fact)
        rows.append(Row(fact["quantity"], fact["unit"], float(fact["value"]), value, note, fact["source"]))
    return rows, f"{table['study']} ({table['source']}). {table['note']}"


def _is_size(model: str, size: str) -> bool:
    return not size or re.search(rf"(?<![\d.]){re.escape(size)}(?![a-z0-9])", model, re.IGNORECASE) is not None


Result = tuple[float, str]
_NOTHING: Result = (math.nan, "not run")


def _settings(count: int) -> str:
    return f"{count} setting{'s' if count != 1 else ''}"


def _of_method(key: str, covered: str) -> Callable[[_Ours, Mapping[str, Any]], Result]:
    def measure(ours: _Ours, fact: Mapping[str, Any]) -> Result:
        row = ours.methods.get(fact["method"])
        if row is None or not getattr(row, covered):
            return _NOTHING
        value = getattr(row, key)
        if value is None:
            return math.nan, "no rank over unequal sets of settings"
        return float(value), _settings(getattr(row, covered))

    return measure


def _outcomes(kind: str) -> Callable[[_Ours, Mapping[str, Any]], Result]:
    def measure(ours: _Ours, fact: Mapping[str, Any]) -> Result:
        record = ours.records.get(fact["method"])
        return (float(record.count(kind)), _settings(len(record.outcomes))) if record else _NOTHING

    return measure


def _cells_mean(value: Callable[[_Ours, Cell, Mapping[str, Any]], float]) -> Callable[..., Result]:
    def measure(ours: _Ours, fact: Mapping[str, Any]) -> Result:
        found = [value(ours, cell, fact) for cell in ours.cells(fact)]
        found = [one for one in found if not math.isnan(one)]
        return (sum(found) / len(found), _settings(len(found))) if found else _NOTHING

    return measure


def _highest(_: _Ours, cell: Cell, fact: Mapping[str, Any]) -> float:
    """The highest validation at the fact's step or span of steps, mean over the runs of the cell."""
    first, last = fact.get("steps") or (fact["step"], fact["step"])
    per_run = [[v.value for v in run.validations if first <= v.step <= last] for run in cell.runs]
    highest = [max(values) for values in per_run if values]
    return sum(highest) / len(highest) if highest else math.nan


def _budget(ours: _Ours, cell: Cell, _: Mapping[str, Any]) -> float:
    last = {row.run: row.score for row in ours.budgets}  # of several horizons the last
    scores = [last.get(run, math.nan) for run in cell.runs]
    return sum(scores) / len(scores)


def _hours(kind: str) -> Callable[[_Ours, Mapping[str, Any]], Result]:
    def measure(ours: _Ours, _: Mapping[str, Any]) -> Result:
        totals = summary.device_hours([row.run for row in ours.curves])
        booked = [row.run for row in ours.curves if summary.ledger_seconds(row.run)]
        if not booked:
            return _NOTHING
        value = sum(totals[name] for name in ("training", "validation", "saving")) if kind == "total" else totals[kind]
        return value, f"{len(booked)} runs"

    return measure


def _per(phases: Sequence[str], count: Callable[[Any], int]) -> Callable[..., Result]:
    """Seconds of some phases in all runs, divided by a count over all runs."""

    def measure(ours: _Ours, _: Mapping[str, Any]) -> Result:
        runs = [row.run for row in ours.curves if summary.ledger_seconds(row.run)]
        number = sum(count(run) for run in runs)
        seconds = sum(summary.ledger_seconds(run).get(phase, 0.0) for run in runs for phase in phases)
        return (seconds / number, f"{len(runs)} runs") if number else _NOTHING

    return measure


def _counted(value: Callable[[_Ours], float]) -> Callable[..., Result]:
    def measure(ours: _Ours, _: Mapping[str, Any]) -> Result:
        return float(value(ours)), ""

    return measure


def _above(ours: _Ours, _: Mapping[str, Any]) -> Result:
    base = ours.methods.get(summary.BASELINE)
    others = [row for row in ours.methods.values() if base and row is not base and row.covered == base.covered > 0]
    if base is None or not others:
        return _NOTHING
    names = [method_name(row.method) for row in others if row.final > base.final]
    return float(len(names)), f"{', '.join(names) or 'none'}; of {len(others)} with GRPO's {_settings(base.covered)}"


def _slow(key: str) -> Callable[..., Result]:
    def measure(ours: _Ours, _: Mapping[str, Any]) -> Result:
        counts = costlier(ours.study)
        return (float(getattr(counts, key)), f"of {counts.pairs} pairs") if counts.pairs else _NOTHING

    return measure


_MEASURES: dict[str, Callable[[_Ours, Mapping[str, Any]], Result]] = {
    "runs": _counted(lambda ours: sum(row.validations > 0 for row in ours.curves)),
    "validations_per_run": _counted(lambda ours: max((row.validations for row in ours.curves), default=0)),
    "validations": _counted(lambda ours: sum(row.validations for row in ours.curves)),
    "final_mean": _of_method("final", "covered"),
    "final_rank": _of_method("final_rank", "covered"),
    "auc_rank": _of_method("auc_rank", "curves"),
    "time_ratio": _of_method("ratio", "ratio_settings"),
    "methods_above": _above,
    "wins": _outcomes("win"),
    "losses": _outcomes("loss"),
    "ties": _outcomes("tie"),
    "final_score": _cells_mean(lambda ours, cell, fact: cell.mean),
    "validation": _cells_mean(_highest),
    "validation_max": _cells_mean(_highest),
    "last_mean": _cells_mean(lambda ours, cell, fact: cell.last),
    "budget_mean": _cells_mean(_budget),
    "fell": _counted(lambda ours: sum(row.drop >= stats.FELL_POINTS for row in ours.curves)),
    "pairs": _slow("pairs"),
    "costlier": _slow("costlier"),
    "costlier_lower": _slow("lower"),
    "costlier_tied": _slow("tied"),
    "hours_training": _hours("training"),
    "hours_validation": _hours("validation"),
    "hours_saving": _hours("saving"),
    "hours_total": _hours("total"),
    "net_step": _per(NET_PHASES, lambda run: run.steps_done),
    "validation_seconds": _per(("validation",), lambda run: len(run.validations)),
    "save_seconds": _per(("save",), lambda run: 1),
}
