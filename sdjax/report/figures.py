"""Figures as plotly specifications, each with its data as CSV and with text for readers who do not see it.

A specification is plain JSON data for plotly.js. Colours are those of the light theme; the page maps them for dark.
"""

import csv
import dataclasses
import io
import math
from collections.abc import Sequence
from typing import Any

from sdjax.report import summary
from sdjax.report.records import LOST, NET_PHASES, Run

# Okabe-Ito (distinguishable with colour-vision deficiencies), light theme -> dark theme. GRPO always has the first.
PALETTE = {
    "#3b4252": "#d5dae3",
    "#c8500a": "#ff8f4d",
    "#0072b2": "#5ab4e8",
    "#008a62": "#2fc79a",
    "#a84b86": "#e59ac5",
    "#8a6d00": "#e0bd3c",
    "#5b5bd6": "#a5a5ff",
    "#7a4a2b": "#c99b7a",
    "#4d7c0f": "#a3d65c",
    "#b3123f": "#ff7d9c",
    "#00758f": "#4fd0e6",
    "#6b7280": "#9aa3b2",
    "#a9b1bd": "#6b7483",
    "#c5cbd4": "#555d6b",
    "#dde1e7": "#434a56",
    "#e8ebef": "#383e49",
    "#d98d96": "#9c4a55",
}
_RUN_COLOURS = list(PALETTE)[:11]
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
SYMBOLS: tuple[str, ...] = (
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "triangle-down",
    "star",
    "hexagon",
    "pentagon",
)
PHASE_COLOURS: dict[str, str] = {
    "rollout": "#0072b2",
    "teacher": "#c8500a",
    "score": "#8a6d00",
    "update": "#008a62",
    "sync": "#a84b86",
    "other": "#6b7280",
    "validation": "#a9b1bd",
    "save": "#c5cbd4",
    "compile": "#dde1e7",
    "startup": "#e8ebef",
    LOST: "#d98d96",
}
OTHER_PHASE_COLOUR = "#e8ebef"
_MANY_POINTS = 40  # beyond it, markers would hide the line
MANY_RUNS = 24  # beyond it, runs are summed up by method or folded away

HEALTH = (
    ("train/reward_mean", "mean training reward"),
    ("train/win_rate", "training success rate"),
    ("engine/logp_gap_abs_mean", "engine–trainer log-prob gap, nats"),
    ("engine/prob_gap_mean", "engine–trainer probability gap"),
    ("optim/clip_frac", "clipped share of tokens"),
    ("train/entropy", "entropy, nats"),
    ("optim/grad_norm", "gradient norm"),
    ("teacher/gap_mean", "teacher gap lT − lO, nats"),
    ("method/gate_mean", "mean gate"),
    ("teacher/context_frac", "rows with teacher context"),
    ("rollout/response_tokens_mean", "response length, tokens"),
    ("rollout/truncated_frac", "truncated responses"),
    ("rollout/valid_action_frac", "valid actions"),
    ("train/flat_groups_frac", "groups without reward spread"),
    ("rollout/failed_episodes", "failed training episodes"),
)


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
      id: unique in the page; also the name of the CSV file.
      title: heading.
      alt: what the figure shows, in words.
      spec: {"data": [...], "layout": {...}} for plotly.js.
      columns, rows: the data behind it.
      axes: alternative horizontal axes by name: {"title": str, "x": one list per trace or None, "shapes": [...]}.
    """

    id: str
    title: str
    alt: str
    spec: dict[str, Any]
    columns: tuple[str, ...]
    rows: list[tuple]
    axes: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def csv(self) -> str:
        return csv_text(self.columns, self.rows)


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table as CSV, numbers with six significant digits. NaN and None become empty cells."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([[_csv_cell(cell) for cell in row] for row in rows])
    return buffer.getvalue()


def _csv_cell(cell: Any) -> Any:
    if _missing(cell):
        return ""
    return f"{cell:.6g}" if isinstance(cell, float) else cell


def plain(text: str) -> str:
    """Text for plotly labels, which would read ``<b>`` or ``<a>`` as markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def run_styles(runs: Sequence[Run]) -> dict[str, dict[str, str]]:
    """Colour, dash and symbol per label, the same in every figure. The baseline comes first, neutral and solid."""
    baselines = dict.fromkeys(run.label for run in runs if run.method == summary.BASELINE)
    labels = list(baselines | dict.fromkeys(run.label for run in runs))
    first = 0 if baselines else 1
    styles = {}
    for number, label in enumerate(labels, start=first):
        styles[label] = {
            "colour": _RUN_COLOURS[number % len(_RUN_COLOURS)],
            "dash": DASHES[(number + number // len(_RUN_COLOURS)) % len(DASHES)],
            "symbol": SYMBOLS[number % len(SYMBOLS)],
        }
    return styles


def layout(x_title: str, y_title: str, height: int, **more: Any) -> dict[str, Any]:
    axis = {"automargin": True, "zeroline": False, "ticks": "outside", "ticklen": 4, "exponentformat": "power"}
    x_axis = axis | ({"title": {"text": x_title, "standoff": 8}} if x_title else {})
    y_axis = axis | ({"title": {"text": y_title, "standoff": 8}} if y_title else {})
    return {
        "height": height,
        "margin": {"l": 48, "r": 14, "t": 10, "b": 40},
        "showlegend": False,
        "hovermode": "x unified",
        "xaxis": x_axis,
        "yaxis": {**y_axis, "rangemode": "tozero"},
        **more,
    }


def _line(run: Run, style: dict[str, str], x: list, y: list, **more: Any) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": plain(run.label),
        "meta": run.label,
        "cliponaxis": False,
        "x": x,
        "y": [None if _missing(value) else float(f"{value:.5g}") for value in y],
        "line": {"color": style["colour"], "dash": style["dash"], "width": 2.2},
        "marker": {"color": style["colour"], "symbol": style["symbol"], "size": 7, "opacity": 1, "line": {"width": 0}},
        **more,
    }


def validation_curves(number: int, group: Sequence[Run], styles: dict[str, dict[str, str]]) -> Figure:
    """Validation score against completed updates or net device time, one line per run of one setting.

    Collapses are shaded and their low validations have cross markers; error bars are one standard error over tasks
    (hidden at first).
    """
    traces, rows, texts, nets = [], [], [], []
    shown = [run for run in group if run.validations]
    scale, unit = _cost_unit(shown)
    shades: dict[str, list] = {"step": [], "net": []}
    for run in shown:
        style = styles[run.label]
        curve = summary.curve_row(run)
        steps, values = run.validation_steps, run.validation_values
        low = {step for stretch in curve.collapses for step in range(stretch.start, stretch.end + 1)}
        detail = [[_number(v.net_s), v.episodes, v.failed, _number(v.se)] for v in run.validations]
        trace = _line(run, style, steps, values)
        trace["marker"]["symbol"] = ["x" if step in low else style["symbol"] for step in steps]
        usual = 7 if len(steps) <= _MANY_POINTS else 4
        trace["marker"]["size"] = [11 if step in low else usual for step in steps]
        trace["error_y"] = {
            "type": "data",
            "array": [row[3] for row in detail],
            "visible": False,
            "thickness": 1.1,
            "width": 3,
        }
        trace["customdata"] = detail
        trace["hovertemplate"] = "%{y:.1f} % ± %{customdata[3]:.1f} (n %{customdata[1]}, net %{customdata[0]:.0f} s)"
        traces.append(trace)
        known = not any(math.isnan(net) for net in run.validation_net)
        cost = [float(f"{net * run.devices / scale:.6g}") for net in run.validation_net] if known else None
        nets.append(cost)
        for stretch in curve.collapses:
            start, end = steps.index(stretch.start), steps.index(stretch.end)
            shades["step"].append(_shade(steps[start], steps[end], style["colour"]))
            if cost:
                shades["net"].append(_shade(cost[start], cost[end], style["colour"]))
        rows += [
            (run.setting_name, run.label, v.step, v.value, *cells, " + ".join(v.panels))
            for v, cells in zip(run.validations, detail, strict=True)
        ]
        peak = f"peak {curve.peak:.1f} % at step {curve.peak_step}, " if len(values) > 1 else ""
        fallen = "".join(f", collapsed at steps {low.start} to {low.end}" for low in curve.collapses)
        ends = f"{values[0]:.1f} % at step {steps[0]}, {peak}{values[-1]:.1f} % at step {steps[-1]}"
        texts.append(f"{run.label}: {ends}{fallen}")
    baseline = next((run for run in shown if run.method == summary.BASELINE), None)
    return Figure(
        f"curves-{number}",
        group[0].setting_name,
        f"Validation {group[0].metric_name} on {group[0].setting_name}. " + "; ".join(texts) + ".",
        {
            "data": traces,
            "layout": layout("completed updates", f"{group[0].metric_name}, %", 330, shapes=shades["step"]),
        },
        ("setting", "run", "step", "score_percent", "net_s", "episodes", "failed", "standard_error", "panel"),
        rows,
        {
            "step": {"title": "completed updates", "x": [trace["x"] for trace in traces], "shapes": shades["step"]},
            "net": {"title": f"net {unit}", "x": nets, "shapes": [*shades["net"], *_budget_line(baseline, scale)]},
        }
        if any(net is not None for net in nets)
        else {},
    )


def _cost_unit(runs: Sequence[Run]) -> tuple[float, str]:
    longest = max((v.net_s * run.devices for run in runs for v in run.validations if v.net_s == v.net_s), default=0.0)
    return (3600.0, "device-hours") if longest >= 3600 else (1.0, "device-seconds")


def _shade(x0: float, x1: float, colour: str) -> dict[str, Any]:
    """A collapse: the stretch of low validations."""
    span = {"type": "rect", "x0": x0, "x1": x1, "y0": 0, "y1": 1, "yref": "paper", "layer": "below"}
    return span | {"fillcolor": colour, "opacity": 0.14, "line": {"width": 0}}


def _budget_line(baseline: Run | None, scale: float) -> list[dict[str, Any]]:
    """Vertical line at the baseline's whole net time, for the cost axis."""
    if baseline is None or math.isnan(baseline.validations[-1].net_s):
        return []
    x = baseline.validations[-1].net_s * baseline.devices / scale
    line = {"color": PHASE_COLOURS["validation"], "dash": "dot", "width": 1.5}
    label = {
        "text": "GRPO's net time",
        "textangle": 0,
        "yanchor": "top",
        "textposition": "end",
        "font": {"size": 11},
        "xanchor": "right",
    }
    return [{"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line, "label": label}]


def ledger_bars(runs: Sequence[Run]) -> Figure | None:
    """Stacked bars of wall seconds per category; excluded categories are hatched and stand after the net ones.

    One bar per run, or per method (the sum over its runs) if there are many runs.
    """
    shown = [run for run in runs if summary.ledger_seconds(run)]
    if not shown:
        return None
    names, seconds = _bars(shown)
    scale, unit = _time_unit(max(sum(one.values()) for one in seconds))
    traces = []
    for phase in dict.fromkeys(phase for one in seconds for phase in one):
        colour = PHASE_COLOURS.get(phase, OTHER_PHASE_COLOUR)
        shape = "" if phase in NET_PHASES else "/"
        pattern = {"shape": shape, "size": 6, "solidity": 0.25, "fillmode": "overlay"}
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": plain(phase),
                "y": [plain(name) for name in names],
                "x": [round(one.get(phase, 0.0) / scale, 4) for one in seconds],
                "marker": {"color": colour, "pattern": pattern},
                "hovertemplate": plain(phase) + f": %{{x:.3g}} {unit}<extra></extra>",
            }
        )
    # Traces come in the order of the categories, whatever order the runs met them in.
    order = list(PHASE_COLOURS)
    traces.sort(key=lambda trace: order.index(trace["name"]) if trace["name"] in order else len(order))
    axes = layout(f"wall time, {unit}", "", 70 + 42 * len(names), barmode="stack", bargap=0.35, hovermode="closest")
    axes["yaxis"] = {"automargin": True, "autorange": "reversed", "type": "category", "ticks": "", "showgrid": False}
    text = "; ".join(
        f"{name}: {summary.net_of(one):.0f} s net of {sum(one.values()):.0f} s booked"
        for name, one in zip(names, seconds, strict=True)
    )
    rows = [
        (run.setting_name, run.label, phase, value, phase in NET_PHASES, value * run.devices / 3600)
        for run in shown
        for phase, value in summary.ledger_seconds(run).items()
    ]
    columns = ("setting", "run", "category", "seconds", "net", "device_hours")
    title = "Where the time went" if len(names) == len(shown) else "Where the time went, sum over the runs of a method"
    spec = {"data": traces, "layout": axes}
    return Figure("ledger-bars", title, f"Time by category. {text}.", spec, columns, rows)


def _bars(runs: Sequence[Run]) -> tuple[list[str], list[dict[str, float]]]:
    if len(runs) <= MANY_RUNS:
        several = len(summary.settings(runs)) > 1
        names = [f"{run.setting_name} · {run.label}" if several else run.label for run in runs]
        return names, [summary.ledger_seconds(run) for run in runs]
    sums: dict[str, dict[str, float]] = {}
    for run in runs:
        total = sums.setdefault(run.method_name, {})
        for phase, value in summary.ledger_seconds(run).items():
            total[phase] = total.get(phase, 0.0) + value
    return list(sums), list(sums.values())


def health_figures(number: int, group: Sequence[Run], styles: dict[str, dict[str, str]]) -> list[Figure]:
    """One small chart per health metric that at least one run of the setting logged."""
    found = []
    for key, title in HEALTH:
        shown = [run for run in group if key in run.metrics]
        if not shown:
            continue
        traces, rows, texts = [], [], []
        for run in shown:
            column = {step: value for step, value in run.metrics[key].items() if math.isfinite(value)}
            steps, values = list(column), list(column.values())
            trace = _line(run, styles[run.label], steps, values, hovertemplate="%{y:.4g}")
            trace["line"]["width"] = 1.8
            trace["mode"] = "lines" if len(steps) > _MANY_POINTS else "lines+markers"
            trace["marker"]["size"] = 3 if len(steps) > 1 else 6
            traces.append(trace)
            rows += [(run.setting_name, run.label, step, value) for step, value in zip(steps, values, strict=True)]
            if values:
                texts.append(
                    f"{run.label} from {values[0]:.3g} to {values[-1]:.3g}, mean {sum(values) / len(values):.3g}"
                )
        axes = layout("", "", 190)
        axes["margin"] = {"l": 40, "r": 10, "t": 6, "b": 24}
        if min((value for trace in traces for value in trace["y"]), default=0) < 0:
            axes["yaxis"]["zeroline"] = True
        figure_id = f"health-{number}-{key.replace('/', '-')}"
        alt = f"{title} ({key}) by completed updates. " + "; ".join(texts) + "."
        found.append(
            Figure(figure_id, title, alt, {"data": traces, "layout": axes}, ("setting", "run", "step", key), rows)
        )
    return found


def _time_unit(longest: float) -> tuple[float, str]:
    if longest < 600:
        return 1.0, "seconds"
    return (60.0, "minutes") if longest < 3 * 3600 else (3600.0, "hours")


def _number(value: float) -> float | None:
    return None if _missing(value) else round(float(value), 4)


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
