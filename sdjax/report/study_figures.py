"""Figures over all runs of a study: change of ranks, histogram of drops, cost against score."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sdjax.report import stats, study, summary
from sdjax.report.figures import Figure, layout, plain
from sdjax.report.records import ENV_NAMES
from sdjax.report.study import MethodRow, Study, method_name, setting_name

_BIN_POINTS = 5
_SIZES = {"circle": "●", "square": "■", "diamond": "◆", "triangle-up": "▲", "star": "★"}  # one symbol per model
_LEVELS = {  # how far a drop is from noise: name -> colour
    "within the 95 % floor": "#a9b1bd",
    "beyond the 95 % floor": "#8a6d00",
    "beyond the 99.9 % floor": "#b3123f",
    "panel size unknown": "#dde1e7",
}


def method_styles(styles: Mapping[str, dict[str, str]], data: Study) -> dict[str, dict[str, str]]:
    """The style of a method's first run, so that it looks alike in every figure."""
    labels = {}
    for cell in data.cells.values():
        labels.setdefault(cell.method, cell.runs[0].label)
    return {method: styles[label] for method, label in labels.items()}


def rank_changes(rows: Sequence[MethodRow], looks: Mapping[str, dict[str, str]]) -> Figure | None:
    """Each ranked method's place by final mean, by AUC and by peak-to-final; None without two rankings."""
    axes = {"final_rank": "final mean", "auc_rank": "AUC", "drop_rank": "peak-to-final"}
    axes = {key: name for key, name in axes.items() if any(getattr(row, key) for row in rows)}
    if len(axes) < 2:
        return None
    traces, table, texts = [], [], []
    first = next(iter(axes))
    ranked = [row for row in rows if any(getattr(row, key) for key in axes)]
    ranked.sort(key=lambda row: getattr(row, first) or len(rows) + 1)
    for row in ranked:
        ranks = [getattr(row, key) for key in axes]
        name, look = method_name(row.method), looks[row.method]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers+text",
                "name": plain(name),
                "x": list(axes.values()),
                "y": ranks,
                "line": {"color": look["colour"], "dash": look["dash"], "width": 2.2},
                "marker": {"color": look["colour"], "symbol": look["symbol"], "size": 9},
                "text": [plain(name) if number in (0, len(axes) - 1) else "" for number in range(len(axes))],
                "textposition": ["middle left", *["top center"] * (len(axes) - 2), "middle right"],
                "hovertemplate": plain(name) + ": %{y} by %{x}<extra></extra>",
            }
        )
        table.append((name, *ranks))
        texts.append(
            f"{name} "
            + ", ".join(f"{rank or 'unranked'} by {axis}" for rank, axis in zip(ranks, axes.values(), strict=True))
        )
    spec = layout("", "", 70 + 34 * len(ranked), hovermode="closest")
    spec["yaxis"] = {"autorange": "reversed", "title": {"text": "rank, 1 is best"}, "dtick": 1, "zeroline": False}
    spec["xaxis"] = {"type": "category", "range": [-0.45, len(axes) - 0.55], "fixedrange": True}
    title = "How the order changes with the question"
    return Figure(
        "rank-changes",
        title,
        "Ranks. " + "; ".join(texts) + ".",
        {"data": traces, "layout": spec},
        ("method", *axes),
        table,
    )


def drop_level(row: summary.CurveRow) -> str:
    """Key of the histogram's levels."""
    if row.floor is None:
        return "panel size unknown"
    if row.drop > row.floor.q999:
        return "beyond the 99.9 % floor"
    return "beyond the 95 % floor" if row.drop > row.floor.q95 else "within the 95 % floor"


def drop_histogram(rows: Sequence[summary.CurveRow]) -> Figure | None:
    """How many runs end how far below their peak, by the noise floor of their own panel."""
    known = [row for row in rows if not math.isnan(row.drop)]
    if not known:
        return None
    edge = _BIN_POINTS * (1 + int(max(row.drop for row in known) // _BIN_POINTS))
    starts = list(range(0, max(edge, 25), _BIN_POINTS))
    traces = []
    for level, colour in _LEVELS.items():
        drops = [row.drop for row in known if drop_level(row) == level]
        if drops:
            counts = [sum(start <= drop < start + _BIN_POINTS for drop in drops) for start in starts]
            traces.append(
                {
                    "type": "bar",
                    "name": level,
                    "x": [start + _BIN_POINTS / 2 for start in starts],
                    "y": counts,
                    "width": _BIN_POINTS * 0.92,
                    "marker": {"color": colour},
                    "hovertemplate": f"%{{y}} runs {level}<extra></extra>",
                }
            )
    line = {"color": "#5b5bd6", "dash": "dot", "width": 1.5}
    mark = {
        "type": "line",
        "x0": stats.FELL_POINTS,
        "x1": stats.FELL_POINTS,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": line,
    }
    mark["label"] = {
        "text": f"{stats.FELL_POINTS:.0f} points",
        "textposition": "end",
        "textangle": 0,
        "xanchor": "left",
        "yanchor": "top",
        "font": {"size": 11},
    }
    spec = layout(
        "peak minus last validation, points", "runs", 300, barmode="stack", hovermode="closest", shapes=[mark]
    )
    spec["xaxis"] |= {"tick0": 0, "dtick": _BIN_POINTS, "range": [0, len(starts) * _BIN_POINTS]}
    spec["yaxis"] |= {"nticks": 7, "tickformat": "d"}
    spec["showlegend"], spec["legend"] = True, {"orientation": "h", "y": 1.12, "x": 0}
    table = [
        (
            row.run.setting_name,
            row.run.label,
            row.drop,
            *((row.floor.mean, row.floor.q95, row.floor.q999) if row.floor else (None,) * 3),
        )
        for row in known
    ]
    fell = sum(row.drop >= stats.FELL_POINTS for row in known)
    counts = "; ".join(f"{sum(drop_level(row) == level for row in known)} {level}" for level in _LEVELS)
    alt = f"Histogram of peak-to-final drops of {len(known)} runs: {counts}. "
    alt += f"{fell} fell by {stats.FELL_POINTS:.0f} points or more."
    columns = ("setting", "run", "peak_to_final", "floor_mean", "floor_95", "floor_999")
    return Figure(
        "drop-histogram", "How far runs end below their peak", alt, {"data": traces, "layout": spec}, columns, table
    )


def cost_figures(data: Study, looks: Mapping[str, dict[str, str]]) -> list[Figure]:
    """Per environment: net device-hours of each cell against its final score (last validation if there is none)."""
    found = []
    for env in dict.fromkeys(setting[0] for setting in data.settings):
        points = [point for cell in data.cells.values() if cell.setting[0] == env for point in [_point(cell)] if point]
        if not points:
            continue
        final = all(not math.isnan(point["cell"].mean) for point in points)
        models = list(dict.fromkeys(point["cell"].setting[1] for point in points))
        scale, unit = (3600.0, "device-hours") if max(p["cost"] for p in points) >= 3600 else (1.0, "device-seconds")
        traces = [_cost_trace(method, points, models, looks[method], scale, final) for method in data.methods]
        kind = "final score" if final else "last validation"
        spec = layout(f"net {unit} per run", f"{kind}, %", 330, hovermode="closest")
        spec["xaxis"]["rangemode"] = "tozero"
        if len(models) > 1:  # no room for names beside the points
            spec["showlegend"], spec["legend"] = True, {"font": {"size": 11}}
        name = ENV_NAMES.get(env, env)
        symbols = ", ".join(f"{_SIZES[_symbol(models, model)]} {model}" for model in models)
        texts = "; ".join(
            f"{method_name(p['cell'].method)} {p['cell'].setting[1]}: {p['cost'] / scale:.3g} {unit}, "
            f"{_score(p['cell'], final):.1f} %"
            for p in points
        )
        title = f"{name}: {kind}" + (f" ({symbols})" if len(models) > 1 else "")
        alt = f"Net {unit} against {kind} on {name}. {texts}."
        rows = [
            (
                name,
                p["cell"].setting[1],
                method_name(p["cell"].method),
                p["cost"] / 3600,
                p["cell"].ratio,
                p["cell"].mean,
                p["cell"].last,
            )
            for p in points
        ]
        columns = (
            "environment",
            "model",
            "method",
            "net_device_hours",
            "time_ratio",
            "final_percent",
            "last_validation_percent",
        )
        traces = [trace for trace in traces if trace["x"]]
        found.append(Figure(f"cost-{len(found)}", title, alt, {"data": traces, "layout": spec}, columns, rows))
    return found


def _point(cell: study.Cell) -> dict[str, Any] | None:
    """Net device-seconds of a cell, the mean over its runs; None if a number is missing."""
    costs = [run.net_seconds(run.steps_done) * run.devices for run in cell.runs if run.steps_done]
    if len(costs) < len(cell.runs) or any(math.isnan(cost) for cost in costs) or math.isnan(cell.last):
        return None
    return {"cell": cell, "cost": sum(costs) / len(costs)}


def _score(cell: study.Cell, final: bool) -> float:
    return cell.mean if final else cell.last


def _symbol(models: Sequence[str], model: str) -> str:
    return list(_SIZES)[models.index(model) % len(_SIZES)]


def _cost_trace(
    method: str,
    points: Sequence[dict[str, Any]],
    models: Sequence[str],
    look: Mapping[str, str],
    scale: float,
    final: bool,
) -> dict[str, Any]:
    mine = [point for point in points if point["cell"].method == method]
    ratios = ["" if math.isnan(p["cell"].ratio) else f", {p['cell'].ratio:.2f} × GRPO's net time" for p in mine]
    name = plain(method_name(method))
    return {
        "type": "scatter",
        "mode": "markers+text" if len(models) == 1 else "markers",
        "name": name,
        "meta": mine[0]["cell"].runs[0].label if mine else "",
        "x": [float(f"{point['cost'] / scale:.5g}") for point in mine],
        "y": [round(_score(point["cell"], final), 3) for point in mine],
        "text": [name for _ in mine],
        "textposition": "top center",
        "cliponaxis": False,
        "customdata": [[plain(setting_name(p["cell"].setting)), ratio] for p, ratio in zip(mine, ratios, strict=True)],
        "hovertemplate": name + ", %{customdata[0]}<br>%{y:.1f} % at %{x:.4g}%{customdata[1]}<extra></extra>",
        "marker": {
            "color": look["colour"],
            "symbol": [_symbol(models, point["cell"].setting[1]) for point in mine],
            "size": 11,
            "line": {"width": 0},
        },
    }
