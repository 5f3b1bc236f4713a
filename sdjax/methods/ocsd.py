"""OCSD: on the turns the policy was least sure of, the next observation decides what each token carries (methods.md,
6.2).

Only the selected turns are scored, under two prompts that differ in the observation alone.
"""

from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from sdjax import losses
from sdjax.methods.base import Advantages, Method
from sdjax.methods.registry import register


@register
class Ocsd(Method):
    name = "ocsd"
    views = ("future_full", "future_ablated")
    weight_name = "observation factor"

    @dataclass(frozen=True)
    class Config(Method.Config):
        """beta: strength. rho: share of the turns of a trajectory that is selected."""

        beta: float = 0.5
        rho: float = 0.2

    def select(self, batch):
        place = (batch.trajectory_N, batch.turn_N, batch.context["future_full"])
        return np.asarray(_select(batch.old_NL, batch.mask_NL, *place, rho=self.config.rho))

    def advantages(self, batch, step, total_steps):
        full_NL, ablated_NL = batch.views["future_full"], batch.views["future_ablated"]
        adv_NL = _advantages(
            batch.adv_N,
            full_NL,
            ablated_NL,
            batch.old_NL,
            batch.mask_NL,
            batch.trajectory_N,
            batch.turn_N,
            batch.context["future_full"],
            beta=self.config.beta,
            rho=self.config.rho,
        )
        selected_N = self.select(batch)
        tokens_NL = batch.mask_NL & selected_N[:, None]
        e_NL = np.where(tokens_NL, full_NL - ablated_NL, 0.0)
        q_NL = np.tanh(e_NL / 2)
        weight_NL = np.where(batch.mask_NL, 1 + self.config.beta * np.sign(batch.adv_N)[:, None] * q_NL, 0.0)
        metrics = {"selected_frac": float(selected_N.sum() / max(batch.ok_N.sum(), 1))}
        if tokens_NL.any():
            metrics |= {
                "evidence_abs_mean": float(np.abs(e_NL[tokens_NL]).mean()),
                "q_mean": float(q_NL[tokens_NL].mean()),
            }
            valid_NL = np.broadcast_to(batch.valid_N[:, None], tokens_NL.shape)
            metrics |= roc_area(e_NL[tokens_NL], valid_NL[tokens_NL])
        return Advantages(np.asarray(adv_NL), metrics, weight_NL.astype(np.float32))


def roc_area(score: np.ndarray, positive: np.ndarray) -> dict[str, float]:
    """``{"validity_auc": area}`` under the ROC curve of ``score``; empty if only one class occurs. Ties count half."""
    p, n = int(positive.sum()), int((~positive).sum())
    if not p or not n:
        return {}
    _, inverse, counts = np.unique(score, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    rank = (last - (counts - 1) / 2)[inverse]
    return {"validity_auc": float((rank[positive].sum() - p * (p + 1) / 2) / (p * n))}


@partial(jax.jit, static_argnames="rho")
def _select(old_NL, mask_NL, trajectory_N, turn_N, eligible_N, *, rho):
    return losses.ocsd_select(old_NL, mask_NL, trajectory_N, turn_N, eligible_N, rho=rho)[0]


_advantages = jax.jit(losses.ocsd_advantages, static_argnames=("beta", "rho"))
