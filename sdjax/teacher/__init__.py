"""Privileged context of the self-distillation teacher: skill banks, trajectory views, token-level prompts, counters."""

from sdjax.teacher.counters import TeacherCounters
from sdjax.teacher.prompt import TeacherIds, TeacherPrompt, check_static
from sdjax.teacher.skills import SkillBank, shipped_banks

__all__ = ["SkillBank", "TeacherCounters", "TeacherIds", "TeacherPrompt", "check_static", "shipped_banks"]
