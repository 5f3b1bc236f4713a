"""The view "sibling": the episode of the group that did best on the same task, actions and observations only."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from sdjax.teacher.prompt import TeacherIds
from sdjax.teacher.views import best_sibling, sibling_text
from sdjax.train.rows import Row
from sdjax.train.views.base import ViewContext, groups_of, trajectory_text


class SiblingView:
    names: ClassVar[tuple[str, ...]] = ("sibling",)

    def __init__(self, context: ViewContext):
        self._graded, self._margin = context.graded, context.config.sibling_margin
        self._prompt = context.teacher_prompt()
        self._texts: dict[int, str] = {}

    def prepare(self, rows: Sequence[Row], step: int) -> tuple[np.ndarray, dict[str, float]]:
        self._texts = {}
        for members in groups_of(rows).values():
            texts = [trajectory_text(member) for member in members]
            for own in texts:
                sibling = best_sibling(own, texts, graded=self._graded, margin=self._margin)
                self._texts[own.trajectory] = "" if sibling is None else sibling_text(sibling)
        return np.array([bool(self.text(row)) for row in rows]), {}

    def prompts(self, row: Row) -> tuple[TeacherIds, ...]:
        return (self._prompt.ids(self.text(row), row.turn.prompt),)

    def text(self, row: Row) -> str:
        return self._texts[row.trajectory.assignment.trajectory]

    def general_only(self, row: Row) -> bool:
        return False
