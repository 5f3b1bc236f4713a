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

from sdjax.report import figures, published, study, study_figures, summary, tables, transcripts
from sdjax.report.load import load_runs
from sdjax.report.records import NET_PHASES, Run

_TEMPLATES = Path(__file__).parent / "templates"
_SIDE_BY_SIDE = 8  # runs whose facts still fit next to each other


def build_report(runs: Sequence[Path | str], out: Path | str) -> Path:
    """Writes the report over run directories to ``out`` and returns its path.

    Args:
      runs: run directories, complete or partial, and metrics logs of other trainers (see `sdjax.report.find_runs` and
        `sdjax.report.logs`); missing parts are shown as "not run".
      out: the HTML file to write (replaced atomically).

    Raises:
      RunDirError: nothing was given, or a path is neither a run directory nor a file.
      DataError: a file is no metrics log.
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
    environment.filters |= {"num": _number, "sortkey": _sort_key, "seconds": _duration, "plainnum": _plain_number}
    text = environment.get_template("report.html.j2").render(_context(loaded, out.parent))
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(out)
    return out


def _context(runs: Sequence[Run], out_folder: Path) -> dict[str, Any]:
    styles = figures.run_styles(runs)
    finals, curves, budgets = summary.final_rows(runs), summary.curve_rows(runs), summary.budget_rows(runs)
    cells = study.build(finals, curves, budgets)
    by_setting = summary.settings(runs)
    groups = [by_setting[setting] for setting in cells.settings]
    methods, records = study.method_rows(cells), study.records(cells)
    published_rows, published_source = published.compare(cells, methods, records, curves, budgets)
    episodes, transcript_warnings = transcripts.collect(runs)
    page = {
        "title": _title(cells),
        "runs": runs,
        "groups": groups,
        "several_settings": len(groups) > 1,
        "any_final": any(run.final for run in runs),
        "many": len(runs) > figures.MANY_RUNS,
        "warnings": tables.warnings(runs, cells, transcript_warnings),
        "verdicts": summary.verdicts(finals, budgets),
        "styles": styles,
        "looks": study_figures.method_styles(styles, cells),
        "finals": finals,
        "curves": curves,
        "budgets": budgets,
        "study": cells,
        "methods": methods,
        "records": records,
        "best": tables.best_cells(cells),
        "costlier": study.costlier(cells),
        "decoding": summary.decoding_rows(runs),
        "published": published_rows,
        "published_source": published_source,
        "ledger_rows": tables.ledger_rows(runs),
        "hours": summary.device_hours(runs),
        "booked": sum(bool(summary.ledger_seconds(run)) for run in runs),
        "net_phases": NET_PHASES,
        "missing": tables.missing_cells(cells),
        "anchors": {run: f"run-{number}" for number, run in enumerate(runs, start=1)},
        "links": {run: _link(run.path, out_folder) for run in runs},
        "transcripts": episodes,
        "method_name": study.method_name,
        "setting_name": study.setting_name,
    }
    drawn = _figures(page)
    return page | drawn | _provenance(runs) | _embedded(page, [one for one in _flat(drawn.values()) if one.rows])


def _figures(page: Mapping[str, Any]) -> dict[str, Any]:
    groups, styles, looks = page["groups"], page["styles"], page["looks"]
    return {
        "curve_figures": [figures.validation_curves(number, group, styles) for number, group in enumerate(groups)],
        "health": [figures.health_figures(number, group, styles) for number, group in enumerate(groups)],
        "ledger": figures.ledger_bars(page["runs"]),
        "rank_figure": study_figures.rank_changes(page["methods"], looks),
        "drop_figure": study_figures.drop_histogram(page["curves"]),
        "cost_figures": study_figures.cost_figures(page["study"], looks),
    }


def _provenance(runs: Sequence[Run]) -> dict[str, Any]:
    facts = [summary.facts(run) for run in runs]
    same, different = summary.split_facts(facts)
    same_config, different_config = summary.split_facts([summary.flatten(run.config) for run in runs])
    return {
        "side_by_side": len(runs) <= _SIDE_BY_SIDE,
        "facts": facts,
        "facts_same": same,
        "facts_different": different,
        "config_same": same_config,
        "config_different": different_config,
    }


def _embedded(page: Mapping[str, Any], drawn: Sequence[figures.Figure]) -> dict[str, Any]:
    """Styles, scripts and packed data."""
    csv = {figure.id: figure.csv for figure in drawn} | {
        "final": tables.finals_csv(page["finals"]),
        "steadiness": tables.curves_csv(page["curves"]),
        "budget": tables.budgets_csv(page["budgets"]),
        "ledger": tables.ledger_csv(page["runs"]),
        "methods": tables.methods_csv(page["methods"]),
        "wins": tables.wins_csv(page["records"]),
        "decoding": tables.decoding_csv(page["decoding"]),
        "published": tables.published_csv(page["published"]),
        "provenance": tables.provenance_csv(page["runs"]),
    }
    return {
        "css": _asset("style.css"),
        "scripts": [_asset(name) for name in ("report.js", "figures.js", "viewer.js")],
        "plotly": pack(get_plotlyjs()),
        "figure_data": pack(script_json({f.id: {"spec": f.spec, "axes": f.axes} for f in drawn})),
        "csv_data": pack(script_json(csv)),
        "transcript_data": pack(script_json(page["transcripts"])),
        "palette": script_json(figures.PALETTE),
    }


def _flat(value: Any) -> list[figures.Figure]:
    if isinstance(value, figures.Figure):
        return [value]
    return [] if value is None else [figure for one in value for figure in _flat(one)]


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


def _title(cells: study.Study) -> str:
    methods = [study.method_name(method) for method in cells.methods]
    settings = [study.setting_name(setting) for setting in cells.settings]
    what = ", ".join(methods[:-1]) + f" and {methods[-1]}" if len(methods) > 1 else methods[0]
    return f"{what} on {settings[0]}" if len(settings) == 1 else f"{what} in {len(settings)} settings"


def _link(path: Path, folder: Path) -> str:
    """Relative link from the report to a run directory."""
    return urllib.parse.quote(os.path.relpath(path.resolve(), folder.resolve()).replace(os.sep, "/"))


def _asset(name: str) -> markupsafe.Markup:
    return markupsafe.Markup((_TEMPLATES / name).read_text(encoding="utf-8"))


def _number(value: float | None, digits: int = 1, sign: bool = False) -> str:
    """A number for a table cell; an en dash where there is none."""
    if value is None or math.isnan(value):
        return "–"
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    return text.replace("-", "−")


def _plain_number(value: float) -> str:
    """A number with as many decimals as it needs, at most two."""
    return _number(value, 2).removesuffix("0").removesuffix(".0")


def _sort_key(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else repr(float(value))


def _duration(value: float | None) -> str:
    """Seconds in a unit that reads well."""
    if value is None or math.isnan(value):
        return "–"
    if value < 600:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if value < 3 * 3600 else f"{value / 3600:.2f} h"
