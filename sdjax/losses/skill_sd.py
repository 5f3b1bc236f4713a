"""Skill-SD: an importance-weighted k3 estimate whose gradient is that of KL(student || teacher)."""

import chex
import jax.numpy as jnp
from jax import lax

from sdjax.losses import masked as mk
from sdjax.losses.types import TokenSum

MAX_NEG_ELL = 20.0
MAX_LOG_RHO = 10.0


def skill_sd(lS_NL, lT_NL, lO_NL, mask_NL) -> TokenSum:
    """Skill-SD's distillation term, rho k3 with ell = lS - lT, k3 = exp(-ell) - 1 + ell and rho = exp(lS - lO).

    Source: "Skill-SD: Skill-Conditioned Self-Distillation for Multi-turn LLM Agents", arXiv 2604.10674, in the
    skill-bank adaptation of SDAR's repository [off], methods 5.3.

    Args:
      lS_NL: `[N, L]` log-probability of the sampled token under the current student, nats.
      lT_NL: `[N, L]` the same under the privileged prompt, nats.
      lO_NL: `[N, L]` the same under the weights at the start of the global step, nats.
      mask_NL: `[N, L]` bool, valid tokens.

    Returns:
      TokenSum in nats, not multiplied by c_aux; metrics ell_sum, k3_max (heavy tail, up to about 1 / p_student),
      rho_max, nonfinite_tokens.

    Gradient: rho ell away from the clamps, because rho carries gradient too; a clamped factor (-ell > 20, lS - lO > 10)
    is a constant and the other keeps its gradient. A non-finite gap on a valid token counts as 0, a non-finite lS - lO
    gives NaN. Deviation: D9.
    """
    lS_NL, lT_NL, lO_NL = mk.as_floats(lS_NL, lT_NL, lO_NL)
    chex.assert_rank([lS_NL, lT_NL, lO_NL, mask_NL], 2)
    chex.assert_equal_shape([lS_NL, lT_NL, lO_NL, mask_NL])
    mask_NL = mk.as_bool(mask_NL)
    lS_NL = mk.masked(lS_NL, mask_NL)
    lO_NL = lax.stop_gradient(mk.masked(lO_NL, mask_NL))
    lT_NL = lax.stop_gradient(lT_NL)

    ell_NL = mk.gap(lS_NL, lT_NL, mask_NL)
    k3_NL = jnp.expm1(jnp.minimum(-ell_NL, MAX_NEG_ELL)) + ell_NL
    rho_NL = jnp.exp(jnp.minimum(lS_NL - lO_NL, MAX_LOG_RHO))
    loss_NL = mk.poison(rho_NL * k3_NL, lS_NL, mask_NL, lO_NL)
    return mk.token_sum(
        loss_NL,
        mask_NL,
        {"ell": ell_NL},
        k3_max=mk.masked_max(k3_NL, mask_NL),
        rho_max=mk.masked_max(rho_NL, mask_NL),
        nonfinite_tokens=mk.nonfinite_tokens(mask_NL, lS_NL, lT_NL),
    )
