"""RLSD: within a narrow band, the teacher's gap decides how much of the advantage a token carries (methods.md, 6.1)."""

from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from sdjax import losses
from sdjax.methods.base import Advantages, Method
from sdjax.methods.registry import register


@register
class Rlsd(Method):
    name = "rlsd"
    views = ("skills",)
    weight_name = "band weight"

    @dataclass(frozen=True)
    class Config(Method.Config):
        """lam_start falls linearly to 0 at step ``warmdown_steps``, whatever the length of the run."""

        lam_start: float = 0.5
        warmdown_steps: int = 100
        eps_w: float = 0.2

    def advantages(self, batch, step, total_steps):
        config, teacher_NL, old_NL = self.config, batch.views["skills"], batch.old_NL
        lam = losses.rlsd_lam(step, start=config.lam_start, warmdown=config.warmdown_steps)
        adv_NL, weight_NL = jax.device_get(
            _kernels(batch.adv_N, teacher_NL, old_NL, batch.mask_NL, lam, eps_w=config.eps_w)
        )
        gap = (teacher_NL - old_NL)[batch.mask_NL]
        far = np.abs(weight_NL[batch.mask_NL] - 1) >= config.eps_w * (1 - 1e-5)
        metrics = {
            "lam": float(lam),
            "gap_mean": float(gap.mean()),
            "gap_std": float(gap.std()),
            "clipped_weight_frac": float(far.mean()),
        }
        return Advantages(adv_NL, metrics, weight_NL)


@partial(jax.jit, static_argnames="eps_w")
def _kernels(adv_N, teacher_NL, old_NL, mask_NL, lam, eps_w):
    return (
        losses.rlsd_advantages(adv_N, teacher_NL, old_NL, mask_NL, lam=lam, eps_w=eps_w),
        losses.rlsd_weight(adv_N, teacher_NL, old_NL, mask_NL, eps_w=eps_w),
    )
