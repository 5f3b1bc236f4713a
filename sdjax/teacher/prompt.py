"""Token-level teacher prompts: privileged text in front of (or inside) the student's own prompt ids.

The student's ids are reused unchanged and only the privileged text is tokenised, so that the scored response
follows exactly the prompt it was sampled from. The public code decodes and tokenises the whole prompt again and
cuts it from the left, which loses the privileged text first; ``truncation="released_left"`` replicates that
cut.

A tokenizer is anything with ``encode(text) -> list[int]`` (adds no ids), ``render_chat(user_text) -> list[int]`` and
``decode(ids) -> str``. If ``encode`` has the option ``special``, it is called with ``special=False``: privileged text
can quote a model or a simulator, and must never open or close a chat message.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from sdjax.errors import TeacherContextError
from sdjax.teacher.skills import SkillBank
from sdjax.teacher.views import FutureViews, Segment

HEADER = "[Privileged Skill Information]\n"
BLANK_LINE = "\n\n"
PLACEMENTS = ("before_chat", "user_turn", "user_end")
TRUNCATIONS = ("own_budget", "released_left")
_SENTINELS = ("Amber", "zinc", "7")  # different first and last characters, so that only the template itself is common
_CACHED_TEXTS = 4096


class Tokenizer(Protocol):
    def encode(self, text: str, /) -> list[int]: ...

    def decode(self, ids: list[int], /) -> str: ...

    def render_chat(self, user_text: str, /) -> list[int]: ...


@dataclass(frozen=True)
class TeacherIds:
    """One teacher prompt.

    ids: [T] int32, privileged and student tokens, without the response.
    privileged_tokens: of these, tokens of header, privileged text and blank line.
    lost_tokens: tokens of header, text and blank line that had to be cut.
    has_context: whether any token of the privileged text itself is left.
    shared_tokens: leading tokens that depend on the privileged text and not on the student's prompt.
    """

    ids: np.ndarray
    privileged_tokens: int
    lost_tokens: int
    has_context: bool
    shared_tokens: int = 0


@dataclass(frozen=True)
class _Privileged:
    """Tokenised privileged text. text_tokens: the part that is text (the rest, at the end, is the blank line)."""

    ids: np.ndarray
    text_tokens: int
    lost: int


@dataclass
class TeacherPrompt:
    """Builds teacher prompts for one tokenizer. Make one per run: it remembers tokenised texts and the
    template's borders.

    placement: "before_chat" (default, in front of the rendered chat, outside any role), "user_turn" (start of
    the first user message) or "user_end" (end of the last user message, for OCSD's views). budget: most
    privileged tokens, header and blank line included. student_limit: most tokens of a student prompt.
    truncation: "own_budget" shortens a too long text at its own end; "released_left" cuts the whole prompt from
    the left to ``student_limit``.
    """

    tokenizer: Tokenizer
    placement: str = "before_chat"
    budget: int = 2048
    student_limit: int = 2048
    truncation: str = "own_budget"
    header: str = HEADER
    _encode: Callable[[str], list[int]] = field(init=False, repr=False)
    _texts: dict[tuple[str, str], _Privileged] = field(default_factory=dict, init=False, repr=False)
    _frame: tuple[np.ndarray, np.ndarray] | None = field(default=None, init=False, repr=False)

    def __post_init__(self):
        _one_of("teacher placement", self.placement, PLACEMENTS)
        _one_of("teacher truncation", self.truncation, TRUNCATIONS)
        if self.truncation == "released_left" and self.placement != "before_chat":
            raise TeacherContextError(
                f"released_left with placement {self.placement!r} would cut the chat template",
                'use placement "before_chat", as the public code does, or truncation "own_budget".',
            )
        self._encode = plain_encoder(self.tokenizer)
        smallest = len(self._encode(self.header)) + len(self._encode(BLANK_LINE)) + 1
        if self.truncation == "own_budget" and self.budget < smallest:
            raise TeacherContextError(
                f"a privileged budget of {self.budget} tokens cannot hold the header and one token of text",
                f"set it to {smallest} or more (2048 is the default).",
            )

    @classmethod
    def build(
        cls, privileged_text: str, student_prompt_ids: Sequence[int] | np.ndarray, tokenizer: Tokenizer, **options: Any
    ) -> TeacherIds:
        """One prompt without keeping anything; ``options`` are the fields of the class."""
        return cls(tokenizer, **options).ids(privileged_text, student_prompt_ids)

    def ids(self, privileged_text: str, student_prompt_ids: Sequence[int] | np.ndarray) -> TeacherIds:
        """Teacher prompt of one row. An empty text adds nothing, no header either."""
        student = self._student(student_prompt_ids)
        if not privileged_text.strip():
            return TeacherIds(student, 0, 0, False)
        before, lead, after = self._split(student)
        text = self._privileged(lead, privileged_text)
        if self.truncation == "own_budget":
            shared = len(before) + len(text.ids) if self.placement != "user_end" else 0
            return TeacherIds(np.concatenate([before, text.ids, after]), len(text.ids), text.lost, True, shared)
        cut = max(len(text.ids) + len(student) - self.student_limit, 0)
        kept = text.ids[cut:]
        has_context = cut < text.text_tokens
        return TeacherIds(np.concatenate([kept, student]), len(kept), cut, has_context, len(kept))

    def matched(
        self,
        views: FutureViews,
        student_prompt_ids: Sequence[int] | np.ndarray,
        *,
        observation_limit: int | None = None,
    ) -> tuple[TeacherIds, TeacherIds]:
        """The full and the ablated prompt of OCSD: equal ids outside the observation spans.

        Segments are tokenised one by one, because a merge across a border would let the observation change its
        neighbours. observation_limit: most tokens of one observation (WebShop 1,024). Where the full view
        exceeds the budget it is cut in the observation (or before the frame) that does not fit, and both views
        end at that segment. No header is added.
        """
        student = self._student(student_prompt_ids)
        full, ablated, lost = self._matched_segments(views.segments, observation_limit)
        has_context = any(segment.observation for segment in views.segments[: len(full)])
        before, lead, after = self._split(student)
        pair = []
        for pieces, lost_here in ((full, lost), (ablated, 0)):
            block = _int32(self._encode(lead) + [token for piece in pieces for token in piece])
            pair.append(TeacherIds(np.concatenate([before, block, after]), len(block), lost_here, has_context))
        return pair[0], pair[1]

    def _matched_segments(
        self, segments: tuple[Segment, ...], observation_limit: int | None
    ) -> tuple[list[list[int]], list[list[int]], int]:
        full, ablated, used, lost = [], [], 0, 0
        for number, segment in enumerate(segments):
            tokens = self._encode(segment.text)
            hidden = self._encode(segment.ablated) if segment.observation else tokens
            length, room = len(tokens), self.budget - used
            if segment.observation and len(hidden) <= room:
                tokens = tokens[: room if observation_limit is None else min(room, observation_limit)]
            elif max(len(tokens), len(hidden)) > room:
                tokens = []
            lost += length - len(tokens)
            if not tokens:
                lost += sum(len(self._encode(rest.text)) for rest in segments[number + 1 :])
                break
            full.append(tokens)
            ablated.append(hidden)
            # Both views must fit, also where the placeholder is longer than what is left of the observation.
            used += max(len(tokens), len(hidden))
        return full, ablated, lost

    def _student(self, student_prompt_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        student = _int32(student_prompt_ids)
        if student.ndim != 1 or not len(student):
            raise TeacherContextError(
                f"a student prompt has shape {student.shape}", "hand over one non-empty row of prompt ids."
            )
        if len(student) > self.student_limit:
            raise TeacherContextError(
                f"a student prompt has {len(student)} tokens, the limit is {self.student_limit}",
                "set student_limit to the environment's prompt limit; the teacher never shortens the student's part.",
            )
        return student

    def _privileged(self, lead: str, text: str) -> _Privileged:
        # Static texts come back in every row of a step; the bound only keeps per-row texts from piling up.
        key = (lead, text)
        if key not in self._texts:
            if len(self._texts) >= _CACHED_TEXTS:
                self._texts.clear()
            self._texts[key] = self._shortened(lead + self.header + text)
        return self._texts[key]

    def _shortened(self, text: str) -> _Privileged:
        whole, without_blank = self._encode(text + BLANK_LINE), self._encode(text)
        if self.truncation == "released_left" or len(whole) <= self.budget:
            # A tokenizer that merges the blank line into the last word leaves no blank-line token of its own.
            return _Privileged(_int32(whole), min(len(without_blank), len(whole)), 0)
        blank = self._encode(BLANK_LINE)
        kept = self.budget - len(blank)
        return _Privileged(_int32(without_blank[:kept] + blank), kept, max(len(without_blank) - kept, 0))

    def _split(self, student: np.ndarray) -> tuple[np.ndarray, str, np.ndarray]:
        """Where the block goes: student ids before it, template text it has to begin with, student ids after it."""
        if self.placement == "before_chat":
            return student[:0], "", student
        before, after = self._borders()
        if self.placement == "user_turn":
            border = _common_prefix([list(before), list(student)])
            # A user text that begins with a line break can merge with the template's own; the block then repeats it.
            lead = self.tokenizer.decode([int(token) for token in before[border:]])
            matches = border == len(before) or (border > 0 and lead != "" and not lead.strip())
        else:
            border, lead = len(student) - len(after), ""
            matches = border >= 0 and np.array_equal(student[border:], after)
        if not matches:
            raise TeacherContextError(
                f"a student prompt does not have the chat template's ids around its user message ({self.placement})",
                'render prompts with the same tokenizer and template, or use placement "before_chat".',
            )
        return student[:border], lead, student[border:]

    def _borders(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids in front of and behind the user's text in a rendered chat, found once from texts with nothing in
        common."""
        if self._frame is None:
            rendered = [list(self.tokenizer.render_chat(text)) for text in _SENTINELS]
            before = _common_prefix(rendered)
            after = _common_prefix([ids[before:][::-1] for ids in rendered])
            for ids, text in zip(rendered, _SENTINELS):
                middle = self.tokenizer.decode(ids[before : len(ids) - after])
                if middle.strip() != text:
                    raise TeacherContextError(
                        f"the user's text cannot be found in the rendered chat: {text!r} became {middle!r}",
                        'the template rewrites it or merges with it; use placement "before_chat".',
                    )
            self._frame = _int32(rendered[0][:before]), _int32(rendered[0][len(rendered[0]) - after :])
        return self._frame


def check_static(bank: SkillBank, tokenizer: Tokenizer, budget: int, *, header: str = HEADER) -> dict[str, int]:
    """Tokens of every text a bank can produce (label -> tokens); TeacherContextError if one exceeds ``budget``.

    Called when a run is loaded: static texts are never shortened.
    """
    encode = plain_encoder(tokenizer)
    tokens = {label: len(encode(header + text + BLANK_LINE)) for label, text in bank.texts().items()}
    over = {label: count for label, count in tokens.items() if count > budget}
    if over:
        listed = ", ".join(f"{label}: {count}" for label, count in over.items())
        raise TeacherContextError(
            f"texts of skill bank {bank.name!r} exceed the privileged budget of {budget} tokens ({listed})",
            f"set teacher.privileged_tokens to at least {max(over.values())} or shorten the bank.",
        )
    return tokens


def plain_encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """``tokenizer.encode`` that reads special tokens inside a text as plain characters, if it has that option."""
    if "special" in inspect.signature(tokenizer.encode).parameters:
        return lambda text: tokenizer.encode(text, special=False)  # pyright: ignore[reportCallIssue]
    return tokenizer.encode


def _common_prefix(rows: list[list[int]]) -> int:
    length = min(map(len, rows))
    return next((place for place in range(length) if len({row[place] for row in rows}) > 1), length)


def _int32(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)


def _one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise TeacherContextError(f"unknown {what} {value!r}", f"use one of {', '.join(allowed)}.")
