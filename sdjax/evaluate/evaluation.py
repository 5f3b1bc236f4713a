"""Validation on the fixed panel and the final evaluation: no privileged context, every task exactly once per seed."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from sdjax import jsonl
from sdjax.envs.base import Panel
from sdjax.errors import DataError
from sdjax.rollout.engine import SamplingParams
from sdjax.rollout.episodes import Assignment, Player, Trajectory, play_all


def evaluate(
    player: Player,
    panel: Panel,
    sampling: SamplingParams,
    *,
    purpose: str,
    seed_index: int = 0,
    on_done: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Plays each task of the panel once.

    Environment seeds depend on the task alone, sampling seeds on ``purpose`` too.
    """
    assignments = [
        Assignment(task=task, group=i, trajectory=i, sample=seed_index, purpose=purpose, step=0)
        for i, task in enumerate(panel.task_ids)
    ]
    return play_all(player, assignments, sampling, on_done)


def records(trajectories: Sequence[Trajectory], panel: Panel, *, step: int, seed_index: int) -> list[dict[str, Any]]:
    """One JSON line per episode, with the sampling parameters that were used."""
    return [
        {
            "task": t.assignment.task,
            "family": t.family,
            "step": step,
            "seed": seed_index,
            "status": t.status,
            "success": t.success,
            "score": t.score,
            "return": t.ret,
            "turns": len(t.turns),
            "valid_actions": sum(turn.valid for turn in t.turns),
            "response_tokens": sum(len(turn.response) for turn in t.turns),
            "error": t.error,
            "sampling": {**asdict(t.sampling), "top_p": 1.0, "top_k": -1, "env_seed": t.env_seed},
            "weight_version": t.turns[-1].weight_version if t.turns else None,
            "panel": panel.name,
            "panel_sha": panel.sha256,
        }
        for t in trajectories
    ]


def write(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Writes a complete file at once: a file that exists is a finished evaluation."""
    jsonl.rewrite(path, lines)


def is_complete(path: Path, *, tasks: int, panel_sha: str, step: int) -> bool:
    """Whether ``path`` holds every task of the panel exactly once, played by the policy after ``step`` updates.

    A file that is torn, damaged or of another panel is not complete.
    """
    try:
        lines = jsonl.read(path)
    except DataError:
        return False
    right = all(line.get("panel_sha") == panel_sha and line.get("step") == step for line in lines)
    return right and len(lines) == tasks == len({line.get("task") for line in lines})


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Success and score over the episodes that did not fail, in percent; failed ones are counted."""
    good = [line for line in lines if line["error"] is None]
    out = {
        "val/success": 100 * float(np.mean([line["success"] for line in good])) if good else float("nan"),
        "val/score": 100 * float(np.mean([line["score"] for line in good])) if good else float("nan"),
        "val/turns_mean": float(np.mean([line["turns"] for line in good])) if good else float("nan"),
        "val/n_tasks": float(len(lines)),
        "val/failed_episodes": float(len(lines) - len(good)),
    }
    for family in sorted({line["family"] for line in good}):
        out[f"val/{family}/success"] = 100 * float(np.mean([x["success"] for x in good if x["family"] == family]))
    return out


def sampling_for(temperature: float, response_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_new_tokens=response_tokens)
