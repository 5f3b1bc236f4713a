"""A few episodes of a step with everything the transcript viewer colours: gaps, weights, advantages, token by token."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sdjax.methods.base import Method, RowBatch
from sdjax.models.tokenizer import Tokenizer
from sdjax.train.rows import Row
from sdjax.train.teacher_pass import Teacher


def build(
    rows: Sequence[Row],
    batch: RowBatch,
    adv_NL: np.ndarray,
    weight_NL: np.ndarray | None,
    method: Method,
    teacher: Teacher | None,
    tokenizer: Tokenizer,
    *,
    step: int,
    episodes: int,
) -> dict[str, Any]:
    """The first ``episodes`` episodes of distinct groups, a success and a failure first where both exist."""
    chosen = _choose(rows, episodes)
    view = next(iter(batch.views), None)
    records = []
    for trajectory in chosen:
        members = [(i, row) for i, row in enumerate(rows) if row.trajectory.assignment.trajectory == trajectory]
        first = members[0][1].trajectory
        records.append(
            {
                "task": first.assignment.task,
                "family": first.family,
                "status": first.status,
                "return": first.ret,
                "group": first.assignment.group,
                "trajectory": trajectory,
                "turns": [_turn(i, row, batch, adv_NL, weight_NL, view, teacher, tokenizer) for i, row in members],
            }
        )
    return {"step": step, "method": method.name, "weight_name": method.weight_name, "episodes": records}


def _choose(rows: Sequence[Row], episodes: int) -> list[int]:
    seen: dict[int, bool] = {}
    groups: set[int] = set()
    for row in rows:
        assignment = row.trajectory.assignment
        if assignment.trajectory not in seen and assignment.group not in groups:
            groups.add(assignment.group)
            seen[assignment.trajectory] = row.trajectory.success
    wins = [t for t, success in seen.items() if success]
    losses = [t for t, success in seen.items() if not success]
    mixed = [t for pair in zip(wins, losses) for t in pair]
    return (mixed + [t for t in seen if t not in mixed])[:episodes]


def _turn(i: int, row: Row, batch: RowBatch, adv_NL, weight_NL, view, teacher, tokenizer) -> dict[str, Any]:
    n = len(row.turn.response)
    numbers = lambda x: [round(float(v), 4) for v in x[i, :n]]  # noqa: E731
    return {
        "prompt": tokenizer.decode(row.turn.prompt, skip_special=False),
        "privileged": teacher.privileged_text(row) if teacher else "",
        "tokens": tokenizer.token_strings(row.turn.response),
        "logp_old": numbers(batch.old_NL),
        "logp_teacher": numbers(batch.views[view]) if view else None,
        "weight": numbers(weight_NL) if weight_NL is not None else None,
        "advantage": numbers(adv_NL),
        "action": row.turn.action,
        "valid": row.turn.valid,
        "observation": row.turn.next_text or "",
    }
