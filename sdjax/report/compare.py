"""Two runs side by side in the terminal, with one sentence that claims no more than the data says."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sdjax.errors import DataError
from sdjax.report import stats, summary
from sdjax.report.load import load_path
from sdjax.report.records import Run


@dataclasses.dataclass(frozen=True)
class Comparison:
    """B against A.

    Attributes:
      difference: B minus A in points with its 95 % interval, None if nothing can be compared.
      basis: what the difference rests on, or why there is none.
      ratio: net time of B / net time of A after the last common update, NaN if unknown.
      ratio_step: that update.
      verdict: one sentence.
    """

    difference: stats.Difference | None
    basis: str
    ratio: float
    ratio_step: int
    verdict: str


def compare(a: Path | str, b: Path | str, console: Console) -> Comparison:
    """Prints two runs side by side and returns what was concluded.

    Args:
      a, b: run directories or metrics logs of other trainers (with one run each).

    Raises:
      RunDirError, DataError: a path cannot be read, holds several runs, or the runs are of different environments.
    """
    first, second = _only_run(a), _only_run(b)
    if first.env != second.env:
        raise DataError(
            f"A is a run on {first.env}, B on {second.env}.",
            "compare two runs of one environment; their scores differ.",
        )
    difference, basis = _difference(first, second)
    ratio, step = _ratio(first, second)
    verdict = _verdict(first, second, difference, basis, ratio, step)
    console.print(_table(first, second))
    if difference is not None:
        low, high = summary.signed(difference.low), summary.signed(difference.high)
        text = f"B minus A: {summary.signed(difference.mean)} points, 95 % interval {low} to {high} ({basis})"
        console.print(Text(text))
    if not math.isnan(ratio):
        console.print(Text(f"net time: B / A = {ratio:.2f} after {step} updates"))
    for warning in dict.fromkeys((*first.warnings, *second.warnings)):
        names = " and ".join(name for name, run in (("A", first), ("B", second)) if warning in run.warnings)
        console.print(Text(f"warning, {names}: {warning}", style="yellow"))
    console.print(Text(verdict, style="bold"))
    return Comparison(difference, basis, ratio, step, verdict)


def _only_run(path: Path | str) -> Run:
    runs = load_path(path)
    if len(runs) != 1:
        names = ", ".join(run.name for run in runs[:5])
        raise DataError(f"{path} holds {len(runs)} runs ({names}).", "give a file with the columns of one run.")
    return runs[0]


def _difference(first: Run, second: Run) -> tuple[stats.Difference | None, str]:
    """The best comparison that both runs allow: final evaluation, else the last common validation."""
    if first.final and second.final:
        if first.final_panels != second.final_panels or len(first.final_panels) > 1:
            panels = [summary.short_hashes(run.final_panels) for run in (first, second)]
            return None, f"the final panels differ (A {panels[0]}, B {panels[1]})"
        found = stats.paired_difference(summary.pairs(second), summary.pairs(first))
        if found is None:
            return None, "the final evaluations share fewer than two tasks"
        seeds = len(set(first.final_seeds) & set(second.final_seeds))
        return (
            found,
            f"final evaluation, paired over {found.tasks} tasks and {seeds} rollout seeds, bootstrap over tasks",
        )
    return _validation_difference(first, second)


def _validation_difference(first: Run, second: Run) -> tuple[stats.Difference | None, str]:
    common = set(first.validation_steps) & set(second.validation_steps)
    if not common:
        return None, "they have no final evaluation and no common validation step"
    step = max(common)
    sides = [next(v for v in run.validations if v.step == step) for run in (first, second)]
    if sides[0].panels != sides[1].panels or len(sides[0].panels) > 1:
        panels = [summary.short_hashes(frozenset(side.panels)) for side in sides]
        return None, f"the validation panels differ (A {panels[0]}, B {panels[1]})"
    looks = [next((e for e in run.looks if e.step == step and e.name == "validation"), None) for run in (first, second)]
    if looks[0] is not None and looks[1] is not None:
        values = [{(task, 0): value for task, value in look.values.items()} for look in looks if look is not None]
        found = stats.paired_difference(values[1], values[0])
        if found is not None:
            return found, f"one validation at step {step}, paired over {found.tasks} tasks, bootstrap over tasks"
    mean = sides[1].value - sides[0].value
    half = 1.96 * math.hypot(sides[0].se, sides[1].se)
    if math.isnan(half):
        return (
            None,
            f"the validations at step {step} differ by {summary.signed(mean)} points, but their noise is unknown",
        )
    found = stats.Difference(mean, mean - half, mean + half, sides[0].episodes)
    return found, f"one validation at step {step}, not paired, normal interval from {sides[0].episodes} tasks"


def _ratio(first: Run, second: Run) -> tuple[float, int]:
    step = min(first.steps_done, second.steps_done)
    net = [run.net_seconds(step) for run in (first, second)] if step else [math.nan, math.nan]
    if any(math.isnan(value) for value in net) or net[0] <= 0:
        return math.nan, step
    return stats.time_ratio(net[1], net[0]), step


def _verdict(first: Run, second: Run, difference: stats.Difference | None, basis: str, ratio: float, step: int) -> str:
    cost = "" if math.isnan(ratio) else f", at {ratio:.2f} times A's net time over {step} updates"
    if cost and first.devices != second.devices:
        cost += f" on {second.devices} against {first.devices} devices"
    if first.copy_key is not None and first.copy_key == second.copy_key:
        return "A and B are copies of one run: there is nothing to compare."
    if difference is None:
        return f"No verdict: {basis}{cost}."
    if not difference.conclusive:
        low, high = summary.signed(difference.low), summary.signed(difference.high)
        few = "" if difference.includes_zero else f", but over {difference.tasks} tasks only"
        text = f"No difference is shown: B minus A is between {low} and {high} points{few}"
    else:
        word = "higher" if difference.mean > 0 else "lower"
        smaller, larger = sorted((abs(difference.low), abs(difference.high)))
        text = f"B scored {word} than A, by {smaller:.1f} to {larger:.1f} points"
    limits = "for these two training runs"
    if first.steps_done != second.steps_done:
        limits += f" of unequal length ({first.steps_done} and {second.steps_done} updates)"
    return f"{text}{cost}, {limits}; one run each says nothing about other training seeds."


def _table(first: Run, second: Run) -> Table:
    names = dict.fromkeys((first.setting_name, second.setting_name))
    table = Table(title=Text(" and ".join(names)))
    table.add_column("")
    for name, run in (("A", first), ("B", second)):
        table.add_column(Text(f"{name}: {run.method_name}\n{run.name or run.path.name}"), justify="right")
    finals = {run: summary.final_rows([run])[0] for run in (first, second)}
    curves = {run: summary.curve_row(run) for run in (first, second)}
    lines: list[tuple[str, Callable[[Run], str]]] = [
        ("state", lambda run: run.state),
        ("updates", lambda run: str(run.steps_done)),
        ("final, % (± SD over seeds)", lambda run: _pm(finals[run].mean, finals[run].sd)),
        ("  clustered SE, points", lambda run: _number(finals[run].se)),
        ("  episodes, failed", lambda run: f"{finals[run].episodes}, {finals[run].failed}"),
        ("last validation, % (step)", lambda run: _at(curves[run].last, curves[run].last_step)),
        ("peak, % (step)", lambda run: _at(curves[run].peak, curves[run].peak_step)),
        ("AUC, %", lambda run: _number(curves[run].auc)),
        ("drop, points (95 % floor)", lambda run: _drop(curves[run])),
        ("net time, s", lambda run: _number(run.net_seconds(run.steps_done), 0)),
        ("  per update, s", lambda run: _number(run.net_seconds(run.steps_done) / max(run.steps_done, 1))),
        ("devices", lambda run: str(run.devices)),
    ]
    for label, value in lines:
        table.add_row(label, *(Text(value(run)) for run in (first, second)))
    return table


def _number(value: float, digits: int = 1) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def _pm(value: float, spread: float) -> str:
    return _number(value) + ("" if math.isnan(spread) else f" ± {spread:.1f}")


def _at(value: float, step: int) -> str:
    return "–" if math.isnan(value) else f"{value:.1f} ({step})"


def _drop(row: summary.CurveRow) -> str:
    if row.floor is None:
        return _number(row.drop)
    return f"{_number(row.drop)} ({row.floor.q95:.1f})"
