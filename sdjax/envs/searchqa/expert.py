"""Experts for warm starts, and the plan that tells a teacher how to win from here.

``gold`` knows the gold passages: it searches for them by title, in the order in which their names come up, and then
gives the golden answer. ``rule`` knows nothing: it searches for the question once and answers with the first title
that the question does not name (that it names, where it asks for one or the other).
"""

import functools
import random
import tomllib
from collections.abc import Sequence
from importlib import resources

from sdjax.envs.base import Environment, ExpertTurn, Observation, Status
from sdjax.envs.searchqa.corpus import Corpus, Passage
from sdjax.envs.searchqa.episode import Rules, State
from sdjax.envs.searchqa.questions import Question
from sdjax.envs.searchqa.scoring import normalize

EXPERTS = ("gold", "rule")
_YES_NO = frozenset(["is", "are", "was", "were", "do", "does", "did", "has", "have", "had", "can"])
_FIRST_WORDS = 6
_STRAY_ANSWERS = 0.25  # share of random turns that answer


def gold_passages(question: Question, corpus: Corpus | None) -> list[Passage]:
    """The gold passages that are needed, in the order in which a reader can know of them: first those whose title the
    question or an earlier passage names."""
    if corpus is None:
        return []
    waiting = [corpus.passage(passage_id) for passage_id in question.gold_ids]
    known, ordered = normalize(question.question), []
    while waiting:
        named = [passage for passage in waiting if normalize(passage.title) in known]
        chosen = named[0] if named else waiting[0]
        waiting.remove(chosen)
        ordered.append(chosen)
        known += " " + normalize(chosen.text)
    return ordered if question.all_gold else ordered[:1]


def plan(state: State, corpus: Corpus | None, rules: Rules) -> list[str] | None:
    """Actions that find the gold passages which were not seen yet, and answer; [] when the episode is over, None when
    no turn is left. Where turns are short, one query names several titles."""
    if state.score is not None:
        return []
    turns = rules.turns - state.turns
    if turns < 1:
        return None
    seen = {passage_id for ids in state.seen for passage_id in ids}
    wanted = [passage for passage in gold_passages(state.question, corpus) if passage.id not in seen]
    if not state.question.all_gold and seen & set(state.question.gold_ids):
        wanted = []
    queries = [_query(passage, state.queries) for passage in wanted]
    if not state.queries and (corpus is None or not state.question.gold_ids):  # where the answer stands is not known
        queries = [state.question.question]
    return [*(_search(query) for query in _merge(queries, turns - 1)), _answer(state.question.golden_answers[0])]


async def play_expert(
    environment: Environment, task_id: str, kind: str, seed: int, max_turns: int, noise: float
) -> list[ExpertTurn]:
    """Plays one episode; see ``Benchmark.expert_episode``."""
    rng = random.Random(f"{seed}/{task_id}/{kind}")
    observation = await environment.reset(task_id, seed)
    turns: list[ExpertTurn] = []
    status = Status.RUNNING
    while status is Status.RUNNING and len(turns) < max_turns:
        action = _gold_action(environment) if kind == "gold" else _rule_action(observation, len(turns))
        action = _answer("unknown") if action is None else action
        stray = rng.random() < noise
        if stray:
            action = _random_action(observation, rng)
        turns.append(ExpertTurn(observation, action, _thought(observation, action, len(turns), stray, rng)))
        result = await environment.step(action)
        observation, status = result.observation, result.status
    return turns if noise > 0 or status is Status.SUCCESS else []


def _query(passage: Passage, asked: Sequence[str]) -> str:
    """The title; where that brought other passages, which have the same title, with the first words of the text."""
    if not any(passage.title in query for query in asked):
        return passage.title
    return f"{passage.title} {' '.join(passage.text.split()[:_FIRST_WORDS])}"


def _gold_action(environment: Environment) -> str | None:
    steps = environment.privileged("plan")
    return steps[0] if steps else None


def _rule_action(observation: Observation, turn: int) -> str:
    if turn == 0:
        return _search(observation.task)
    asked = normalize(observation.task)
    if asked.split(" ", 1)[0] in _YES_NO:
        return _answer("yes")
    titles = _titles(observation.text)
    choice = "or" in asked.split()  # between things that the question names
    fitting = [title for title in titles if (normalize(title) in asked) == choice]
    return _answer((fitting or titles or [observation.task.split()[-1]])[0])


def _random_action(observation: Observation, rng: random.Random) -> str:
    """A search for some words of the question, or, after a search, one of the titles as the answer."""
    titles = _titles(observation.text)
    if titles and rng.random() < _STRAY_ANSWERS:
        return _answer(rng.choice(titles))
    words = observation.task.split()
    return _search(" ".join(rng.sample(words, min(len(words), rng.randint(1, 3)))))


def _titles(text: str) -> list[str]:
    """Titles of the passages that an observation shows: what stands in quotes in lines that begin with ``Doc``."""
    lines = text.removeprefix("<information>").splitlines()
    return [line.split('"')[1] for line in lines if line.startswith("Doc ") and line.count('"') >= 2]


def _thought(observation: Observation, action: str, turn: int, stray: bool, rng: random.Random) -> str:
    text = action.split(">", 1)[1].rsplit("<", 1)[0]
    titles = _titles(observation.text)
    if action.startswith("<search>"):
        kind = "stray" if stray else "next_search" if titles else "first_search"
    else:
        kind = "guess" if stray or turn == 0 else "answer"
    return rng.choice(_thoughts()[kind]).format(query=text, answer=text, clue=titles[0] if titles else "")


@functools.cache
def _thoughts() -> dict[str, list[str]]:
    return tomllib.loads(resources.files("sdjax.envs.searchqa").joinpath("expert.toml").read_text(encoding="utf-8"))


def _merge(queries: Sequence[str], count: int) -> list[str]:
    """``queries`` in at most ``count`` strings, evenly and in order."""
    if count < 1:
        return []
    size = -(-len(queries) // count)
    return [" ".join(queries[start : start + size]) for start in range(0, len(queries), size)] if size else []


def _search(query: str) -> str:
    return f"<search>{query}</search>"


def _answer(answer: str) -> str:
    return f"<answer>{answer}</answer>"
