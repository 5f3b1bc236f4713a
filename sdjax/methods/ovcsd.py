"""OVCSD: in groups of failures a teacher acts, and only what it wins teaches (methods.md, 6.6).

"From Scoring to Acting: Outcome-Verified Comparative Self-Distillation for LLM Agents", arXiv 2607.27937. Groups
without a success and without spread are continued by the skill-conditioned policy from states that the failures share.
Where a verified continuation first differs from the failures, its action and theirs get a contrast as advantage; its
later turns get a forward KL. Everything else of such a group gets no advantage; every other group is GRPO's.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import numpy as np

from sdjax import losses
from sdjax.methods.base import ActingRules, Advantages, Coefficients, Method, RowBatch
from sdjax.methods.registry import register
from sdjax.rollout.continuations import ContinuationRules


@register
class Ovcsd(Method):
    name = "ovcsd"
    acts = True
    extra_validations = ("greedy", "sampled")
    weight_name = "contrast"

    @dataclass(frozen=True)
    class Config:
        """continuations, nodes, support, fallback_depth, topk, coef, flat_std: [3p]. scope: which tokens of a response
        count in contrast and suffix ("action": released launchers [3p]; "response": the port's documentation).
        reserve_rows: extra rows of one step at most [our]. graded: compare successes instead of returns in the trigger
        (ScienceWorld) [our]."""

        preset: str = "default"
        continuations: int = 2
        nodes: int = 3
        support: int = 2
        fallback_depth: int = 4
        topk: int = 16
        coef: float = 1.0
        scope: Literal["action", "response"] = "action"
        reserve_rows: int = 512
        flat_std: float = 1e-6
        graded: bool | None = None

    @classmethod
    def preset_values(cls, preset, environment):
        return {"graded": environment == "scienceworld"}

    def coefficients(self, step, total_steps):
        return Coefficients(suffix=self.config.coef)

    def acting(self):
        c = self.config
        search = ContinuationRules(c.continuations, c.nodes, c.support, c.fallback_depth)
        return ActingRules(search, c.scope, c.topk, c.reserve_rows)

    def triggered(self, batch: RowBatch) -> np.ndarray:
        outcome_N = batch.success_N.astype(np.float32) if self.config.graded else batch.return_N
        args = (outcome_N, batch.success_N, batch.group_N, batch.trajectory_N, batch.ok_N)
        return np.asarray(_trigger(*args, eps=self.config.flat_std))

    def suffix_weight(self, site_N, mask_NL):
        return np.asarray(_suffix_weight(site_N, mask_NL))

    def advantages(self, batch, step, total_steps):
        plain = super().advantages(batch, step, total_steps)
        sites = batch.sites
        if sites is None:
            return Advantages(plain.adv_NL, {"contrast_tokens": 0.0}, plain.adv_NL)
        adv_NL = _contrast(plain.adv_NL, sites.site_N, sites.teacher_N, sites.action_NL, sites.triggered_N)
        at_site_NL = sites.action_NL & (sites.site_N >= 0)[:, None]
        return Advantages(np.asarray(adv_NL), {"contrast_tokens": float(at_site_NL.sum())}, np.asarray(adv_NL))


_contrast = jax.jit(losses.ovcsd_contrast)
_suffix_weight = jax.jit(losses.ovcsd_suffix_weight)


@partial(jax.jit, static_argnames="eps")
def _trigger(*args, eps):
    return losses.ovcsd_trigger(*args, eps=eps)
