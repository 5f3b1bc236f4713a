"""Reads run directories into records; a partial run loads with what is there.

What a reader must know about damaged or doubtful input becomes a line in ``Run.warnings``, which the report prints at
its top. Only a path that is no run directory at all is an error.
"""

import dataclasses
import hashlib
import json
import math
import multiprocessing
import os
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from sdjax import jsonl
from sdjax.errors import DataError, RunDirError
from sdjax.report import checks, logs, stats
from sdjax.report.records import (
    LOST,
    NET_PHASES,
    SCORE_ENVS,
    Episode,
    Evaluation,
    Metrics,
    Phase,
    Run,
    Validation,
    method_order,
    net_seconds,
    setting_order,
)

_CONTENT = ("config.json", "provenance.json", "metrics.jsonl", "ledger.jsonl", "val", "final_eval", "rollouts")
_RUNS_PER_WORKER = 16  # fewer are read before a second process has started
_LOOKS = {"val": "validation", "val_greedy": "greedy validation", "val_sampled": "sampled validation"}


def load_run(path: Path | str) -> Run:
    """Reads one run directory.

    Raises:
      RunDirError: ``path`` is not a directory or holds none of the files of a run.
    """
    path = Path(path)
    if not path.is_dir() or not any((path / name).exists() for name in _CONTENT):
        raise RunDirError(f"{path} is not a run directory.", "give directories that hold a config.json.")
    warnings: list[str] = []
    config = json_object(path / "config.json", warnings)
    if not (path / "config.json").exists():
        warnings.append("config.json is missing: method, environment and model are unknown.")
    env = str(_nested(config, "env", "name") or "unknown")
    steps, metrics, attempts = _metrics(path / "metrics.jsonl", warnings)
    validations, validation_sampling = _validations(path / "val", env, metrics, warnings)
    final, final_sampling = _final(path / "final_eval", env, warnings)
    ledger = _ledger(path / "ledger.jsonl", warnings)
    warnings += checks.metric_warnings(steps, metrics)
    warnings += checks.ledger_warnings(ledger, metrics)
    warnings += checks.panel_warnings(validations, final)
    state, failure = _state(path, warnings, started=bool(steps or validations or ledger))
    return Run(
        path=path,
        method=str(_nested(config, "method", "name") or "unknown"),
        env=env,
        model=model_name(config),
        seed=_nested(config, "seed"),
        state=state,
        failure=failure,
        config=config,
        provenance=json_object(path / "provenance.json", warnings),
        steps=steps,
        metrics=metrics,
        attempts=max([attempts, *(phase.attempt for phase in ledger)]),
        validations=validations,
        final=final,
        sampling={"validation": validation_sampling, "final": final_sampling},
        ledger=ledger,
        rollout_files=tuple(_numbered(path / "rollouts", r"step_(\d+)\.json").values()),
        warnings=tuple(warnings),
        looks=_looks(path, env, validations[-1].step) if validations else (),
        name=path.name,
        fingerprint=_fingerprint(path),
    )


def find_runs(paths: Sequence[Path | str]) -> list[Path]:
    """Returns what can be reported at or below ``paths``, in order of their names.

    A run directory is a folder with a config.json that names a method and an environment (planned runs, which have
    nothing else yet, are "not run" in the report). Metrics logs of other trainers are found by their content, and only
    outside run directories; a file that is named itself is taken as it is.
    """
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if path.is_file():
            found.setdefault(path)
            continue
        configs = sorted([*path.glob("config.json"), *path.glob("*/config.json"), *path.glob("*/*/config.json")])
        directories = [config.parent for config in configs if _is_run(config)]
        found |= dict.fromkeys(directories)
        inside = set(directories)
        for file in sorted(file for pattern in ("*", "*/*") for file in path.glob(pattern)):
            if not inside & set(file.parents) and logs.is_log(file):
                found.setdefault(file)
    return list(found)


def _is_run(config: Path) -> bool:
    if (config.parent / "metrics.jsonl").exists() or (config.parent / "LOCK").exists():
        return True
    return _is_config(json_object(config, []))


def _is_config(content: Mapping[str, Any]) -> bool:
    """Whether it is a run's resolved config; a Hugging Face model directory has a config.json too."""
    return isinstance(content.get("method"), Mapping) and isinstance(content.get("env"), Mapping)


def load_runs(paths: Sequence[Path | str]) -> list[Run]:
    """Reads several runs and logs, each path once, labelled uniquely within their setting, GRPO first.

    A copy (same method, setting, seed and metrics under another path) is left out with a warning on the first one.

    Raises:
      RunDirError: no path was given, or one is neither a run directory nor a file.
      DataError: a file is no metrics log.
    """
    unique: dict[Path, Path] = {}
    for path in paths:
        unique.setdefault(Path(path).resolve(), Path(path))
    if not unique:
        raise RunDirError("no run directory was given.", "pass at least one run directory or metrics log.")
    runs = _without_copies([run for found in _load_all(list(unique.values())) for run in found])
    labelled = [dataclasses.replace(run, label=_label(run, runs)) for run in runs]
    return sorted(labelled, key=lambda run: (setting_order(run.setting), method_order(run.method)))


def _load_all(paths: Sequence[Path]) -> list[list[Run]]:
    """Reads each path; a whole study in several processes.

    They are forked, so that a script needs no guard around its main part; that is safe while JAX and its threads are
    not loaded, which they are not for reports.
    """
    workers = min(os.cpu_count() or 1, len(paths) // _RUNS_PER_WORKER)
    if workers < 2 or sys.platform != "linux" or "jax" in sys.modules:
        return [load_path(path) for path in paths]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        return list(pool.map(load_path, paths, chunksize=4))


def load_path(path: Path | str) -> list[Run]:
    """The run of a directory, or the runs of a metrics log (see `load_run`, `sdjax.report.logs.load_logs`).

    A resolved config alone is a run that is planned.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".json" and _is_config(json_object(path, [])):
        return [_planned(path)]
    return logs.load_logs(path) if path.is_file() else [load_run(path)]


def _planned(path: Path) -> Run:
    config = json_object(path, [])
    return Run(
        path=path,
        method=str(_nested(config, "method", "name") or "unknown"),
        env=str(_nested(config, "env", "name") or "unknown"),
        model=model_name(config),
        seed=_nested(config, "seed"),
        state="not run",
        failure={},
        config=config,
        provenance={},
        steps=(),
        metrics={},
        attempts=0,
        validations=(),
        final=(),
        sampling={"validation": {}, "final": {}},
        ledger=(),
        rollout_files=(),
        warnings=(),
        name=path.stem,
    )


def _without_copies(runs: Sequence[Run]) -> list[Run]:
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.copy_key or id(run), []).append(run)
    kept = []
    for first, *copies in groups.values():
        found = [f"{copy.path} is a copy of {first.path} (same metrics) and was left out." for copy in copies]
        kept.append(dataclasses.replace(first, warnings=(*first.warnings, *found)))
    return kept


def _label(run: Run, runs: Sequence[Run]) -> str:
    """The method; with the training seed, else the directory, else a number, if others of the setting share it."""
    same = [other for other in runs if other.setting == run.setting and other.method == run.method]
    if len(same) == 1:
        return run.method_name
    for text in (lambda one: f"seed {one.seed}", lambda one: f"({one.name})"):
        if len({text(one) for one in same}) == len(same):
            return f"{run.method_name} {text(run)}"
    return f"{run.method_name} #{same.index(run) + 1}"


def _metrics(path: Path, warnings: list[str]) -> tuple[tuple[int, ...], Metrics, int]:
    records = _lines(path, warnings)
    lines = [record for record in records if isinstance(record.get("step"), int)]
    if len(lines) < len(records):
        warnings.append(f"{path.name}: {len(records) - len(lines)} lines without an integer step were left out.")
    warnings += checks.nonfinite_warnings(lines)
    by_step = dict(sorted({line["step"]: line for line in lines}.items()))
    if len(by_step) < len(lines):
        repeated = len(lines) - len(by_step)
        warnings.append(f"{path.name}: {repeated} steps were run again after a restart; the last line of each counts.")
    metrics: dict[str, dict[int, float]] = {}
    for step, line in by_step.items():
        for key, value in line.items():
            # Text metrics (a panel hash) have no curve.
            if key not in ("step", "attempt") and _is_number(value):
                metrics.setdefault(key, {})[step] = float(value)
    attempts = [line["attempt"] for line in lines if isinstance(line.get("attempt"), int)]
    return tuple(by_step), metrics, max(attempts, default=1)


def _episodes(path: Path, env: str, warnings: list[str], rollout_seed: int = 0) -> tuple[list[Episode], dict[str, Any]]:
    """Episode lines, and the sampling parameters of the last one."""
    key = "score" if env in SCORE_ENVS else "success"
    episodes, sampling = [], {}
    for record in _lines(path, warnings):
        failed, value = record.get("status") == "error", record.get(key)
        if not failed and not (isinstance(value, int | float) and math.isfinite(value)):
            warnings.append(f"{path.name}: an episode without a numeric {key!r} was counted as failed.")
            failed = True
        percent = math.nan if failed else 100.0 * float(value)  # type: ignore[arg-type]
        panel, task = str(record.get("panel_sha") or checks.NO_HASH), str(record.get("task"))
        episodes.append(Episode(sys.intern(task), percent, failed, sys.intern(panel), rollout_seed))
        sampling = record.get("sampling") or {}
    repeats = len(episodes) - len({episode.task for episode in episodes})
    if repeats:
        warnings.append(f"{path.name}: {repeats} tasks appear more than once in one evaluation.")
    outside = sum(not 0 <= episode.value <= 100 for episode in episodes if not episode.failed)
    if outside:
        warnings.append(f"{path.name}: {outside} episodes have a score outside 0..1.")
    return episodes, sampling if isinstance(sampling, dict) else {}


def _looks(path: Path, env: str, step: int) -> tuple[Evaluation, ...]:
    """Every evaluation of the checkpoint after ``step`` updates; its warnings were given when the curves were read."""
    found = []
    for folder, name in _LOOKS.items():
        episodes, sampling = _episodes(path / folder / f"step_{step:06d}.jsonl", env, [])
        good = {episode.task: episode.value for episode in episodes if not episode.failed}
        if good:
            panels = frozenset(episode.panel for episode in episodes)
            found.append(Evaluation(name, step, sampling.get("temperature"), good, panels))
    return tuple(found)


def _fingerprint(path: Path) -> str:
    """Hash of the metrics and of which evaluations there are, empty if there are no metrics."""
    file = path / "metrics.jsonl"
    data = file.read_bytes() if file.exists() else b""
    if not data.strip():
        return ""
    sizes = [(str(one.relative_to(path)), one.stat().st_size) for one in sorted(path.glob("*/*.jsonl"))]
    return hashlib.sha256(data + repr(sizes).encode()).hexdigest()


def _validations(folder: Path, env: str, metrics: Metrics, warnings: list[str]):
    found, sampling = [], {}
    for step, file in _numbered(folder, r"step_(\d+)\.jsonl").items():
        episodes, used = _episodes(file, env, warnings)
        good = [episode.value for episode in episodes if not episode.failed]
        if not good:
            warnings.append(f"{file.name}: no scored episode; this validation is left out.")
            continue
        sampling = used
        found.append(
            Validation(
                step=step,
                value=sum(good) / len(good),
                se=stats.standard_error(good),
                episodes=len(episodes),
                failed=len(episodes) - len(good),
                panels=tuple(sorted({episode.panel for episode in episodes})),
                net_s=net_seconds(metrics, step),
            )
        )
    return tuple(found), sampling


def _final(folder: Path, env: str, warnings: list[str]):
    found, sampling = [], {}
    for seed, file in _numbered(folder, r"seed_(\d+)\.jsonl").items():
        episodes, used = _episodes(file, env, warnings, seed)
        if not episodes:
            warnings.append(f"final_eval/{file.name} is empty.")
            continue
        found += episodes
        sampling = used
    return tuple(found), sampling


def _ledger(path: Path, warnings: list[str]) -> tuple[Phase, ...]:
    lines = _lines(path, warnings)
    good = [line for line in lines if _is_number(line.get("seconds")) and isinstance(line.get("phase"), str)]
    if len(good) < len(lines):
        warnings.append(f"{path.name}: {len(lines) - len(good)} lines without phase or seconds were left out.")
    phases = []
    for line in good:
        step, start, end = (line.get(key) if _is_number(line.get(key)) else None for key in ("step", "start", "end"))
        attempt, devices = (line[key] if isinstance(line.get(key), int) else 1 for key in ("attempt", "devices"))
        # The trainer marks what it cut at a restart as "lost".
        booked = LOST if line["phase"] == "lost" else line["phase"]
        phases.append(Phase(line["phase"], float(line["seconds"]), step, attempt, devices, start, end, booked))
    latest: dict[Any, int] = {}
    for phase in phases:
        latest[phase.step] = max(latest.get(phase.step, 0), phase.attempt)
    # A training phase that a later attempt ran again for the same step was thrown away: it cost time, not net time.
    phases = [
        dataclasses.replace(one, booked=LOST)
        if one.phase in NET_PHASES and one.step is not None and one.attempt < latest[one.step]
        else one
        for one in phases
    ]
    return tuple(phases)


def _state(path: Path, warnings: list[str], *, started: bool) -> tuple[str, Mapping[str, Any]]:
    if (path / "DONE.json").exists():
        return "done", {}
    if (path / "FAILED.json").exists():
        return "failed", json_object(path / "FAILED.json", warnings)
    return ("unfinished" if started else "not run"), {}


def _lines(path: Path, warnings: list[str]) -> list[dict[str, Any]]:
    whole = _whole(path)
    if whole is not None:
        return whole
    try:
        records = jsonl.read(path)
    except DataError as error:
        warnings.append(f"{path.name} is left out: {error.found.removeprefix(f'{path}: ')}")
        return []
    if path.exists() and _is_torn(path):
        warnings.append(f"{path.name}: the last line is torn and was left out.")
    return records


def _whole(path: Path) -> list[dict[str, Any]] | None:
    """All lines in one parse, which halves the time over a study's millions of episodes; None if a line is unusual."""
    data = path.read_bytes() if path.exists() else b""
    if not data.endswith(b"\n"):
        return None
    try:
        records = json.loads(b"[" + data[:-1].replace(b"\n", b",") + b"]")
    except ValueError:
        return None
    good = len(records) == data.count(b"\n") and all(isinstance(record, dict) for record in records)
    return records if good else None


def _is_torn(path: Path) -> bool:
    """True if the last line has no end and is no JSON object, which `jsonl.read` leaves out."""
    data = path.read_bytes()
    last = data[data.rfind(b"\n") + 1 :]
    try:
        return bool(last.strip()) and not isinstance(json.loads(last), dict)
    except ValueError:
        return True


def json_object(path: Path, warnings: list[str]) -> dict[str, Any]:
    """The object in a JSON file, empty if there is none; what is wrong with it is added to ``warnings``."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        warnings.append(f"{path.name} is not valid JSON ({error}).")
        return {}
    if isinstance(value, dict):
        return value
    warnings.append(f"{path.name} is not a JSON object.")
    return {}


def _numbered(folder: Path, pattern: str) -> dict[int, Path]:
    """Files whose whole name matches ``pattern``, keyed and ordered by its number."""
    matches = [(re.fullmatch(pattern, file.name), file) for file in folder.glob("*")] if folder.is_dir() else []
    return dict(sorted((int(match[1]), file) for match, file in matches if match))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _nested(config: Mapping[str, Any], *keys: str) -> Any:
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def model_name(config: Mapping[str, Any]) -> str:
    """The model's name in a resolved config: its own, else the last part of its path."""
    name = _nested(config, "model", "name") or _nested(config, "model", "path")
    return Path(str(name)).name if name else "unknown"
