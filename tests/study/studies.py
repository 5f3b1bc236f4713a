"""Small studies of tests, and invented run directories."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from sdjax import jsonl
from sdjax.study import Grid, axis, grid, prod, settings
from sdjax.study.manifest import Entry, Manifest
from sdjax.study.plan import write_plan

CELL = str(Path(__file__).with_name("cell.py"))
METHODS = ("grpo", "sdar", "rlsd")


def small(*methods: str, name: str = "small", rules=(), warm_start: str = "", **keys: Any) -> Any:
    """Settings of a study with one environment and one model."""
    points = prod(axis("env", "alfworld"), axis("model", "tiny"), axis("method", *(methods or METHODS)))
    values = settings(name, Grid(points, f"{CELL}:{{method}}", tuple(rules), warm_start))
    values.update(keys)
    return values


def plan(values: Any, workdir: Path, *, seen_in=()) -> Manifest:
    return write_plan(grid.load(values), workdir, seen_in, Console(quiet=True))


def path_of(manifest: Manifest, entry: Entry) -> Path:
    return Path(manifest.root) / entry.workdir


def write_progress(manifest: Manifest, workdir: Path, entry: Entry, steps: int, *, seconds: float = 10.0) -> Path:
    """A run directory after ``steps`` updates of ``seconds`` each; returns it."""
    path = path_of(manifest, entry)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text((workdir / entry.config_file).read_text())
    hours = entry.devices * seconds / 3600
    lines = [
        {"step": step, "time/step_s": seconds, "cost/net_gpu_h": step * hours, "cost/val_gpu_h": 0.5}
        for step in range(steps + 1)
    ]
    jsonl.append(path / "metrics.jsonl", lines)
    ledger = [{"step": 0, "attempt": 1, "phase": "startup", "seconds": 30.0, "devices": entry.devices}]
    for step in range(1, steps + 1):
        for phase, share in (("rollout", 0.75), ("update", 0.25)):
            ledger.append({"step": step, "attempt": 1, "phase": phase, "seconds": share * seconds})
            ledger[-1]["devices"] = entry.devices
    ledger.append({"step": steps, "attempt": 1, "phase": "lost", "seconds": 1e6, "devices": entry.devices})
    jsonl.append(path / "ledger.jsonl", ledger)
    return path


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
