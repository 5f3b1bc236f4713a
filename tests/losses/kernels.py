"""Every kernel behind one signature, so that a rule which holds for all of them is written once.

`LOSSES[name](b, lS)` gives a TokenSum, `ADVANTAGES[name](b)` gives `[N, L]`. Both are jitted; a `Batch` becomes a dict.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from sdjax import losses
from sdjax.losses import TokenSum

from .batches import Batch


def _adv_NL(b):
    return jnp.broadcast_to(b["adv"][:, None], b["mask"].shape)


def _feedback(b):
    return losses.has_feedback(b["success"], b["group"], b["trajectory"], b["ok"])


def _prior(b):
    return losses.prior_success(b["success"].astype(b["adv"].dtype), b["group"], b["trajectory"], b["ok"])


def _contrast(b):
    return losses.has_contrast(b["success"], b["group"], b["ok"])


LOSSES = {
    "clipped_surrogate": lambda b, lS: losses.clipped_surrogate(lS, b["lO"], _adv_NL(b), b["mask"]),
    "reference_kl": lambda b, lS: losses.reference_kl(lS, b["lR"], b["mask"]),
    "sdar": lambda b, lS: losses.sdar(lS, b["lT"], b["mask"]),
    "grpo_opsd": lambda b, lS: losses.sdar(lS, b["lT"], b["mask"], beta=0.0),
    "reverse_kl_opsd": lambda b, lS: losses.reverse_kl_opsd(lS, b["lT"], b["mask"]),
    "skill_sd": lambda b, lS: losses.skill_sd(lS, b["lT"], b["lO"], b["mask"]),
    "fa_sd": lambda b, lS: losses.fa_sd(lS, b["lT"], b["mask"], _feedback(b)),
    "fa_sd_is": lambda b, lS: losses.fa_sd(lS, b["lT"], b["mask"], _feedback(b), lO_NL=b["lO"], is_cap=1.5),
    "icsd": lambda b, lS: losses.icsd(lS, b["lT"], b["lO"], b["adv"], b["mask"]),
    "icsd_turn": lambda b, lS: losses.icsd(lS, b["lT"], b["lO"], b["adv"], b["mask"], calibration="turn"),
    "pcsd": lambda b, lS: losses.pcsd(lS, b["lT"], b["mask"]),
}
# Losses whose value on a batch is the sum of their values on its rows.
ROWWISE_LOSSES = sorted(set(LOSSES) - {"icsd", "pcsd"})


def _agent(b, **options):
    return losses.agent_opsd_advantages(
        b["adv"], b["lT"], b["lO"], b["mask"], b["trajectory"], b["turn"], _prior(b), **options
    )


def _adrs(b, eta_t=0.02, **options):
    return losses.adrs_advantages(b["adv"], b["score"], b["lT"], b["mask"], b["group"], eta_t=eta_t, **options)


def _ocsd(b):
    return losses.ocsd_advantages(
        b["adv"], b["lF"], b["lA"], b["lO"], b["mask"], b["trajectory"], b["turn"], b["eligible"]
    )


def _group(b, **options):
    ids = {"trajectory_N": b["trajectory"], "turn_N": b["turn"]}
    adv_N = losses.group_advantages(b["score"], b["group"], ok_N=b["ok"], **ids, **options)
    return jnp.where(b["mask"], adv_N[:, None], 0)


# One entry per code path; the others differ in a constant.
VARIANTS = ("group_nostd", "agent_paper", "adrs_fixed", "adrs_after")
ADVANTAGES = {
    "group_row": _group,
    "group_trajectory": functools.partial(_group, stats="trajectory"),
    "group_nostd": functools.partial(_group, norm_std=False),
    "rlsd": lambda b: losses.rlsd_advantages(b["adv"], b["lT"], b["lO"], b["mask"], lam=0.3),
    "ocsd": _ocsd,
    "agent_turn": _agent,
    "agent_token": functools.partial(_agent, granularity="token"),
    "agent_paper": functools.partial(_agent, gamma=0.95),
    "grsd": lambda b: losses.grsd_advantages(b["adv"], b["lT"], b["lO"], b["mask"], b["group"], _contrast(b)),
    "adrs": _adrs,
    "adrs_fixed": functools.partial(_adrs, adaptive=False),
    "adrs_after": functools.partial(_adrs, gate="after", gate_norm=True),
}


def as_dict(b: Batch) -> dict:
    return {f.name: jnp.asarray(getattr(b, f.name)) for f in dataclasses.fields(b)}


@functools.cache
def _jitted_loss(name):
    def scalar(differentiable, rest):
        b = differentiable | rest
        out = LOSSES[name](b, b["lS"])
        return out.total, out

    return jax.jit(jax.value_and_grad(scalar, has_aux=True))


@functools.cache
def _jitted_advantage(name):
    return jax.jit(ADVANTAGES[name])


def run_loss_with_all_gradients(name: str, b: Batch) -> tuple[TokenSum, dict[str, np.ndarray]]:
    """TokenSum of a loss and its gradient to every float array of the batch."""
    arrays = as_dict(b)
    floats = {k: x for k, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    rest = {k: x for k, x in arrays.items() if k not in floats}
    (_, out), grads = _jitted_loss(name)(floats, rest)
    return out, {k: np.asarray(g) for k, g in grads.items()}


def run_loss(name: str, b: Batch) -> tuple[TokenSum, np.ndarray]:
    """TokenSum of a loss and d total / d lS."""
    out, grads = run_loss_with_all_gradients(name, b)
    return out, grads["lS"]


def run_advantage(name: str, b: Batch) -> np.ndarray:
    return np.asarray(_jitted_advantage(name)(as_dict(b)))
