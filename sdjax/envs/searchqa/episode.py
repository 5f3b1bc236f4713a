"""One Search-QA episode: what an action does, what the agent reads, when it ends.

Two rules are known, named after the code bases whose protocols they are:

* ``verl_agent``: a passage is shown as ``Doc 1: "Title"`` and its text on the next line. An invalid turn is answered
  with nothing. Passages are plain text here; the original shows them JSON-escaped, which makes exact copies fail.
* ``search_r1``: ``Doc 1(Title: "Title") text``. An invalid turn is answered with a message. A question without a
  question mark gets one.

Every turn counts, also an invalid one, and the last turn can only answer: its search is not carried out. So the 4
turns of verl-agent are at most 3 searches and an answer; Search-R1's ``max_turns=4``, four searches and one more
answer, are 5 turns here. An episode ends with its first answer; only the words of that answer block are scored.
"""

import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from sdjax.envs.searchqa.actions import parse
from sdjax.envs.searchqa.backends import Hit
from sdjax.envs.searchqa.questions import Question
from sdjax.envs.searchqa.scoring import AnswerScore, score_answer
from sdjax.errors import ConfigError

RULES = ("verl_agent", "search_r1")
_QUERY_CHARACTERS = 2000  # more than a response can hold; bounds what hostile text costs


@dataclass(frozen=True)
class Rules:
    """turns: of the whole episode. passage_characters: longer passages are cut at a blank."""

    name: str
    turns: int
    topk: int
    passage_characters: int
    messages: dict[str, str]


def make_rules(name: str, turns: int, topk: int, passage_characters: int) -> Rules:
    """Raises ConfigError for an unknown rule or a limit that leaves nothing."""
    if name not in RULES:
        raise ConfigError(f"env.searchqa.rule = {name!r}.", f"use one of {', '.join(RULES)}.")
    for key, value, least in (
        ("turns", turns, 1),
        ("searchqa.topk", topk, 1),
        ("searchqa.passage_characters", passage_characters, 40),
    ):
        if value < least:
            raise ConfigError(f"env.{key} = {value}.", f"use at least {least}.")
    text = resources.files("sdjax.envs.searchqa").joinpath("messages.toml").read_text(encoding="utf-8")
    return Rules(name, turns, topk, passage_characters, tomllib.loads(text))


@dataclass(frozen=True)
class State:
    """Everything an episode knows. Immutable, so a snapshot is the object itself.

    text: the current observation. queries: searched so far. seen: passage ids of each answered search. turns, errors
    (failed searches): counted so far.
    """

    question: Question
    text: str
    queries: tuple[str, ...] = ()
    seen: tuple[tuple[str, ...], ...] = ()
    turns: int = 0
    errors: int = 0
    score: AnswerScore | None = None

    def key(self) -> str:
        parts = (self.turns, self.queries, self.errors, self.seen, self.score)
        return f"{self.question.id}#{hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()}"


def task_text(question: Question, rules: Rules) -> str:
    if rules.name == "search_r1" and not question.question.endswith("?"):
        return question.question + "?"
    return question.question


def start(question: Question, rules: Rules) -> State:
    return State(question, task_text(question, rules))


def query_of(state: State, action_text: str, rules: Rules) -> str | None:
    """The query that ``action_text`` sends to the search engine now; None if nothing is searched."""
    action = parse(action_text)
    if action.kind != "search" or state.turns + 1 >= rules.turns:
        return None
    return action.text[:_QUERY_CHARACTERS].strip()


def play(state: State, action_text: str, found: Sequence[Hit] | str, rules: Rules) -> tuple[State, dict[str, Any]]:
    """One turn. ``found``: what the search of ``query_of`` brought, or the text of its failure.

    Returns:
      The next state and facts of the turn: kind (search, answer, invalid), admissible (whether it is one of the first
      two), searched, search_error, passages, passages_cut, characters_cut, query_cut, the totals search_errors and
      searches, termination ("answered", "turn_limit" or None), and for an answer em, sub_em, f1.
    """
    action = parse(action_text)
    query = query_of(state, action_text, rules)
    searched = query is not None
    failed = searched and isinstance(found, str)
    info: dict[str, Any] = {"kind": action.kind, "admissible": action.kind != "invalid", "searched": searched}
    info["search_error"] = found if failed else None
    text, seen, score, cuts = "", state.seen, None, [0]
    if searched and isinstance(found, str):
        text = wrap(rules.messages["search_failed"])
    elif searched and not isinstance(found, str):
        pieces = [passage_text(number, hit, rules) for number, hit in enumerate(found, 1)]
        cuts = [cut for _, cut in pieces]
        text = wrap("\n".join(piece for piece, _ in pieces) or rules.messages["nothing_found"])
        seen = (*seen, tuple(hit.passage.id for hit in found))
    elif action.kind == "invalid" and state.turns + 1 < rules.turns:
        text = rules.messages[f"invalid_{rules.name}"]
    elif action.kind == "answer":
        score = score_answer(action.text, state.question.golden_answers)
        info.update(em=score.em, sub_em=score.sub_em, f1=score.f1)
    following = replace(
        state,
        text=text,
        seen=seen,
        turns=state.turns + 1,
        queries=state.queries if query is None else (*state.queries, query),
        errors=state.errors + failed,
        score=score,
    )
    info.update(
        passages=len(found) if searched and not failed else 0,
        passages_cut=sum(cut > 0 for cut in cuts),
        characters_cut=sum(cuts),
        query_cut=searched and len(action.text) > _QUERY_CHARACTERS,
        searches=len(following.queries),
        search_errors=following.errors,
        termination="answered" if score else "turn_limit" if following.turns >= rules.turns else None,
    )
    return following, info


def wrap(text: str) -> str:
    return f"<information>{text}</information>"


def passage_text(number: int, hit: Hit, rules: Rules) -> tuple[str, int]:
    """One passage as the agent reads it, and how many of its characters were cut."""
    contents = hit.passage.contents.strip()
    shown = _shorten(contents, rules.passage_characters)
    cut = len(contents) - len(shown)
    if cut:
        shown += " ..."
    if rules.name == "verl_agent":
        return f"Doc {number}: {shown}", cut
    title, _, text = shown.partition("\n")
    return f"Doc {number}(Title: {title}) {text}", cut


def _shorten(text: str, limit: int) -> str:
    """At most ``limit`` characters, to the last blank before that unless it is far away."""
    if len(text) <= limit:
        return text
    end = text.rfind(" ", limit // 2, limit + 1)
    return text[: end if end > 0 else limit].rstrip()
