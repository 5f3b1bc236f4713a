"""Prefix tree, first divergence, restore by replay, the search for a verified continuation, and action tokens."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from sdjax.envs.alfworld.adapter import AlfworldBenchmark
from sdjax.envs.config import GeneratorConfig
from sdjax.errors import EngineError
from sdjax.rollout import prefix_tree
from sdjax.rollout.action_tokens import action_tokens
from sdjax.rollout.continuations import Branch, ContinuationRules, Continuations, sites_of
from sdjax.rollout.prefix_tree import Path
from tests.methods.corridor import SAMPLING, STUDENTS, WIN, Bytes, Script, make_group, make_player, oracle


def path(*steps: str) -> Path:
    """ "obs>action" for every turn."""
    seen, done = zip(*(step.split(">") for step in steps))
    return Path(seen, done)


# --- tree -----------------------------------------------------------------------------------------------------------


def test_tree_of_hand_written_episodes():
    paths = [
        path("Start>go", "hall>look", "hall>open"),
        path("start >GO", "Hall>look", "hall>shut", "x>y"),
        path("start>wait", "start>go"),
    ]
    tree = prefix_tree.build(paths)
    assert {key: node.members for key, node in tree.items()} == {
        ("start",): (0, 1, 2),
        ("start", ("go", "hall")): (0, 1),
        ("start", ("go", "hall"), ("look", "hall")): (0, 1),
        ("start", ("go", "hall"), ("look", "hall"), ("shut", "x")): (1,),
        ("start", ("wait", "start")): (2,),
    }
    shared = prefix_tree.eligible(tree, support=2, fallback_depth=4)
    assert [node.depth for node in prefix_tree.schedule(shared, 3)] == [2, 1, 0]
    assert [node.depth for node in prefix_tree.schedule(shared, 2)] == [2, 1]


def test_without_a_shared_state_the_first_levels_may_be_used():
    paths = [path(*(f"s{i}{k}>x{i}{k}" if k else f"s>x{i}" for k in range(7))) for i in range(2)]
    nodes = prefix_tree.eligible(prefix_tree.build(paths), support=2, fallback_depth=4)
    assert sorted(node.depth for node in nodes) == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [(n.depth, n.members) for n in prefix_tree.schedule(nodes, 9)] == [
        (4, (0,)), (3, (0,)), (2, (0,)), (1, (0,)), (0, (0, 1)),
    ]  # fmt: skip


def test_ties_go_to_the_state_with_more_episodes():
    paths = [path("s>a", "p>x"), *[path("s>a", "p>x"), path("s>b", "q>x"), path("s>b", "q>x"), path("s>b", "q>y")]]
    nodes = prefix_tree.eligible(prefix_tree.build(paths), support=2, fallback_depth=4)
    assert prefix_tree.schedule(nodes, 1)[0].members == (2, 3, 4)
    assert prefix_tree.schedule([], 3) == []


@pytest.mark.parametrize(
    ("student", "teacher", "turn"),
    [
        (path("s>a", "p>x"), path("s>a", "p>y"), 1),
        (path("s>a"), path("s>B"), 0),
        (path("S  t>a ", "p>x"), path("s t>A", "P>y"), 1),  # case and spaces make no other state
        (path("s>a", "p>x"), path("s>a", "q>y"), None),  # the states differ first
        (path("s>a"), path("s>a", "p>y"), None),  # the student ends before they differ
        (path("s>a", "p>x"), path("s>a", "p>x"), None),
    ],
)
def test_first_divergence(student, teacher, turn):
    assert prefix_tree.first_divergence(student, teacher) == turn


# --- action tokens --------------------------------------------------------------------------------------------------


def marked(text: str) -> str:
    tokens = [*Bytes().encode(text), 256]  # an end token without text
    mask = action_tokens(tokens, Bytes().decode)
    assert mask.shape == (len(tokens),)
    return bytes(t for t, m in zip(tokens, mask) if m and t < 256).decode()


def test_tokens_of_the_last_action_block():
    assert marked("<think>é</think><action>go é</action> é") == "<action>go é</action>"
    assert marked("<action>one</action> <Action>two</ACTION>!") == "<Action>two</ACTION>"
    assert marked("<search>one</search><answer>two</answer>") == "<answer>two</answer>"
    assert marked("<action>never closed") == "<action>never closed"
    assert action_tokens([256], Bytes().decode).tolist() == [True]
    assert not action_tokens([*Bytes().encode("<action>x</action>"), 256], Bytes().decode)[-1]


def test_a_token_that_is_partly_in_the_block_counts():
    words = ["<think>", "no</think><act", "ion>go</action", ">.", "end"]
    mask = action_tokens(range(5), lambda ids: "".join(words[i] for i in ids))
    assert mask.tolist() == [False, True, True, True, False]


# --- search ---------------------------------------------------------------------------------------------------------


def acting(student, prompt):
    return np.concatenate([np.array(Bytes().encode("skill "), np.int32), prompt])


def search(player, failures, **rules):
    return Continuations(player, ContinuationRules(**rules), acting, SAMPLING).search([0], failures)


def test_a_verified_branch_starts_at_the_deepest_shared_state():
    engine = Script(STUDENTS, oracle)
    player = make_player(engine)
    failures = make_group(player, 4)
    branches, counts = search(player, failures)
    branch = branches[0]
    assert branch.depth == 1 and branch.trajectory.success and [t.action for t in branch.trajectory.turns] == WIN
    assert [t.assignment.trajectory for t in branch.covered] == [7, 8, 9]
    assert (counts.attempts, counts.continuations, counts.verified, counts.diverged) == (1, 2, 2, 0)
    assert (counts.env_steps, counts.replayed_steps) == (4, 2)
    sites, mismatched = sites_of(branch)
    assert [(site.turn, site.students) for site in sites] == [(1, (7, 8)), (2, (9,))] and mismatched == 0
    for turn in branch.trajectory.turns[1:]:
        assert Bytes().decode(turn.acting_prompt) == "skill " + Bytes().decode(turn.prompt)
    np.testing.assert_array_equal(branch.trajectory.turns[1].prompt, failures[0].turns[1].prompt)


def test_all_members_of_the_root_are_covered_when_nothing_deeper_wins():
    def late(sample, turn):
        return "no" if attempts_so_far() < 2 else WIN[turn]

    engine = Script(STUDENTS, late)

    def attempts_so_far():
        return len({name.split("/")[3].split(" ")[0] for name, text, _ in engine.asked if text.startswith("skill")})

    player = make_player(engine)
    branches, counts = search(player, make_group(player, 4))
    assert branches[0].depth == 0 and counts.attempts == 2 and counts.continuations == 4
    assert [(s.turn, s.students) for s in sites_of(branches[0])[0]] == [(0, (10,)), (1, (7, 8)), (2, (9,))]


def test_no_win_no_branch_and_the_turn_budget_holds():
    engine = Script(STUDENTS, lambda sample, turn: "no")
    player = make_player(engine)
    branches, counts = search(player, make_group(player, 4), nodes=1)
    assert branches == {} and counts.attempts == 1 and counts.verified == 0
    assert counts.env_steps == 2 * 3  # one of four turns was replayed
    assert search(player, [])[0] == {}


def test_two_searches_draw_the_same_seeds_and_all_seeds_differ():
    asked = []
    for _ in range(2):
        engine = Script(STUDENTS, lambda sample, turn: "no")
        player = make_player(engine)
        failures = make_group(player, 4)
        engine.asked.clear()
        search(player, failures)
        asked.append(sorted(engine.asked))
    assert asked[0] == asked[1]
    assert len({seed for _, _, seed in asked[0]}) == len(asked[0])


def test_a_replay_that_shows_something_else_is_dropped_and_counted():
    engine = Script(STUDENTS, oracle)
    player = make_player(engine)
    failures = make_group(player, 4)
    ticks = iter(range(10_000))
    player.benchmark.noise = lambda: next(ticks)  # type: ignore[attr-defined]
    branches, counts = search(player, failures)
    assert branches == {} and counts.diverged == counts.continuations == 4 and counts.env_steps == 0


@pytest.mark.parametrize(("retries", "broken", "failed"), [(1, (1,), 0), (0, (1, 2), 2)])
def test_a_failed_environment_is_replaced_then_counted(retries, broken, failed):
    engine = Script(STUDENTS, oracle)
    player = make_player(engine, retries=retries)
    failures = make_group(player, 4)
    start = player.benchmark.steps  # type: ignore[attr-defined]
    player.benchmark.broken = tuple(start + n for n in broken)  # type: ignore[attr-defined]
    branches, counts = search(player, failures, nodes=1)
    assert counts.failed == failed and bool(branches) == (not failed)


def test_an_error_of_the_engine_is_raised():
    engine = Script(STUDENTS, oracle)
    player = make_player(engine)
    failures = make_group(player, 4)

    async def broken(request):
        raise EngineError("out of memory.", "use fewer slots.")

    engine.generate = broken
    with pytest.raises(EngineError, match="out of memory"):
        search(player, failures)


def test_another_prompt_at_the_site_drops_the_pair():
    engine = Script(STUDENTS, oracle)
    player = make_player(engine)
    failures = make_group(player, 4)
    branch = search(player, failures)[0][0]
    student = branch.covered[0]
    other = replace(student, turns=tuple(replace(t, prompt=t.prompt[1:]) for t in student.turns))
    sites, mismatched = sites_of(Branch(branch.trajectory, branch.depth, (other, *branch.covered[1:])))
    assert mismatched == 1 and [(s.turn, s.students) for s in sites] == [(1, (8,)), (2, (9,))]


def test_restoring_a_real_game_twice_shows_the_same():
    games = GeneratorConfig(train_games=1, valid_games=1, test_games=1)
    benchmark = AlfworldBenchmark("generated", "native", games)
    task = benchmark.task_ids("train")[0]
    actions = [turn.action for turn in asyncio.run(benchmark.expert_episode(task, "plan", 0, 30))]
    assert len(actions) > 2

    async def restore():
        return await benchmark.make().restore(task, 5, [*actions[:-1], "sing"])

    first, second = asyncio.run(restore()), asyncio.run(restore())
    assert first == second and len(first) == len(actions) + 1
    assert first[0] != first[-1]
