"""Questions of the seven data sets with their golden answers and what is known of where the answers stand."""

import difflib
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdjax.envs.searchqa import rows
from sdjax.envs.searchqa.scoring import normalize
from sdjax.errors import DataError

SOURCES = ("nq", "triviaqa", "popqa", "hotpotqa", "2wiki", "musique", "bamboogle")
# Names of the same data set elsewhere.
ALIASES = {"2wikimultihopqa": "2wiki", "2wikimultihop": "2wiki"}


@dataclass(frozen=True)
class Question:
    """One task.

    source: one of ``SOURCES``. gold_ids: passages that support an answer. all_gold: whether all of them are needed (the
    hops of an annotated question) or any one is enough. decomposition: sub-questions with answers, or triples of
    evidence, one line each, in order.
    """

    id: str
    source: str
    question: str
    golden_answers: tuple[str, ...]
    gold_ids: tuple[str, ...] = ()
    all_gold: bool = False
    decomposition: tuple[str, ...] = ()

    def row(self) -> dict[str, Any]:
        """What identifies the task and its score, as JSON values."""
        return {
            "id": self.id,
            "data_source": self.source,
            "question": self.question,
            "golden_answers": list(self.golden_answers),
        }


def canonical_source(name: str, where: str) -> str:
    """One of ``SOURCES``; DataError for any other data set."""
    source = ALIASES.get(name, name)
    if source not in SOURCES:
        near = difflib.get_close_matches(str(name), SOURCES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise DataError(f"{where}: unknown data_source {name!r}.", f"{hint}known: {', '.join(SOURCES)}.")
    return source


def question_from(row: dict[str, Any], where: str) -> Question:
    """Checks one row of ``questions.jsonl``. A golden answer that normalises to nothing is dropped: a blank answer
    would equal it.

    Raises:
      DataError: a missing or misshapen key, an unknown source, or no usable golden answer.
    """
    golds = _texts(row, "golden_answers", where)
    usable = tuple(dict.fromkeys(gold for gold in golds if normalize(gold)))
    if not usable:
        raise DataError(f"{where}: no golden answer has a word ({golds!r:.80}).", "leave this question out.")
    return Question(
        id=rows.text(row, "id", where),
        source=canonical_source(rows.text(row, "data_source", where), where),
        question=" ".join(rows.text(row, "question", where).split()),
        golden_answers=usable,
        gold_ids=tuple(dict.fromkeys(_texts(row, "gold_ids", where) if "gold_ids" in row else ())),
        all_gold=row.get("gold_kind") == "annotated",
        decomposition=_decomposition(row, where),
    )


def read_questions(path: Path) -> list[tuple[str, Question]]:
    """(split, question) for each line; a line without ``split`` belongs to "eval".

    Raises:
      DataError: an unusable row.
    """
    found = []
    for where, row in rows.read(path):
        question = question_from(row, where)
        split = row.get("split", "eval")
        if not isinstance(split, str) or not split or ":" in split:
            raise DataError(f"{where}: the split {split!r}.", "write train or eval.")
        found.append((split, question))
    return found


def content_hash(questions: Iterable[Question]) -> str:
    """sha256 over what is asked and what counts as right, in this order."""
    digest = hashlib.sha256()
    for question in questions:
        digest.update(json.dumps(question.row(), ensure_ascii=False, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _texts(row: dict[str, Any], key: str, where: str) -> Sequence[str]:
    values = row.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise DataError(f"{where}: {key!r} is {values!r:.80}.", "give it a list of texts.")
    return values


def _decomposition(row: dict[str, Any], where: str) -> tuple[str, ...]:
    """Lines from MuSiQue's ``decomposition`` or 2Wiki's ``evidences``."""
    try:
        if row.get("decomposition"):
            return tuple(f"{step['question']} {step['answer']}" for step in row["decomposition"])
        return tuple(" | ".join(triple) for triple in row.get("evidences") or ())
    except (TypeError, KeyError) as error:
        raise DataError(
            f"{where}: decomposition or evidences cannot be read ({error!r}).",
            "write decomposition as objects with question and answer, evidences as lists of three texts.",
        ) from error
