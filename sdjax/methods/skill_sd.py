"""Skill-SD: an importance-weighted k3 term whose gradient is that of KL(student || teacher) (methods.md, 5.3)."""

from dataclasses import dataclass

import jax

from sdjax import losses
from sdjax.methods.base import Coefficients, Method
from sdjax.methods.registry import register


@register
class SkillSd(Method):
    name = "skill_sd"
    views = ("skills",)
    weight_name = "gradient weight (rho ell)"

    @dataclass(frozen=True)
    class Config(Method.Config):
        coef: float = 0.001

    def coefficients(self, step, total_steps):
        return Coefficients(auxiliary=self.config.coef)

    def auxiliary(self, student, fields, mask):
        return losses.skill_sd(student, fields["skills"], fields["old"], mask)

    def token_weight(self, student, fields, mask):
        return jax.grad(lambda s: self.auxiliary(s, fields, mask).total)(student)
