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


def _windows(x_NL, window: int) -> jax.Array:
    """`[W, N, L]`: entry k is x shifted right by k, i.e. the value k tokens earlier; 0 (False) before the row."""
    length = x_NL.shape[1]
    padded = jnp.pad(x_NL, ((0, 0), (window - 1, 0)))
    return jnp.stack([padded[:, window - 1 - k : window - 1 - k + length] for k in range(window)])


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

    in_WNL = _windows(mask_NL, window)
    gap_WNL = _windows(gap_NL, window)
    age_W11 = jnp.arange(window, dtype=gap_NL.dtype)[:, None, None]
    n_NL = mk.masked_count(in_WNL, axis=0, dtype=gap_NL.dtype)
    mean_NL = mk.masked_mean(gap_WNL, in_WNL, axis=0)
    centered_WNL = mk.masked(gap_WNL - mean_NL, in_WNL)
    var_NL = mk.masked_var(gap_WNL, in_WNL, axis=0)
    # Averaging the differences to the token's own gap keeps equal gaps exactly equal.
    decay_WNL = mk.masked(jnp.asarray(decay, gap_NL.dtype) ** age_W11, in_WNL)
    shift_NL = jnp.sum(decay_WNL * (gap_WNL - gap_NL), axis=0) / jnp.maximum(jnp.sum(decay_WNL, axis=0), EPS)
    kappa_NL = var_NL / (var_NL + mk.masked_mean(var_NL, mask_NL) + EPS)
    adaptive_NL = gap_NL + kappa_NL * shift_NL

    time_WNL = mk.masked(-age_W11 - mk.masked_mean(jnp.broadcast_to(-age_W11, in_WNL.shape), in_WNL, axis=0), in_WNL)
    time_var_NL = jnp.sum(jnp.square(time_WNL), axis=0)
    slope_NL = jnp.sum(time_WNL * centered_WNL, axis=0) / jnp.where(n_NL >= 3, time_var_NL, 1)
    slope_NL = mk.masked(slope_NL, mask_NL & (n_NL >= 3))
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
