"""Helpers of the ScienceWorld tests: settings, commands to play, and traces to compare."""

import asyncio
import random
from dataclasses import replace

import pytest

from sdjax.envs.base import Environment, Observation, StepResult
from sdjax.envs.config import EnvConfig
from sdjax.envs.scienceworld.adapter import ScienceworldBenchmark
from sdjax.envs.scienceworld.config import ScienceworldConfig
from sdjax.errors import ConfigError

# Episodes of different kinds: circuits, plants with random bees, measuring, chemistry.
TASKS = (
    "find-animal/225",
    "power-component/15",
    "grow-plant/93",
    "chemistry-mix-paint-secondary-color/27",
    "boil/21",
    "lifespan-longest-lived/93",
    "test-conductivity/675",
    "identify-life-stages-2/6",
)


def config(workers: int = 1, timeout_s: float = 120.0, data: str = "generated", **settings) -> EnvConfig:
    return replace(
        EnvConfig(),
        name="scienceworld",
        data=data,
        workers=workers,
        worker_timeout_s=timeout_s,
        scienceworld=ScienceworldConfig(**settings),
    )


def make_or_skip(made: EnvConfig) -> ScienceworldBenchmark:
    try:
        return ScienceworldBenchmark(made)
    except ConfigError as error:
        pytest.skip(f"the simulator is not here: {error}")


def run(coroutine):
    return asyncio.run(coroutine)


def shown(step: Observation | StepResult) -> list:
    """Everything that a caller gets, as something to compare and print."""
    if isinstance(step, Observation):
        return [step.text, step.task, step.admissible, step.objects]
    info = {key: value for key, value in step.info.items() if key != "worker_restarts"}
    return [*shown(step.observation), step.reward, step.score, step.status.value, info]


def commands(benchmark: ScienceworldBenchmark, task_id: str, count: int) -> list[str]:
    """The gold path with nonsense, questions and odd objects between; waiting behind it."""
    gold = benchmark.tasks.gold(task_id)
    assert gold is not None
    rng = random.Random(task_id)
    made: list[str] = []
    for action in (*gold.actions, *["wait1"] * count):
        if not action.isdecimal() and rng.random() < 0.2:
            made.append(rng.choice(["xyzzy", "look at air", "inventory", "pick up agent", "examine door", "open door"]))
        made.append(action)
    return made[:count]


async def play(environment: Environment, task_id: str, actions: list[str]) -> list[list]:
    """The whole trace until the actions or the episode end; state keys and goals are part of it."""
    trace = [shown(await environment.reset(task_id, 0))]
    for action in actions:
        result = await environment.step(action)
        trace.append([*shown(result), environment.state_key(), environment.privileged("goal_progress")])
        if result.status != "running":
            break
    return trace
