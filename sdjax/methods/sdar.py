"""SDAR, GRPO+OPSD and true reverse KL: pulls of the sampled tokens towards a skill-conditioned teacher (methods.md,
5.1, 5.2 and 7)."""

from dataclasses import dataclass

from sdjax import losses
from sdjax.losses import masked
from sdjax.methods.base import Coefficients, Method
from sdjax.methods.registry import register


@register
class Sdar(Method):
    name = "sdar"
    views = ("skills",)
    weight_name = "gate"

    @dataclass(frozen=True)
    class Config(Method.Config):
        beta: float = 5.0
        coef: float = 0.01

    def coefficients(self, step, total_steps):
        return Coefficients(auxiliary=self.config.coef)

    def auxiliary(self, student, fields, mask):
        return losses.sdar(student, fields["skills"], mask, beta=self.config.beta)

    def token_weight(self, student, fields, mask):
        return losses.sdar_gate(student, fields["skills"], mask, beta=self.config.beta)


@register
class GrpoOpsd(Sdar):
    """SDAR with a constant gate of one half: the teacher enters the loss value but not the gradient."""

    name = "grpo_opsd"

    @dataclass(frozen=True)
    class Config(Method.Config):
        coef: float = 0.01

    def auxiliary(self, student, fields, mask):
        return losses.sdar(student, fields["skills"], mask, beta=0.0)

    def token_weight(self, student, fields, mask):
        return losses.sdar_gate(student, fields["skills"], mask, beta=0.0)


@register
class ReverseKlOpsd(Method):
    """The teacher-dependent version of GRPO+OPSD, not part of the study (methods.md, section 7)."""

    name = "reverse_kl_opsd"
    views = ("skills",)
    weight_name = "log-prob pull (lT - lS)"

    @dataclass(frozen=True)
    class Config(Method.Config):
        coef: float = 0.01

    def coefficients(self, step, total_steps):
        return Coefficients(auxiliary=self.config.coef)

    def auxiliary(self, student, fields, mask):
        return losses.reverse_kl_opsd(student, fields["skills"], mask)

    def token_weight(self, student, fields, mask):
        return masked.gap(fields["skills"], student, mask)
