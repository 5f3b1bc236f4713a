"""ICSD: SDAR's gate, recalibrated by how the surrogate would answer a nudge towards the teacher (methods.md, 5.4)."""

from dataclasses import dataclass
from typing import Literal

from sdjax import losses
from sdjax.methods.base import Coefficients, Method
from sdjax.methods.registry import register


@register
class Icsd(Method):
    name = "icsd"
    views = ("skills",)
    separable = False  # median and spreads run over the mini-batch, mass is conserved per row
    weight_name = "calibrated gate"

    @dataclass(frozen=True)
    class Config(Method.Config):
        eta: float = 0.5
        beta: float = 5.0
        coef: float = 0.01
        calibration: Literal["minibatch", "turn"] = "minibatch"

    def coefficients(self, step, total_steps):
        return Coefficients(auxiliary=self.config.coef)

    def _arguments(self, student, fields, mask):
        # The advantage is the row's own, and a response starts in column 0.
        return student, fields["skills"], fields["old"], fields["adv"][:, 0], mask

    def _options(self):
        return {"eta": self.config.eta, "beta": self.config.beta, "calibration": self.config.calibration}

    def auxiliary(self, student, fields, mask):
        return losses.icsd(*self._arguments(student, fields, mask), **self._options())

    def token_weight(self, student, fields, mask):
        return losses.icsd_weight(*self._arguments(student, fields, mask), **self._options())

    def step_metrics(self, means):
        """Teacher-opposed mass (u < 0) as a share of all weight, before and after calibration."""
        shares = {"before": "method/gate_mean", "after": "method/weight_mean"}
        return {
            f"method/opposed_{when}_frac": means[f"method/opposed_{when}_mean"] / means[whole]
            for when, whole in shares.items()
            if means.get(whole, 0.0) > 0
        }
