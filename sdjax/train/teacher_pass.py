"""The shared teacher: log-probabilities of the student's own responses under privileged prompts (methods.md, 4).

Scored once per global step, before the first update, on the rows that the method selects.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sdjax.methods.base import Method, RowBatch
from sdjax.teacher.counters import TeacherCounters
from sdjax.train.optimize import Optimizer
from sdjax.train.packing import Sequences
from sdjax.train.rows import Row
from sdjax.train.session import Session
from sdjax.train.views import SkillTeacher, View, ViewContext, make_views

__all__ = ["SkillTeacher", "Teacher"]


class Teacher:
    """Provides every view that the method declares.

    A method whose rows may lack a privileged text declares ``optional_context``; elsewhere such a row is an error.
    """

    def __init__(self, method: Method, session: Session):
        config = session.config
        self.config, self.tokenizer = config.teacher, session.tokenizer
        context = ViewContext(
            config=config.teacher,
            tokenizer=session.tokenizer,
            engine=session.engine,
            prompt_tokens=config.rollout.prompt_tokens,
            max_length=config.rollout.max_length,
            temperature=config.rollout.temperature,
            run_seed=config.seed,
            graded=session.protocol.graded,
        )
        self.views: list[View] = make_views(method.views, context)
        self.names = tuple(name for view in self.views for name in view.names)
        self._optional = method.optional_context

    def prepare(self, rows: Sequence[Row], padded: int, step: int) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Makes this step's privileged texts. Returns which of the ``padded`` rows have one, by view, and metrics."""
        context, metrics = {}, {}
        for view in self.views:
            has_text = np.zeros(padded, bool)
            has_text[: len(rows)], numbers = view.prepare(rows, step)
            context |= dict.fromkeys(view.names, has_text)
            prefix = self._prefix(view)
            metrics |= {f"{prefix}/{key}": value for key, value in numbers.items()}
            metrics[f"{prefix}/available_frac"] = float(has_text[: len(rows)].mean())
        return context, metrics

    def score(
        self, optimizer: Optimizer, params: Any, rows: Sequence[Row], batch: RowBatch, selected_N: np.ndarray
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Returns the log-probabilities [N, L] of each view, equal to the old ones in rows not scored, and metrics.

        Raises:
          TeacherContextError: a selected row has no text and the method does not allow that.
        """
        scored, metrics = {}, {}
        for view in self.views:
            chosen = [i for i in range(len(rows)) if selected_N[i] and self._wanted(view, batch, i)]
            counters = TeacherCounters(missing=self.config.on_missing)
            prompts = []
            for i in chosen:
                built = view.prompts(rows[i])
                name = f"task {rows[i].trajectory.assignment.task}, turn {rows[i].index},"
                counters.add(built[0], general_only=view.general_only(rows[i]), name=name)
                prompts.append(built)
            responses = [rows[i].turn.response for i in chosen]
            for k, name in enumerate(view.names):
                scored[name] = batch.old_NL.copy()
                if chosen:
                    scored[name][chosen] = optimizer.score(
                        params,
                        Sequences([built[k].ids for built in prompts], responses),
                        (len(chosen), batch.mask_NL.shape[1]),
                        extra_tokens=self.config.privileged_tokens,
                        shared=[built[k].shared_tokens for built in prompts],
                    )
            metrics |= self._renamed(view, counters.metrics())
            metrics[f"{self._prefix(view)}/scored_frac"] = len(chosen) / max(len(rows), 1)
            metrics |= self._gaps(view, scored, batch, chosen)
        return scored, metrics

    def examples(self, rows: Sequence[Row]) -> dict[str, str]:
        """For each view the whole prompt of the first row with a privileged text, for reading."""
        found = {}
        for view in self.views:
            row = next((row for row in rows if view.text(row)), None)
            if row is not None:
                prompts = view.prompts(row)
                found |= {
                    name: self.tokenizer.decode(prompt.ids, skip_special=False)
                    for name, prompt in zip(view.names, prompts)
                }
        return found

    def privileged_text(self, row: Row) -> str:
        return "\n\n".join(view.text(row) for view in self.views)

    def _wanted(self, view: View, batch: RowBatch, i: int) -> bool:
        return not self._optional or bool(batch.context[view.names[0]][i])

    def _prefix(self, view: View) -> str:
        return "teacher" if len(self.views) == 1 else f"teacher/{view.names[0]}"

    def _renamed(self, view: View, metrics: dict[str, float]) -> dict[str, float]:
        return {f"{self._prefix(view)}/{key.removeprefix('teacher/')}": value for key, value in metrics.items()}

    def _gaps(self, view: View, scored: dict[str, np.ndarray], batch: RowBatch, chosen: list[int]) -> dict[str, float]:
        """Mean gap to the old log-probabilities over the tokens that were scored."""
        out = {}
        for name in view.names if chosen else ():
            gap = (scored[name][chosen] - batch.old_NL[chosen])[batch.mask_NL[chosen]]
            prefix = "teacher" if len(self.names) == 1 else f"teacher/{name}"
            out |= {f"{prefix}/gap_mean": float(gap.mean()), f"{prefix}/gap_abs_mean": float(np.abs(gap).mean())}
        return out
