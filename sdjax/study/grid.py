"""The grid of a study as plain data: axes, their product, and what a point of it means as a command.

    grid = prod(axis("env", "alfworld", "webshop"), axis("model", "qwen3.5-2b"), axis("method", "grpo", "sdar"))

is a tuple of four points such as ``{"env": "alfworld", "model": "qwen3.5-2b", "method": "grpo"}``.
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_collections

from sdjax.errors import ConfigError

Point = dict[str, str]
KINDS = ("sft", "train")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def axis(name: str, *values: Any) -> tuple[Point, ...]:
    """One point for each value. Values become parts of file names.

    Raises:
      ConfigError: no value, one twice, or one that cannot be part of a file name.
    """
    texts = [str(value) for value in values]
    bad = [text for text in texts if not _NAME.fullmatch(text)]
    if bad or not texts or len(set(texts)) < len(texts):
        raise ConfigError(
            f"axis {name!r} has the values {', '.join(map(repr, texts)) or '(none)'}.",
            "give different values of letters, digits, '.', '_' and '-'.",
        )
    return tuple({name: text} for text in texts)


def prod(*parts: tuple[Point, ...]) -> tuple[Point, ...]:
    """Every combination of one point from each part; the last part varies fastest."""
    points = []
    for combination in itertools.product(*parts):
        names = [name for point in combination for name in point]
        if len(set(names)) < len(names):
            raise ConfigError(f"a product has the axes {', '.join(names)}.", "name every axis once in a product.")
        points.append({name: value for point in combination for name, value in point.items()})
    return tuple(points)


def chain(*parts: tuple[Point, ...]) -> tuple[Point, ...]:
    """The points of all parts, one part after the other."""
    return tuple(point for part in parts for point in part)


@dataclass(frozen=True)
class Rule:
    """Overrides for the runs whose axes (and ``kind``: train or sft) have the values of ``where``."""

    keys: Mapping[str, Any]
    where: Mapping[str, str] = field(default_factory=dict)

    def applies(self, point: Point, kind: str) -> bool:
        facts = {"kind": kind, **point}
        return all(facts.get(name) == value for name, value in self.where.items())


def rule(keys: Mapping[str, Any], **where: str) -> Rule:
    """``rule({"train.tasks_per_step": 16}, env="searchqa")``: config keys of the runs with that value."""
    return Rule(keys, where)


@dataclass(frozen=True)
class Grid:
    """What is run.

    points: one for each cell. config: config file of a cell with its arguments; ``{axis}`` stands for the cell's value
    on that axis. rules: overrides, later ones win. warm_start: config file of the warm start (``--mode=sft``) from
    whose model a cell begins, written like ``config``; cells that name the same one share it. ``""``: none.
    """

    points: tuple[Point, ...]
    config: str
    rules: tuple[Rule, ...] = ()
    warm_start: str = ""


@dataclass(frozen=True)
class Study:
    """A study file's settings, checked. models, data: paths by the value of the axis ``model`` or ``env`` (characters
    other than letters and digits as ``_``); ``""`` keeps the path of the config file. overrides, warm_overrides:
    ``"train.steps=20 eval.every=10"`` for all cells, or all warm starts."""

    name: str
    grid: Grid
    seeds: int
    models: Mapping[str, str]
    data: Mapping[str, str]
    overrides: str
    warm_overrides: str

    def points(self) -> tuple[Point, ...]:
        """The points of the grid with their training seeds."""
        return prod(self.grid.points, axis("seed", *range(self.seeds)))


def key(value: str) -> str:
    """The key of an axis value in ``models`` and ``data``: ``qwen3.5-2b`` -> ``qwen3_5_2b``."""
    return re.sub(r"\W|-", "_", value)


def settings(
    name: str, grid: Grid, *, models: Mapping[str, str] | None = None, data: Mapping[str, str] | None = None
) -> Any:
    """What ``get_config`` of a study file returns: the grid, and keys that the command line can override.

    ``--config.models.qwen3_5_2b=PATH``, ``--config.data.alfworld=PATH``, ``--config.seeds=3`` (training seeds of each
    cell), ``--config.overrides="train.steps=20"``, ``--config.name=NAME``.
    """
    keys = {"model": dict(models or {}), "env": dict(data or {})}
    paths = {
        name: {key(value): keys[name].get(value, "") for value in sorted({p[name] for p in grid.points if name in p})}
        for name in keys
    }
    return ml_collections.ConfigDict(
        {
            "name": name,
            "grid": grid,
            "seeds": 1,
            "models": paths["model"],
            "data": paths["env"],
            "overrides": "",
            "warm_overrides": "",
        }
    )


def load(values: Any) -> Study:
    """Checks what ``get_config`` of a study file returned.

    Raises:
      ConfigError: it is no study, or a value is out of range.
    """
    values = values.to_dict() if isinstance(values, ml_collections.ConfigDict) else values
    known = set(Study.__dataclass_fields__)
    if not isinstance(values, dict) or set(values) != known or not isinstance(values["grid"], Grid):
        raise ConfigError(
            "--config names no study file.",
            "use experiments/study.py, or a file whose get_config() returns sdjax.study.settings(...).",
        )
    study = Study(**values)
    if not _NAME.fullmatch(study.name):
        raise ConfigError(f"the study's name is {study.name!r}.", "use letters, digits, '.', '_' and '-'.")
    if study.seeds < 1 or not study.grid.points:
        raise ConfigError(
            f"the study {study.name!r} has {len(study.grid.points)} cells and {study.seeds} training seeds.",
            "give it at least one of each.",
        )
    return study
