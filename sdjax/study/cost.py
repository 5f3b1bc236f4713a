"""What a run will cost, from the ledgers of runs that were seen.

Cost per update comes from the nearest kind of run there is: the same cell, then the same environment and model with
another method, scaled by what the methods cost relative to GRPO, then the same environment. Restarts (time that was
lost) and the final evaluation, which no ledger has, are not in it.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdjax import jsonl
from sdjax.errors import DataError
from sdjax.report.load import json_object, model_name
from sdjax.study.manifest import Cost

_ONCE = ("startup", "compile")  # of an attempt, whatever its number of updates
_BASELINE = "grpo"


@dataclass(frozen=True)
class Seen:
    """One run's ledger. Device-seconds: seconds times devices."""

    env: str
    model: str
    method: str
    once: float
    per_step: float


def observe(paths: Sequence[Path]) -> tuple[Seen, ...]:
    """Reads the ledgers of run directories; those without an update or with a damaged file say nothing."""
    found = [_observe(Path(path)) for path in paths if Path(path).is_dir()]
    return tuple(seen for seen in found if seen is not None)


def _observe(path: Path) -> Seen | None:
    config = json_object(path / "config.json", [])
    try:
        lines = jsonl.read(path / "ledger.jsonl")
    except DataError:
        return None
    env, method = (config.get(part, {}).get("name") for part in ("env", "method"))
    steps = max((line["step"] for line in lines if isinstance(line.get("step"), int)), default=0)
    # A warm start plays no episodes while it trains.
    if not steps or not env or not method or not any(line.get("phase") == "rollout" for line in lines):
        return None
    seconds = dict.fromkeys((True, False), 0.0)
    for line in lines:
        if line.get("phase") != "lost":
            seconds[line.get("phase") in _ONCE] += float(line.get("seconds", 0)) * int(line.get("devices", 1))
    return Seen(env, model_name(config), method, seconds[True], seconds[False] / steps)


def estimate(config: Mapping[str, Any], steps: int, devices: int, seen: Sequence[Seen]) -> Cost:
    """Cost of a run of this resolved configuration; unknown if no run of its environment was seen."""
    env, method, model = config["env"]["name"], config["method"]["name"], model_name(config)
    ratios = _ratios(seen)
    here = [one for one in seen if one.env == env]
    setting = [one for one in here if one.model == model]
    cell = [one for one in setting if one.method == method]
    if cell:
        return _cost(cell, [1.0] * len(cell), steps, devices, "the same cell")
    for runs, what in ((setting, "the same environment and model"), (here, "the same environment, other models")):
        if runs:
            scale = [ratios.get(method, 1.0) / ratios.get(one.method, 1.0) for one in runs]
            scaled = method in ratios and all(one.method in ratios for one in runs)
            how = "scaled by the methods' ratio" if scaled else "other methods, ratio unknown and taken as 1"
            return _cost(runs, scale, steps, devices, f"{what}, {how}")
    return Cost(None, None, "unknown: no run of this environment was seen")


def _cost(runs: Sequence[Seen], scale: Sequence[float], steps: int, devices: int, basis: str) -> Cost:
    totals = [one.once + one.per_step * factor * steps for one, factor in zip(runs, scale)]
    hours = statistics.fmean(totals) / 3600
    count = f"{len(runs)} run{'s' * (len(runs) > 1)}"
    return Cost(round(hours, 4), round(hours / devices, 4), f"{count} of {basis}")


def _ratios(seen: Sequence[Seen]) -> dict[str, float]:
    """Mean over settings of a method's cost of one update / GRPO's."""
    per_step: dict[tuple[str, str, str], list[float]] = {}
    for one in seen:
        per_step.setdefault((one.env, one.model, one.method), []).append(one.per_step)
    means = {where: statistics.fmean(values) for where, values in per_step.items()}
    ratios: dict[str, list[float]] = {}
    for (env, model, method), value in means.items():
        base = means.get((env, model, _BASELINE))
        if base:
            ratios.setdefault(method, []).append(value / base)
    return {method: statistics.fmean(values) for method, values in ratios.items()}
