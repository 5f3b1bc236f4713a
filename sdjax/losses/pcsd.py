"""PCSD: trust a gap more when its neighbourhood agrees and less when support is declining. A reconstruction.

No code exists and most constants are unpublished; results must say so. The windows couple the tokens of a row and the
scale couples the mini-batch, so this kernel must see whole rows.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
from jax import lax

from sdjax.losses import masked as mk
from sdjax.losses.types import TokenSum

EPS = 1e-8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PcsdTerms:
    """Everything PCSD computes on the way to its weight; `[N, L]` each, detached, 0 off the mask.

    gap: lT - lS, nats.
    kappa: share of the long window in the adaptive gap, in [0, 1).
    adaptive_gap: (1 - kappa) gap + kappa (decayed window mean), nats.
    slope: least-squares slope of the gap over the window, nats per token.
    trend: attenuation of declining support, in [0, 1].
    weight: sigma(beta adaptive_gap) trend, in [0, 1].
    """

    gap: jax.Array
    kappa: jax.Array
    adaptive_gap: jax.Array
    slope: jax.Array
    trend: jax.Array
    weight: jax.Array


def _earlier(x_NL, tokens: int) -> jax.Array:
    """x shifted right: the value `tokens` positions earlier in the row; 0 (False) before the row."""
    return jnp.pad(x_NL, ((0, 0), (tokens, 0)))[:, : x_NL.shape[1]]


@dataclasses.dataclass(frozen=True)
class _Window:
    """Moments of the gap over the valid positions of each token's window; `[N, L]` each."""

    variance: jax.Array
    decayed_shift: jax.Array  # decayed window mean minus the token's own gap
    slope: jax.Array


def _window(gap_NL, mask_NL, window: int, decay: float) -> _Window:
    # One array per window position and no stacked axis: the compiler fuses all of it into a few loops over tokens.
    ages = range(min(window, gap_NL.shape[1]))
    in_window = [_earlier(mask_NL, k) for k in ages]
    # Differences to the token's own gap keep equal gaps exactly equal.
    offset = [mk.masked(_earlier(gap_NL, k) - gap_NL, valid) for k, valid in zip(ages, in_window)]

    def total(values):
        return sum((mk.masked(x, valid) for x, valid in zip(values, in_window)), jnp.zeros_like(gap_NL))

    n_NL = total([jnp.ones_like(gap_NL)] * len(ages))
    at_least_1_NL = jnp.maximum(n_NL, 1)
    mean_NL = total(offset) / at_least_1_NL
    mean_age_NL = total([jnp.full_like(gap_NL, k) for k in ages]) / at_least_1_NL
    centered = [x - mean_NL for x in offset]
    time = [mean_age_NL - k for k in ages]
    weight = [jnp.full_like(gap_NL, decay**k) for k in ages]
    several_NL = mask_NL & (n_NL >= 3)
    slope_NL = total([s * x for s, x in zip(time, centered)])
    slope_NL /= jnp.where(several_NL, total([jnp.square(s) for s in time]), 1)
    return _Window(
        variance=total([jnp.square(x) for x in centered]) / at_least_1_NL,
        decayed_shift=total([w * x for w, x in zip(weight, offset)]) / jnp.where(mask_NL, total(weight), 1),
        slope=mk.masked(slope_NL, several_NL),
    )


def pcsd_terms(
    lS_NL, lT_NL, mask_NL, *, window: int = 8, decay: float = 0.8, gamma: float = 0.5, beta: float = 5.0
) -> PcsdTerms:
    """PCSD's weight and its intermediates; arguments as for `pcsd`."""
    lS_NL, lT_NL = mk.as_floats(lS_NL, lT_NL)
    chex.assert_rank([lS_NL, lT_NL, mask_NL], 2)
    chex.assert_equal_shape([lS_NL, lT_NL, mask_NL])
    if window < 1:
        raise ValueError(f"window is {window}; it must be at least 1 token.")
    mask_NL = mk.as_bool(mask_NL)
    gap_NL = mk.gap(lT_NL, lS_NL, mask_NL)

    moments = _window(gap_NL, mask_NL, window, decay)
    kappa_NL = moments.variance / (moments.variance + mk.masked_mean(moments.variance, mask_NL) + EPS)
    adaptive_NL = gap_NL + kappa_NL * moments.decayed_shift
    slope_NL = moments.slope
    scale = jnp.sqrt(mk.masked_var(gap_NL, mask_NL))
    trend_NL = jnp.clip(1 - gamma * jax.nn.relu(-slope_NL / (scale + EPS)), 0, 1)
    terms = PcsdTerms(
        gap=gap_NL,
        kappa=mk.masked(kappa_NL, mask_NL),
        adaptive_gap=mk.masked(adaptive_NL, mask_NL),
        slope=slope_NL,
        trend=mk.masked(trend_NL, mask_NL),
        weight=mk.masked(jax.nn.sigmoid(beta * adaptive_NL) * trend_NL, mask_NL),
    )
    return lax.stop_gradient(terms)


def pcsd_weight(lS_NL, lT_NL, mask_NL, **options) -> jax.Array:
    """PCSD's weight, `[N, L]` in [0, 1], detached, 0 off the mask; arguments as for `pcsd`."""
    return pcsd_terms(lS_NL, lT_NL, mask_NL, **options).weight


def pcsd(
    lS_NL, lT_NL, mask_NL, *, window: int = 8, decay: float = 0.8, gamma: float = 0.5, beta: float = 5.0
) -> TokenSum:
    """Persistence-weighted distillation term, w (lT - lS).

    Source: "PCSD: Persistent Consistency for Self-Distillation in Agentic Reinforcement Learning", arXiv 2608.01837.
    Windows, decayed aggregation and attenuation of declining support [abs, dig]; decay, gamma, beta, scale, form of
    kappa and the causal direction are a reconstruction [our], methods 5.5.

    Args:
      lS_NL: `[N, L]` log-probability of the sampled token under the current student, nats.
      lT_NL: `[N, L]` the same under the privileged prompt, nats.
      mask_NL: `[N, L]` bool, valid tokens; a row without any is padding.
      window: length of the long window in token positions, this token and earlier ones of the same row.
      decay: weight ratio of neighbouring window positions.
      gamma: strength of the attenuation, in slopes per scale (standard deviation of the gap over the mini-batch).
      beta: sharpness of the gate per nat.

    Returns:
      TokenSum in nats, not multiplied by c_aux; metrics weight_sum, weight_active_sum (w > 0.5, the calibration
      target), kappa_sum, declining_sum (trend < 1), gap_sum, nonfinite_tokens.

    Raises:
      ValueError: `window` below 1.

    Gradient: -w; w is detached. Scale and mean variance are those of the rows given: cutting a mini-batch into chunks
    changes the result. Non-finite gaps on valid tokens count as 0. Deviation: none (there is no public code).
    """
    terms = pcsd_terms(lS_NL, lT_NL, mask_NL, window=window, decay=decay, gamma=gamma, beta=beta)
    lS_NL, lT_NL = mk.as_floats(lS_NL, lT_NL)
    mask_NL = mk.as_bool(mask_NL)
    gap_NL = mk.gap(lax.stop_gradient(lT_NL), lS_NL, mask_NL)
    return mk.token_sum(
        terms.weight * gap_NL,
        mask_NL,
        {
            "weight": terms.weight,
            "weight_active": terms.weight > 0.5,
            "kappa": terms.kappa,
            "declining": terms.trend < 1,
            "gap": terms.gap,
        },
        nonfinite_tokens=mk.nonfinite_tokens(mask_NL, lS_NL, lT_NL),
    )
