"""The manifest: what a study runs, as one JSON file that launchers, status and report read.

    {"format": "sdjax study manifest", "version": 1, "study": NAME, "git_commit": SHA, "root": DIRECTORY,
     "entries": [
       {"index": 0,                      place in the list
        "kind": "train",                 "sft": a warm start; "train": training and final evaluation
        "name": "alfworld-qwen3.5-2b-sdar-0a1b2c3d",      unique; ends with the config's first 8 hex digits
        "cell": "alfworld-qwen3.5-2b-sdar",               unique; the same under every config
        "axes": {"env": "alfworld", "model": "qwen3.5-2b", "method": "sdar", "seed": "0"},
        "workdir": "runs/study/alfworld-qwen3.5-2b-sdar-0a1b2c3d",
        "command": ["python", "-m", "sdjax.main", ...],   idempotent: done -> exit 0, else it goes on where it stopped
        "eval": ["python", "-m", "sdjax.main", ...],      plays missing files of the final evaluation (null for sft)
        "needs": [names],                                 entries that must be done before
        "config_file": "configs/NAME.json", "config_sha256": HEX,     the resolved config
        "devices": 8, "steps": 100,
        "cost": {"gpu_hours": 80.1, "hours": 10.0, "basis": TEXT}}]}  null and why, if nothing is known

Commands are run in ``root``; relative paths in them start there. ``python`` stands for the interpreter of the
environment in which sdjax is installed.
"""

import difflib
import fnmatch
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sdjax.errors import ConfigError, DataError

FILE, CONFIGS, REPORT = "manifest.json", "configs", "report.html"
FORMAT, VERSION = "sdjax study manifest", 1


@dataclass(frozen=True)
class Cost:
    """Expected cost of a whole run; basis: from which runs it was estimated."""

    gpu_hours: float | None
    hours: float | None
    basis: str


@dataclass(frozen=True)
class Entry:
    """One run of a study; the fields are explained above."""

    index: int
    kind: str
    name: str
    cell: str
    axes: dict[str, str]
    workdir: str
    command: tuple[str, ...]
    eval: tuple[str, ...] | None
    needs: tuple[str, ...]
    config_file: str
    config_sha256: str
    devices: int
    steps: int
    cost: Cost


@dataclass(frozen=True)
class Manifest:
    study: str
    git_commit: str
    root: str
    entries: tuple[Entry, ...]

    def entry(self, name: str) -> Entry:
        return next(entry for entry in self.entries if entry.name == name)

    def text(self) -> str:
        head = {"format": FORMAT, "version": VERSION}
        return json.dumps(head | asdict(self), indent=1) + "\n"


def read(workdir: Path, study: str | None = None) -> Manifest:
    """Reads ``workdir/manifest.json``. study: the name that it must have.

    Raises:
      ConfigError: there is no manifest, or it belongs to another study.
      DataError: it is damaged, or of another version.
    """
    path = Path(workdir) / FILE
    again = "run --study=plan again; finished runs stay."
    if not path.is_file():
        raise ConfigError(f"{path} does not exist.", "run --mode=study --study=plan with this --workdir first.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
    except ValueError as error:
        raise DataError(f"{path} is not whole ({error}).", again) from error
    if value.get("format") != FORMAT or value.get("version") != VERSION:
        found = f"format {value.get('format')!r}, version {value.get('version')!r}"
        raise DataError(f"{path} has {found}; this is {FORMAT!r}, version {VERSION}.", again)
    try:
        manifest = Manifest(
            value["study"], value["git_commit"], value["root"], tuple(_entry(one) for one in value["entries"])
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} lacks a key or has an unknown one ({error}).", again) from error
    if study is not None and manifest.study != study:
        raise ConfigError(
            f"{path} belongs to the study {manifest.study!r}, --config to {study!r}.",
            "use another --workdir, or the config of that study.",
        )
    return manifest


def _entry(value: dict[str, Any]) -> Entry:
    lists = {name: tuple(value[name]) for name in ("command", "needs")}
    evaluation = None if value["eval"] is None else tuple(value["eval"])
    return Entry(**{**value, **lists, "eval": evaluation, "cost": Cost(**value["cost"])})


def select(manifest: Manifest, wanted: Sequence[str]) -> tuple[Entry, ...]:
    """Entries that ``wanted`` names: ``3``, ``5-9``, a name, a cell, or a pattern such as ``alfworld-*-grpo``.

    All of them if nothing is wanted. In the order of the manifest.

    Raises:
      ConfigError: a part that names nothing.
    """
    if not wanted:
        return manifest.entries
    chosen: set[int] = set()
    for part in wanted:
        found = _match(manifest, part)
        if not found:
            names = [entry.cell for entry in manifest.entries]
            near = difflib.get_close_matches(part, names, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"they are {names[0]} to {names[-1]}."
            count = len(manifest.entries)
            raise ConfigError(f"--cells: {part!r} is none of the {count} runs (0 to {count - 1}).", hint)
        chosen |= found
    return tuple(entry for entry in manifest.entries if entry.index in chosen)


def _match(manifest: Manifest, part: str) -> set[int]:
    span = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
    if span:
        first, last = int(span[1]), int(span[2] or span[1])
        inside = range(first, last + 1) if last < len(manifest.entries) else ()
        return set(inside)
    return {
        entry.index
        for entry in manifest.entries
        if any(fnmatch.fnmatchcase(name, part) for name in (entry.name, entry.cell))
    }
