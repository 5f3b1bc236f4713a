"""Writes run directories as the trainer does, with invented but plausible numbers."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from sdjax import jsonl

PHASES = {"rollout": 2.0, "teacher": 0.0, "score": 0.3, "update": 0.8, "sync": 0.02, "other": 0.05}
WORDS = [
    "<think>",
    "I",
    " should",
    " go",
    " to",
    " the",
    " shelf",
    ".",
    "</think>",
    "\n",
    "<action>",
    "go to shelf 1",
    "</action>",
]


def write_run(
    root: Path,
    method: str = "grpo",
    *,
    env: str = "alfworld",
    seed: int = 0,
    steps: int = 20,
    every: int = 5,
    tasks: int = 64,
    final_seeds: int = 3,
    curve: list[float] | None = None,
    panel: str = "a" * 64,
    teacher_s: float = 0.0,
    done: bool = True,
    hostile: str = "",
) -> Path:
    """Writes one complete run of ``steps`` updates into ``root/<method>-<seed>`` and returns that directory.

    Args:
      curve: success rates (0..1) of the validations; a rising curve by default.
      hostile: text put wherever a model, an environment or a user can write.
    """
    path = root / f"{env}-{method}-{seed}"
    path.mkdir(parents=True)
    rng = np.random.default_rng([seed, len(method)])
    at = list(range(0, steps + 1, every))
    rates = curve or [0.08 + 0.55 * (1 - np.exp(-2.5 * step / steps)) for step in at]
    config = {
        "name": f"demo{hostile}",
        "seed": seed,
        "method": {"name": method, "coef": 0.1},
        "env": {"name": env, "history": 2},
        "model": {"path": "models/tiny-0.2M"},
        "optim": {"lr": 1e-4},
    }
    _json(path / "config.json", config)
    _json(path / "provenance.json", {"git": {"sha": "0123abcd", "dirty": False}, "python": "3.11", "note": hostile})
    seconds = PHASES | {"teacher": teacher_s}
    ledger, net, clock = [_phase("startup", None, 4.0, 0.0)], 0.0, 4.0
    for index, step in enumerate(range(steps + 1)):
        if step:
            parts = {phase: value * rng.uniform(0.9, 1.1) for phase, value in seconds.items()}
            for phase, value in parts.items():
                ledger.append(_phase(phase, step, value, clock))
                clock += value
            net += sum(parts.values())
            jsonl.append(
                path / "metrics.jsonl", [_metrics(step, parts, net, index / steps, rng, teacher=teacher_s > 0)]
            )
        if step in at:
            rate = rates[at.index(step)]
            episodes = [_episode(k, rng, rate, env, panel, hostile) | {"step": step} for k in range(tasks)]
            jsonl.append(path / "val" / f"step_{step:06d}.jsonl", episodes)
            ledger.append(_phase("validation", step, 1.5, clock))
            clock += 1.5
    ledger.append(_phase("save", steps, 0.4, clock))
    jsonl.append(path / "ledger.jsonl", ledger)
    difficulty = rng.uniform(-0.2, 0.2, tasks)
    for final_seed in range(final_seeds):
        episodes = [_episode(k, rng, rates[-1] + difficulty[k], env, panel, hostile) for k in range(tasks)]
        jsonl.append(path / "final_eval" / f"seed_{final_seed}.jsonl", episodes)
    for step in (1, steps):
        _json(path / "rollouts" / f"step_{step:06d}.json", rollouts(step, method, rng, hostile, teacher=teacher_s > 0))
    if done:
        _json(path / "DONE.json", {"step": steps})
    return path


def rollouts(
    step: int, method: str, rng: np.random.Generator, hostile: str, *, teacher: bool, episodes: int = 3
) -> dict[str, Any]:
    """Content of one rollouts/step_*.json file."""
    return {
        "step": step,
        "method": method,
        "weight_name": "gate",
        "episodes": [
            {
                "task": f"pick_and_place-{k}{hostile}",
                "family": "pick_and_place",
                "status": ("success", "failed", "truncated")[k % 3],
                "return": 10.0 * (k % 3 == 0),
                "group": k,
                "trajectory": k,
                "turns": [_turn(turn, rng, hostile, teacher) for turn in range(3)],
            }
            for k in range(episodes)
        ],
    }


def _turn(turn: int, rng: np.random.Generator, hostile: str, teacher: bool) -> dict[str, Any]:
    tokens = WORDS + ([hostile] if hostile else [])
    old = -rng.exponential(0.6, len(tokens))
    gap = rng.normal(0.1, 0.7, len(tokens))
    return {
        "prompt": "You are an expert agent.\nYour task is to: put a mug on the shelf.\n"
        + "Observation. " * 20
        + hostile,
        "privileged": "Skill: look at open surfaces first." + hostile if teacher else "",
        "tokens": tokens,
        "logp_old": old.tolist(),
        "logp_teacher": (old + gap).tolist() if teacher else None,
        "weight": (1 / (1 + np.exp(5 * gap))).tolist() if teacher else None,
        "advantage": [float(0.8 - 0.5 * turn)] * len(tokens),
        "action": "go to shelf 1" + hostile,
        "valid": turn != 1,
        "observation": "You arrive at shelf 1. On the shelf 1, you see a mug 2." + hostile,
    }


def _metrics(step: int, parts: dict[str, float], net: float, done: float, rng: np.random.Generator, *, teacher: bool):
    record = {
        "step": step,
        "attempt": 1,
        "time/step_s": sum(parts.values()),
        **{f"time/{phase}_s": value for phase, value in parts.items()},
        "cost/net_s": net,
        "train/reward_mean": 6 * done + rng.normal(0, 0.3),
        "train/win_rate": min(1.0, max(0.0, 0.6 * done + rng.normal(0, 0.04))),
        "engine/logp_gap_abs_mean": 1e-5 * rng.uniform(1, 2),
        "optim/clip_frac": 0.02 * rng.uniform(0, 1),
        "optim/grad_norm": 1.5 * rng.uniform(0.6, 1.4),
        "train/entropy": 1.2 - 0.7 * done + rng.normal(0, 0.02),
        "rollout/response_tokens_mean": 40 - 12 * done + rng.normal(0, 1),
        "train/flat_groups_frac": rng.uniform(0.1, 0.5),
    }
    if teacher:
        record |= {
            "teacher/gap_mean": 0.2 * (1 - done) + rng.normal(0, 0.01),
            "method/gate_mean": 0.5 + 0.1 * done,
            "teacher/context_frac": 1.0,
        }
    return record


def _episode(k: int, rng: np.random.Generator, rate: float, env: str, panel: str, hostile: str) -> dict[str, Any]:
    success = bool(rng.uniform() < rate)
    score = float(np.clip(rng.normal(rate, 0.2), 0, 1)) if env == "scienceworld" else float(success)
    return {
        "task": f"game-{k}",
        "family": "pick_and_place" + hostile,
        "seed": k,
        "status": "success" if success else "failed",
        "success": success,
        "score": score,
        "return": 10.0 * success,
        "turns": 7,
        "error": None,
        "sampling": {"temperature": 0.4, "max_new_tokens": 64},
        "weight_version": 1,
        "panel_sha": panel,
    }


def _phase(phase: str, step: int | None, seconds: float, start: float) -> dict[str, Any]:
    row = {"attempt": 1, "step": step, "phase": phase, "seconds": seconds}
    return row | {"start": start, "end": start + seconds, "devices": 1}


def _json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
