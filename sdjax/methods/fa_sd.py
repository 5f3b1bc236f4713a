"""FA-SD: distillation from a teacher that reads a successful sibling's episode; replaces the surrogate (methods.md,
6.7)."""

from dataclasses import dataclass, replace

from sdjax import losses
from sdjax.losses import masked
from sdjax.methods.base import Coefficients, Method
from sdjax.methods.registry import register


@register
class FaSd(Method):
    name = "fa_sd"
    views = ("sibling",)
    optional_context = True  # a row has feedback only if another episode of its group succeeded
    teacher_weights = "ema"
    extra_validations = ("teacher_weights",)
    weight_name = "distillation weight (lS - lT)"

    @dataclass(frozen=True)
    class Config(Method.Config):
        """is_cap: cap of the optional importance ratio. kl_coef, entropy_coef: in force instead of ``train``'s."""

        coef: float = 1.0
        is_cap: float | None = None
        kl_coef: float = 0.0
        entropy_coef: float = 0.0

    def coefficients(self, step, total_steps):
        config = self.config
        return Coefficients(surrogate=0.0, auxiliary=config.coef, kl=config.kl_coef, entropy=config.entropy_coef)

    def select(self, batch):
        return batch.context["sibling"]

    def auxiliary_mask(self, batch):
        return batch.mask_NL & batch.context["sibling"][:, None]

    def advantages(self, batch, step, total_steps):
        """GRPO's, for the logs alone: the surrogate's coefficient is 0."""
        feedback = self.auxiliary_mask(batch).sum() / max(batch.mask_NL.sum(), 1)
        return replace(super().advantages(batch, step, total_steps), metrics={"effective_sample_frac": float(feedback)})

    def auxiliary(self, student, fields, mask):
        # The mask is already that of rows with feedback.
        return losses.fa_sd(student, fields["sibling"], mask, mask, lO_NL=fields["old"], is_cap=self.config.is_cap)

    def token_weight(self, student, fields, mask):
        return masked.gap(student, fields["sibling"], mask)
