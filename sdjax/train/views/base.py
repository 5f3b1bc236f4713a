"""What a view is to the teacher pass, and episodes as the texts that views are made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from sdjax.config import TeacherConfig
from sdjax.models.tokenizer import Tokenizer
from sdjax.rollout.engine import Engine
from sdjax.rollout.episodes import Trajectory
from sdjax.teacher.prompt import TeacherIds, TeacherPrompt
from sdjax.teacher.views import TrajectoryText, TurnText
from sdjax.train.rows import Row


@dataclass(frozen=True)
class ViewContext:
    """What views may use.

    prompt_tokens: the student's prompt limit. max_length: prompt + response tokens of the engine. temperature: of the
    rollout. graded: whether the benchmark's returns are graded rather than won or lost.
    """

    config: TeacherConfig
    tokenizer: Tokenizer
    engine: Engine
    prompt_tokens: int
    max_length: int
    temperature: float
    run_seed: int
    graded: bool = False

    def teacher_prompt(self) -> TeacherPrompt:
        return make_prompt(self.config, self.tokenizer, self.prompt_tokens)


class View(Protocol):
    """One kind of privileged text, for the rows of one global step at a time.

    names: the views it provides; several where their prompts belong together.
    """

    names: ClassVar[tuple[str, ...]]

    def prepare(self, rows: Sequence[Row], step: int) -> tuple[np.ndarray, dict[str, float]]:
        """Makes this step's texts. Returns [rows] bool, which rows have one, and metrics (names without prefix)."""
        ...

    def prompts(self, row: Row) -> tuple[TeacherIds, ...]:
        """Teacher prompts of a prepared row, one for each of ``names``; without a text the student's own prompt."""
        ...

    def text(self, row: Row) -> str:
        """The privileged text of a prepared row, "" if it has none."""
        ...

    def general_only(self, row: Row) -> bool:
        """Whether the text says nothing about this kind of task (only skill banks have such a part)."""
        ...


class PlainText:
    """The tokenizer as privileged text sees it: special tokens inside the text are ordinary characters."""

    def __init__(self, tokenizer: Tokenizer):
        self.render_chat, self.decode = tokenizer.render_chat, tokenizer.decode
        self._encode = tokenizer.encode

    def encode(self, text: str) -> list[int]:
        return self._encode(text, special=False)


def make_prompt(config: TeacherConfig, tokenizer: Tokenizer, prompt_tokens: int) -> TeacherPrompt:
    return TeacherPrompt(
        PlainText(tokenizer),
        placement=config.placement,
        budget=config.privileged_tokens,
        student_limit=prompt_tokens,
        truncation=config.truncation,
    )


def trajectories_of(rows: Sequence[Row]) -> dict[int, Trajectory]:
    """The trajectories of the rows by their number, in row order."""
    return {row.trajectory.assignment.trajectory: row.trajectory for row in rows}


def groups_of(rows: Sequence[Row]) -> dict[int, list[Trajectory]]:
    """The trajectories of each group, in row order."""
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories_of(rows).values():
        groups.setdefault(trajectory.assignment.group, []).append(trajectory)
    return groups


def trajectory_text(trajectory: Trajectory) -> TrajectoryText:
    """An episode without its thoughts."""
    first = trajectory.turns[0].observation
    return TrajectoryText(
        task=first.task,
        turns=tuple(TurnText(turn.next_text or "", turn.action) for turn in trajectory.turns),
        success=trajectory.success,
        ret=trajectory.ret,
        trajectory=trajectory.assignment.trajectory,
        opening=first.text,
    )
