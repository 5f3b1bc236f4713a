"""The shared teacher: log-probabilities of the student's own responses under a privileged prompt (methods.md, section 4).

Scored once per global step with the weights at its start, before the first update.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sdjax.config import TeacherConfig
from sdjax.errors import ConfigError
from sdjax.models.tokenizer import Tokenizer
from sdjax.teacher.counters import TeacherCounters
from sdjax.teacher.prompt import TeacherPrompt, check_static
from sdjax.teacher.skills import SkillBank
from sdjax.train.optimize import Optimizer, Sequences
from sdjax.train.rows import Row


class _PlainText:
    """The tokenizer as privileged text sees it: special tokens inside the text are ordinary characters."""

    def __init__(self, tokenizer: Tokenizer):
        self.render_chat, self.decode = tokenizer.render_chat, tokenizer.decode
        self._encode = tokenizer.encode

    def encode(self, text: str) -> list[int]:
        return self._encode(text, special=False)


class SkillTeacher:
    """The view "skills": the skill bank's text in front of the student's prompt.

    Raises:
      TeacherContextError: at construction, if a text of the bank exceeds the privileged budget.
    """

    def __init__(self, config: TeacherConfig, tokenizer: Tokenizer, prompt_tokens: int):
        self.config = config
        self.bank = SkillBank.load(config.bank)
        plain = _PlainText(tokenizer)
        if config.truncation == "own_budget":
            check_static(self.bank, plain, config.privileged_tokens)
        self.prompt = TeacherPrompt(
            plain,
            placement=config.placement,
            budget=config.privileged_tokens,
            student_limit=prompt_tokens,
            truncation=config.truncation,
        )

    def text(self, family: str) -> tuple[str, bool]:
        """Privileged text of a task family, and whether it is the general part alone."""
        return self.bank.text(self.bank.route({"task_type": family}))

    def sequences(self, rows: Sequence[Row]) -> tuple[Sequences, dict[str, float]]:
        """Teacher prompts with the student's responses, and the counters of this step."""
        counters = TeacherCounters(missing=self.config.on_missing)
        prompts = []
        for row in rows:
            text, general_only = self.text(row.trajectory.family)
            built = self.prompt.ids(text, row.turn.prompt)
            counters.add(built, general_only=general_only, name=f"task {row.trajectory.assignment.task}")
            prompts.append(built.ids)
        return Sequences(prompts, [row.turn.response for row in rows]), counters.metrics()


class Teacher:
    """Provides every view that a method declares. ``views`` names what is wanted."""

    def __init__(self, views: Sequence[str], config: TeacherConfig, tokenizer: Tokenizer, prompt_tokens: int):
        known = {"skills": SkillTeacher}
        unknown = [v for v in views if v not in known]
        if unknown:
            raise ConfigError(f"no teacher provides the view {unknown[0]!r}.", f"known views: {', '.join(known)}.")
        self.views = {v: known[v](config, tokenizer, prompt_tokens) for v in views}
        self.tokenizer, self.extra_tokens = tokenizer, config.privileged_tokens

    def score(
        self, optimizer: Optimizer, params: Any, rows: Sequence[Row], shape: tuple[int, int]
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Returns the log-probabilities [N, L] of each view, and the teacher's metrics."""
        scored, metrics = {}, {}
        for name, view in self.views.items():
            sequences, counters = view.sequences(rows)
            scored[name] = optimizer.score(params, sequences, shape, extra_tokens=self.extra_tokens)
            metrics |= counters
        return scored, metrics

    def example(self, row: Row) -> dict[str, str]:
        """The whole prompt of one row for each view, as text, for reading."""
        return {
            name: self.tokenizer.decode(view.sequences([row])[0].prompts[0], skip_special=False)
            for name, view in self.views.items()
        }

    def privileged_text(self, row: Row) -> str:
        return "\n\n".join(view.text(row.trajectory.family)[0] for view in self.views.values())
