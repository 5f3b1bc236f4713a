"""GRPO: the baseline (methods.md, section 3)."""

from sdjax.methods.base import Method
from sdjax.methods.registry import register


@register
class Grpo(Method):
    name = "grpo"
