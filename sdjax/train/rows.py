"""From trajectories to the rows of one global step (methods.md, sections 2 and 3.1)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import jax
import numpy as np

from sdjax import losses
from sdjax.config import TrainConfig
from sdjax.envs.prompts import Protocol
from sdjax.methods.base import RowBatch
from sdjax.rollout.episodes import Trajectory, Turn

_CLONED = 1e-6  # identical samples that are less likely than that are not chance
_ROW_BUCKET = 256  # advantage kernels see a multiple of this many rows, so they compile a handful of times


@dataclass(frozen=True)
class Row:
    """One turn and the trajectory it belongs to. extra: it comes from a teacher's episode, not from the rollout."""

    trajectory: Trajectory
    turn: Turn
    index: int  # turn number, from 0
    extra: bool = False


def make_rows(trajectories: Sequence[Trajectory]) -> list[Row]:
    """One row per turn, in trajectory order. Failed episodes have no rows: they are counted, not trained."""
    return [
        Row(trajectory, turn, k)
        for trajectory in trajectories
        if trajectory.error is None
        for k, turn in enumerate(trajectory.turns)
        if len(turn.response)
    ]


def padded_rows(n: int) -> int:
    return -(-max(n, 1) // _ROW_BUCKET) * _ROW_BUCKET


def make_batch(rows: Sequence[Row], protocol: Protocol, response_tokens: int, train: TrainConfig) -> RowBatch:
    """Builds the host batch with scores and GRPO advantages; log-probabilities are filled in later.

    ``protocol`` gives the largest return and the invalid-action penalty of the benchmark.
    """
    N, L = padded_rows(len(rows)), response_tokens
    ints = {name: np.zeros(N, np.int32) for name in ("group", "trajectory", "turn")}
    ok, valid, success = (np.zeros(N, bool) for _ in range(3))
    ret = np.zeros(N, np.float32)
    mask = np.zeros((N, L), bool)
    for i, row in enumerate(rows):
        ints["group"][i] = row.trajectory.assignment.group
        ints["trajectory"][i] = row.trajectory.assignment.trajectory
        ints["turn"][i] = row.index
        ok[i], valid[i], success[i] = True, row.turn.valid, row.trajectory.success
        ret[i] = row.trajectory.ret
        mask[i, : len(row.turn.response)] = True
    score = np.where(ok, ret - protocol.invalid_penalty * ~valid, 0.0).astype(np.float32)
    advantages = _group_advantages(
        score, ints["group"], ok, ints["trajectory"], ints["turn"], train.adv_stats, train.adv_norm_std
    )
    return RowBatch(
        group_N=ints["group"],
        trajectory_N=ints["trajectory"],
        turn_N=ints["turn"],
        ok_N=ok,
        valid_N=valid,
        return_N=ret,
        outcome_N=(ret / protocol.reward_success).astype(np.float32),
        success_N=success,
        score_N=score,
        adv_N=np.asarray(advantages),
        mask_NL=mask,
        old_NL=np.zeros((N, L), np.float32),
        reference_NL=np.zeros((N, L), np.float32),
    )


def append_rows(batch: RowBatch, n: int, extra: Sequence[Row], protocol: Protocol, reserve: int) -> RowBatch:
    """The batch with ``extra`` rows behind its ``n`` real ones and room for ``reserve`` of them.

    All advantages stay what they were: extra rows enter no statistic and have advantage 0.
    """
    total = len(batch.ok_N) + padded_rows(reserve)
    end = n + len(extra)
    arrays = {}
    for f in fields(batch):
        value = getattr(batch, f.name)
        if isinstance(value, np.ndarray):
            arrays[f.name] = np.zeros((total, *value.shape[1:]), value.dtype)
            arrays[f.name][:n] = value[:n]
    columns = {
        "group_N": [row.trajectory.assignment.group for row in extra],
        "trajectory_N": [row.trajectory.assignment.trajectory for row in extra],
        "turn_N": [row.index for row in extra],
        "ok_N": [True] * len(extra),
        "valid_N": [row.turn.valid for row in extra],
        "return_N": [row.trajectory.ret for row in extra],
        "outcome_N": [row.trajectory.ret / protocol.reward_success for row in extra],
        "success_N": [row.trajectory.success for row in extra],
        "score_N": [row.trajectory.ret - protocol.invalid_penalty * (not row.turn.valid) for row in extra],
    }
    for name, values in columns.items():
        arrays[name][n:end] = values
    for i, row in enumerate(extra, start=n):
        arrays["mask_NL"][i, : len(row.turn.response)] = True
    return replace(batch, **arrays)


@partial(jax.jit, static_argnames=("stats", "norm_std"))
def _group_advantages(score_N, group_N, ok_N, trajectory_N, turn_N, stats, norm_std):
    return losses.group_advantages(
        score_N, group_N, ok_N=ok_N, trajectory_N=trajectory_N, turn_N=turn_N, stats=stats, norm_std=norm_std
    )


def rollout_metrics(trajectories: Sequence[Trajectory], rows: Sequence[Row], batch: RowBatch) -> dict[str, float]:
    """The per-step numbers of methods.md section 3.9 that need no model."""
    played = [t for t in trajectories if t.error is None]
    groups: dict[int, list[Trajectory]] = {}
    for t in played:
        groups.setdefault(t.assignment.group, []).append(t)
    flat = [len({t.ret for t in members}) == 1 for members in groups.values()]
    n = max(len(played), 1)
    turns = [row.turn for row in rows]
    ok = batch.ok_N
    metrics = {
        "train/score_mean": float(batch.score_N[ok].mean()) if ok.any() else 0.0,
        "train/reward_mean": sum(t.ret for t in played) / n,
        "train/win_rate": sum(t.success for t in played) / n,
        "train/adv_abs_mean": float(np.abs(batch.adv_N[ok]).mean()) if ok.any() else 0.0,
        "train/flat_groups_frac": float(np.mean(flat)) if flat else 0.0,
        "train/all_fail_groups_frac": float(np.mean([not any(t.success for t in m) for m in groups.values()] or [0])),
        "train/all_win_groups_frac": float(np.mean([all(t.success for t in m) for m in groups.values()] or [0])),
        "rollout/episodes": float(len(trajectories)),
        "rollout/failed_episodes": float(len(trajectories) - len(played)),
        "rollout/retried_episodes": float(sum(t.attempts > 1 for t in trajectories)),
        "rollout/episode_turns_mean": sum(len(t.turns) for t in played) / n,
        "rollout/rows": float(len(rows)),
        "rollout/identical_groups": float(sum(_identical(m) for m in groups.values())),
        "rollout/cloned_groups": float(sum(_identical(m) and _chance(m) < _CLONED for m in groups.values())),
    }
    if turns:
        metrics |= {
            "rollout/valid_action_frac": float(np.mean([t.valid for t in turns])),
            "rollout/admissible_frac": float(np.mean([bool(t.info.get("admissible", True)) for t in turns])),
            "rollout/response_tokens_mean": float(np.mean([len(t.response) for t in turns])),
            "rollout/prompt_tokens_mean": float(np.mean([len(t.prompt) for t in turns])),
            "rollout/prompt_tokens_max": float(max(len(t.prompt) for t in turns)),
            "rollout/overlong_prompts": float(sum(t.overlong for t in turns)),
            "rollout/truncated_frac": float(np.mean([t.finish == "length" for t in turns])),
            "rollout/shared_actions_frac": _shared_actions(rows),
        }
    for status in ("success", "failed", "truncated"):
        metrics[f"rollout/stop_{status}"] = float(sum(t.status == status for t in played))
    return metrics


def _shared_actions(rows: Sequence[Row]) -> float:
    """Share of turns whose action also occurs on another task: a policy that collapses to templates approaches 1."""
    tasks: dict[str, set[str]] = {}
    for row in rows:
        tasks.setdefault(row.turn.action, set()).add(row.trajectory.assignment.task)
    return float(np.mean([len(tasks[row.turn.action]) > 1 for row in rows]))


def _identical(group: Sequence[Trajectory]) -> bool:
    """True if all samples of a group drew the same tokens: a sharp policy, or seeds or sampling are broken."""
    first = [t.response.tolist() for t in group[0].turns]
    return len(group) > 1 and all([t.response.tolist() for t in other.turns] == first for other in group[1:])


def _chance(group: Sequence[Trajectory]) -> float:
    """Probability that the other samples of a group draw the tokens of the first, by its own log-probabilities."""
    logp = sum(float(turn.engine_logps.sum()) for turn in group[0].turns)
    return math.exp(min(0.0, logp * (len(group) - 1)))
