"""Reads run directories into records; a partial run loads with what is there.

What a reader must know about damaged or doubtful input becomes a line in ``Run.warnings``, which the report prints at
its top. Only a path that is no run directory at all is an error.
"""

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdjax import jsonl
from sdjax.errors import DataError, RunDirError
from sdjax.report import checks, stats
from sdjax.report.records import LOST, NET_PHASES, SCORE_ENVS, Episode, Metrics, Phase, Run, Validation, net_seconds

_CONTENT = ("config.json", "provenance.json", "metrics.jsonl", "ledger.jsonl", "val", "final_eval", "rollouts")


def load_run(path: Path | str) -> Run:
    """Reads one run directory.

    Raises:
      RunDirError: ``path`` is not a directory or holds none of the files of a run.
    """
    path = Path(path)
    if not path.is_dir() or not any((path / name).exists() for name in _CONTENT):
        raise RunDirError(f"{path} is not a run directory.", "give directories that hold a config.json.")
    warnings: list[str] = []
    config = _json_object(path / "config.json", warnings)
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
        model=_model_name(config),
        seed=_nested(config, "seed"),
        state=state,
        failure=failure,
        config=config,
        provenance=_json_object(path / "provenance.json", warnings),
        steps=steps,
        metrics=metrics,
        attempts=max([attempts, *(phase.attempt for phase in ledger)]),
        validations=validations,
        final=final,
        sampling={"validation": validation_sampling, "final": final_sampling},
        ledger=ledger,
        rollout_files=tuple(_numbered(path / "rollouts", r"step_(\d+)\.json").values()),
        warnings=tuple(warnings),
    )


def find_runs(paths: Sequence[Path | str]) -> list[Path]:
    """Returns every run directory (a folder with config.json) at or below ``paths``, in order of their names."""
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        for config in sorted([*path.glob("config.json"), *path.glob("*/config.json"), *path.glob("*/*/config.json")]):
            if (config.parent / "metrics.jsonl").exists() or (config.parent / "LOCK").exists():
                found.setdefault(config.parent)
    return list(found)


def load_runs(paths: Sequence[Path | str]) -> list[Run]:
    """Reads several runs, each directory once, labelled uniquely within their setting, GRPO first.

    Raises:
      RunDirError: no path was given, or one is no run directory.
    """
    unique: dict[Path, Path] = {}
    for path in paths:
        unique.setdefault(Path(path).resolve(), Path(path))
    if not unique:
        raise RunDirError("no run directory was given.", "pass at least one run directory.")
    runs = [load_run(path) for path in unique.values()]
    labelled = [dataclasses.replace(run, label=_label(run, runs)) for run in runs]
    order = {setting: number for number, setting in enumerate(dict.fromkeys(run.setting for run in labelled))}
    return sorted(labelled, key=lambda run: (order[run.setting], run.method != "grpo"))


def _label(run: Run, runs: Sequence[Run]) -> str:
    """The method; with the training seed, else the directory, else a number, if others of the setting share it."""
    same = [other for other in runs if other.setting == run.setting and other.method == run.method]
    if len(same) == 1:
        return run.method_name
    for text in (lambda one: f"seed {one.seed}", lambda one: f"({one.path.name})"):
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
        if not failed and not (_is_number(value) or isinstance(value, bool)):
            warnings.append(f"{path.name}: an episode without a numeric {key!r} was counted as failed.")
            failed = True
        percent = math.nan if failed or value is None else 100.0 * float(value)
        panel = str(record.get("panel_sha") or checks.NO_HASH)
        episodes.append(Episode(str(record.get("task")), percent, failed, panel, rollout_seed))
        sampling = record.get("sampling") or {}
    repeats = sum(count - 1 for count in Counter(episode.task for episode in episodes).values())
    if repeats:
        warnings.append(f"{path.name}: {repeats} tasks appear more than once in one evaluation.")
    outside = sum(not 0 <= episode.value <= 100 for episode in episodes if not episode.failed)
    if outside:
        warnings.append(f"{path.name}: {outside} episodes have a score outside 0..1.")
    return episodes, sampling if isinstance(sampling, dict) else {}


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
    latest: dict[int, int] = {}
    for line in good:
        if line.get("step") is not None:
            latest[line["step"]] = max(latest.get(line["step"], 0), line.get("attempt") or 1)
    phases = []
    for line in good:
        phase, step, attempt = line["phase"], line.get("step"), line.get("attempt") or 1
        # A training phase that a later attempt ran again for the same step was thrown away: it cost time, not net time.
        superseded = phase in NET_PHASES and step is not None and attempt < latest[step]
        start, end, devices = line.get("start"), line.get("end"), line.get("devices") or 1
        booked = LOST if superseded else phase
        phases.append(Phase(phase, float(line["seconds"]), step, attempt, devices, start, end, booked))
    return tuple(phases)


def _state(path: Path, warnings: list[str], *, started: bool) -> tuple[str, Mapping[str, Any]]:
    if (path / "DONE.json").exists():
        return "done", {}
    if (path / "FAILED.json").exists():
        return "failed", _json_object(path / "FAILED.json", warnings)
    return ("unfinished" if started else "not run"), {}


def _lines(path: Path, warnings: list[str]) -> list[dict[str, Any]]:
    try:
        records = jsonl.read(path)
    except DataError as error:
        warnings.append(f"{path.name} is left out: {error.found.removeprefix(f'{path}: ')}")
        return []
    if path.exists() and sum(bool(line.strip()) for line in path.read_bytes().split(b"\n")) > len(records):
        warnings.append(f"{path.name}: the last line is torn and was left out.")
    return records


def _json_object(path: Path, warnings: list[str]) -> dict[str, Any]:
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


def _model_name(config: Mapping[str, Any]) -> str:
    path = _nested(config, "model", "path") or _nested(config, "model", "name")
    return Path(str(path)).name if path else "unknown"
