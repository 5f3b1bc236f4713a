"""GRSD: rows that the group's own guide makes more (or less) likely carry more (or less) advantage (methods.md, 6.4).

The policy writes the guide from reflections on its own episodes. There is no judge and no reflection loss. A guide has
at most ``teacher.reflection_tokens`` tokens, so the released budget of 4,096 privileged tokens never binds.
"""

from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from sdjax import losses
from sdjax.methods.base import Advantages, Method
from sdjax.methods.registry import register


@register
class Grsd(Method):
    name = "grsd"
    views = ("guide",)
    optional_context = True  # groups without a success and a failure stay plain GRPO
    weight_name = "guide multiplier"

    @dataclass(frozen=True)
    class Config(Method.Config):
        """lam: strength. dead: |qn| up to here has no effect. g_max: bound on |qn|."""

        lam: float = 0.5
        dead: float = 0.0
        g_max: float = 0.2

    def select(self, batch):
        return batch.context["guide"]

    def advantages(self, batch, step, total_steps):
        config, guided_N = self.config, batch.context["guide"]
        adv_NL, terms = jax.device_get(
            _kernels(
                batch.adv_N,
                batch.views["guide"],
                batch.old_NL,
                batch.mask_NL,
                batch.group_N,
                guided_N,
                lam=config.lam,
                dead=config.dead,
                g_max=config.g_max,
            )
        )
        groups = len(np.unique(batch.group_N[batch.ok_N]))
        metrics = {
            "guided_groups_frac": len(np.unique(batch.group_N[guided_N])) / max(groups, 1),
            "multiplier_mean": float(terms.multiplier[batch.ok_N].mean()),
        }
        if guided_N.any():
            metrics |= {
                "gap_mean": float(terms.gap[guided_N].mean()),
                "q_abs_mean": float(np.abs(terms.normalised[guided_N]).mean()),
            }
        weight_NL = np.where(batch.mask_NL, terms.multiplier[:, None], 0.0).astype(np.float32)
        return Advantages(adv_NL, metrics, weight_NL)


@partial(jax.jit, static_argnames=("lam", "dead", "g_max"))
def _kernels(adv_N, teacher_NL, old_NL, mask_NL, group_N, contrast_N, *, lam, dead, g_max):
    inputs = (adv_N, teacher_NL, old_NL, mask_NL, group_N, contrast_N)
    options = {"lam": lam, "eta": dead, "g_max": g_max}
    return losses.grsd_advantages(*inputs, **options), losses.grsd_terms(*inputs, **options)
