"""PCSD: trusts a gap more when its neighbourhood agrees, less when support is declining (methods.md, 5.5).

A reconstruction: the outline is published, most constants are not. Results must say so.
"""

from dataclasses import dataclass

from sdjax import losses
from sdjax.methods.base import Coefficients, Method
from sdjax.methods.registry import register


@register
class Pcsd(Method):
    name = "pcsd"
    views = ("skills",)
    separable = False  # windows run over the row, scale and mean variance over the mini-batch
    weight_name = "persistence weight"

    @dataclass(frozen=True)
    class Config(Method.Config):
        window: int = 8
        decay: float = 0.8
        gamma: float = 0.5
        beta: float = 5.0
        coef: float = 0.01

    def coefficients(self, step, total_steps):
        return Coefficients(auxiliary=self.config.coef)

    def _options(self):
        config = self.config
        return {"window": config.window, "decay": config.decay, "gamma": config.gamma, "beta": config.beta}

    def auxiliary(self, student, fields, mask):
        return losses.pcsd(student, fields["skills"], mask, **self._options())

    def token_weight(self, student, fields, mask):
        return losses.pcsd_weight(student, fields["skills"], mask, **self._options())
