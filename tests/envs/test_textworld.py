"""The native engine against the real one (packages alfworld and textworld), and the adapter that plays the real one."""

import asyncio
import importlib.util
import random
import sys

import pytest

from sdjax.envs.alfworld.adapter import AlfworldBenchmark, TextworldEnvironment
from sdjax.envs.alfworld.engine import Episode
from sdjax.envs.alfworld.planner import plan
from sdjax.envs.alfworld.store import GameStore, open_store
from sdjax.envs.base import Status
from sdjax.envs.config import GeneratorConfig
from sdjax.envs.workers import WorkerPool
from sdjax.errors import ConfigError, EnvError

WORKER = "sdjax.envs.alfworld.textworld_worker"
SMALL = GeneratorConfig(train_games=12, receptacles_max=8, distractors_max=6)
needs_textworld = pytest.mark.skipif(
    importlib.util.find_spec("textworld") is None or importlib.util.find_spec("alfworld") is None,
    reason="the packages alfworld and textworld are not installed",
)
HOSTILE = ["", "fly to the moon", "look\nlook", "\x00", "Ω {brace} %s", "x" * 20_000, "  look  "]


def next_command(rng: random.Random, episode: Episode) -> str:
    """Random play that gets somewhere: oracle moves, hostile text, object commands, anything admissible."""
    draw = rng.random()
    commands = plan(episode) if draw < 0.5 else None
    if commands:
        return commands[0]
    if draw < 0.6:
        return rng.choice(HOSTILE)
    objects = [command for command in episode.admissible if command.split()[0] not in ("go", "examine", "look")]
    return rng.choice(objects if draw < 0.85 else list(episode.admissible))


async def compare(store: GameStore, task_ids, steps: int) -> int:
    """Plays both engines side by side and asserts equal answers. Returns the number of games won on the way."""
    pool, won = WorkerPool(WORKER, 1, 120.0), 0
    try:
        for task_id in task_ids:
            rng, episode, session = random.Random(task_id), Episode(store.game(task_id)), pool.session()
            answer = await session.call("reset", game=store.game_file(task_id))
            for _ in range(steps):
                native = {"text": episode.text, "admissible": list(episode.admissible), "won": episode.won()}
                assert answer == native, task_id
                if episode.won():
                    won += 1
                    break
                command = next_command(rng, episode)
                answer = await session.call("step", action=command)
                episode.step(command)
            await session.close()
    finally:
        pool.close()
    return won


@pytest.mark.textworld
@needs_textworld
def test_engines_agree_on_generated_games():
    store = open_store("generated", SMALL)
    assert asyncio.run(compare(store, store.task_ids("train")[:4], steps=15)) >= 1


@pytest.mark.textworld
@needs_textworld
def test_engines_agree_on_fixture_games(fixture_path):
    store = open_store(str(fixture_path))
    asyncio.run(compare(store, store.task_ids("alfworld_fixture")[::6], steps=15))


@pytest.mark.textworld
@pytest.mark.shared
@needs_textworld
def test_engines_agree_on_released_games(released):
    store = open_store(str(released))
    asyncio.run(compare(store, store.task_ids("valid_seen")[::70], steps=12))


@pytest.mark.textworld
@needs_textworld
def test_real_engine_behind_the_protocol_wins_a_walkthrough():
    async def play():
        benchmark = AlfworldBenchmark("generated", "textworld", SMALL, workers=1)
        native = AlfworldBenchmark("generated", "native", SMALL)
        environment, other = benchmark.make(), native.make()
        task_id = benchmark.task_ids("train")[0]
        assert await environment.reset(task_id, 0) == await other.reset(task_id, 0)
        for command in environment.privileged("plan"):
            assert environment.state_key() == other.state_key()
            result = await environment.step(command)
            assert result == await other.step(command)
        assert result.status == Status.SUCCESS and result.reward == 10.0
        with pytest.raises(EnvError, match="finished"):
            await environment.step("look")
        assert {"alfworld", "textworld"} <= benchmark.provenance().keys()
        await environment.reset(benchmark.task_ids("train")[1], 0)  # the worker's environment serves another game
        await environment.close()
        benchmark.close()

    asyncio.run(play())


FAKE = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    result = {"text": "You wake up.", "admissible": [], "won": False}
    print(json.dumps({"id": request["id"], "result": result}), flush=True)
"""


def test_a_real_engine_that_differs_is_an_env_error(fixture_path):
    store = open_store(str(fixture_path))
    pool = WorkerPool([sys.executable, "-c", FAKE], 1, 30.0)
    environment = TextworldEnvironment(store, 10.0, pool)
    task_id = store.task_ids("alfworld_fixture")[0]
    with pytest.raises(EnvError, match="differs from the native one in text, admissible"):
        asyncio.run(environment.reset(task_id, 0))
    with pytest.raises(EnvError, match="restore"):
        environment.resume(None)
    asyncio.run(environment.close())
    pool.close()


@pytest.mark.skipif(importlib.util.find_spec("textworld") is not None, reason="textworld is installed")
def test_without_the_packages_the_error_says_what_to_install():
    with pytest.raises(ConfigError, match=r"sdjax\[alfworld\]"):
        AlfworldBenchmark("generated", "textworld", SMALL)
    pool = WorkerPool(WORKER, 1, 60.0)
    with pytest.raises(EnvError, match=r"sdjax\[alfworld\]"):
        asyncio.run(pool.session().call("reset", game={}))
    pool.close()
