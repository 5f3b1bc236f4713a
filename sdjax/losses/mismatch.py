"""Correction for tokens that were drawn by another program than the one that differentiates them."""

from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jax import lax

from sdjax.losses import masked as mk

# exp of it is far beyond every cap and far from overflow.
MAX_LOG_RATIO = 20.0


def mismatch_weight(lO_NL, lE_NL, mask_NL, *, kind: Literal["truncate", "mask"], cap: float = 2.0) -> jax.Array:
    """Importance weight w = exp(lO - lE) of the trainer's policy against the engine's, bounded.

    The engine drew the tokens from a policy that differs from the trainer's by rounding, kernels or quantisation; w
    makes the policy gradient one of the trainer's own policy again. It multiplies the surrogate only.

    Sources: "truncate", min(w, cap) for each token: Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training" (2025). "mask", w inside [1 / cap, cap] and 0 outside: "Every Step Evolves",
    arXiv 2510.18855.

    Args:
      lO_NL: `[N, L]` log-probability of the sampled token by the trainer, under the weights that drew it, nats.
      lE_NL: `[N, L]` the same as the engine reported it, nats.
      mask_NL: `[N, L]` bool, valid tokens.
      kind: what happens beyond the bound.
      cap: the bound, at least 1.

    Returns:
      `[N, L]` weight; 0 off the mask. Exactly 1 where both agree.

    Gradient: none. Where one side is not finite the weight is 1: the gap's own check stops such a step.
    """
    lO_NL, lE_NL = mk.as_floats(lO_NL, lE_NL)
    chex.assert_rank([lO_NL, lE_NL, mask_NL], 2)
    chex.assert_equal_shape([lO_NL, lE_NL, mask_NL])
    mask_NL = mk.as_bool(mask_NL)
    log_NL = jnp.clip(mk.gap(lO_NL, lE_NL, mask_NL), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "truncate":
        weight_NL = jnp.minimum(jnp.exp(log_NL), cap)
    else:
        weight_NL = jnp.where(jnp.abs(log_NL) <= jnp.log(cap), jnp.exp(log_NL), 0)
    return lax.stop_gradient(mk.masked(weight_NL, mask_NL))
