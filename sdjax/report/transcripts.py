"""Selects saved episodes for the transcript viewer and shortens their numbers, within a size fit for a browser.

The page shows this data as text only; nothing here is markup.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sdjax.report.records import Run

REPORT_BYTES = 10_000_000  # raw JSON over all runs; about a tenth of it after compression
_STREAMS = ("logp_old", "logp_teacher", "weight", "advantage")
_TEXTS = ("prompt", "privileged", "action", "observation")


def collect(runs: Sequence[Run], *, limit_bytes: int = REPORT_BYTES) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns viewer records and warnings.

    Each run gets an equal share of ``limit_bytes``. Inside a run the last saved step comes first, then the first one,
    then the others backwards, so that a cut keeps both ends of the training.

    Returns:
      One record per run with transcripts, {"run", "setting", "omitted", "steps": [{"step", "weight_name", "episodes"}]}
      with episodes as in rollouts/step_*.json with rounded numbers; warnings about files that could not be used.
    """
    records, warnings = [], []
    with_files = [run for run in runs if run.rollout_files]
    for run in with_files:
        record, found = _run_record(run, limit_bytes // len(with_files))
        warnings += found
        if record["steps"]:
            records.append(record)
    return records, warnings


def _run_record(run: Run, budget: int) -> tuple[dict[str, Any], list[str]]:
    steps, warnings, omitted = [], [], 0
    files = list(run.rollout_files)
    for file in [files[-1], *files[:1], *reversed(files[1:-1])][: len(files)]:
        try:
            saved = json.loads(file.read_bytes())
            episodes = [_episode(item) for item in saved["episodes"]]
            head = {"step": int(saved["step"]), "weight_name": str(saved.get("weight_name") or "weight")}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            warnings.append(f"{run.label}: {file.name} is not a readable transcript file ({error!r}).")
            continue
        kept = []
        for episode in episodes:
            size = len(json.dumps(episode, ensure_ascii=False))
            if size > budget:
                omitted += 1
                continue
            budget -= size
            kept.append(episode)
        if kept:
            steps.append({**head, "episodes": kept})
    record = {"run": run.label, "setting": run.setting_name, "omitted": omitted}
    return {**record, "steps": sorted(steps, key=lambda item: item["step"])}, warnings


def _episode(saved: Mapping[str, Any]) -> dict[str, Any]:
    episode: dict[str, Any] = {key: str(saved.get(key, "")) for key in ("task", "family", "status")}
    episode["return"] = _round(saved.get("return"))
    episode["group"], episode["trajectory"] = saved.get("group"), saved.get("trajectory")
    return {**episode, "turns": [_turn(turn) for turn in saved["turns"]]}


def _turn(saved: Mapping[str, Any]) -> dict[str, Any]:
    turn: dict[str, Any] = {key: str(saved.get(key) or "") for key in _TEXTS}
    turn["valid"] = bool(saved.get("valid", True))
    turn["tokens"] = [str(token) for token in saved["tokens"]]
    for key in _STREAMS:
        values = saved.get(key)
        if values is not None and len(values) != len(turn["tokens"]):
            # Colours on the wrong tokens would mislead, so a file with such a turn is reported, not drawn.
            raise ValueError(f"{len(values)} values of {key} for {len(turn['tokens'])} tokens")
        turn[key] = None if values is None else [_round(value) for value in values]
    return turn


def _round(value: Any) -> float | None:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return round(float(value), 4)
