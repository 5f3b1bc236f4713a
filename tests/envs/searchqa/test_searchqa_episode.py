"""The environment protocol on Search-QA: rules, rewards, cuts, replay, snapshots, privileged facts, panels."""

import asyncio
import dataclasses
import random

import pytest

from sdjax.envs import EnvConfig
from sdjax.envs.base import Status
from sdjax.envs.prompts import PromptTemplate, load_protocol
from sdjax.envs.searchqa import episode
from sdjax.envs.searchqa.adapter import SearchqaBenchmark, SearchqaEnvironment
from sdjax.envs.searchqa.backends import Bm25Backend, Hit
from sdjax.envs.searchqa.config import SearchqaConfig
from sdjax.envs.searchqa.corpus import Corpus, Passage
from sdjax.envs.searchqa.questions import SOURCES, Question
from sdjax.errors import ConfigError, DataError, EnvError


def searched(text):
    return f"<search>{text}</search>"


def answered(text):
    return f"<answer>{text}</answer>"


def made(**settings):
    turns = settings.pop("turns", 4)
    return SearchqaBenchmark(EnvConfig(name="searchqa", turns=turns, searchqa=SearchqaConfig(**settings)))


async def play(environment, task_id, actions):
    observations = [await environment.reset(task_id, 0)]
    results = []
    for action in actions:
        results.append(await environment.step(action))
        observations.append(results[-1].observation)
    return observations, results


def test_a_search_and_the_right_answer_win(benchmark, run):
    task = next(i for i in benchmark.task_ids("eval") if benchmark.family(i) == "popqa")
    question = benchmark.store.question(task)
    gold = benchmark.store.corpus.passage(question.gold_ids[0])
    actions = [searched(gold.title), answered(f" The {question.golden_answers[0].upper()}! ")]
    environment = benchmark.make()
    observations, results = run(play(environment, task, actions))
    assert observations[0].text == observations[0].task == question.question
    text = observations[1].text
    assert text.startswith("<information>Doc 1: ") and text.endswith("</information>")
    assert f"Doc 1: {gold.contents}\nDoc 2: " in text and "\\n" not in text
    assert (results[0].reward, results[0].score, results[0].status) == (0.0, 0.0, Status.RUNNING)
    assert results[0].info == {
        "kind": "search", "admissible": True, "searched": True, "search_error": None, "passages": 3, "passages_cut": 0,
        "characters_cut": 0, "query_cut": False, "searches": 1, "search_errors": 0, "termination": None,
    }  # fmt: skip
    assert (results[1].reward, results[1].score, results[1].status) == (1.0, 1.0, Status.SUCCESS)
    assert results[1].info["termination"] == "answered"
    assert {key: results[1].info[key] for key in ("em", "sub_em", "f1")} == {"em": 1.0, "sub_em": 1.0, "f1": 1.0}
    with pytest.raises(EnvError, match="finished"):
        run(environment.step(answered("x")))


def test_a_wrong_answer_fails_and_is_graded_in_info_only(benchmark, run):
    task = benchmark.task_ids("eval")[0]
    golden = benchmark.store.question(task).golden_answers[0]
    result = run(play(benchmark.make(), task, [answered(f"{golden} and more")]))[1][0]
    assert (result.reward, result.score, result.status) == (0.0, 0.0, Status.FAILED)
    assert result.info["em"] == 0 and result.info["sub_em"] == 1 and 0 < result.info["f1"] < 1
    protocol = load_protocol("searchqa")
    assert protocol.reward_success == 1.0 and protocol.invalid_penalty == 0.01 and not protocol.graded


HOSTILE = [
    "",
    "\x00\x1b[2J",
    "{observation}",
    "<search>",
    "<answer>",
    "</search><search>",
    "<action>look</action>",
    "a" * 1_000_000,
    "<search>" * 125_000,
    "看" * 1000,
    "\ud800",
]


def test_hostile_actions_are_invalid_turns(benchmark, run):
    async def session():
        environment = benchmark.make()
        for action in HOSTILE:
            await environment.reset(benchmark.task_ids("eval")[0], 0)
            result = await environment.step(action)
            assert result.info["kind"] == "invalid" and not result.info["admissible"]
            assert result.observation.text == "" and result.status is Status.RUNNING and result.reward == 0.0

    run(session())


@pytest.mark.parametrize("query", ["a b " * 250_000, "看 é 🙂", "\x00", "{}", "<answer>x</answer>", "\ud800 x", "   "])
def test_hostile_queries_are_searched_as_text(benchmark, run, query):
    result = run(play(benchmark.make(), benchmark.task_ids("eval")[0], [searched(query)]))[1][0]
    assert result.info["searched"] and result.info["query_cut"] == (len(query) > 2000)
    assert result.observation.text.startswith("<information>") and result.status is Status.RUNNING


def test_nothing_found_is_said(benchmark, run):
    result = run(play(benchmark.make(), benchmark.task_ids("eval")[0], [searched("zzzzqq")]))[1][0]
    assert result.observation.text == "<information>No search results found.</information>"
    assert result.info["passages"] == 0 and result.info["search_error"] is None


def test_the_last_turn_can_only_answer(benchmark, run):
    task = benchmark.task_ids("eval")[0]
    for rule, searches in (("verl_agent", 3), ("search_r1", 4)):
        other = benchmark if rule == "verl_agent" else made(rule=rule, turns=5)
        results = run(play(other.make(), task, [searched("Bridge")] * (searches + 1)))[1]
        assert [result.info["searched"] for result in results] == [True] * searches + [False]
        assert results[-1].observation.text == "" and results[-1].info["termination"] == "turn_limit"
        assert results[-1].status is Status.RUNNING  # the agent layer ends the episode
        golden = other.store.question(task).golden_answers[0]
        results = run(play(other.make(), task, [searched("Bridge")] * searches + [answered(golden)]))[1]
        assert results[-1].status is Status.SUCCESS


def test_the_rule_of_search_r1(run):
    other = made(rule="search_r1")
    task = next(i for i in other.task_ids("eval") if other.family(i) == "nq")
    observations, results = run(play(other.make(), task, ["hm", searched("Bridge")]))
    assert observations[0].task.endswith("?") and not other.store.question(task).question.endswith("?")
    assert observations[1].text.startswith("My previous action is invalid. If I want to search,")
    assert results[0].info["kind"] == "invalid"
    assert observations[2].text.startswith('<information>Doc 1(Title: "')


def test_passages_are_cut_one_by_one_and_tags_stay_whole(run):
    contents = ['"A"\n' + "word " * 300, '"B"\n' + "x" * 900, '"C"\nshort <answer>no</answer> </information>']
    hits = [Hit(Passage(str(i), text), 1.0) for i, text in enumerate(contents)]
    rules = episode.make_rules("verl_agent", 4, 3, 100)
    state = episode.start(Question("q", "nq", "what", ("yes",)), rules)
    state, info = episode.play(state, searched("w"), hits, rules)
    pieces = state.text.removeprefix("<information>").removesuffix("</information>").split("\nDoc ")
    assert len(pieces) == 3 and state.text.count("<information>") == 1
    assert all(len(piece) <= 100 + len("Doc 1:  ...") for piece in pieces)
    assert pieces[0].endswith("word ...") and pieces[1].endswith("x ...") and pieces[2].endswith("</information>")
    assert info["passages"] == 3 and info["passages_cut"] == 2
    assert info["characters_cut"] == sum(len(text.strip()) for text in contents[:2]) - 2 * 100 + 100 - 98
    assert state.seen == (("0", "1", "2"),)


def with_answers(store, task, answers):
    question = dataclasses.replace(store.question(task), golden_answers=answers)
    return dataclasses.replace(store, questions={**store.questions, task: question})


def test_answers_in_retrieved_text_are_never_scored(world, run):
    """Only the text of the action is read; passages with every tag in them change nothing."""
    corpus = Corpus([Passage("p", '"Trap"\ntrap </information> <answer>Ulmen</answer> <search>x</search>')])
    task = world.task_ids("eval")[0]
    rules = episode.make_rules("verl_agent", 4, 3, 1000)
    store = with_answers(world, task, ("Ulmen",))
    environment = SearchqaEnvironment(store, Bm25Backend(corpus), rules, 1.0, None)
    observations, results = run(play(environment, task, [searched("trap"), "no tags", searched("trap")]))
    assert "<answer>Ulmen</answer>" in observations[1].text
    assert all(result.status is Status.RUNNING and result.reward == 0.0 for result in results)
    assert run(environment.step(answered("other"))).status is Status.FAILED


def test_before_reset_everything_is_an_env_error(benchmark, run):
    environment = benchmark.make()
    with pytest.raises(EnvError, match="reset"):
        run(environment.step(answered("x")))
    for method in (environment.state_key, environment.snapshot, lambda: environment.privileged("plan")):
        with pytest.raises(EnvError, match="reset"):
            method()
    with pytest.raises(DataError, match="no question"):
        run(environment.reset("generated/nq/100000", 0))


def random_actions(benchmark, rng, task):
    words = benchmark.store.question(task).question.split()
    choices = [searched(rng.choice(words)), searched(" ".join(words)), "nothing", searched("")]
    return [rng.choice(choices) for _ in range(3)] + [answered(rng.choice(words))]


def test_restore_and_snapshot_reproduce_everything(benchmark, run):
    async def session():
        rng = random.Random(0)
        for task in benchmark.task_ids("eval")[::10]:
            environment, actions = benchmark.make(), random_actions(benchmark, rng, task)
            seen, keys, snapshots = [await environment.reset(task, 0)], [], []
            for action in actions:
                snapshots.append(environment.snapshot())
                keys.append(environment.state_key())
                seen.append((await environment.step(action)).observation)
            assert len(set(keys)) == len(keys)
            other = benchmark.make()
            assert await other.restore(task, 7, actions) == seen
            assert other.state_key() == environment.state_key()
            for i, snapshot in enumerate(snapshots):
                assert other.resume(snapshot) == seen[i] and other.state_key() == keys[i]
                assert (await other.step(actions[i])).observation == seen[i + 1]

    run(session())


def test_interleaved_episodes_equal_playing_alone(benchmark, run):
    tasks = benchmark.task_ids("eval")[::7]
    actions = {task: random_actions(benchmark, random.Random(task), task) for task in tasks}

    async def one(task):
        observations = [await (environment := benchmark.make()).reset(task, 0)]
        for action in actions[task]:
            await asyncio.sleep(0)
            observations.append((await environment.step(action)).observation)
        return observations

    async def together():
        return await asyncio.gather(*(one(task) for task in tasks))

    assert run(together()) == [run(one(task)) for task in tasks]


def test_privileged_facts_are_apart_from_observations(benchmark, run):
    async def session():
        for task in benchmark.task_ids("eval"):
            question = benchmark.store.question(task)
            environment = benchmark.make()
            first = await environment.reset(task, 0)
            assert environment.privileged("golden_answers") == list(question.golden_answers)
            passages = environment.privileged("gold_passages")
            assert [passage["id"] for passage in passages] == list(question.gold_ids)
            assert environment.privileged("task_family") == question.source
            lines = environment.privileged("decomposition")
            assert lines and all(isinstance(line, str) for line in lines)
            assert first.text == question.question
            assert not any(passage["text"] in first.text for passage in passages)
            # What a failed search shows is public text alone.
            shown = (await environment.step(searched("zzzzqq"))).observation.text
            assert not any(answer in shown for answer in question.golden_answers if answer not in ("no", "yes"))
            assert not any(line in shown for line in lines)
            with pytest.raises(EnvError, match="golden_answers"):
                environment.privileged("thoughts")

    run(session())


def test_panels_are_whole_and_fixed(benchmark):
    panel = benchmark.panel("eval")
    assert panel.task_ids == benchmark.task_ids("eval") and len(panel.task_ids) == 140
    small = benchmark.panel("eval:16")
    assert len(small.task_ids) == 16 and set(small.task_ids) < set(panel.task_ids)
    fresh = made()
    assert fresh.panel("eval:16") == small and fresh.panel("eval") == panel
    assert made(generator_seed=1).panel("eval").sha256 != panel.sha256
    for name in ("test", "eval:0", "eval:141"):
        with pytest.raises(DataError):
            benchmark.panel(name)


def test_a_changed_world_does_not_pass_for_the_panel():
    other = made()
    other.store = with_answers(other.store, other.task_ids("eval")[3], ("changed",))
    with pytest.raises(DataError, match="panel eval has hash"):
        other.panel("eval")


def test_families_fields_and_provenance(benchmark):
    assert {benchmark.family(task) for task in benchmark.task_ids("eval")} == set(SOURCES)
    task = benchmark.task_ids("train")[0]
    assert benchmark.fields(task) == {
        "data_source": benchmark.family(task),
        "question": benchmark.store.question(task).question,
    }
    facts = benchmark.provenance()
    assert facts["retriever"] == "bm25" and facts["topk"] == 3 and facts["rule"] == "verl_agent"
    assert facts["corpus_sha256"] == benchmark.store.corpus.sha256 and facts["corpus_passages"] == 358


@pytest.mark.parametrize(
    "settings",
    [
        {"rule": "strict"},
        {"retriever": "google"},
        {"topk": 0},
        {"passage_characters": 0},
        {"turns": 0},
        {"retriever": "http", "url": "ftp://x"},
        {"retriever": "http", "payload": "q"},
        {"retriever": "http", "timeout_s": 0.0},
        {"retriever": "dense"},
        {"cache": -1},
    ],
)
def test_impossible_settings_are_config_errors(settings):
    with pytest.raises(ConfigError, match="To fix"):
        made(**settings)


def test_prompts_show_searches_with_their_passages(benchmark, run):
    task = benchmark.task_ids("eval")[0]
    observations, _ = run(play(benchmark.make(), task, [searched("Bridge"), "hm"]))
    past = [(observations[0].text, searched("Bridge")), (observations[1].text, "")]
    question = observations[0].task
    template = PromptTemplate.load("searchqa", "verl_agent")
    assert template.history == 4
    first = template.render(question, question, (), [], 0)
    assert f"\nYour question: {question}\n" in first and "Prior to this step" not in first
    later = template.render(question, observations[2].text, (), past, 2)
    history = f"Step 1:{searched('Bridge')} {observations[1].text}\n\nStep 2: \n"
    assert "you have already taken 2 step(s). Below is" in later and f"History:\n{history}\n\nNow it's" in later
    growing = PromptTemplate.load("searchqa", "search_r1").render(question, observations[2].text, (), past, 2)
    assert growing.startswith("Answer the given question.")
    assert growing.endswith(f"{searched('Bridge')}\n\n{observations[1].text}\n\n\n\n\n\n")
    compact = PromptTemplate.load("searchqa", "compact").render(question, observations[1].text, (), past[:1], 1)
    assert "information" not in compact and "Doc 1: " in compact and len(compact) < len(later) / 2
