"""The views "future_full" and "future_ablated": the next observations after the user's message, shown and hidden.

Both prompts share every token but those of the observations. They have a place and a budget of their own, so
``teacher.placement`` and ``teacher.truncation`` do not apply.
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from sdjax.teacher.prompt import TeacherIds, TeacherPrompt
from sdjax.teacher.views import TrajectoryText, future_views, is_eligible
from sdjax.train.rows import Row
from sdjax.train.views.base import PlainText, ViewContext, trajectories_of, trajectory_text


class FutureView:
    names: ClassVar[tuple[str, ...]] = ("future_full", "future_ablated")

    def __init__(self, context: ViewContext):
        config = context.config
        self._horizon, self._observation_tokens = config.horizon, config.observation_tokens
        self._prompt = TeacherPrompt(
            PlainText(context.tokenizer),
            placement="user_end",
            budget=config.privileged_tokens,
            student_limit=context.prompt_tokens,
        )
        self._texts: dict[int, TrajectoryText] = {}

    def prepare(self, rows: Sequence[Row], step: int) -> tuple[np.ndarray, dict[str, float]]:
        self._texts = {number: trajectory_text(t) for number, t in trajectories_of(rows).items()}
        return np.array([is_eligible(self._episode(row), row.index) for row in rows]), {}

    def prompts(self, row: Row) -> tuple[TeacherIds, ...]:
        if not is_eligible(self._episode(row), row.index):
            plain = TeacherIds(np.asarray(row.turn.prompt, np.int32), 0, 0, False)
            return plain, plain
        views = future_views(self._episode(row), row.index, horizon=self._horizon)
        return self._prompt.matched(views, row.turn.prompt, observation_limit=self._observation_tokens)

    def text(self, row: Row) -> str:
        episode = self._episode(row)
        if not is_eligible(episode, row.index):
            return ""
        return future_views(episode, row.index, horizon=self._horizon).full.strip()

    def general_only(self, row: Row) -> bool:
        return False

    def _episode(self, row: Row) -> TrajectoryText:
        return self._texts[row.trajectory.assignment.trajectory]
