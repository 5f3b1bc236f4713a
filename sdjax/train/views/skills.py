"""The view "skills": the skill bank's text in front of the student's prompt."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from sdjax.config import TeacherConfig
from sdjax.models.tokenizer import Tokenizer
from sdjax.teacher.prompt import TeacherIds, check_static
from sdjax.teacher.skills import SkillBank
from sdjax.train.rows import Row
from sdjax.train.views.base import PlainText, ViewContext, make_prompt


class SkillTeacher:
    """A skill bank with the prompts it goes into.

    Raises:
      TeacherContextError: at construction, if a text of the bank exceeds the privileged budget.
    """

    def __init__(self, config: TeacherConfig, tokenizer: Tokenizer, prompt_tokens: int):
        self.bank = SkillBank.load(config.bank)
        if config.truncation == "own_budget":
            check_static(self.bank, PlainText(tokenizer), config.privileged_tokens)
        self.prompt = make_prompt(config, tokenizer, prompt_tokens)

    def text(self, fields: dict[str, Any]) -> tuple[str, bool]:
        """Privileged text of a task with these structured facts, and whether it is the general part alone."""
        return self.bank.text(self.bank.route(fields))


class SkillView:
    names: ClassVar[tuple[str, ...]] = ("skills",)

    def __init__(self, context: ViewContext):
        self._teacher = SkillTeacher(context.config, context.tokenizer, context.prompt_tokens)

    def prepare(self, rows: Sequence[Row], step: int) -> tuple[np.ndarray, dict[str, float]]:
        return np.array([bool(self.text(row).strip()) for row in rows]), {}

    def prompts(self, row: Row) -> tuple[TeacherIds, ...]:
        return (self._teacher.prompt.ids(self.text(row), row.turn.prompt),)

    def text(self, row: Row) -> str:
        return self._teacher.text(row.trajectory.fields)[0]

    def general_only(self, row: Row) -> bool:
        return self._teacher.text(row.trajectory.fields)[1]
