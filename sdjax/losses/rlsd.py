"""RLSD: the teacher's gap, within a narrow band, decides how much of the advantage each token carries."""

import chex
import jax
import jax.numpy as jnp
from jax import lax

from sdjax.losses import masked as mk


def rlsd_weight(adv_N, lT_NL, lO_NL, mask_NL, *, eps_w: float = 0.2) -> jax.Array:
    """RLSD's token weight clip(exp(sign(A) (lT - lO)), 1 - eps_w, 1 + eps_w), `[N, L]`; 0 off the mask."""
    adv_N, lT_NL, lO_NL = mk.as_floats(adv_N, lT_NL, lO_NL)
    chex.assert_rank([adv_N, lT_NL, lO_NL, mask_NL], [1, 2, 2, 2])
    chex.assert_equal_shape([lT_NL, lO_NL, mask_NL])
    chex.assert_equal_shape_prefix([adv_N, lT_NL], 1)
    mask_NL = mk.as_bool(mask_NL)
    sign_NL = jnp.sign(mk.masked(adv_N[:, None], mask_NL))
    exponent_NL = sign_NL * mk.gap(lT_NL, lO_NL, mask_NL)
    # Clamping the exponent and not its exponential cannot overflow.
    weight_NL = jnp.exp(jnp.clip(exponent_NL, jnp.log1p(-eps_w), jnp.log1p(eps_w)))
    return lax.stop_gradient(mk.masked(weight_NL, mask_NL))


def rlsd_advantages(adv_N, lT_NL, lO_NL, mask_NL, *, lam, eps_w: float = 0.2) -> jax.Array:
    """RLSD's advantage A ((1 - lam) + lam w).

    Source: "Self-Distilled RLVR", arXiv 2604.03128, in the skill-bank adaptation of SDAR's repository [off],
    methods 6.1.

    Args:
      adv_N: `[N]` the row's GRPO advantage.
      lT_NL: `[N, L]` log-probability of the sampled token under the privileged prompt, nats.
      lO_NL: `[N, L]` the same under the plain prompt, same weights, nats.
      mask_NL: `[N, L]` bool, valid tokens.
      lam: share of the reweighted advantage, see `schedules.rlsd_lam`; may be traced.
      eps_w: half width of the band around 1, in [0, 1).

    Returns:
      `[N, L]` advantage, 0 off the mask; |Ahat / A - 1| <= lam eps_w. Exactly A at lam = 0 or lT = lO.

    Gradient: none; compute once per global step. Non-finite gaps on valid tokens count as 0 (count them with
    `nonfinite_tokens`). Deviation: D9.
    """
    weight_NL = rlsd_weight(adv_N, lT_NL, lO_NL, mask_NL, eps_w=eps_w)
    mask_NL = mk.as_bool(mask_NL)
    adv_NL = mk.masked(jnp.asarray(adv_N, weight_NL.dtype)[:, None], mask_NL)
    return lax.stop_gradient(adv_NL * (1 + jnp.asarray(lam, weight_NL.dtype) * mk.masked(weight_NL - 1, mask_NL)))
