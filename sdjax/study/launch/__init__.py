"""Ready-to-submit files for a study: a Slurm array, SkyPilot managed jobs or Kubernetes JobSets.

sdjax schedules nothing itself. Every file runs commands of the manifest, which go on where they stopped, and tells its
scheduler what the exit codes mean: start interrupted runs again, leave locked ones alone, do not repeat failures.
"""

import dataclasses
import difflib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sdjax.errors import ConfigError, DataError
from sdjax.study.launch import jobset, sky, slurm
from sdjax.study.launch.batch import Batch
from sdjax.study.manifest import Entry, Manifest

FOLDER = "launch"
_SPARE_S = 20  # between the end of a run's own grace and the scheduler's


@dataclasses.dataclass(frozen=True)
class _Launcher:
    options: type
    files: Callable[[Batch, Any], dict[str, str]]


LAUNCHERS = {
    "slurm": _Launcher(slurm.Options, slurm.files),
    "sky": _Launcher(sky.Options, sky.files),
    "jobset": _Launcher(jobset.Options, jobset.files),
}


def write(
    manifest: Manifest, entries: Sequence[Entry], workdir: Path, launcher: str, options: Sequence[str], console: Console
) -> Path:
    """Writes ``workdir/launch/<launcher>/`` anew and returns it; the same manifest and options give the same bytes.

    Args:
      entries: those of the manifest that shall run.
      workdir: directory of the study.
      launcher: a key of LAUNCHERS.
      options: ``key=value`` texts, fields of the launcher's Options.

    Raises:
      ConfigError: an unknown launcher or option, nothing to run, or what the scheduler would refuse.
    """
    chosen = LAUNCHERS.get(launcher)
    if chosen is None:
        raise ConfigError(f"--launcher={launcher!r}.", f"use one of {', '.join(LAUNCHERS)}.")
    if not entries:
        raise ConfigError("there are no runs to launch.", "plan a study that has some, or choose other --cells.")
    batch = Batch(manifest, tuple(entries), workdir, _grace_s(entries, workdir) + _SPARE_S)
    files = chosen.files(batch, _options(chosen.options, options, launcher))
    folder = workdir / FOLDER / launcher
    if folder.exists():
        for path in folder.iterdir():
            if path.is_file():  # logs of earlier submissions stay
                path.unlink()
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if text.startswith("#!"):
            path.chmod(0o755)
    console.print(
        f"{manifest.study}: {len(entries)} runs in {folder}; start them with {folder / 'submit'}", highlight=False
    )
    return folder


def _options(cls: type, texts: Sequence[str], launcher: str) -> Any:
    """Builds ``cls`` from ``key=value`` texts."""
    known = {field.name: field.type for field in dataclasses.fields(cls)}
    found: dict[str, Any] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if key not in known or not separator:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}=...?" if near else f"{launcher} knows {', '.join(known)}."
            raise ConfigError(f"--options: {text!r} is no option of {launcher}.", hint)
        if known[key] is int:
            if not value.isdecimal():
                raise ConfigError(f"--options: {text!r} is no number.", f"write {key}=8, for example.")
            found[key] = int(value)
        else:
            found[key] = value
    return cls(**found)


def _grace_s(entries: Sequence[Entry], workdir: Path) -> int:
    """The longest ``save.grace_s`` of all runs."""
    longest = 0.0
    for entry in entries:
        path = workdir / entry.config_file
        try:
            longest = max(longest, json.loads(path.read_text(encoding="utf-8"))["save"]["grace_s"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} cannot be read ({error}).", "run --study=plan again.") from error
    return int(longest)
