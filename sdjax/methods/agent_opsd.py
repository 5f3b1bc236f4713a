"""AgentOPSD: a belief in success, updated turn by turn from the teacher's evidence, shifts credit (methods.md, 6.3)."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import numpy as np

from sdjax import losses
from sdjax.methods.base import Advantages, Method
from sdjax.methods.registry import register

_TOKEN_ENVIRONMENTS = ("webshop", "searchqa")


@register
class AgentOpsd(Method):
    """Presets.

    default: the released constants with the mean outcome as prior (D8). released: the released prior. paper: turns
    everywhere, gamma 0.95, success rate as prior and an upper clip of 0.24.
    """

    name = "agent_opsd"
    presets = ("default", "released", "paper")
    views = ("skills",)
    weight_name = "credit weight"

    @dataclass(frozen=True)
    class Config(Method.Config):
        """Keys that are None come from the preset; clip_high None keeps ``train.clip_high``."""

        granularity: Literal["turn", "token"] | None = None
        gamma: float | None = None
        prior: Literal["outcome", "success", "released"] | None = None
        clip_high: float | None = None
        lam: float = 0.5
        band: float = 0.2

    @classmethod
    def preset_values(cls, preset, environment):
        if preset == "paper":
            return {"granularity": "turn", "gamma": 0.95, "prior": "success", "clip_high": 0.24}
        granularity = "token" if environment in _TOKEN_ENVIRONMENTS else "turn"
        return {
            "granularity": granularity,
            "gamma": 1.0,
            "prior": "released" if preset == "released" else "outcome",
        }

    def clip_high(self):
        return self.config.clip_high

    def _prior(self, batch) -> jax.Array:
        place = (batch.group_N, batch.trajectory_N)
        if self.config.prior == "released":
            return _prior_released(batch.score_N, *place, batch.turn_N, batch.ok_N)
        value_N = batch.outcome_N if self.config.prior == "outcome" else batch.success_N
        return _prior_success(value_N, *place, batch.ok_N)

    def advantages(self, batch, step, total_steps):
        config = self.config
        prior_N = self._prior(batch)
        adv_NL, weight_NL, terms = jax.device_get(
            _kernels(
                batch.adv_N,
                batch.views["skills"],
                batch.old_NL,
                batch.mask_NL,
                batch.trajectory_N,
                batch.turn_N,
                prior_N,
                granularity=config.granularity,
                gamma=config.gamma,
                lam=config.lam,
                band=config.band,
            )
        )
        units = batch.ok_N if config.granularity == "turn" else batch.mask_NL
        belief, weight = terms.belief[units], terms.weight[units]
        metrics = {
            "evidence_abs_mean": float(np.abs(terms.evidence[units]).mean()),
            "belief_saturated_frac": float(((belief < 0.01) | (belief > 0.99)).mean()),
            "prior_mean": float(np.asarray(prior_N)[batch.ok_N].mean()),
            "weight_mean": float(weight.mean()),
            "weight_min": float(weight.min()),
            "weight_max": float(weight.max()),
            "z_above_1_frac": float((np.abs(terms.z[units]) > 1).mean()),
        }
        return Advantages(adv_NL, metrics, weight_NL)


_prior_success = jax.jit(losses.prior_success)
_prior_released = jax.jit(losses.prior_released)


@partial(jax.jit, static_argnames=("granularity", "gamma", "lam", "band"))
def _kernels(adv_N, teacher_NL, old_NL, mask_NL, trajectory_N, turn_N, prior_N, *, granularity, gamma, lam, band):
    inputs = (adv_N, teacher_NL, old_NL, mask_NL, trajectory_N, turn_N, prior_N)
    options = {"granularity": granularity, "gamma": gamma, "band": band}
    return (
        losses.agent_opsd_advantages(*inputs, lam=lam, **options),
        losses.agent_opsd_weight(*inputs, **options),
        losses.agent_opsd_terms(*inputs, **options),
    )
