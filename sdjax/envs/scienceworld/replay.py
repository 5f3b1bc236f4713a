"""Plays gold paths through the environment and notes what they score. Shared by ``check`` and ``make_gold``."""

from dataclasses import dataclass

from sdjax.envs.base import Environment, Status
from sdjax.envs.scienceworld.store import Gold


@dataclass(frozen=True)
class Replay:
    """score: of the simulator, -100 to 100. score_curve: (turn, score) at each change.."""

    score: int
    score_curve: tuple[tuple[int, int], ...]
    turns: int


async def replay(environment: Environment, gold: Gold) -> Replay:
    """Plays ``gold`` until its actions or the episode end."""
    await environment.reset(gold.task_id, 0)
    curve: list[tuple[int, int]] = []
    turns = 0
    for action in gold.actions:
        result = await environment.step(action)
        turns += 1
        score = int(result.info["raw_score"])
        if not curve or curve[-1][1] != score:
            curve.append((turns, score))
        if result.status is not Status.RUNNING:
            break
    return Replay(curve[-1][1] if curve else 0, tuple(curve), turns)
