"""Where a study stands, read from the files of its run directories alone: no lock is taken, nothing is loaded."""

import datetime
import json
import os
import socket
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sdjax import config as config_lib
from sdjax.report.load import json_object
from sdjax.study.manifest import Entry, Manifest

DONE, RUNNING, ELSEWHERE, FAILED = "done", "running", "on another host", "failed"
STALE, STOPPED, QUEUED, WAITING, OTHER = "stale lock", "stopped", "queued", "waiting", "other config"
_STYLES = {DONE: "green", RUNNING: "cyan", ELSEWHERE: "cyan", FAILED: "red", OTHER: "red", STALE: "yellow"}
_TAIL_BYTES = 1 << 17  # some twenty lines of metrics
_RECENT = 10  # updates whose mean time gives the ETA


@dataclass(frozen=True)
class State:
    """One run now. step: completed updates. eta_s: seconds left at the recent speed, None if unknown. device_hours: of
    training, validation and saving so far, None before the first update. note: for people."""

    entry: Entry
    state: str
    step: int
    eta_s: float | None
    device_hours: float | None
    note: str


def states(manifest: Manifest, workdir: Path) -> list[State]:
    """The state of every run of the manifest in ``workdir``."""
    root = Path(manifest.root)
    found: dict[str, State] = {}
    for entry in manifest.entries:  # warm starts come first
        needed = [found[name] for name in entry.needs if name in found]
        found[entry.name] = state_of(entry, run_path(root, entry), needed)
    return list(found.values())


def run_path(root: Path, entry: Entry) -> Path:
    """The run directory; a relative one starts in the directory in which the study was planned."""
    return root / entry.workdir


def state_of(entry: Entry, path: Path, needed: Sequence[State] = ()) -> State:
    lines = tail(path / "metrics.jsonl")
    step = int(lines[-1].get("step", 0)) if lines else 0
    hours = _device_hours(lines[-1]) if lines else None

    def made(state: str, note: str = "", eta_s: float | None = None) -> State:
        return State(entry, state, step, eta_s, hours, note)

    changed = _other_config(entry, path)
    if changed:
        return made(OTHER, changed)
    if (path / "DONE.json").exists():
        return made(DONE)
    holder = _holder(path / "LOCK")
    if holder is not None:
        host, pid, start = holder
        since = f"pid {pid} on {host}, for {duration(time.time() - start)}"
        if host != socket.gethostname():
            return made(ELSEWHERE, f"locked by {since}; this host cannot see whether it lives", _eta(entry, lines))
        if is_alive(pid, start):
            return made(RUNNING, since + _final_note(entry, path, step), _eta(entry, lines))
        if not (path / "FAILED.json").exists():
            return made(STALE, f"{since}, but that process is gone; the same command goes on")
    if (path / "FAILED.json").exists():
        failure = json_object(path / "FAILED.json", [])
        boundary, message = failure.get("boundary", failure.get("type", "?")), failure.get("message", "?")
        return made(FAILED, f"[{boundary}] {message}" + (f" To fix: {failure['fix']}" if failure.get("fix") else ""))
    if lines or (path / "config.json").exists():
        return made(STOPPED, "the same command goes on" + _final_note(entry, path, step))
    missing = [one.entry.cell for one in needed if one.state != DONE]
    return made(WAITING, f"needs {', '.join(missing)}") if missing else made(QUEUED)


def tail(path: Path) -> list[dict[str, Any]]:
    """The last whole lines of a JSON lines file, however long it is; a torn line is left out."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - _TAIL_BYTES)
            file.seek(start)
            data = file.read()
    except OSError:
        return []
    lines = data[: data.rfind(b"\n") + 1].splitlines()[1 if start else 0 :]
    found = []
    for line in lines[-_RECENT - 1 :]:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("step"), int):
            found.append(value)
    return found


def is_alive(pid: int, start: float) -> bool:
    """Whether the process that took a lock at ``start`` (seconds since 1970) still lives on this host."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    began = _began(pid)
    return began is None or began <= start + 2  # a later process has got the number since


def _began(pid: int) -> float | None:
    """When a process began, where /proc says it; None where it does not. A zombie never began."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        if fields[0] == "Z":
            return float("inf")
        return int(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, StopIteration, IndexError, ValueError):
        return None


def _holder(lock: Path) -> tuple[str, int, float] | None:
    """(host, pid, start) of the process that works in a run directory; None if nobody does."""
    try:
        text = lock.read_text(encoding="utf-8")
    except OSError:
        return None
    if not text.strip():
        return None
    try:
        value = json.loads(text)
        return str(value["host"]), int(value["pid"]), float(value["start"])
    except (ValueError, KeyError, TypeError):
        return "an unknown host", 0, lock.stat().st_mtime


def _other_config(entry: Entry, path: Path) -> str:
    """Why the directory's config is not the planned one; ``""`` if it is, or if nothing ran there."""
    file = path / "config.json"
    if not file.exists():
        return ""
    found = config_lib.fingerprint(json_object(file, []))
    return "" if found == entry.config_sha256 else f"config.json has hash {found[:8]}, not {entry.config_sha256[:8]}"


def _final_note(entry: Entry, path: Path, step: int) -> str:
    if entry.kind != "train" or step < entry.steps:
        return ""
    return f"; final evaluation, {len(list(path.glob('final_eval/seed_*.jsonl')))} seeds played"


def _eta(entry: Entry, lines: Sequence[dict[str, Any]]) -> float | None:
    recent = [line["time/step_s"] for line in lines[-_RECENT:] if line["step"] > 0 and "time/step_s" in line]
    return statistics.fmean(recent) * (entry.steps - lines[-1]["step"]) if recent else None


def _device_hours(line: dict[str, Any]) -> float | None:
    parts = [line.get(f"cost/{part}_gpu_h") for part in ("net", "val", "save")]
    return sum(part for part in parts if part is not None) if any(part is not None for part in parts) else None


def duration(seconds: float | None) -> str:
    return "-" if seconds is None else str(datetime.timedelta(seconds=max(0, round(seconds))))


def show(manifest: Manifest, found: Sequence[State], console: Console) -> None:
    """Prints a table, what is to be said about single runs, and totals."""
    table = Table(title=f"study {manifest.study}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name, width in (("#", 3), ("run", 0), ("state", 10), ("updates", 7), ("time left", 9), ("device-h", 8)):
        left = name in ("run", "state")
        table.add_column(name, min_width=width or None, overflow="fold", justify="left" if left else "right")
    for one in found:
        style = _STYLES.get(one.state, "")
        table.add_row(
            str(one.entry.index),
            one.entry.cell,
            f"[{style}]{one.state}[/]" if style else one.state,
            f"{one.step}/{one.entry.steps}",
            duration(one.eta_s),
            "-" if one.device_hours is None else f"{one.device_hours:.2f}",
        )
    console.print(table)
    for one in found:
        if one.note and one.state != WAITING:
            console.print(f"#{one.entry.index} {one.entry.cell}: {one.note}", highlight=False, markup=False)
    counts = Counter(one.state for one in found)
    spent = sum(one.device_hours or 0.0 for one in found)
    text = f"{len(found)} runs: " + ", ".join(f"{count} {state}" for state, count in counts.most_common())
    console.print(f"{text}; {spent:,.2f} device-hours so far{_expected(found)}", highlight=False)


def _expected(found: Sequence[State]) -> str:
    """What is still to come, of the runs whose cost is known."""
    open_runs = [one for one in found if one.state != DONE and one.entry.kind == "train"]
    known = [one for one in open_runs if one.entry.cost.gpu_hours is not None]
    if not known:
        return ""
    left = sum(max(0.0, (one.entry.cost.gpu_hours or 0) - (one.device_hours or 0)) for one in known)
    return f", about {left:,.1f} to come ({len(known)} of {len(open_runs)} open runs can be estimated)"
