"""The native engine against the real one (packages alfworld and textworld), and the adapter that plays the real one.

``test_certify.py`` compares further games: together at least 50.
"""

import asyncio
import importlib.util
import sys
from dataclasses import replace

import pytest

from sdjax import jsonl
from sdjax.envs.alfworld.adapter import AlfworldBenchmark, TextworldEnvironment
from sdjax.envs.alfworld.certify import WORKER_MODULE, compare_games
from sdjax.envs.alfworld.store import open_store
from sdjax.envs.base import Status
from sdjax.envs.config import GeneratorConfig
from sdjax.envs.workers import WorkerPool
from sdjax.errors import ConfigError, EnvError
from tests.train.tiny_run import run, tiny_checkpoint, tiny_config

SMALL = GeneratorConfig(train_games=30, receptacles_max=8, distractors_max=6)
needs_textworld = pytest.mark.skipif(
    importlib.util.find_spec("textworld") is None or importlib.util.find_spec("alfworld") is None,
    reason="the packages alfworld and textworld are not installed",
)


@pytest.mark.slow
@pytest.mark.textworld
@needs_textworld
def test_engines_agree_on_generated_games():
    store = open_store("generated", SMALL)
    outcomes = compare_games(store, store.task_ids("train"), steps=7)
    assert len(outcomes) == 30
    assert [o for o in outcomes if o.mismatch or o.error] == []
    assert sum(o.won for o in outcomes) >= 3 and sum(o.steps for o in outcomes) > 150


@pytest.mark.textworld
@pytest.mark.shared
@needs_textworld
def test_engines_agree_on_released_games(released):
    store = open_store(str(released))
    outcomes = compare_games(store, store.task_ids("valid_seen")[::28], steps=8)
    assert len(outcomes) == 5 and [o for o in outcomes if o.mismatch or o.error] == []


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


@pytest.mark.slow
@pytest.mark.textworld
@needs_textworld
def test_training_with_the_real_engine_equals_training_with_the_native_one(tmp_path):
    """One step of a tiny model; the same episodes, so the same metrics."""
    model = tiny_checkpoint(tmp_path / "model")
    metrics = []
    for engine in ("native", "textworld"):
        config = tiny_config(model, steps=1, tasks_per_step=1)
        env = replace(config.env, engine=engine, workers=1)
        config = replace(config, env=env, eval=replace(config.eval, panel="valid:1", final_seeds=0))
        run(config, tmp_path / engine)
        last = jsonl.read(tmp_path / engine / "metrics.jsonl")[-1]
        # What is left out depends on clocks and on which requests the engine happened to batch.
        metrics.append({key: v for key, v in last.items() if not key.startswith(("time/", "cost/", "engine/"))})
        assert last["step"] == 1 and (tmp_path / engine / "DONE.json").exists()
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-4, abs=1e-6, nan_ok=True)
    assert metrics[0]["rollout/rows"] > 0


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
    pool = WorkerPool(WORKER_MODULE, 1, 60.0)
    with pytest.raises(EnvError, match=r"sdjax\[alfworld\]"):
        asyncio.run(pool.session().call("reset", game={}))
    pool.close()
