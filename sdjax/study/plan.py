"""From a study file to its manifest: every cell's configuration is resolved, nothing is loaded or run."""

import json
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from sdjax import config as config_lib
from sdjax.config import RunConfig
from sdjax.errors import ConfigError, RunDirError
from sdjax.report.load import find_runs, json_object
from sdjax.study import cost
from sdjax.study import manifest as manifests
from sdjax.study.grid import Point, Study, key
from sdjax.study.manifest import CONFIGS, Cost, Entry, Manifest
from sdjax.study.resolve import config_of, option

_FIRST_AXES = ("env", "model", "method")
_UNKNOWN = Cost(None, None, "unknown: warm starts are not estimated")


def write_plan(study: Study, workdir: Path, seen_in: Sequence[str], console: Console) -> Manifest:
    """Writes ``manifest.json`` and ``configs/`` in ``workdir``; the same study gives the same bytes.

    seen_in: folders with further runs whose ledgers tell what a run costs.

    Raises:
      ConfigError: a cell that does not load or is there twice; another study's manifest in ``workdir``.
      RunDirError: a cell already has results under another configuration.
    """
    if (workdir / manifests.FILE).exists():
        manifests.read(workdir, study.name)
    made = make_plan(study, workdir)
    _refuse_other_results(workdir, made)
    seen = cost.observe(find_runs([path for path in (workdir, *map(Path, seen_in)) if path.exists()]))
    entries = tuple(
        entry
        if entry.kind == "sft"
        else replace(entry, cost=cost.estimate(config_lib.resolved(config), entry.steps, entry.devices, seen))
        for entry, config in made
    )
    manifest = Manifest(study.name, _git_commit(), str(Path.cwd()), entries)
    for entry, config in made:
        _write(workdir / entry.config_file, json.dumps(config_lib.resolved(config), indent=1) + "\n")
    _write(workdir / manifests.FILE, manifest.text())
    _show(manifest, workdir, console)
    return manifest


def make_plan(study: Study, workdir: Path) -> list[tuple[Entry, RunConfig]]:
    """Entries and their configurations, warm starts first.

    Raises:
      ConfigError: a cell does not load, or two are the same.
    """
    grid, warm = study.grid, {}
    if grid.warm_start:
        for point in study.points():
            text = _fill(grid.warm_start, point)
            if text not in warm:
                warm[text] = _entry(study, point, workdir, "sft", text)
    trained = []
    for point in study.points():
        start = warm[_fill(grid.warm_start, point)][0] if warm else None
        trained.append(_entry(study, point, workdir, "train", _fill(grid.config, point), start))
    made = [*warm.values(), *trained]
    twice = [cell for cell, count in Counter(entry.cell for entry, _ in made).items() if count > 1]
    same = Counter(entry.config_sha256 for entry, _ in trained)
    twice += [entry.name for entry, _ in trained if same[entry.config_sha256] > 1]
    if twice:
        raise ConfigError(
            f"{len(twice)} cells of the study {study.name!r} are there more than once: {', '.join(twice[:4])}.",
            "let the grid name every cell once, and every axis appear in its config or its rules.",
        )
    return [(replace(entry, index=index), config) for index, (entry, config) in enumerate(made)]


def _entry(
    study: Study, point: Point, workdir: Path, kind: str, config: str, start: Entry | None = None
) -> tuple[Entry, RunConfig]:
    """One run. start: the warm start whose model it begins with."""
    options = [option(name, value) for name, value in _overrides(study, point, kind, start).items()]
    arguments = [f"--config={config}", *options]
    axes = point if kind == "train" else {name: point[name] for name in ("env", "model") if name in point}
    where = ", ".join(f"{name}={value}" for name, value in axes.items())
    resolved = config_of(arguments, f"cell {where} ({kind})")
    digest = config_lib.fingerprint(config_lib.resolved(resolved))
    cell = _cell_name(point, kind)
    path = str(workdir / f"{cell}-{digest[:8]}")

    def command(mode: str) -> tuple[str, ...]:
        return ("python", "-m", "sdjax.main", f"--mode={mode}", f"--workdir={path}", *arguments)

    mesh = resolved.mesh
    entry = Entry(
        index=0,
        kind=kind,
        name=f"{cell}-{digest[:8]}",
        cell=cell,
        axes=dict(axes),
        workdir=path,
        command=command(kind),
        eval=command("eval") if kind == "train" else None,
        needs=(start.name,) if start else (),
        config_file=f"{CONFIGS}/{cell}-{digest[:8]}.json",
        config_sha256=digest,
        devices=mesh.data * mesh.fsdp * mesh.tensor,
        steps=resolved.train.steps if kind == "train" else resolved.sft.steps,
        cost=_UNKNOWN,
    )
    return entry, resolved


def _overrides(study: Study, point: Point, kind: str, start: Entry | None) -> dict[str, Any]:
    """Config keys of one run; later ones win."""
    found: dict[str, Any] = {}
    if start is not None:
        found["model.path"] = f"{start.workdir}/model"
    elif study.models.get(key(point.get("model", ""))):
        found["model.path"] = study.models[key(point["model"])]
    if study.data.get(key(point.get("env", ""))):
        found["env.data"] = study.data[key(point["env"])]
    if kind == "train":
        found["seed"] = int(point["seed"])
    for rule in study.grid.rules:
        if rule.applies(point, kind):
            found |= rule.keys
    return found | _typed(study.overrides if kind == "train" else study.warm_overrides)


def _typed(text: str) -> dict[str, str]:
    """``"train.steps=20 eval.every=10"`` as a dictionary of texts, which the flags give their types."""
    parts = shlex.split(text)
    bad = [part for part in parts if "=" not in part]
    if bad:
        raise ConfigError(
            f"overrides: {bad[0]!r} has no '='.", 'write --config.overrides="train.steps=20 eval.every=5".'
        )
    return dict(part.split("=", 1) for part in parts)


def _fill(text: str, point: Mapping[str, str]) -> str:
    try:
        return text.format_map(point)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"{text!r} asks for an axis that the grid lacks ({error}).", f"it has {', '.join(point)}."
        ) from error


def _cell_name(point: Point, kind: str) -> str:
    """``<env>-<model>-<method>``, then further axes with their names; the first training seed goes without saying."""
    if kind == "sft":
        return "-".join([*(point[name] for name in ("env", "model") if name in point), "warm_start"])
    parts = [point[name] for name in _FIRST_AXES if name in point]
    others = {
        name: value for name, value in point.items() if name not in _FIRST_AXES and (name, value) != ("seed", "0")
    }
    return "-".join([*parts, *(f"{name}{value}" for name, value in others.items())])


def _refuse_other_results(workdir: Path, made: Sequence[tuple[Entry, RunConfig]]) -> None:
    """A cell has results under one configuration only: two would be compared as if they were the same."""
    cells = {entry.cell: (entry, config) for entry, config in made}
    for path in sorted(workdir.glob("*-*")):
        match = re.fullmatch(r"(.+)-[0-9a-f]{8}", path.name)
        if match is None or match[1] not in cells or not has_results(path):
            continue
        entry, config = cells[match[1]]
        found = json_object(path / "config.json", [])
        changed = config_lib.difference(found, config_lib.resolved(config))
        if changed:
            listing = "\n  ".join(changed[:12])
            raise RunDirError(
                f"cell {entry.cell} already has results in {path}, under another config:\n  {listing}\n",
                "repeat the old settings, use another --workdir, give the changed axis value another name in the study "
                "file (new cells do not touch old results), or move that directory away.",
            )


def has_results(path: Path) -> bool:
    """Whether a run directory holds more than a plan or a start that failed."""
    metrics = path / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def _write(path: Path, text: str) -> None:
    """Atomic, and not at all where the file is the same."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _git_commit() -> str:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "not a git checkout"
    try:
        found = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True)
    except OSError:
        return "git is not installed"
    return found.stdout.strip()


def _show(manifest: Manifest, workdir: Path, console: Console) -> None:
    trained = [entry for entry in manifest.entries if entry.kind == "train"]
    known = [entry.cost for entry in trained if entry.cost.gpu_hours is not None]
    text = f"{manifest.study}: {len(trained)} runs"
    if len(trained) < len(manifest.entries):
        text += f" and {len(manifest.entries) - len(trained)} warm starts"
    text += f" in {workdir / manifests.FILE}"
    if known:
        hours = sum(one.gpu_hours or 0 for one in known)
        text += f"; about {hours:,.1f} device-hours for the {len(known)} runs whose cost can be estimated"
    else:
        text += "; their cost is unknown, no run of these environments was seen (--runs=FOLDER shows some)"
    console.print(text, highlight=False)
    cells = {entry.cell for entry in manifest.entries}
    listed = {Path(entry.workdir).name for entry in manifest.entries}
    others = [path.name for path in sorted(workdir.glob("*-*")) if has_results(path) and path.name not in listed]
    if others:
        console.print(
            f"{len(others)} run directories there belong to none of the {len(cells)} cells and are not reported: "
            f"{', '.join(others[:4])}",
            highlight=False,
        )
