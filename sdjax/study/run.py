"""Runs the cells of a study on this machine, one after another or several at once.

Every cell is the manifest's own command in a process (and session) of its own, so a cell that crashes takes nothing
with it, and the study goes on where it stopped when the same command is given again.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from sdjax.errors import CTRL_C_EXIT_CODE, INTERRUPTED_EXIT_CODE, LOCKED_EXIT_CODE, ConfigError
from sdjax.report.load import json_object
from sdjax.study import needs, status
from sdjax.study.manifest import Entry, Manifest
from sdjax.study.resolve import config_of

DONE, ALREADY, LOCKED, FAILED = "done", "was done", "locked", "failed"
UNABLE, HELD, INTERRUPTED, NOT_STARTED = "not runnable", "held back", "interrupted", "not started"
_BAD = (FAILED, UNABLE, HELD, INTERRUPTED)
_POLL_S, _REFRESH_S, _LOG_BYTES = 0.1, 1.0, 4000


@dataclass(frozen=True)
class Result:
    """What became of one cell in this call."""

    entry: Entry
    outcome: str
    seconds: float = 0.0
    note: str = ""


@dataclass
class _Child:
    entry: Entry
    process: subprocess.Popen
    log: IO[bytes]
    slot: int
    bar: TaskID
    start: float = field(default_factory=time.time)
    told: bool = False  # that it should end


class Runner:
    """Runs ``entries`` of a manifest, and what they need, ``parallel`` at a time.

    Raises:
      ConfigError: the directory of the study is gone, or ``parallel`` does not fit the accelerators.
    """

    def __init__(self, manifest: Manifest, entries: Sequence[Entry], console: Console, *, parallel: int = 1):
        self.manifest, self.console = manifest, console
        self.root = Path(manifest.root)
        if not self.root.is_dir():
            raise ConfigError(
                f"the study was planned in {self.root}, which is not here.", "run --study=plan on this machine."
            )
        wanted = {name for entry in entries for name in (entry.name, *entry.needs)}
        self.open = [entry for entry in manifest.entries if entry.name in wanted]
        self.slots = _slots(parallel, self.open)
        self.results: dict[str, Result] = {}
        self._children: list[_Child] = []
        self._signal, self._signals, self._said = 0, 0, False
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._total = self._bars.add_task(f"[bold]{manifest.study}", total=len(self.open), note="")

    def run(self) -> int:
        """Runs everything; returns the exit code: 0, 1 if a cell failed or could not start, 128 + signal if stopped."""
        with _handling(self._stop), self._bars:
            try:
                while self.open or self._children:
                    self._pass_on()
                    self._collect()
                    self._start_ready()
                    time.sleep(_POLL_S)
            finally:
                for child in self._children:  # only after an error of this class itself
                    _kill(child.process)
        show(list(self.results.values()), self.console)
        if self._signal:
            self.console.print("Stopped; the same command goes on.")
            return 128 + self._signal
        return int(any(result.outcome in _BAD for result in self.results.values()))

    def _stop(self, number: int) -> None:
        """The signal handler; the loop does the rest, so that no child is between two states."""
        self._signal, self._signals = number, self._signals + 1

    def _pass_on(self) -> None:
        """First signal: children may save and end. Second: they are killed."""
        if self._signals and not self._said:
            name, count = signal.Signals(self._signal).name, len(self._children)
            self.console.print(f"{name}: stopping {count} runs, which may save first; once more kills them.")
            self._said = True
        for child in self._children:
            if self._signals > 1:
                _kill(child.process)
            elif self._signals and not child.told:
                child.process.terminate()
                child.told = True

    def _start_ready(self) -> None:
        free = set(range(len(self.slots))) - {child.slot for child in self._children}
        for entry in list(self.open):
            if self._signal:
                self.results |= {entry.name: Result(entry, NOT_STARTED) for entry in self.open}
                self.open.clear()
                return
            if not free:
                return
            needed = [self.results.get(name) for name in entry.needs]
            if any(result is None for result in needed):
                continue
            self.open.remove(entry)
            result = self._refuse(entry, [result for result in needed if result is not None])
            if result is not None:
                self._finished(result)
                continue
            self._children.append(self._start(entry, free.pop()))

    def _refuse(self, entry: Entry, needed: Sequence[Result]) -> Result | None:
        """Why a cell is not started; None if it is."""
        state = status.state_of(entry, self._path(entry))
        if state.state == status.DONE:
            return Result(entry, ALREADY)
        for result in needed:
            if result.outcome not in (DONE, ALREADY):
                outcome = LOCKED if result.outcome == LOCKED else HELD
                return Result(entry, outcome, note=f"needs {result.entry.cell}, which is {result.outcome}")
        if state.state == status.RUNNING:
            return Result(entry, LOCKED, note=state.note)
        if state.state == status.OTHER:
            return Result(entry, FAILED, note=f"{state.note}; move {entry.workdir} away, or run --study=plan again")
        with contextlib.chdir(self.root):
            arguments = [argument for argument in entry.command if argument.startswith("--config")]
            try:
                config = config_of(arguments, f"cell {entry.cell}")
            except ConfigError as error:
                return Result(entry, FAILED, note=str(error))
        from sdjax.config import fingerprint, resolved

        plain = resolved(config)
        if fingerprint(plain) != entry.config_sha256:
            return Result(
                entry,
                FAILED,
                note="its config file, or sdjax itself, has changed since the plan; run --study=plan again",
            )
        missing = needs.missing(plain, self.root, model_is_made=bool(entry.needs))
        return Result(entry, UNABLE, note=missing) if missing else None

    def _start(self, entry: Entry, slot: int) -> _Child:
        logs = self._path(entry) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        log = (logs / "study.log").open("ab")
        log.write(f"\n$ {' '.join(entry.command)}\n".encode())
        log.flush()
        environment = dict(os.environ)
        if self.slots[slot]:
            environment["CUDA_VISIBLE_DEVICES"] = self.slots[slot]
        process = subprocess.Popen(
            [sys.executable if entry.command[0] == "python" else entry.command[0], *entry.command[1:]],
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C of the terminal reaches the study alone, which passes it on
        )
        bar = self._bars.add_task(f"  {entry.cell}", total=entry.steps, note="")
        if not self.console.is_terminal:
            self.console.print(f"{entry.cell}: started ({entry.workdir}/logs/study.log)", highlight=False)
        return _Child(entry, process, log, slot, bar)

    def _collect(self) -> None:
        for child in list(self._children):
            code = child.process.poll()
            if code is None:
                self._refresh(child)
                continue
            self._children.remove(child)
            _kill(child.process)  # what it left behind: workers of an environment
            child.log.close()
            self._bars.remove_task(child.bar)
            outcome, note = self._outcome(child, code)
            self._finished(Result(child.entry, outcome, time.time() - child.start, note))

    def _outcome(self, child: _Child, code: int) -> tuple[str, str]:
        path = self._path(child.entry)
        if code == 0 and (path / "DONE.json").exists():
            return DONE, ""
        if self._signal or code in (INTERRUPTED_EXIT_CODE, CTRL_C_EXIT_CODE):
            return INTERRUPTED, "the same command goes on"
        if code == LOCKED_EXIT_CODE:
            return LOCKED, "another process works in its directory"
        failure = json_object(path / "FAILED.json", [])
        if failure and failure.get("time", 0) >= child.start:  # not that of an earlier start
            boundary, message = failure.get("boundary", failure.get("type", "?")), failure.get("message", "?")
            return FAILED, f"[{boundary}] {message}" + (f" To fix: {failure['fix']}" if failure.get("fix") else "")
        reason = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return FAILED, f"{reason}; {_last_line(path / 'logs' / 'study.log')}"

    def _finished(self, result: Result) -> None:
        self.results[result.entry.name] = result
        self._bars.advance(self._total)
        took = f" after {status.duration(result.seconds)}" if result.seconds else ""
        text = f"{result.entry.cell}: {result.outcome}{took}" + (f" ({result.note})" if result.note else "")
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _refresh(self, child: _Child) -> None:
        if not self.console.is_terminal or time.monotonic() % _REFRESH_S > _POLL_S:
            return
        state = status.state_of(child.entry, self._path(child.entry))
        left = f"{status.duration(state.eta_s)} left" if state.eta_s else ""
        self._bars.update(child.bar, completed=state.step, note=left)

    def _path(self, entry: Entry) -> Path:
        return status.run_path(self.root, entry)


@contextlib.contextmanager
def _handling(handler) -> Iterator[None]:
    """SIGINT and SIGTERM call ``handler`` inside the block."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: handler(number)) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _kill(process: subprocess.Popen) -> None:
    """Ends the whole session of a child."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _slots(parallel: int, entries: Sequence[Entry]) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each cell that runs at the same time, ``""`` for all devices."""
    if parallel < 1:
        raise ConfigError(f"--parallel={parallel}.", "use 1 or more.")
    if parallel == 1:
        return [""]
    devices = _accelerators()
    if not devices:
        return [""] * parallel
    each = len(devices) // parallel
    largest = max(entries, key=lambda entry: entry.devices)
    if largest.devices > each:
        raise ConfigError(
            f"--parallel={parallel} leaves {each} of {len(devices)} accelerators to a cell, and {largest.cell} wants "
            f"{largest.devices}.",
            f"use --parallel={max(1, len(devices) // largest.devices)} or less.",
        )
    return [",".join(devices[slot * each : (slot + 1) * each]) for slot in range(parallel)]


def _accelerators() -> list[str]:
    """The NVIDIA devices that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [one for one in visible.split(",") if one.strip()]
    if shutil.which("nvidia-smi") is None:
        return []
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return [str(i) for i in range(sum(line.startswith("GPU ") for line in found.stdout.splitlines()))]


def _last_line(log: Path) -> str:
    lines = log.read_bytes()[-_LOG_BYTES:].decode(errors="replace").strip().splitlines()
    return f"{lines[-1].strip()} (more in {log})" if lines else f"nothing in {log}"


def show(results: Sequence[Result], console: Console) -> None:
    """Prints which cells were not simply done, and the totals. Their reasons were printed when they ended."""
    for outcome in (*_BAD, LOCKED):
        names = [result.entry.cell for result in results if result.outcome == outcome]
        if names:
            console.print(f"{outcome}: {', '.join(names)}", highlight=False)
    counts = Counter(result.outcome for result in results)
    seconds = sum(result.seconds for result in results)
    text = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    console.print(f"{len(results)} runs: {text}; {status.duration(seconds)} of run time", highlight=False)
