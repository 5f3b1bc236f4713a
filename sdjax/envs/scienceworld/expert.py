"""The gold expert, for warm starts: it plays a stored gold path with short thoughts.

Gold paths know where things are and measure a lot; many need more turns than an episode has. What is worth imitating is
said by ``env.scienceworld.expert_score``.
"""

import functools
import random
import tomllib
from collections.abc import Sequence
from importlib import resources
from typing import Any

from sdjax.envs.base import Environment, ExpertTurn, Observation, Status
from sdjax.envs.scienceworld.store import Gold

# What a random turn plays: it may open a question, but changes nothing, so that the gold path still fits.
_LOOKS = ("look around", "inventory", "look at OBJ", "look in OBJ")


async def gold_episode(
    environment: Environment, gold: Gold, seed: int, max_turns: int, least_score: int, noise: float
) -> list[ExpertTurn]:
    """Plays ``gold``, cut behind its last gain within ``max_turns``.

    Args:
      seed: of the random turns. least_score: 0 to 100. noise: probability of a random turn.
    Returns:
      The turns. Without noise, none if the score stays below ``least_score``; with noise, what was played.
    """
    worth = gold.turns_worth(max_turns)
    if noise <= 0 and (worth == 0 or gold.score_at(worth) < least_score):
        return []
    commands = list(gold.actions[:worth] if noise <= 0 else gold.actions)
    rng = random.Random(f"scienceworld expert {gold.task_id} {seed}")
    observation = await environment.reset(gold.task_id, seed)
    turns: list[ExpertTurn] = []
    score, asked = 0, False  # asked: a random turn opened a question
    while commands and len(turns) < max_turns:
        # Nothing may come between a question of the gold path and its answer, a number.
        is_random = not asked and not commands[0].isdecimal() and rng.random() < noise
        if asked:
            action, thought = "0", _words()["number"]
        elif is_random:
            action, thought = _random_look(observation, rng), _words()["random"]
        else:
            action = commands.pop(0)
            thought = thought_for(action)
        turns.append(ExpertTurn(observation, action, thought))
        result = await environment.step(action)
        asked = is_random and result.info["ambiguous"]
        observation, score = result.observation, result.info["raw_score"]
        if result.status is not Status.RUNNING:
            break
    return turns if noise > 0 or score >= least_score else []


def thought_for(action: str) -> str:
    """A short thought for a command, from the templates of ``expert.toml``."""
    if action.isdecimal():
        return _words()["number"]
    for rule in _words()["thoughts"]:
        if action.startswith(rule["prefix"]):
            return rule["thought"].format(rest=action[len(rule["prefix"]) :])
    return _words()["other"]


def _random_look(observation: Observation, rng: random.Random) -> str:
    objects: Sequence[str] = observation.objects or ("agent",)
    return rng.choice(_LOOKS).replace("OBJ", rng.choice(objects))


@functools.cache
def _words() -> dict[str, Any]:
    text = resources.files("sdjax.envs.scienceworld").joinpath("expert.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
