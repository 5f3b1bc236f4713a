"""ICSD: SDAR's trust weight, recalibrated by how the surrogate would answer to a nudge towards the teacher.

The calibration couples the tokens of a mini-batch (or of a row), so this kernel must see whole rows.
"""

import dataclasses
from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jax import lax

from sdjax.losses import masked as mk
from sdjax.losses.types import TokenSum

MAX_LOG_RHO = 10.0
EPS_SPREAD = 1e-8
# Mass of phi-weighted gates below which alpha would be noise: the row keeps its gates.
MIN_MASS = 1e-12


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IcsdTerms:
    """Everything ICSD computes on the way to its weight; detached, 0 off the mask.

    gap: `[N, L]` lT - lS, nats.
    gate: `[N, L]` trust weight sigma(beta gap).
    influence: `[N, L]` u = A rho gap.
    calibration: `[N, L]` phi in (0, 1), increasing in u.
    ambiguous: `[N, L]` bool, tokens with A < 0 and gap < 0, which keep their trust weight.
    weight: `[N, L]` c, with the same sum over each row as the gate.
    mu, b_lo, b_hi: `[N, 1]` median and one-sided spreads of u over the row's calibration set.
    """

    gap: jax.Array
    gate: jax.Array
    influence: jax.Array
    calibration: jax.Array
    ambiguous: jax.Array
    weight: jax.Array
    mu: jax.Array
    b_lo: jax.Array
    b_hi: jax.Array


def _calibrate(u_NL, mask_NL, eta, axis):
    """phi, mu, b_lo, b_hi of u over the calibration set: all tokens (axis None) or each row (axis 1)."""
    mu = mk.lower_median(u_NL, mask_NL, axis=axis)
    mu = mu if axis is None else mu[:, None]
    away_NL = jnp.abs(u_NL - mu)
    below_NL = u_NL < mu
    b_lo = mk.masked_mean(away_NL, mask_NL & below_NL, axis=axis)
    b_hi = mk.masked_mean(away_NL, mask_NL & ~below_NL, axis=axis)
    b_lo, b_hi = (b if axis is None else b[:, None] for b in (b_lo, b_hi))
    low_NL = eta * jnp.exp(-away_NL / (b_lo + EPS_SPREAD))
    high_NL = 1 - (1 - eta) * jnp.exp(-away_NL / (b_hi + EPS_SPREAD))
    column = (u_NL.shape[0], 1)
    return jnp.where(below_NL, low_NL, high_NL), *(jnp.broadcast_to(x, column) for x in (mu, b_lo, b_hi))


def icsd_terms(
    lS_NL,
    lT_NL,
    lO_NL,
    adv_N,
    mask_NL,
    *,
    eta: float = 0.5,
    beta: float = 5.0,
    calibration: Literal["minibatch", "turn"] = "minibatch",
) -> IcsdTerms:
    """ICSD's weight and its intermediates; arguments as for `icsd`."""
    lS_NL, lT_NL, lO_NL, adv_N = mk.as_floats(lS_NL, lT_NL, lO_NL, adv_N)
    chex.assert_rank([lS_NL, lT_NL, lO_NL, adv_N, mask_NL], [2, 2, 2, 1, 2])
    chex.assert_equal_shape([lS_NL, lT_NL, lO_NL, mask_NL])
    chex.assert_equal_shape_prefix([lS_NL, adv_N], 1)
    if calibration not in ("minibatch", "turn"):
        raise ValueError(f'calibration is {calibration!r}; use "minibatch" or "turn".')
    mask_NL = mk.as_bool(mask_NL)
    adv_NL = mk.masked(adv_N[:, None], mask_NL)

    gap_NL = mk.gap(lT_NL, lS_NL, mask_NL)
    gate_NL = mk.masked(jax.nn.sigmoid(beta * gap_NL), mask_NL)
    rho_NL = jnp.exp(jnp.minimum(mk.gap(lS_NL, lO_NL, mask_NL), MAX_LOG_RHO))
    u_NL = adv_NL * rho_NL * gap_NL
    phi_NL, mu_N1, b_lo_N1, b_hi_N1 = _calibrate(u_NL, mask_NL, eta, None if calibration == "minibatch" else 1)

    ambiguous_NL = mask_NL & (adv_NL < 0) & (gap_NL < 0)
    calibrated_NL = mask_NL & ~ambiguous_NL
    before_N1 = mk.masked_sum(gate_NL, calibrated_NL, axis=1)[:, None]
    after_N1 = mk.masked_sum(gate_NL * phi_NL, calibrated_NL, axis=1)[:, None]
    usable_N1 = after_N1 >= MIN_MASS
    alpha_N1 = before_N1 / jnp.where(usable_N1, after_N1, 1)
    weight_NL = jnp.where(calibrated_NL & usable_N1, alpha_N1 * gate_NL * phi_NL, gate_NL)
    terms = IcsdTerms(
        gap=gap_NL,
        gate=gate_NL,
        influence=u_NL,
        calibration=mk.masked(phi_NL, mask_NL),
        ambiguous=ambiguous_NL,
        weight=weight_NL,
        mu=mu_N1,
        b_lo=b_lo_N1,
        b_hi=b_hi_N1,
    )
    return lax.stop_gradient(terms)


def icsd_weight(lS_NL, lT_NL, lO_NL, adv_N, mask_NL, **options) -> jax.Array:
    """ICSD's weight c, `[N, L]`, detached, 0 off the mask; arguments as for `icsd`."""
    return icsd_terms(lS_NL, lT_NL, lO_NL, adv_N, mask_NL, **options).weight


def icsd(
    lS_NL,
    lT_NL,
    lO_NL,
    adv_N,
    mask_NL,
    *,
    eta: float = 0.5,
    beta: float = 5.0,
    calibration: Literal["minibatch", "turn"] = "minibatch",
) -> TokenSum:
    """Influence-calibrated distillation term, c (lT - lS).

    Source: "Trust Is Not Enough: Influence Calibration for On-Policy Self-Distillation in Agentic RL", arXiv 2608.14945
    [dig]; calibration set, beta, median rule and caps [our], methods 5.4.

    Args:
      lS_NL: `[N, L]` log-probability of the sampled token under the current student, nats.
      lT_NL: `[N, L]` the same under the privileged prompt, nats.
      lO_NL: `[N, L]` the same under the weights at the start of the global step, nats.
      adv_N: `[N]` the row's GRPO advantage.
      mask_NL: `[N, L]` bool, valid tokens; a row without any is padding.
      eta: calibration phi at the median influence.
      beta: sharpness of the trust gate per nat.
      calibration: set for median and spreads: "minibatch" (all rows given) or "turn" (each row).

    Returns:
      TokenSum in nats, not multiplied by c_aux; metrics gate_sum, weight_sum, gap_sum, ambiguous_sum (indicator of D),
      opposed_before_sum and opposed_after_sum (gate and weight on tokens with u < 0), mu_sum, b_lo_sum, b_hi_sum (their
      token means are the statistics), weight_max, nonfinite_tokens.

    Raises:
      ValueError: unknown `calibration`.

    Gradient: -c; c is detached. Statistics are those of the rows given: with "minibatch", cutting a mini-batch into
    chunks changes the result. Non-finite gaps on valid tokens count as 0. Deviation: none (there is no public code).
    """
    terms = icsd_terms(lS_NL, lT_NL, lO_NL, adv_N, mask_NL, eta=eta, beta=beta, calibration=calibration)
    lS_NL, lT_NL, lO_NL = mk.as_floats(lS_NL, lT_NL, lO_NL)
    mask_NL = mk.as_bool(mask_NL)
    gap_NL = mk.gap(lax.stop_gradient(lT_NL), lS_NL, mask_NL)
    opposed_NL = terms.influence < 0
    return mk.token_sum(
        terms.weight * gap_NL,
        mask_NL,
        {
            "gate": terms.gate,
            "weight": terms.weight,
            "gap": terms.gap,
            "ambiguous": terms.ambiguous,
            "opposed_before": mk.masked(terms.gate, opposed_NL),
            "opposed_after": mk.masked(terms.weight, opposed_NL),
            "mu": terms.mu,
            "b_lo": terms.b_lo,
            "b_hi": terms.b_hi,
        },
        weight_max=mk.masked_max(terms.weight, mask_NL),
        nonfinite_tokens=mk.nonfinite_tokens(mask_NL, lS_NL, lT_NL, lO_NL),
    )
