"""Rows and CSV texts of the page's tables, from the rows of `summary` and `study`."""

import math
from collections.abc import Sequence
from typing import Any

from sdjax.report import figures, published, study, summary
from sdjax.report.records import EXCLUDED_PHASES, NET_PHASES, Run


def warnings(runs: Sequence[Run], cells: study.Study, more: Sequence[str]) -> list[tuple[str, str]]:
    """(where, what) pairs in the order of their weight: comparisons first; equal texts of several runs are one."""
    found: dict[str, list[str]] = {}
    for setting, text in cells.refused.items():
        reason = f"{study.setting_name(setting)} takes part in no aggregate: {text}."
        found.setdefault(reason, []).append("comparison")
    for text in summary.comparison_warnings(runs):
        found.setdefault(text, []).append("comparison")
    for run in runs:
        where = f"{run.setting_name} · {run.label}"
        if run.state == "failed":
            said = " ".join(str(run.failure[key]) for key in ("message", "fix") if run.failure.get(key))
            text = f"the run failed ({run.failure.get('boundary', 'unknown boundary')}). {said}"
            found.setdefault(text, []).append(where)
        for text in dict.fromkeys(run.warnings):
            found.setdefault(text, []).append(where)
    for text in more:
        found.setdefault(text, []).append("transcripts")
    return [(wheres[0] if len(wheres) == 1 else _several(wheres, len(runs)), text) for text, wheres in found.items()]


def _several(wheres: Sequence[str], runs: int) -> str:
    if len(wheres) == runs:
        return f"all {runs} runs"
    return ", ".join(wheres[:3]) + (f" and {len(wheres) - 3} more" if len(wheres) > 3 else "")


def ledger_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Per run: seconds by phase, net, per update, device-hours, and what is neither net nor validation nor saving."""
    rows = []
    for run in runs:
        seconds = summary.ledger_seconds(run)
        extra = {name: value for name, value in seconds.items() if name not in (*NET_PHASES, "validation", "save")}
        net = summary.net_of(seconds)
        rows.append(
            {
                "run": run,
                "seconds": seconds,
                "net": net if seconds else math.nan,
                "net_hours": net * run.devices / 3600 if seconds else math.nan,
                "per_step": net / run.steps_done if run.steps_done and seconds else math.nan,
                "extra": sum(extra.values()) if seconds else math.nan,
                "extra_names": ", ".join(extra) or ", ".join(EXCLUDED_PHASES[2:]),
            }
        )
    return rows


def finals_csv(rows: Sequence[summary.FinalRow]) -> str:
    columns = ("setting", "run", "rollout_seeds", "episodes", "failed", "mean", "sample_sd", "clustered_se")
    columns += ("difference", "difference_low", "difference_high", "rank", "note")
    table = []
    for row in rows:
        diff = row.difference
        interval = (diff.mean, diff.low, diff.high) if diff else (None, None, None)
        counts = (row.seeds, row.episodes, row.failed, row.mean, row.sd, row.se)
        table.append((row.run.setting_name, row.run.label, *counts, *interval, row.rank, row.note))
    return figures.csv_text(columns, table)


def curves_csv(rows: Sequence[summary.CurveRow]) -> str:
    columns = ("setting", "run", "validations", "auc", "peak", "peak_step", "last", "last_step", "peak_to_final")
    columns += ("floor_mean", "floor_95", "floor_999", "verdict", "rank", "note")
    table = []
    for row in rows:
        floor = (row.floor.mean, row.floor.q95, row.floor.q999) if row.floor else (None, None, None)
        curve = (row.validations, row.auc, row.peak, row.peak_step, row.last, row.last_step, row.drop)
        table.append((row.run.setting_name, row.run.label, *curve, *floor, row.verdict, row.rank, row.note))
    return figures.csv_text(columns, table)


def budgets_csv(rows: Sequence[summary.BudgetRow]) -> str:
    columns = ("setting", "run", "horizon_step", "score_at_horizon", "auc_to_horizon", "budget_s", "step", "score")
    columns += ("grpo_score", "time_ratio", "time_ratio_step", "note")
    table = []
    for row in rows:
        reached = (row.horizon, row.at_horizon, row.auc, row.budget_s, row.step, row.score)
        against = (row.baseline_score, row.ratio, row.ratio_step, row.note)
        table.append((row.run.setting_name, row.run.label, *reached, *against))
    return figures.csv_text(columns, table)


def ledger_csv(runs: Sequence[Run]) -> str:
    phases = (*NET_PHASES, *EXCLUDED_PHASES)
    rows = [
        (
            row["run"].setting_name,
            row["run"].label,
            *(row["seconds"].get(p) for p in phases),
            row["net"],
            row["net_hours"],
        )
        for row in ledger_rows(runs)
    ]
    return figures.csv_text(("setting", "run", *(f"{p}_s" for p in phases), "net_s", "net_device_hours"), rows)


def methods_csv(rows: Sequence[study.MethodRow]) -> str:
    columns = ("method", "settings", "of", "final_mean", "final_rank", "iqm", "iqm_low", "iqm_high", "improvement")
    columns += ("improvement_low", "improvement_high", "auc_mean", "auc_rank", "peak_to_final_mean", "drop_rank")
    columns += ("time_ratio_mean", "time_ratio_settings")
    table = []
    for row in rows:
        estimates = [
            value
            for estimate in (row.iqm, row.improvement)
            for value in ((estimate.value, estimate.low, estimate.high) if estimate else (None,) * 3)
        ]
        final = (study.method_name(row.method), row.covered, row.of, row.final, row.final_rank)
        curve = (row.auc, row.auc_rank, row.drop, row.drop_rank, row.ratio, row.ratio_settings)
        table.append((*final, *estimates, *curve))
    return figures.csv_text(columns, table)


def wins_csv(records: Sequence[study.Record]) -> str:
    rows = [
        (study.method_name(record.method), study.setting_name(setting), points, outcome, beyond)
        for record in records
        for setting, (points, outcome, beyond) in record.outcomes.items()
    ]
    return figures.csv_text(("method", "setting", "difference_points", "outcome", "beyond_interval"), rows)


def decoding_csv(rows: Sequence[summary.DecodingRow]) -> str:
    columns = ("setting", "run", "step", "first", "first_score", "second", "second_score", "gap", "gap_low", "gap_high")
    table = []
    for row in rows:
        gap = (row.gap.mean, row.gap.low, row.gap.high) if row.gap else (None, None, None)
        scores = (row.first, row.first_score, row.second, row.second_score)
        table.append((row.run.setting_name, row.run.label, row.step, *scores, *gap))
    return figures.csv_text(columns, table)


def published_csv(rows: Sequence[published.Row]) -> str:
    table = [(row.quantity, row.unit, row.published, row.ours, row.note, row.source) for row in rows]
    return figures.csv_text(("quantity", "unit", "published", "this_study", "over", "source"), table)


def provenance_csv(runs: Sequence[Run]) -> str:
    """Long form: one line per run and fact."""
    rows = [
        (run.setting_name, run.label, key, value)
        for run in runs
        for key, value in (
            summary.facts(run) | {f"config.{k}": v for k, v in summary.flatten(run.config).items()}
        ).items()
    ]
    return figures.csv_text(("setting", "run", "key", "value"), rows)


def best_cells(cells: study.Study) -> set[tuple[str, tuple[str, str]]]:
    """(method, setting) of the highest final mean of each setting whose panels agree, ties included."""
    best = set()
    for setting in cells.usable:
        means = {m: round(cells.cell(m, setting).mean, 2) for m in cells.methods if cells.cell(m, setting).scored}
        if len(means) > 1:
            best |= {(method, setting) for method, mean in means.items() if mean == max(means.values())}
    return best


def missing_cells(cells: study.Study) -> list[str]:
    """Cells of the grid without validations, without the final evaluation that others have, or cut short."""
    any_final = any(not math.isnan(cell.mean) for cell in cells.cells.values())
    found = []
    for setting in cells.settings:
        for method in cells.methods:
            cell = cells.cell(method, setting)
            name = f"{study.method_name(method)} on {study.setting_name(setting)}"
            if not any(run.validations for run in cell.runs):
                found.append(f"{name}: not run")
            elif any_final and not any(run.final for run in cell.runs):
                found.append(f"{name}: no final evaluation")
            elif cell.partial:
                found.append(f"{name}: {cell.partial}")
    return found
