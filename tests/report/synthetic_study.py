"""Writes a whole study with invented numbers: 11 methods, 3 sizes, 4 environments, 21 validations, 8 rollout seeds.

Scores are drawn from a rate per cell; a few cells follow the published shapes (a collapse that recovers, two that do
not, a greedy score that falls while the samples hold), so that every part of the report has something to show.
"""

import json
from pathlib import Path

import numpy as np

METHODS = (
    "grpo",
    "grpo_opsd",
    "sdar",
    "skill_sd",
    "rlsd",
    "ocsd",
    "ovcsd",
    "agent_opsd",
    "adrs",
    "icsd",
    "pcsd",
)
SIZES = ("2B", "4B", "9B")
PANELS = {"alfworld": 140, "scienceworld": 200, "webshop": 128, "searchqa": 3125}
_PHASES = {"rollout": 250.0, "teacher": 30.0, "score": 20.0, "update": 45.0, "sync": 2.0, "other": 3.0}
_TOP = {"alfworld": 0.7, "scienceworld": 0.45, "webshop": 0.5, "searchqa": 0.4}
_COSTS = {method: 1.0 + 0.04 * number for number, method in enumerate(METHODS)}


def write_study(
    root: Path,
    *,
    methods: tuple[str, ...] = METHODS,
    sizes: tuple[str, ...] = SIZES,
    panels: dict[str, int] | None = None,
    steps: int = 100,
    every: int = 5,
    seeds: int = 8,
) -> list[Path]:
    """Writes one run per method, size and environment into ``root``. ``panels``: tasks per environment."""
    paths = []
    for env, tasks in (panels or PANELS).items():
        for size in sizes:
            for method in methods:
                rng = np.random.default_rng([METHODS.index(method), SIZES.index(size), list(PANELS).index(env)])
                path = root / f"{env}-{size.lower()}-{method}"
                curve = _curve(method, size, env, list(range(0, steps + 1, every)), rng)
                _write(path, method, size, env, tasks, curve, steps, every, seeds, rng)
                paths.append(path)
    return paths


def _curve(method: str, size: str, env: str, at: list[int], rng: np.random.Generator) -> list[float]:
    """True success rate at each validation."""
    top = _TOP[env] + 0.05 * SIZES.index(size) + rng.normal(0, 0.05)
    rates = [0.05 + (top - 0.05) * (1 - np.exp(-3 * step / max(at))) for step in at]
    if (method, size, env) == ("agent_opsd", "4B", "alfworld"):
        rates = [0.02 if 45 <= step <= 70 else rate for step, rate in zip(at, rates, strict=True)]
    if (method, size, env) in {("grpo_opsd", "4B", "alfworld"), ("icsd", "4B", "webshop")}:
        rates = [0.005 if step >= 60 else rate for step, rate in zip(at, rates, strict=True)]
    if (method, size, env) == ("ovcsd", "2B", "searchqa"):
        rates = [0.0134 if step >= 85 else rate for step, rate in zip(at, rates, strict=True)]
    return [float(np.clip(rate, 0, 1)) for rate in rates]


def _write(path, method, size, env, tasks, curve, steps, every, seeds, rng) -> None:
    path.mkdir(parents=True)
    panel = f"{list(PANELS).index(env):x}" * 64
    config = {
        "method": {"name": method},
        "env": {"name": env},
        "model": {"path": f"models/Qwen3.5-{size}"},
        "seed": 0,
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "provenance.json").write_text(
        json.dumps({"git_commit": "0123abcd", "devices": ["synthetic"], "packages": {"jax": "0"}})
    )
    ledger, metrics, net = [], [], 0.0
    for step in range(1, steps + 1):
        scale = _COSTS[method] * rng.uniform(0.95, 1.05)
        parts = {p: s * scale for p, s in _PHASES.items() if p != "teacher" or method != "grpo"}
        ledger += [_phase(phase, step, seconds) for phase, seconds in parts.items()]
        net += sum(parts.values())
        metrics.append(_metrics(step, steps, parts, net, rng))
    temperature = 0.0 if env in ("searchqa", "webshop") else 0.4
    for rate, step in zip(curve, range(0, steps + 1, every), strict=True):
        _episodes(path / "val" / f"step_{step:06d}.jsonl", tasks, rate, env, panel, temperature, rng)
        ledger.append(_phase("validation", step, 246.0))
    final = 0.33 if (method, size, env) == ("ovcsd", "2B", "searchqa") else curve[-1]
    difficulty = np.random.default_rng(tasks).uniform(-0.15, 0.15, tasks) * (final > 0.05)
    for seed in range(seeds):
        _episodes(path / "final_eval" / f"seed_{seed}.jsonl", tasks, final + difficulty, env, panel, 0.4, rng)
    ledger.append(_phase("save", steps, 97.0))
    _lines(path / "metrics.jsonl", metrics)
    _lines(path / "ledger.jsonl", ledger)
    (path / "DONE.json").write_text(json.dumps({"step": steps}))


def _metrics(step: int, steps: int, parts: dict[str, float], net: float, rng: np.random.Generator) -> dict:
    noise = rng.normal(0, 1, 8)
    return {
        "step": step,
        "attempt": 1,
        "time/step_s": sum(parts.values()),
        **{f"time/{phase}_s": seconds for phase, seconds in parts.items()},
        "cost/net_s": net,
        "train/reward_mean": 6 * step / steps + 0.3 * noise[0],
        "train/win_rate": float(np.clip(0.6 * step / steps + 0.03 * noise[1], 0, 1)),
        "train/entropy": 1.2 - 0.7 * step / steps + 0.02 * noise[2],
        "train/flat_groups_frac": float(np.clip(0.3 + 0.05 * noise[3], 0, 1)),
        "engine/logp_gap_abs_mean": 1e-3 * abs(noise[4]),
        "optim/clip_frac": 1e-3 * abs(noise[5]),
        "optim/grad_norm": 1.5 + 0.1 * noise[6],
        "rollout/response_tokens_mean": 130 + noise[7],
        "rollout/truncated_frac": 0.001,
        "rollout/failed_episodes": 0.0,
        "teacher/context_frac": 1.0,
    }


def _episodes(path: Path, tasks: int, rate, env: str, panel: str, temperature: float, rng: np.random.Generator) -> None:
    draws = rng.uniform(size=tasks)
    success = draws < rate
    scores = np.where(success, 1.0, 0.0)
    sampling = json.dumps({"temperature": temperature, "max_new_tokens": 512, "top_p": 1.0, "top_k": -1})
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        "".join(
            f'{{"task":"{env}-{k}","family":"f{k % 6}","seed":0,"status":"{"success" if win else "failed"}",'
            f'"success":{"true" if win else "false"},"score":{score},"return":{10 * score},"turns":12,'
            f'"valid_actions":12,"response_tokens":1500,"error":null,"sampling":{sampling},"weight_version":7,'
            f'"panel":"test","panel_sha":"{panel}"}}\n'
            for k, (win, score) in enumerate(zip(success.tolist(), scores.tolist(), strict=True))
        )
    )


def _phase(phase: str, step: int, seconds: float) -> dict:
    return {"attempt": 1, "step": step, "phase": phase, "seconds": round(seconds, 3), "devices": 8}


def _lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
