"""Exact match, substring match and F1 of Search-QA answers.

The rules are those of Search-R1's ``qa_em.py`` (after SQuAD): lower case, ASCII punctuation deleted, the words a, an,
the removed, blanks joined. So Unicode quotes, dashes and accents are kept, and ``twenty-one`` equals ``twentyone``.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class AnswerScore:
    """em, sub_em: 0 or 1 (the normalised answer equals, contains a golden answer). f1: overlap of words, in [0, 1]."""

    em: float
    sub_em: float
    f1: float


def normalize(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_DELETE_PUNCTUATION)).split())


def score_answer(answer: str, golden_answers: Sequence[str]) -> AnswerScore:
    """Best score of ``answer`` over ``golden_answers``."""
    said = normalize(answer)
    golds = [normalize(gold) for gold in golden_answers]
    return AnswerScore(
        em=float(said in golds),
        sub_em=float(any(gold in said for gold in golds)),
        f1=max((_f1(said.split(), gold.split()) for gold in golds), default=0.0),
    )


def _f1(said: list[str], gold: list[str]) -> float:
    if not said or not gold:
        return float(said == gold)
    shared = sum((Counter(said) & Counter(gold)).values())
    return 2 * shared / (len(said) + len(gold))
