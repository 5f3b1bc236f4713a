"""What an answer of the model asks for: a search, a final answer, or neither.

Only the model's own text is read here; retrieved text never is. Nothing is parsed with a backtracking expression, so
hostile text of a megabyte costs milliseconds.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Action:
    """text: what stands between the tags, stripped; "" for an invalid one."""

    kind: Literal["search", "answer", "invalid"]
    text: str = ""


def parse(text: str) -> Action:
    """Reads one action by verl-agent's rule: the text is cut after the first ``</search>``, else after the first
    ``</answer>``; the first search block counts, else the first answer block. Tags are case-sensitive.

    So an answer block inside a search query is a part of the query.
    """
    for closing in ("</search>", "</answer>"):
        end = text.find(closing)
        if end >= 0:
            text = text[: end + len(closing)]
            break
    search = _first_block(text, "search")
    if search is not None:
        return Action("search", search)
    answer = _first_block(text, "answer")
    return Action("invalid") if answer is None else Action("answer", answer)


def last_answer(transcript: str) -> str | None:
    """The text of the last ``<answer>`` block, stripped; None without one.

    This is how Search-R1 and verl-agent score a whole response. Give it the model's own words only: a block inside
    retrieved text counts as well. Episodes are scored by the one block of the finishing action instead.
    """
    found, start = None, 0
    while True:
        begin = transcript.find("<answer>", start)
        end = transcript.find("</answer>", begin + len("<answer>"))
        if begin < 0 or end < 0:
            return found
        found = transcript[begin + len("<answer>") : end].strip()
        start = end + len("</answer>")


def _first_block(text: str, tag: str) -> str | None:
    begin = text.find(f"<{tag}>")
    end = text.find(f"</{tag}>", begin + 1)
    if begin < 0 or end < 0:
        return None
    return text[begin + len(tag) + 2 : end].strip()
