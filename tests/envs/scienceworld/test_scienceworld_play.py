"""Episodes of the real simulator: rewards, status, determinism, replay, hostile text, experts."""

import asyncio
import hashlib
import json
import random

import pytest
from scienceworld_play import TASKS, commands, play, run, shown

from sdjax.envs.base import Status
from sdjax.envs.scienceworld.adapter import ScienceworldEnvironment
from sdjax.envs.scienceworld.config import ScienceworldConfig
from sdjax.envs.scienceworld.expert import gold_episode
from sdjax.envs.scienceworld.replay import replay
from sdjax.envs.scienceworld.store import Tasks
from sdjax.errors import ConfigError, DataError, EnvError

pytestmark = pytest.mark.scienceworld

# Of the eight traces below. Another Java, package or option that changes an episode changes it.
TRACE_SHA256 = "eb08c62fdc579b3e2e2a0c39b032cc43e4a9e1587ca112d471652772f8a056b5"


@pytest.fixture(scope="module")
def alone(benchmark):
    """Each task of TASKS played alone, in one environment after the other."""

    async def one(task_id):
        environment = benchmark.make()
        trace = await play(environment, task_id, commands(benchmark, task_id, 25))
        await environment.close()
        return trace

    return {task_id: run(one(task_id)) for task_id in TASKS}


def test_traces_are_those_that_were_stored(alone):
    text = json.dumps([alone[task_id] for task_id in TASKS], sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest() == TRACE_SHA256


@pytest.mark.slow
def test_40_interleaved_episodes_equal_playing_alone(benchmark, alone):
    """In one Java process, stepped in random order."""

    async def everything():
        rng = random.Random(0)
        players = []
        for i in range(40):
            task_id, environment = TASKS[i % len(TASKS)], benchmark.make()
            players.append((task_id, environment, commands(benchmark, task_id, 25), []))
        waiting = list(range(40))
        rng.shuffle(waiting)
        while waiting:
            place = rng.randrange(len(waiting))
            task_id, environment, actions, trace = players[waiting[place]]
            if not trace:
                trace.append(shown(await environment.reset(task_id, 0)))
                continue
            result = await environment.step(actions[len(trace) - 1])
            trace.append([*shown(result), environment.state_key(), environment.privileged("goal_progress")])
            if result.status != "running" or len(trace) > len(actions):
                waiting.pop(place)
        for _, environment, _, _ in players:
            await environment.close()
        return [(task_id, trace) for task_id, _, _, trace in players]

    for task_id, trace in run(everything()):
        assert trace == alone[task_id]


def test_gold_paths_replay_to_their_stored_score_curves(benchmark):
    """Twenty short ones of the panel; ``python -m sdjax.envs.scienceworld.check`` replays all 200."""
    rows = [benchmark.tasks.gold(task_id) for task_id in benchmark.panel("panel200:200").task_ids]
    short = [gold for gold in rows if gold is not None and len(gold.actions) <= 25][:20]
    assert len(short) == 20 and len({gold.task_id.partition("/")[0] for gold in short}) > 8

    async def everything():
        environments = [benchmark.make() for _ in short]
        found = await asyncio.gather(*(replay(e, gold) for e, gold in zip(environments, short, strict=True)))
        for environment in environments:
            await environment.close()
        return found

    for gold, found in zip(short, run(everything()), strict=True):
        assert (found.score, found.score_curve) == (gold.score, gold.score_curve), gold.task_id


def test_rewards_add_up_to_a_tenth_of_the_score_and_success_is_score_100(benchmark):
    async def one():
        environment = benchmark.make()
        first = await environment.reset("find-animal/225", seed=3)
        assert first.task.startswith("Your task is to find") and "\n" not in first.task
        assert "look around" in first.admissible and "reset task" not in first.admissible and first.objects
        total, result = 0.0, None
        for action in benchmark.tasks.gold("find-animal/225").actions:
            result = await environment.step(action)
            total += result.reward
            assert total == pytest.approx(10 * result.score)
            assert result.status == (Status.SUCCESS if result.score == 1.0 else Status.RUNNING)
        assert result is not None and result.status is Status.SUCCESS and total == pytest.approx(10.0)
        with pytest.raises(EnvError, match="finished"):
            await environment.step("look around")
        await environment.close()

    run(one())


@pytest.mark.parametrize(
    ("settings", "total"),
    [
        ({}, 0.0),
        ({"failed_penalty": 1.0}, -1.0),
        ({"failed_return": "keep"}, 1.7),
        ({"failed_return": "keep", "failed_penalty": 0.5}, 1.2),
    ],
)
def test_a_wrong_focus_fails_the_episode(benchmark, settings, total):
    """Two doors earn 17 points first; what stays of them is a setting."""

    async def one():
        environment = ScienceworldEnvironment(benchmark.tasks, ScienceworldConfig(**settings), 10.0, benchmark.pool)
        await environment.reset("find-animal/225", 0)
        actions = ["open door to hallway", "go to hallway", "focus on air"]
        results = [await environment.step(action) for action in actions]
        assert [result.score for result in results] == [0.08, 0.17, 0.0]
        assert sum(result.reward for result in results) == pytest.approx(total)
        assert results[-1].status is Status.FAILED
        assert results[-1].info["failed"] and results[-1].info["raw_score"] == -100
        with pytest.raises(EnvError, match="finished"):
            await environment.step("look around")
        await environment.close()

    run(one())


def test_waiting_wins_nothing(benchmark):
    """One cheap subgoal, then waiting far beyond the 100 moves at which the package's own wrapper ends an episode."""

    async def one():
        environment = benchmark.make()
        await environment.reset("find-animal/225", 0)
        for action in ["open door to hallway", *["wait"] * 12]:
            result = await environment.step(action)
        assert result.info["moves"] > 100
        assert result.status is Status.RUNNING and result.score == 0.08 and result.reward == 0.0
        await environment.close()

    run(one())


@pytest.mark.parametrize(
    "action",
    [
        "reset task",
        "RESET Task",
        "reset the task",
        "the reset a task",
        "reset\t task ",
        "\x01reset\ntask\x02",
        "reset  an  task",
    ],
)
def test_reset_task_is_blocked_in_every_spelling(benchmark, action):
    async def one():
        environment = benchmark.make()
        await environment.reset("find-animal/225", 0)
        await environment.step("open door to hallway")
        key = environment.state_key()
        result = await environment.step(action)
        assert result.observation.text == "No known action matches that input."
        assert result.score == 0.08 and result.reward == 0.0 and not result.info["admissible"]
        assert environment.state_key() == key
        await environment.close()

    run(one())


HOSTILE = [
    "",
    "\x00\x1b[2J",
    "{action}{0}%s",
    "__import__('os').system('true')",
    "<action>look around</action>",
    "<think><think></action><action>",
    "a" * 1_000_000,
    "open " * 200_000,
    "看\u202e\U0001f600",
    "\ud800 lone surrogate",
    "look in $1 \\ [(",
    "!yro15:java.lang.System",
]


def test_hostile_actions_are_plain_text(benchmark):
    async def one():
        environment = benchmark.make()
        await environment.reset("boil/21", 0)
        key = environment.state_key()
        for action in HOSTILE:
            result = await environment.step(action)
            assert result.observation.text == "No known action matches that input.", action[:40]
            assert not result.info["admissible"] and result.status is Status.RUNNING and result.reward == 0.0
        assert environment.state_key() == key
        await environment.close()

    run(one())


def test_an_ambiguous_command_asks_for_a_number(benchmark):
    async def one():
        environment = benchmark.make()
        await environment.reset("boil/21", 0)
        for action in ["open door to kitchen", "go to kitchen"]:
            await environment.step(action)
        key = environment.state_key()
        asked = await environment.step("open door")
        assert asked.info["ambiguous"] and "0:\topen door" in asked.observation.text and environment.state_key() != key
        answered = await environment.step("0")
        assert not answered.info["ambiguous"] and answered.observation.text == "The door is now open."
        await environment.step("close door")
        blocked = await environment.step("reset task")  # as any other text it cancels the question
        assert blocked.observation.text.startswith("Unknown action.") and not blocked.info["ambiguous"]
        await environment.close()

    run(one())


def test_restore_and_resume_reproduce_the_episode(benchmark):
    async def one():
        task_id, actions = TASKS[0], commands(benchmark, TASKS[0], 9)
        environment, other, third = benchmark.make(), benchmark.make(), benchmark.make()
        seen = [await environment.reset(task_id, 0)]
        for action in actions:
            seen.append((await environment.step(action)).observation)
        snapshot = environment.snapshot()
        assert await other.restore(task_id, 5, actions) == seen
        assert await third.resume(snapshot) == seen[-1]
        assert environment.state_key() == other.state_key() == third.state_key()
        steps = [await e.step("look around") for e in (environment, other, third)]
        assert shown(steps[0]) == shown(steps[1]) == shown(steps[2])
        assert await environment.resume(snapshot) == seen[-1]  # later play has not changed it
        for e in (environment, other, third):
            await e.close()

    run(one())


def test_privileged_facts_follow_the_play(benchmark):
    async def one():
        environment = benchmark.make()
        with pytest.raises(EnvError, match="no episode"):
            environment.privileged("gold")
        await environment.reset("find-animal/225", 0)
        gold = list(benchmark.tasks.gold("find-animal/225").actions)
        assert environment.privileged("gold") == environment.privileged("plan") == gold
        assert environment.privileged("task_family") == "find-animal"
        before = environment.privileged("goal_progress")
        await environment.step(gold[0])
        assert environment.privileged("plan") == gold[1:]
        after = environment.privileged("goal_progress")
        assert len(before) == len(after) and before != after
        assert all(sentence.startswith(("open: ", "done: ")) for sentence in after)
        assert sum(sentence.startswith("done: ") for sentence in after) > sum(s.startswith("done: ") for s in before)
        await environment.step("look around")
        assert environment.privileged("plan") is None and environment.privileged("gold") == gold
        with pytest.raises(EnvError, match="facts"):
            environment.privileged("facts")
        for task_id in ("find-animal/226", "grow-fruit/93"):  # no path; one that does not win
            await environment.reset(task_id, 0)
            assert environment.privileged("gold") is None and environment.privileged("plan") is None
        await environment.close()

    run(one())


def test_no_privileged_text_is_ever_observed(benchmark, alone):
    """Goals with their state, the simulator's own table of them, and the gold path: in no text and in no list."""
    for task_id, trace in alone.items():
        private = ["Completed keys", "Subgoals", "GoalFind", *(goal for _, *rest in trace[1:] for goal in rest[-1])]
        private.append(", ".join(benchmark.tasks.gold(task_id).actions[:2]))
        assert len(private) > 10
        for text, task, admissible, objects, *_ in trace:
            public = "\n".join([text, task, ", ".join(admissible), ", ".join(objects)])
            assert not [secret for secret in private if secret in public], task_id


def test_the_expert_plays_gold_paths_that_win_in_time(benchmark):
    async def one(**kwargs):
        return await benchmark.expert_episode("find-animal/225", "gold", 0, **kwargs)

    turns = run(one(max_turns=30))
    assert [turn.action for turn in turns] == list(benchmark.tasks.gold("find-animal/225").actions)
    assert turns[0].observation.text.startswith("This room is called") and turns[0].observation.objects
    assert all(turn.thought for turn in turns)
    assert run(one(max_turns=15)) == []  # not in time
    assert run(benchmark.expert_episode("find-animal/226", "gold", 0, 30)) == []  # no gold path
    with pytest.raises(ConfigError, match="search"):
        run(benchmark.expert_episode("find-animal/225", "search", 0, 30))
    noisy = run(one(max_turns=30, noise=0.4))
    assert len(noisy) > len(turns) and noisy != turns
    assert noisy == run(one(max_turns=30, noise=0.4))


def test_the_expert_can_be_cut_behind_its_last_gain(benchmark):
    async def cut(least_score):
        gold, environment = benchmark.tasks.gold("find-animal/225"), benchmark.make()
        turns = await gold_episode(environment, gold, 0, max_turns=14, least_score=least_score, noise=0.0)
        await environment.close()
        return turns

    assert [turn.action for turn in run(cut(75))] == list(benchmark.tasks.gold("find-animal/225").actions[:9])
    assert run(cut(76)) == []


def test_the_simulator_knows_what_the_environment_refuses(benchmark):
    async def one(task_id):
        environment = benchmark.make()
        with pytest.raises(DataError, match="no ScienceWorld task"):
            await environment.reset(task_id, 0)
        with pytest.raises(EnvError, match="no episode"):
            await environment.step("look around")

    for task_id in ("boil/30", "boil", "boil/-1", "boil/x", "cook/1", "../boil/1", ""):
        run(one(task_id))

    async def direct():  # past the adapter: the worker refuses and lives
        session = benchmark.pool.session()
        answer = await session.call("reset", task_name="boil", variation=99, simplification="")
        assert "exceeds the total number of variations" in answer["refused"]
        assert "unknown method" in (await session.call("explode"))["refused"]
        await session.close()

    run(direct())


def test_easy_opens_doors_and_adds_teleport(benchmark):
    async def one():
        tasks = Tasks("easy")
        environment = ScienceworldEnvironment(tasks, ScienceworldConfig(simplification="easy"), 10.0, benchmark.pool)
        first = await environment.reset("find-animal/225", 0)
        assert "teleport OBJ" in first.admissible or any("teleport" in action for action in first.admissible)
        result = await environment.step("teleport to outside")
        assert result.info["admissible"] and "outside" in result.observation.text
        assert environment.privileged("gold") is None  # stored paths are of no simplification
        await environment.close()

    run(one())
