"""ADRS: the teacher's own log-probabilities, centred per row and whitened per group, join the advantage (methods.md,
6.5)."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

from sdjax import losses
from sdjax.methods.base import Advantages, Coefficients, Method
from sdjax.methods.registry import register


@register
class Adrs(Method):
    name = "adrs"
    views = ("skills",)
    weight_name = "teacher's share of the advantage"

    @dataclass(frozen=True)
    class Config(Method.Config):
        """The teacher acts in steps first_step..last_step, whatever the length of the run, and so does entropy_coef.

        entropy_coef: 0.003 is the value for the Qwen3 family, other backbones were run with 0.01; None (WebShop) keeps
        ``train.entropy_coef``. adaptive: bound the contribution by the group's spread over the median spread (not on
        WebShop). gate: "after" whitens first, a repair, because whitening cancels the gate.
        """

        eta: float = 0.02
        first_step: int = 21
        last_step: int = 70
        tau: float = 2.0
        temp: float = 1.0
        clip: float = 0.2
        gate: Literal["before", "after"] = "before"
        gate_norm: bool = False
        adaptive: bool | None = None
        entropy_coef: float | None = None

    @classmethod
    def preset_values(cls, preset, environment):
        if environment == "webshop":
            return {"adaptive": False}
        return {"adaptive": True, "entropy_coef": 0.003}

    def coefficients(self, step, total_steps):
        active = self.config.first_step <= step <= self.config.last_step
        return Coefficients(entropy=self.config.entropy_coef if active else None)

    def _options(self) -> dict[str, Any]:
        names = ("eta", "tau", "temp", "clip", "adaptive", "gate", "gate_norm")
        return {name: getattr(self.config, name) for name in names}

    def advantages(self, batch, step, total_steps):
        config = self.config
        eta_t = losses.adrs_eta(step, eta=config.eta, first=config.first_step, last=config.last_step)
        adv_NL, terms = jax.device_get(
            _kernels(
                batch.adv_N,
                batch.score_N,
                batch.views["skills"],
                batch.mask_NL,
                batch.group_N,
                eta_t,
                options=tuple(self._options().items()),
            )
        )
        groups = np.unique(np.where(batch.ok_N, batch.group_N, -1), return_index=True)[1]
        groups = groups[batch.ok_N[groups]]  # one row of each group
        size = np.abs(terms.contribution)[batch.mask_NL]
        bound = np.broadcast_to(terms.bound[:, None], batch.mask_NL.shape)[batch.mask_NL]
        metrics = {
            "eta": float(eta_t),
            "preference_mean": float(terms.preference[groups].mean()),
            "preference_positive_frac": float((terms.preference[groups] > 0).mean()),
            "gate_mean": float(terms.gate[groups].mean()),
            "contribution_abs_mean": float(size.mean()),
            "contribution_abs_max": float(size.max()),
            "clipped_frac": float(((size > 0) & (size >= bound * (1 - 1e-5))).mean()),
        }
        return Advantages(adv_NL, metrics, terms.contribution)


@partial(jax.jit, static_argnames="options")
def _kernels(adv_N, score_N, teacher_NL, mask_NL, group_N, eta_t, options):
    return (
        losses.adrs_advantages(adv_N, score_N, teacher_NL, mask_NL, group_N, eta_t=eta_t, **dict(options)),
        losses.adrs_terms(score_N, teacher_NL, mask_NL, group_N, eta_t=eta_t, **dict(options)),
    )
