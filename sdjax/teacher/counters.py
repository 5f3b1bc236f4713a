"""What happened to the privileged text of each row: the numbers that make a missing or cut context visible."""

from dataclasses import dataclass, field

import numpy as np

from sdjax.errors import TeacherContextError
from sdjax.teacher.prompt import TeacherIds


@dataclass
class TeacherCounters:
    """Counts over the rows of one step. ``missing``: "error" (default) or "count" for a row that was given no text.

    Only rows that must have a context are added; rows for which a method asks for none are not.
    """

    missing: str = "error"
    _lost: list[int] = field(default_factory=list, repr=False)
    _length: list[int] = field(default_factory=list, repr=False)
    _with_context: int = 0
    _general_only: int = 0

    def __post_init__(self):
        if self.missing not in ("error", "count"):
            raise TeacherContextError(f"unknown rule for missing contexts {self.missing!r}", 'use "error" or "count".')

    def add(self, prompt: TeacherIds, *, general_only: bool = False, name: str = "a row") -> None:
        """Counts one row; ``name`` says which in the error."""
        given = prompt.privileged_tokens + prompt.lost_tokens > 0
        if not given and self.missing == "error":
            raise TeacherContextError(
                f"{name} has no privileged text, so its teacher would be the plain student",
                'give it a context, leave it out of the teacher pass, or set teacher.missing = "count".',
            )
        self._lost.append(prompt.lost_tokens)
        self._length.append(len(prompt.ids))
        self._with_context += prompt.has_context
        self._general_only += general_only

    def metrics(self) -> dict[str, float]:
        """Means over the rows added so far; empty without rows.

        ``*_frac``: share of rows. truncated: lost at least one token. context: privileged text is in the
        prompt. empty: the rest, nothing given or everything cut. general_only: no family text.
        ``lost_tokens_mean``: over all rows.
        """
        rows = len(self._lost)
        if not rows:
            return {}
        return {
            "teacher/truncated_frac": sum(lost > 0 for lost in self._lost) / rows,
            "teacher/lost_tokens_mean": sum(self._lost) / rows,
            "teacher/lost_tokens_max": float(max(self._lost)),
            "teacher/context_frac": self._with_context / rows,
            "teacher/empty_frac": 1 - self._with_context / rows,
            "teacher/general_only_frac": self._general_only / rows,
            "teacher/prompt_tokens_mean": sum(self._length) / rows,
            "teacher/prompt_tokens_p99": float(np.percentile(self._length, 99)),
        }
