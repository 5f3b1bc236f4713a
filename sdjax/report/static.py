"""Static pictures of a report for places without scripts, such as a README."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no display; must be chosen before pyplot is imported

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from sdjax.report import figures, summary
from sdjax.report.load import load_runs
from sdjax.report.records import Run

_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (9, 3))}
_MARKERS = dict(zip(figures.SYMBOLS, "osD^v*hp", strict=True))


def save_curves_png(runs: Sequence[Path | str], out: Path | str) -> Path:
    """Draws the validation curves of run directories, one panel per setting, with a band of one standard error.

    Raises:
      RunDirError: see `sdjax.report.load.load_runs`.
    """
    loaded = load_runs(runs)
    groups = list(summary.settings(loaded).values())
    styles = figures.run_styles(loaded)
    columns = min(3, len(groups))
    rows = -(-len(groups) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(6.4 * columns, 3.7 * rows), squeeze=False, layout="constrained")
    for axis, group in zip(axes.flat, groups, strict=False):
        for run in group:
            _draw(axis, run, styles[run.label])
        axis.set_title(group[0].setting_name, fontsize=11, loc="left", fontweight="bold")
        axis.set_xlabel("completed updates")
        axis.set_ylabel(f"{group[0].metric_name}, %")
        axis.set_ylim(bottom=0)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(color="#e8ebf0", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
        axis.legend(frameon=False, fontsize=9)
    for axis in list(axes.flat)[len(groups) :]:
        axis.set_visible(False)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150, facecolor="white", metadata={"Software": None})
    plt.close(figure)
    return out


def _draw(axis: Axes, run: Run, style: dict[str, str]) -> None:
    if not run.validations:
        axis.plot([], [], color=style["colour"], label=f"{run.label} (not run)")
        return
    steps, values = run.validation_steps, np.array(run.validation_values)
    errors = np.array([validation.se for validation in run.validations])
    axis.fill_between(steps, values - errors, values + errors, color=style["colour"], alpha=0.13, linewidth=0)
    dash, marker = _DASHES[style["dash"]], _MARKERS[style["symbol"]]
    axis.plot(
        steps,
        values,
        linestyle=dash,
        marker=marker,
        color=style["colour"],
        linewidth=2,
        markersize=4.5,
        label=run.label,
    )
