"""Games that some actions win at once: a tiny random policy then has groups with successes and failures."""

import dataclasses
import zlib
from pathlib import Path

from sdjax.config import RunConfig
from sdjax.envs.alfworld.adapter import AlfworldBenchmark
from sdjax.envs.base import Status, StepResult
from tests.train.tiny_run import tiny_config


class LuckyEnvironment:
    """Wins on an action whose checksum is divisible by five; otherwise the inner environment."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    async def step(self, action: str) -> StepResult:
        result = await self.inner.step(action)
        if zlib.crc32(action.encode()) % 5 or result.status is not Status.RUNNING:
            return result
        return dataclasses.replace(result, reward=10.0, score=1.0, status=Status.SUCCESS)


def make_lucky(monkeypatch) -> None:
    make = AlfworldBenchmark.make
    monkeypatch.setattr(AlfworldBenchmark, "make", lambda self: LuckyEnvironment(make(self)))


def lucky_config(model: Path, method: str, **train) -> RunConfig:
    """The tiny run with room for reflections and little evaluation."""
    config = tiny_config(model, method, **{"steps": 2, "group_size": 4, **train})
    return dataclasses.replace(
        config,
        rollout=dataclasses.replace(config.rollout, max_length=1200),
        teacher=dataclasses.replace(config.teacher, reflection_tokens=24, reflection_observation_chars=60),
        eval=dataclasses.replace(config.eval, every=10, final_seeds=1),
    )
