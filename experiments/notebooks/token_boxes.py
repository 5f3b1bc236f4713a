"""Draws the answers of an episode as boxes, one per token, coloured by a number."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

COLUMNS = 104  # characters of a line
_LABEL = 19  # characters kept free for the label of a turn
_INCH_PER_CHARACTER, _INCH_PER_LINE = 0.092, 0.30
_FONT_POINTS = 9.0


@dataclass(frozen=True)
class Box:
    """One token: text as shown, line from the top, first column and width in characters."""

    text: str
    line: int
    column: int
    width: int


def visible(token: str) -> str:
    """Blanks and line breaks get a glyph, because a box must not look empty."""
    return token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") or "∅"


def layout(turns: Sequence[Sequence[str]], columns: int = COLUMNS) -> tuple[list[Box], list[int]]:
    """Boxes of all turns and the line on which each turn starts. A turn starts a line; long turns are broken."""
    boxes, starts, line = [], [], 0
    for tokens in turns:
        starts.append(line)
        column = _LABEL
        for token in tokens:
            text = visible(token)
            if column + len(text) > columns and column > _LABEL:
                line, column = line + 1, _LABEL
            boxes.append(Box(text, line, column, len(text)))
            column += len(text)
        line += 1
    return boxes, starts


def token_boxes(
    turns: Sequence[Sequence[str]],
    values: Sequence[np.ndarray],
    labels: Sequence[str],
    *,
    title: str,
    colorbar: str,
    center: float | None = None,
    limits: tuple[float, float] | None = None,
) -> Figure:
    """One figure.

    Args:
      turns: token texts of each turn.
      values: one number per token, same layout.
      labels: text left of each turn.
      title, colorbar: what is shown, and the unit.
      center: value that is drawn white, for a scale with two directions; None for a scale that starts at white.
      limits: lowest and highest value of the scale, values beyond have its end colours; default: symmetric around
        ``center``, or 0 to the maximum.
    """
    flat = np.concatenate([np.asarray(v, float) for v in values])
    if limits is None:
        reach = max(float(np.max(np.abs(flat - (center or 0.0)))), 1e-9)
        limits = (center - reach, center + reach) if center is not None else (0.0, reach)
    norm = Normalize(*limits) if center is None else TwoSlopeNorm(center, *limits)
    cmap = plt.get_cmap("YlGnBu" if center is None else "RdBu")
    boxes, starts = layout(turns)
    lines = boxes[-1].line + 1
    size = (COLUMNS * _INCH_PER_CHARACTER + 1.4, lines * _INCH_PER_LINE + 0.5)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    for box, value in zip(boxes, flat, strict=True):
        color = cmap(norm(value))
        axes.add_patch(Rectangle((box.column, box.line), box.width, 0.86, facecolor=color, edgecolor="0.6", lw=0.5))
        ink = "white" if np.dot(color[:3], (0.299, 0.587, 0.114)) < 0.5 else "black"
        axes.text(
            box.column + box.width / 2, box.line + 0.45, box.text, color=ink,
            ha="center", va="center", family="monospace", fontsize=_FONT_POINTS, parse_math=False,
        )  # fmt: skip
    for label, line in zip(labels, starts, strict=True):
        axes.text(0, line + 0.45, label, va="center", family="monospace", fontsize=_FONT_POINTS - 1, color="0.25")
    axes.set(xlim=(0, COLUMNS), ylim=(lines, -0.1))
    axes.axis("off")
    axes.set_title(title, loc="left", fontsize=11)
    low, high = flat.min() < limits[0], flat.max() > limits[1]
    extend = "both" if low and high else "min" if low else "max" if high else "neither"
    mappable = ScalarMappable(norm, cmap)
    figure.colorbar(mappable, ax=axes, label=colorbar, fraction=0.025, pad=0.01, extend=extend)
    return figure
