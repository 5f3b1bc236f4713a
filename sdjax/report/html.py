"""Builds the report: one HTML file without any network access, enforced by its own content security policy.

All text from runs (configuration, model output, observations) is either auto-escaped by jinja2 or travels as compressed
JSON that the page inserts with ``textContent``.
"""

import base64
import gzip
import json
import math
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
from plotly.offline import get_plotlyjs

from sdjax.report import figures, summary, transcripts
from sdjax.report.load import load_runs
from sdjax.report.records import EXCLUDED_PHASES, NET_PHASES, Run

_TEMPLATES = Path(__file__).parent / "templates"


def build_report(runs: Sequence[Path | str], out: Path | str) -> Path:
    """Writes the report over run directories to ``out`` and returns its path.

    Args:
      runs: run directories, complete or partial; missing parts are shown as "not run".
      out: the HTML file to write (replaced atomically).

    Raises:
      RunDirError: no directory was given, or one is not a run directory.
    """
    out = Path(out)
    loaded = load_runs(runs)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"num": _number, "sortkey": _sort_key, "seconds": _duration}
    text = environment.get_template("report.html.j2").render(_context(loaded, out.parent))
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(out)
    return out


def _context(runs: Sequence[Run], out_folder: Path) -> dict[str, Any]:
    styles = figures.run_styles(runs)
    groups = list(summary.settings(runs).values())
    episodes, transcript_warnings = transcripts.collect(runs)
    finals, curves, budgets = summary.final_rows(runs), summary.curve_rows(runs), summary.budget_rows(runs)
    curve_figures = [figures.validation_curves(number, group, styles) for number, group in enumerate(groups)]
    health = [figures.health_figures(number, group, styles) for number, group in enumerate(groups)]
    ledger = figures.ledger_bars(runs)
    drawn = [figure for figure in curve_figures if figure.rows] + [figure for one in health for figure in one]
    same, different = summary.split_facts([summary.facts(run) for run in runs])
    same_config, different_config = summary.split_facts([summary.flatten(run.config) for run in runs])
    return {
        "title": _title(groups),
        "runs": runs,
        "several_settings": len(groups) > 1,
        "warnings": _warnings(runs, transcript_warnings),
        "verdicts": summary.verdicts(finals, budgets),
        "styles": styles,
        "curve_figures": curve_figures,
        "finals": finals,
        "finals_csv": _finals_csv(finals),
        "curves": curves,
        "curves_csv": _curves_csv(curves),
        "budgets": budgets,
        "budgets_csv": _budgets_csv(budgets),
        "ledger": ledger,
        "ledger_rows": _ledger_rows(runs),
        "net_phases": NET_PHASES,
        "phase_colours": figures.PHASE_COLOURS,
        "other_phase_colour": figures.OTHER_PHASE_COLOUR,
        "health": list(zip(groups, health, strict=True)),
        "facts_same": same,
        "facts_different": different,
        "config_same": same_config,
        "config_different": different_config,
        "anchors": {run: f"run-{number}" for number, run in enumerate(runs, start=1)},
        "links": {run: _link(run.path, out_folder) for run in runs},
        "transcripts": episodes,
        "css": _asset("style.css"),
        "scripts": [_asset("report.js"), _asset("viewer.js")],
        "plotly": pack(get_plotlyjs()),
        "figure_data": pack(script_json({f.id: {"spec": f.spec, "axes": f.axes} for f in [*drawn, *_some(ledger)]})),
        "transcript_data": pack(script_json(episodes)),
        "palette": script_json(figures.PALETTE),
    }


def pack(text: str) -> str:
    """Text as base64 of gzip, without a time stamp so that equal input gives equal bytes."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def script_json(value: Any) -> markupsafe.Markup:
    """JSON that is safe inside a script element, with NaN as null."""
    text = json.dumps(_finite(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return markupsafe.Markup(text)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _title(groups: Sequence[Sequence[Run]]) -> str:
    methods = list(dict.fromkeys(run.method_name for group in groups for run in group))
    settings = [group[0].setting_name for group in groups]
    what = ", ".join(methods[:-1]) + f" and {methods[-1]}" if len(methods) > 1 else methods[0]
    return f"{what} on {settings[0]}" if len(settings) == 1 else f"{what} in {len(settings)} settings"


def _warnings(runs: Sequence[Run], more: Sequence[str]) -> list[tuple[str, str]]:
    """(where, what) pairs in the order of their weight: comparisons first."""
    found = [("comparison", text) for text in summary.comparison_warnings(runs)]
    for run in runs:
        where = f"{run.setting_name} · {run.label}"
        if run.state == "failed":
            said = " ".join(str(run.failure[key]) for key in ("message", "fix") if run.failure.get(key))
            found.append((where, f"the run failed ({run.failure.get('boundary', 'unknown boundary')}). {said}"))
        found += [(where, text) for text in run.warnings]
    return found + [("transcripts", text) for text in more]


def _ledger_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
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
                "net_hours": net * summary.ledger_devices(run) / 3600 if seconds else math.nan,
                "per_step": net / run.steps_done if run.steps_done and seconds else math.nan,
                "extra": sum(extra.values()) if seconds else math.nan,
                "extra_names": ", ".join(extra) or ", ".join(EXCLUDED_PHASES[2:]),
            }
        )
    return rows


def _finals_csv(rows: Sequence[summary.FinalRow]) -> str:
    columns = ("setting", "run", "rollout_seeds", "episodes", "failed", "mean", "sample_sd", "clustered_se")
    columns += ("difference", "difference_low", "difference_high", "rank", "note")
    table = []
    for row in rows:
        diff = row.difference
        interval = (diff.mean, diff.low, diff.high) if diff else (None, None, None)
        counts = (row.seeds, row.episodes, row.failed, row.mean, row.sd, row.se)
        table.append((row.run.setting_name, row.run.label, *counts, *interval, row.rank, row.note))
    return figures.csv_uri(columns, table)


def _curves_csv(rows: Sequence[summary.CurveRow]) -> str:
    columns = ("setting", "run", "validations", "auc", "peak", "peak_step", "last", "last_step", "peak_to_final")
    columns += ("floor_mean", "floor_95", "floor_999", "verdict", "rank", "note")
    table = []
    for row in rows:
        floor = (row.floor.mean, row.floor.q95, row.floor.q999) if row.floor else (None, None, None)
        curve = (row.validations, row.auc, row.peak, row.peak_step, row.last, row.last_step, row.drop)
        table.append((row.run.setting_name, row.run.label, *curve, *floor, row.verdict, row.rank, row.note))
    return figures.csv_uri(columns, table)


def _budgets_csv(rows: Sequence[summary.BudgetRow]) -> str:
    columns = ("setting", "run", "budget_s", "step", "score", "grpo_score", "time_ratio", "time_ratio_step", "note")
    table = [
        (r.run.setting_name, r.run.label, r.budget_s, r.step, r.score, r.baseline_score, r.ratio, r.ratio_step, r.note)
        for r in rows
    ]
    return figures.csv_uri(columns, table)


def _link(path: Path, folder: Path) -> str:
    """Relative link from the report to a run directory."""
    return urllib.parse.quote(os.path.relpath(path.resolve(), folder.resolve()).replace(os.sep, "/"))


def _asset(name: str) -> markupsafe.Markup:
    return markupsafe.Markup((_TEMPLATES / name).read_text(encoding="utf-8"))


def _some(figure: figures.Figure | None) -> list[figures.Figure]:
    return [figure] if figure else []


def _number(value: float | None, digits: int = 1, sign: bool = False) -> str:
    """A number for a table cell; an en dash where there is none."""
    if value is None or math.isnan(value):
        return "–"
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    return text.replace("-", "−")


def _sort_key(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else repr(float(value))


def _duration(value: float | None) -> str:
    """Seconds in a unit that reads well."""
    if value is None or math.isnan(value):
        return "–"
    if value < 600:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if value < 3 * 3600 else f"{value / 3600:.2f} h"
