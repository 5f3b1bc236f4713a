"""Expert episodes as a file: what a line holds, and that an interruption leaves no trace in it."""

import asyncio
import io
import json

import pytest
from rich.console import Console

from sdjax import jsonl
from sdjax.envs import EnvConfig, GeneratorConfig, demos, make_benchmark
from sdjax.envs.prompts import PromptTemplate, project
from sdjax.errors import ConfigError, DataError, EnvError
from sdjax.seeds import derive_seed

EPISODES, TURNS = 70, 12
SMALL = GeneratorConfig(
    train_games=30, task_types=("pick_and_place_simple",), receptacles_min=3, receptacles_max=5, distractors_max=4
)


def quiet() -> Console:
    return Console(file=io.StringIO())


@pytest.fixture(scope="module")
def benchmark():
    return make_benchmark(EnvConfig(data="generated", generator=SMALL))


@pytest.fixture(scope="module")
def template():
    return PromptTemplate.load("alfworld", "verl_agent", 2)


@pytest.fixture(scope="module")
def wanted(benchmark):
    return demos.draw(benchmark.task_ids("train"), EPISODES, run_seed=3, noise=0.4)


@pytest.fixture(scope="module")
def whole(benchmark, template, wanted, tmp_path_factory) -> bytes:
    """The file without an interruption."""
    path = tmp_path_factory.mktemp("demos") / "demos.jsonl"
    demos.write_demos(benchmark, template, wanted, "", TURNS, path, quiet())
    return path.read_bytes()


def test_seeds_are_those_of_a_warm_start(benchmark, wanted):
    ids = benchmark.task_ids("train")
    assert [w.task for w in wanted] == [ids[i % len(ids)] for i in range(EPISODES)]
    assert wanted[31].seed == derive_seed(3, "sft/expert", task=ids[1], step=31) != wanted[1].seed


def test_a_line_is_an_episode_that_can_be_played(benchmark, template, wanted, whole):
    lines = [json.loads(line) for line in whole.splitlines()]
    assert len(lines) == EPISODES and 0 < sum(line["won"] for line in lines) < EPISODES
    for line, demonstration in zip(lines, wanted):
        assert list(line) == ["task", "family", "expert", "seed", "won", "messages"]
        assert (line["task"], line["seed"], line["expert"]) == (demonstration.task, demonstration.seed, "search")
        assert line["family"] == "pick_and_place_simple"
        assert all([m["role"] for m in turn] == ["user", "assistant"] for turn in line["messages"])
        actions = [project(turn[1]["content"], template).action for turn in line["messages"]]
        assert asyncio.run(play(benchmark, line["task"], actions)) == (line["won"], len(actions))


async def play(benchmark, task, actions) -> tuple[bool, int]:
    environment = benchmark.make()
    await environment.reset(task, 0)
    for number, action in enumerate(actions, 1):
        result = await environment.step(action)
        if result.status == "success":
            return True, number
    return False, len(actions)


@pytest.mark.parametrize("cut", [0, 1, 5000, -1, -4000])
def test_an_interrupted_file_ends_up_the_same(benchmark, template, wanted, whole, tmp_path, cut):
    path = tmp_path / "demos.jsonl"
    path.write_bytes(whole[:cut])
    demos.write_demos(benchmark, template, wanted, "", TURNS, path, quiet())
    assert path.read_bytes() == whole


def test_finished_lines_are_not_played_again(benchmark, template, wanted, whole, tmp_path, monkeypatch):
    path = tmp_path / "demos.jsonl"
    path.write_bytes(b"\n".join(whole.splitlines()[:-2]) + b"\n")
    played = []

    class Counting:
        """The benchmark, with a note of who was played."""

        def __getattr__(self, name):
            return getattr(benchmark, name)

        async def expert_episode(self, task, *arguments):
            played.append(task)
            return await benchmark.expert_episode(task, *arguments)

    demos.write_demos(Counting(), template, wanted, "", TURNS, path, quiet())
    assert played == [w.task for w in wanted[-2:]] and path.read_bytes() == whole
    demos.write_demos(Counting(), template, wanted, "", TURNS, path, quiet())
    assert len(played) == 2


def test_a_file_of_other_episodes_is_refused(benchmark, template, wanted, whole, tmp_path):
    path = tmp_path / "demos.jsonl"
    path.write_bytes(whole)
    for other in (wanted[:5], demos.draw(benchmark.task_ids("train"), EPISODES, run_seed=4, noise=0.4)):
        with pytest.raises(DataError, match=r"line (1|6) is not the episode"):
            demos.write_demos(benchmark, template, other, "", TURNS, path, quiet())
    with pytest.raises(DataError, match="line 1 is not the episode"):
        demos.write_demos(benchmark, template, wanted, "plan", TURNS, path, quiet())
    assert path.read_bytes() == whole
    with pytest.raises(ConfigError, match=r"sft\.expert to one of search, plan"):
        demos.write_demos(benchmark, template, wanted, "rule", TURNS, path, quiet())


def test_a_lost_episode_of_an_expert_without_noise_has_no_messages(benchmark, template, tmp_path):
    wanted = demos.draw(benchmark.task_ids("train"), 6, run_seed=0, noise=0.0)
    demos.write_demos(benchmark, template, wanted, "plan", 3, tmp_path / "demos.jsonl", quiet())
    lines = jsonl.read(tmp_path / "demos.jsonl")
    assert len(lines) == 6 and any(not line["won"] for line in lines)
    assert all(line["won"] == bool(line["messages"]) for line in lines)


@pytest.mark.parametrize("name", ["webshop", "searchqa"])
def test_other_benchmarks_write_the_same_form(name, tmp_path):
    config = EnvConfig(name=name, turns=8)
    made = make_benchmark(config)
    wanted = demos.draw(made.task_ids("train"), 4, run_seed=0, noise=0.2)
    path = tmp_path / "demos.jsonl"
    demos.write_demos(made, PromptTemplate.load(name, "compact"), wanted, "", 8, path, quiet())
    made.close()
    lines = jsonl.read(path)
    assert len(lines) == 4 and all(line["messages"] for line in lines)
    assert {line["expert"] for line in lines} == {made.experts[0]}


def test_an_expert_that_cannot_be_replayed_is_an_error(benchmark, template, wanted, tmp_path):
    """Fault: the environment shows something else the second time."""

    class Moody:
        def __getattr__(self, name):
            return getattr(benchmark, name)

        def make(self):
            environment = benchmark.make()
            reset = environment.reset

            async def other_reset(task, seed):
                await reset(benchmark.task_ids("train")[-1], seed)
                return environment._observation()

            environment.reset = other_reset
            return environment

    with pytest.raises(EnvError, match="another observation"):
        demos.write_demos(Moody(), template, wanted[:1], "", TURNS, tmp_path / "demos.jsonl", quiet())
    assert not (tmp_path / "demos.jsonl").exists()
