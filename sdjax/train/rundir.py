"""The run directory: one run, one directory, one living process.

Opening it takes the lock, checks that the config is the one the directory was started with, and cuts every record that
lies after the checkpoint from which the run goes on.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from sdjax import config as config_lib
from sdjax import jsonl
from sdjax.errors import RunDirError, SdjaxError
from sdjax.interrupt import Interrupted
from sdjax.train import distributed

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "chex", "transformers", "tokenizers", "numpy")


# Files by which a run knows how far it is.
_PROGRESS = ("*.json", "*.jsonl", "teacher_prompt_*.txt", "final_eval/*.jsonl")
_MEETING_S = 600.0


class Locked(RunDirError):
    """Another living process works in this directory."""


class RunDir:
    """Paths and small files of one run. Use as a context manager: the lock lives as long as the block."""

    def __init__(self, path: Path | str, *, checkpoints: Path | None = None):
        self.path = Path(path)
        self._checkpoints = checkpoints or self.path / "checkpoints"
        self._lock = None

    def __enter__(self) -> "RunDir":
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "LOCK").open("a+")
        except OSError as error:
            raise RunDirError(f"cannot write to {self.path}: {error}.", "choose a writable --workdir.") from error
        try:
            # The kernel drops this lock with the process, so a crash never leaves a directory locked.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "an unknown process"
            self._lock.close()
            self._lock = None
            raise Locked(
                f"{self.path} is in use by {holder}.", "wait for that process, stop it, or choose another --workdir."
            ) from error
        self._lock.truncate(0)
        self._lock.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "start": time.time()}))
        self._lock.flush()
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):  # a full disk must not hide the error that ended the run
                self._lock.truncate(0)
            self._lock.close()
            self._lock = None

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self._checkpoints.absolute()

    @property
    def done(self) -> Path:
        return self.path / "DONE.json"

    def validation(self, step: int, kind: str = "") -> Path:
        """``kind``: a further validation beside the usual one."""
        return self.path / (f"val_{kind}" if kind else "val") / f"step_{step:06d}.jsonl"

    def final(self, seed: int) -> Path:
        return self.path / "final_eval" / f"seed_{seed}.jsonl"

    def transcripts(self, step: int) -> Path:
        return self.path / "rollouts" / f"step_{step:06d}.json"

    def batch(self, step: int) -> Path:
        return self.path / "rollouts" / f"batch_{step:06d}.npz"

    def write_config(self, plain: dict[str, Any]) -> None:
        """Stores the resolved config, or refuses if the directory was started with another one."""
        path = self.path / "config.json"
        if not path.exists():
            write_json(path, plain)
            return
        changed = config_lib.difference(json.loads(path.read_text()), plain)
        if changed:
            listing = "\n  ".join(changed)
            raise RunDirError(
                f"{self.path} was started with another config:\n  {listing}\n",
                "use another --workdir for the new config, or repeat the old one.",
            )

    def new_attempt(self) -> tuple[int, Path]:
        """Counts starts: returns the attempt number and its log folder, and points ``logs/latest`` at it."""
        logs = self.path / "logs"
        logs.mkdir(exist_ok=True)
        number = 1 + max((int(p.name.split("_")[1]) for p in logs.glob("attempt_*")), default=0)
        folder = logs / f"attempt_{number:03d}"
        folder.mkdir()
        latest = logs / "latest"
        latest.unlink(missing_ok=True)
        latest.symlink_to(folder.name)
        return number, folder

    def trim(self, step: int) -> None:
        """Drops what was written after ``step``: these updates are done again.

        Lost time stays in the ledger as ``lost``.
        """
        for path in (self.metrics, self.ledger):
            jsonl.repair(path)
        records = jsonl.read(self.metrics)
        if any(r["step"] > step for r in records):
            jsonl.rewrite(self.metrics, [r for r in records if r["step"] <= step])
        lines = jsonl.read(self.ledger)
        if any(r["step"] > step and r["phase"] != "lost" for r in lines):
            jsonl.rewrite(
                self.ledger,
                [
                    r if r["step"] <= step or r["phase"] == "lost" else {**r, "phase": "lost", "lost_phase": r["phase"]}
                    for r in lines
                ],
            )
        by_step = ("val/step_*.jsonl", "rollouts/step_*.json", "rollouts/batch_*.npz")
        for path in (path for pattern in by_step for path in self.path.glob(pattern)):
            if int(path.stem.split("_")[1]) > step:
                path.unlink()

    def fail(self, error: BaseException) -> None:
        record = {"message": str(error), "type": type(error).__name__, "time": time.time()}
        if isinstance(error, SdjaxError):
            record |= {"boundary": error.boundary, "message": error.found, "fix": error.fix}
        with contextlib.suppress(OSError):  # a full disk must not hide the error that ended the run
            write_json(self.path / "FAILED.json", record)

    @contextlib.contextmanager
    def recording_failure(self) -> Iterator[None]:
        """What fails inside the block ends up in FAILED.json; an interruption is no failure."""
        try:
            yield
        except Interrupted:
            raise
        except SdjaxError as error:
            self.fail(error)
            raise

    def clear_failure(self) -> None:
        (self.path / "FAILED.json").unlink(missing_ok=True)


@contextlib.contextmanager
def open_run(path: Path) -> Iterator[RunDir]:
    """The run directory of this process.

    In a run over several processes it is that of process 0. The others write all but checkpoints, which are common,
    into a temporary directory that begins with what tells a run how far it is.

    Raises:
      RunDirError: as ``RunDir``. ProcessesError: the other processes do not come, or this one waits for process 0 in
        vain, which may have found the directory locked.
    """
    if not distributed.several():
        with RunDir(path) as directory:
            yield directory
        return
    if distributed.is_first():
        with RunDir(path) as directory:
            distributed.barrier("the run directory is open", timeout_s=_MEETING_S)
            distributed.barrier("the run directory was read", timeout_s=_MEETING_S)
            yield directory
        return
    distributed.barrier("the run directory is open", timeout_s=_MEETING_S)
    with tempfile.TemporaryDirectory(prefix="sdjax-process-") as own:
        for source in (source for pattern in _PROGRESS for source in path.glob(pattern)):
            copy = Path(own) / source.relative_to(path)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, copy)
        distributed.barrier("the run directory was read", timeout_s=_MEETING_S)
        with RunDir(own, checkpoints=path / "checkpoints") as directory:
            yield directory


def write_json(path: Path, value: Any) -> None:
    """Writes atomically: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_provenance(path: Path) -> dict[str, Any]:
    """What ``provenance.json`` of a run directory says; empty if it is missing or damaged."""
    try:
        value = json.loads((path / "provenance.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def provenance(plain_config: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Where a number comes from: code, packages, host, devices, data."""
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {
        "config_sha256": config_lib.fingerprint(plain_config),
        **_git_state(),
        "python": platform.python_version(),
        "packages": versions,
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "devices": [d.device_kind for d in jax.devices()],
        "platform": jax.default_backend(),
        **extra,
    }


def _git_state() -> dict[str, Any]:
    root = Path(__file__).resolve().parents[2]
    if shutil.which("git") is None or not (root / ".git").exists():
        return {"git_commit": "not a git checkout"}

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True).stdout.strip()

    return {"git_commit": git("rev-parse", "HEAD"), "git_dirty": bool(git("status", "--porcelain"))}
