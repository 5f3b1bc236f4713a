"""Experts and plans: they win, they see the evidence first, and they read like an agent's answers."""

import pytest

from sdjax.envs import EnvConfig
from sdjax.envs.base import Status
from sdjax.envs.demos import Demonstration, chat_turns, play_experts
from sdjax.envs.prompts import PromptTemplate, project
from sdjax.envs.searchqa import check, episode
from sdjax.envs.searchqa.actions import parse
from sdjax.envs.searchqa.adapter import SearchqaBenchmark
from sdjax.envs.searchqa.backends import Bm25Backend
from sdjax.envs.searchqa.config import SearchqaConfig
from sdjax.envs.searchqa.corpus import Corpus, Passage
from sdjax.envs.searchqa.expert import gold_passages, plan
from sdjax.envs.searchqa.questions import Question
from sdjax.errors import DataError


@pytest.mark.parametrize("rule", ["verl_agent", "search_r1"])
def test_the_gold_expert_wins_with_the_evidence_before_its_eyes(run, rule):
    benchmark = SearchqaBenchmark(EnvConfig(name="searchqa", turns=4, searchqa=SearchqaConfig(rule=rule)))
    for task in benchmark.task_ids("eval"):
        question = benchmark.store.question(task)
        turns = run(benchmark.expert_episode(task, "gold", 0, 4))
        assert 2 <= len(turns) <= 4
        kinds = [parse(turn.action).kind for turn in turns]
        assert kinds == ["search"] * (len(turns) - 1) + ["answer"]
        read = "\n".join(turn.observation.text for turn in turns)
        for passage_id in question.gold_ids:
            assert benchmark.store.corpus.passage(passage_id).text in read
        assert all(turn.thought and "{" not in turn.thought for turn in turns)


def test_experts_that_do_not_win_in_time_show_nothing(benchmark, run):
    task = benchmark.task_ids("eval")[0]
    assert run(benchmark.expert_episode(task, "gold", 0, 1)) == []
    rule = [run(benchmark.expert_episode(task, "rule", 0, 4)) for task in benchmark.task_ids("eval")]
    won = [turns for turns in rule if turns]
    assert 0 < len(won) < len(rule) and all(len(turns) == 2 for turns in won)
    with pytest.raises(DataError, match="oracle"):
        run(benchmark.expert_episode(task, "oracle", 0, 4))


def test_noise_is_seeded_and_keeps_lost_episodes(benchmark, run):
    def play(seed, noise):
        return [run(benchmark.expert_episode(task, "gold", seed, 4, noise)) for task in benchmark.task_ids("eval")[:40]]

    noisy = play(1, 0.5)
    assert noisy == play(1, 0.5) and noisy != play(2, 0.5)
    assert all(turns for turns in noisy)
    ends = [parse(turns[-1].action) for turns in noisy]
    golds = [benchmark.store.question(task).golden_answers for task in benchmark.task_ids("eval")[:40]]
    assert any(end.text not in gold for end, gold in zip(ends, golds, strict=True))
    assert any(len(turns) == 4 for turns in noisy)


def test_plans_win_from_wherever_an_episode_is(benchmark, run):
    async def session():
        for task in benchmark.task_ids("eval")[::9]:
            for played in ([], ["hm"], ["<search>river</search>", "hm"], ["hm"] * 3):
                environment = benchmark.make()
                await environment.reset(task, 0)
                for action in played:
                    await environment.step(action)
                steps = environment.privileged("plan")
                assert len(steps) <= 4 - len(played)
                for action in steps:
                    result = await environment.step(action)
                assert result.status is Status.SUCCESS and environment.privileged("plan") == []
            environment = benchmark.make()
            await environment.restore(task, 0, ["hm"] * 4)
            assert environment.privileged("plan") is None

    run(session())


def test_hops_are_looked_up_in_the_order_in_which_they_come_up():
    corpus = Corpus(
        [
            Passage("c", '"Cort"\nCort is a lake.'),
            Passage("b", '"Birn"\nBirn flows into Cort.'),
            Passage("a", '"Alder"\nAlder lies on the Birn.'),
        ]
    )
    question = Question(
        "q", "musique", "Into what flows the river of Alder?", ("Cort",), ("c", "b", "a"), all_gold=True
    )
    assert [passage.id for passage in gold_passages(question, corpus)] == ["a", "b", "c"]
    rules = episode.make_rules("verl_agent", 3, 3, 100)
    state = episode.start(question, rules)
    assert plan(state, corpus, rules) == [
        "<search>Alder Birn</search>", "<search>Cort</search>", "<answer>Cort</answer>"
    ]  # fmt: skip
    # The same title again brought another passage: its first words are added.
    tried = episode.State(question, "", queries=("Alder",), seen=(("x",),), turns=1)
    assert plan(tried, corpus, rules)[0].startswith("<search>Alder Alder lies on the Birn.")
    # Without a corpus there is nothing better than the question.
    assert plan(state, None, rules) == [f"<search>{question.question}</search>", "<answer>Cort</answer>"]
    unknown = episode.start(Question("q", "nq", "what is it", ("x",)), rules)
    assert plan(unknown, None, rules) == ["<search>what is it</search>", "<answer>x</answer>"]


@pytest.mark.parametrize("name", ["verl_agent", "search_r1", "compact"])
def test_demonstrations_are_valid_answers_in_every_template(benchmark, name):
    template = PromptTemplate.load("searchqa", name)
    wanted = [Demonstration(task, 3) for task in benchmark.task_ids("train")[::40]]
    for turns in play_experts(benchmark, wanted, "", 4):
        for turn, chat in zip(turns, chat_turns(turns, template), strict=True):
            projection = project(chat.answer, template)
            assert projection.valid and projection.action == turn.action


def test_the_check_prints_recall_speed_and_experts(capsys):
    assert check.main(["--queries", "50"]) == 0
    printed = capsys.readouterr().out
    assert "generated: 358 passages, 500 questions" in printed and "queries/s on one core" in printed
    assert "macro EM on eval within 4 turns: gold 1.00" in printed
    assert check.main(["--data", "/nothing/here"]) == 1


def test_recall_counts_questions_with_a_gold_passage_near_the_top(world):
    corpus = Corpus([Passage(str(i), f'"{word}"\n{word} thing') for i, word in enumerate(["red", "blue", "green"])])
    questions = [
        Question("a", "nq", "red", ("x",), ("0",)),
        Question("b", "nq", "red thing", ("x",), ("2",)),
        Question("c", "nq", "blue", ("x",)),
    ]
    assert check.recall(Bm25Backend(corpus), questions) == {"nq": {1: 0.5, 3: 1.0, 10: 1.0}}
    found = check.recall(Bm25Backend(world.corpus), list(world.questions.values()))
    assert min(depths[3] for depths in found.values()) > 0.9


# Shares of questions with a gold passage among the first 1, 3 and 10, measured with the library bm25s on the same data.
RECALL = {
    "nq": (0.22, 0.59, 0.88),
    "triviaqa": (0.75, 0.95, 0.99),
    "popqa": (0.68, 0.87, 0.93),
    "hotpotqa": (0.78, 0.91, 0.99),
    "2wiki": (0.92, 0.98, 1.00),
    "musique": (0.61, 0.79, 0.95),
    "bamboogle": (0.11, 0.23, 0.48),
}


@pytest.mark.shared
@pytest.mark.slow
def test_the_real_corpus_drops_in(closed_corpus, run):
    """Folder as it is, recall as measured, splits without a leak, the gold expert wins on real questions."""
    benchmark = SearchqaBenchmark(EnvConfig(name="searchqa", data=str(closed_corpus), turns=4))
    store = benchmark.store
    assert {split: len(ids) for split, ids in store.splits.items()} == {"eval": 664, "train": 2046, "eval_3125": 3125}
    assert len(store.corpus) == 23083 and len(benchmark.panel("eval_3125").task_ids) == 3125
    found = check.recall(Bm25Backend(store.corpus), list(store.questions.values()))
    for source, shares in RECALL.items():
        assert [found[source][depth] for depth in (1, 3, 10)] == pytest.approx(shares, abs=0.025)
    for task in store.task_ids("eval")[::15]:
        turns = run(benchmark.expert_episode(task, "gold", 0, 4))
        assert turns and turns[-1].action == f"<answer>{store.question(task).golden_answers[0]}</answer>"
