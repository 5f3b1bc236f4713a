"""The environment protocol on ALFWorld: rewards, status, replay, snapshots, privileged facts, panels."""

import asyncio
import random

import pytest

from sdjax.envs import EnvConfig, GeneratorConfig, make_benchmark
from sdjax.envs.alfworld.adapter import AlfworldBenchmark
from sdjax.envs.base import Status
from sdjax.envs.config import GeneratorKnobs
from sdjax.errors import ConfigError, EnvError

SMALL = GeneratorConfig(train_games=30, valid_games=24, test_games=6, receptacles_max=10)


@pytest.fixture(scope="module")
def benchmark():
    made = AlfworldBenchmark("generated", generator=SMALL)
    yield made
    made.close()


def run(coroutine):
    return asyncio.run(coroutine)


def test_a_walkthrough_is_rewarded_on_its_winning_step_only(benchmark):
    async def play(task_id):
        environment = benchmark.make()
        first = await environment.reset(task_id, seed=0)
        assert first.text.endswith(f"Your task is to: {first.task}") and "help" in first.admissible
        results = [await environment.step(command) for command in benchmark.store.row(task_id).walkthrough]
        with pytest.raises(EnvError, match="finished"):
            await environment.step("look")
        return results

    for task_id in benchmark.task_ids("train")[:12]:
        results = run(play(task_id))
        assert [result.reward for result in results] == [0.0] * (len(results) - 1) + [10.0]
        assert [result.score for result in results] == [0.0] * (len(results) - 1) + [1.0]
        assert results[-1].status == Status.SUCCESS
        assert all(result.status == Status.RUNNING for result in results[:-1])
        assert all(result.info == {"admissible": True, "same_place_go": False} for result in results)


HOSTILE = [
    "",
    "\x00\x1b[2J",
    "{action}",
    "__import__('os')",
    "<action>look</action>",
    "a" * 1_000_000,
    "go\nto desk 1",
    "看",
]


def test_hostile_actions_are_plain_text(benchmark):
    async def play():
        environment = benchmark.make()
        await environment.reset(benchmark.task_ids("train")[0], seed=0)
        key = environment.state_key()
        for action in HOSTILE:
            result = await environment.step(action)
            assert result.observation.text == "Nothing happens." and not result.info["admissible"]
            assert result.status == Status.RUNNING and result.reward == 0.0
        assert environment.state_key() == key

    run(play())


def test_going_to_the_own_place_is_told_apart(benchmark):
    async def play():
        environment = benchmark.make()
        first = await environment.reset(benchmark.task_ids("train")[0], seed=0)
        place = next(command for command in first.admissible if command.startswith("go to"))
        assert not (await environment.step(place)).info["same_place_go"]
        again = await environment.step(place)
        assert again.info == {"admissible": False, "same_place_go": True}
        assert again.observation.text == "Nothing happens."
        assert (await environment.step("go to the moon")).info == {"admissible": False, "same_place_go": False}

    run(play())


def test_before_reset_everything_is_an_env_error(benchmark):
    environment = benchmark.make()
    with pytest.raises(EnvError, match="reset"):
        run(environment.step("look"))
    for method in (environment.state_key, environment.snapshot, lambda: environment.privileged("plan")):
        with pytest.raises(EnvError, match="reset"):
            method()


def test_restore_replays_every_observation(benchmark):
    async def play():
        rng = random.Random(0)
        environment = benchmark.make()
        for task_id in benchmark.task_ids("train")[:6]:
            seen, actions = [await environment.reset(task_id, seed=0)], []
            for _ in range(12):
                action = "fly" if rng.random() < 0.1 else rng.choice(seen[-1].admissible)
                result = await environment.step(action)
                actions.append(action)
                seen.append(result.observation)
                if result.status != Status.RUNNING:
                    break
            key = environment.state_key()
            other = benchmark.make()
            assert await other.restore(task_id, 0, actions) == seen
            assert other.state_key() == key

    run(play())


def test_snapshot_survives_play_and_serves_many(benchmark):
    async def play():
        task_id = benchmark.task_ids("train")[1]
        environment = benchmark.make()
        await environment.reset(task_id, seed=0)
        await environment.step(environment.privileged("plan")[0])
        snapshot, key, plan = environment.snapshot(), environment.state_key(), environment.privileged("plan")
        for command in plan:
            result = await environment.step(command)
        assert result.status == Status.SUCCESS
        for _ in range(2):
            other = benchmark.make()
            observation = other.resume(snapshot)
            assert other.state_key() == key and observation.admissible
            for command in plan:
                result = await other.step(command)
            assert result.status == Status.SUCCESS

    run(play())


def test_concurrent_episodes_do_not_leak(benchmark):
    async def play(task_id, seed):
        rng = random.Random(seed)
        environment = benchmark.make()
        trace = [await environment.reset(task_id, seed=seed)]
        for _ in range(15):
            await asyncio.sleep(0)
            result = await environment.step(rng.choice(trace[-1].admissible))
            trace.append(result.observation)
            if result.status != Status.RUNNING:
                break
        return trace

    async def together(jobs):
        return await asyncio.gather(*(play(*job) for job in jobs))

    jobs = [(task_id, seed) for task_id in benchmark.task_ids("train")[:4] for seed in range(4)]
    assert run(together(jobs)) == [run(play(*job)) for job in jobs]


def test_privileged_information_never_shows_in_observations(benchmark):
    async def play():
        for task_id in benchmark.task_ids("train")[:12]:
            environment = benchmark.make()
            first = await environment.reset(task_id, seed=0)
            plan = environment.privileged("plan")
            assert plan and environment.privileged("task_family") == benchmark.family(task_id)
            facts = environment.privileged("facts")
            taken = next(command for command in plan if command.startswith("take"))
            name = " ".join(taken.split()[1:3])
            assert any(fact.startswith(f"{name} is in ") for fact in facts)
            assert not any(fact in first.text for fact in facts)
            with pytest.raises(EnvError, match="task_family"):
                environment.privileged("thoughts")

    run(play())


def test_experts_of_the_benchmark_win(benchmark):
    for kind in ("search", "plan"):
        turns = run(benchmark.expert_episode(benchmark.task_ids("train")[2], kind, seed=0, max_turns=50))
        assert turns[-1].action.startswith("move") and turns[0].observation.text.startswith("-= Welcome")
    assert run(benchmark.expert_episode(benchmark.task_ids("train")[2], "search", seed=0, max_turns=2)) == []


def test_panels_are_whole_fixed_and_independent_of_use(benchmark):
    panel = benchmark.panel("valid")
    assert panel.task_ids == benchmark.task_ids("valid") and len(set(panel.task_ids)) == 24
    small = benchmark.panel("valid:8")
    assert len(small.task_ids) == 8 and set(small.task_ids) <= set(panel.task_ids)
    fresh = AlfworldBenchmark("generated", generator=SMALL)
    fresh.store.game(fresh.task_ids("train")[3])
    assert fresh.panel("valid:8") == small and fresh.panel("valid") == panel
    assert {fresh.panel("valid").sha256, fresh.panel("test").sha256, small.sha256, fresh.panel("train").sha256}


def test_make_benchmark_reads_the_config(fixture_path):
    made = make_benchmark(EnvConfig(generator=SMALL))
    assert made.name == "alfworld" and len(made.task_ids("valid")) == 24
    assert made.provenance()["engine"] == "native" and made.provenance()["store"] == "generated"
    made = make_benchmark(EnvConfig(data=str(fixture_path)))
    assert len(made.panel("alfworld_fixture").task_ids) == 12
    with pytest.raises(ConfigError, match=r"env\.name"):
        make_benchmark(EnvConfig(name="chess"))
    with pytest.raises(ConfigError, match=r"env\.engine"):
        make_benchmark(EnvConfig(engine="steam"))
    knobs = AlfworldBenchmark(generator=GeneratorKnobs(receptacles_max=9))
    assert len(knobs.task_ids("train")) == GeneratorConfig().train_games
