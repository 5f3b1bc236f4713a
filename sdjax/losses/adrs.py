"""ADRS: the teacher's own log-probabilities, centred per row and whitened per group, are added to the advantage."""

import dataclasses
from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jax import lax

from sdjax.losses import masked as mk
from sdjax.losses.grpo import FLAT_STD

EPS_Q = 1e-8
EPS_WHITEN = 1e-8
EPS_MEDIAN = 1e-6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdrsTerms:
    """What ADRS computes on the way to its contribution; 0 on padding.

    qhat: `[N, L]` lT, centred and scaled inside its row; sums to 0.
    alpha: `[N]` how much the teacher likes the row, in (0, 1).
    preference: `[N]` d of the row's group, reward units.
    gate: `[N]` sigma(tau d) of the row's group.
    whitened: `[N, L]` Z.
    bound: `[N]` c_g, the clip of the row's group.
    contribution: `[N, L]` what is added to A.
    """

    qhat: jax.Array
    alpha: jax.Array
    preference: jax.Array
    gate: jax.Array
    whitened: jax.Array
    bound: jax.Array
    contribution: jax.Array


def _whiten(x_NL, mask_NL, group_N):
    """(x - mean) / sqrt(var + 1e-8) over the valid tokens of each group, unbiased variance; two passes."""
    n = mk.segment_sum(mk.masked_count(mask_NL, axis=1, dtype=x_NL.dtype), group_N)
    at_least_1 = jnp.maximum(n, 1)
    for _ in range(2):
        mean = mk.segment_sum(mk.masked_sum(x_NL, mask_NL, axis=1), group_N) / at_least_1
        x_NL = mk.masked(x_NL - mean[group_N][:, None], mask_NL)
    var = mk.segment_sum(jnp.sum(jnp.square(x_NL), axis=1), group_N) / jnp.maximum(n - 1, 1)
    return x_NL / jnp.sqrt(var + EPS_WHITEN)[group_N][:, None]


def _preference(alpha_N, score_N, ok_N, group_N):
    """d_g, handed to the rows: mean score weighted by alpha minus that weighted by 1 - alpha; 0 with one row."""

    def weighted_mean(weight_N):
        weight_N = mk.masked(weight_N, ok_N)
        return mk.segment_sum(weight_N * score_N, group_N) / (mk.segment_sum(weight_N, group_N) + EPS_Q)

    several = mk.segment_count(group_N) > 1
    d = jnp.where(several, weighted_mean(alpha_N) - weighted_mean(1 - alpha_N), 0)
    return mk.masked(d[group_N], ok_N)


def _bound(std, rows, clip, adaptive):
    """c_g per segment: clip, scaled down in groups whose spread is below the median spread."""
    if not adaptive:
        return jnp.full_like(std, clip)
    counted = (rows > 0) & (std >= FLAT_STD)
    counted = counted.at[-1].set(False)
    median = jnp.where(jnp.any(counted), mk.lower_median(std, counted), 1)
    return clip * jnp.minimum(1, std / (median + EPS_MEDIAN))


def adrs_terms(
    score_N,
    lT_NL,
    mask_NL,
    group_N,
    *,
    eta_t,
    eta: float = 0.02,
    tau: float = 2.0,
    temp: float = 1.0,
    clip: float = 0.2,
    adaptive: bool = True,
    gate: Literal["before", "after"] = "before",
    gate_norm: bool = False,
) -> AdrsTerms:
    """ADRS's contribution to the advantage and its intermediates; arguments as for `adrs_advantages`."""
    score_N, lT_NL = mk.as_floats(score_N, lT_NL)
    chex.assert_rank([score_N, lT_NL, mask_NL, group_N], [1, 2, 2, 1])
    chex.assert_equal_shape([lT_NL, mask_NL])
    chex.assert_equal_shape_prefix([lT_NL, score_N, group_N], 1)
    if gate not in ("before", "after"):
        raise ValueError(f'gate is {gate!r}; use "before" or "after".')
    mask_NL = mk.as_bool(mask_NL)
    ok_N = jnp.any(mask_NL, axis=1)
    score_N = mk.masked(score_N, ok_N)
    group_N = mk.segment_ids(group_N, ok_N)
    # A non-finite teacher value leaves the statistics; the token keeps its plain advantage.
    used_NL = mask_NL & jnp.isfinite(lT_NL)
    lT_NL = mk.masked(lT_NL, used_NL)

    lbar_N = mk.masked_mean(lT_NL, used_NL, axis=1)
    std_N = jnp.sqrt(mk.masked_var(lT_NL, used_NL, axis=1))
    qhat_NL = mk.masked((lT_NL - lbar_N[:, None]) / (std_N[:, None] + EPS_Q), used_NL)
    alpha_N = mk.masked(jax.nn.sigmoid((lbar_N - mk.masked_mean(lbar_N, ok_N)) / temp), ok_N)
    d_N = _preference(alpha_N, score_N, ok_N, group_N)
    gate_input_N = d_N
    if gate_norm:
        gate_input_N = d_N / (jnp.sqrt(mk.masked_var(d_N, ok_N, ddof=1)) + EPS_Q)
    gate_N = mk.masked(jax.nn.sigmoid(tau * gate_input_N), ok_N)

    if gate == "before":
        z_NL = _whiten(eta * gate_N[:, None] * qhat_NL, used_NL, group_N)
    else:
        z_NL = gate_N[:, None] * _whiten(qhat_NL, used_NL, group_N)
    rows = mk.segment_count(group_N)
    std = jnp.where(rows == 1, 1, mk.segment_std(score_N, group_N, ddof=1))
    bound_N = _bound(std, rows, clip, adaptive)[group_N]
    acts_N = ok_N & (rows[group_N] > 1) & (std[group_N] >= FLAT_STD)
    contribution_NL = jnp.clip(jnp.asarray(eta_t, z_NL.dtype) * z_NL, -bound_N[:, None], bound_N[:, None])
    return lax.stop_gradient(
        AdrsTerms(
            qhat=qhat_NL,
            alpha=alpha_N,
            preference=d_N,
            gate=gate_N,
            whitened=z_NL,
            bound=mk.masked(bound_N, ok_N),
            contribution=mk.masked(contribution_NL, used_NL & acts_N[:, None]),
        )
    )


def adrs_advantages(
    adv_N,
    score_N,
    lT_NL,
    mask_NL,
    group_N,
    *,
    eta_t,
    eta: float = 0.02,
    tau: float = 2.0,
    temp: float = 1.0,
    clip: float = 0.2,
    adaptive: bool = True,
    gate: Literal["before", "after"] = "before",
    gate_norm: bool = False,
) -> jax.Array:
    """ADRS's advantage A + clip(eta_t Z, -c_g, c_g).

    Source: "Agentic Reinforcement Learning with Self-Distilled Reward Shaping", arXiv 2608.03223 [off], methods 6.5.

    Args:
      adv_N: `[N]` the row's GRPO advantage, from unshaped scores.
      score_N: `[N]` row score, reward units.
      lT_NL: `[N, L]` log-probability of the sampled token under the privileged prompt, nats.
      mask_NL: `[N, L]` bool, valid tokens; a row without any is padding.
      group_N: `[N]` int task group.
      eta_t: strength at this step, see `schedules.adrs_eta`; may be traced.
      eta: scale of the shaping reward before whitening.
      tau: sharpness of the gate per reward unit.
      temp: temperature of alpha, nats.
      clip: bound of the contribution.
      adaptive: scale the bound by the group's spread over the median spread.
      gate: "before" whitening, where it cancels but for the 1e-8 floor [off]; "after" is a repair [our].
      gate_norm: divide the gate's input by its sample standard deviation over all rows.

    Returns:
      `[N, L]` advantage, 0 off the mask; |Ahat - A| <= clip. Exactly A at eta_t = 0, in groups with one row and in flat
      groups.

    Raises:
      ValueError: unknown `gate`.

    Gradient: none; compute once per global step. A valid token with a non-finite lT keeps A (count them with
    `nonfinite_tokens`). Deviation: D7.
    """
    terms = adrs_terms(
        score_N,
        lT_NL,
        mask_NL,
        group_N,
        eta_t=eta_t,
        eta=eta,
        tau=tau,
        temp=temp,
        clip=clip,
        adaptive=adaptive,
        gate=gate,
        gate_norm=gate_norm,
    )
    (adv_N,) = mk.as_floats(adv_N)
    chex.assert_rank(adv_N, 1)
    chex.assert_equal_shape_prefix([adv_N, lT_NL], 1)
    mask_NL = mk.as_bool(mask_NL)
    adv_NL = mk.masked(adv_N[:, None].astype(terms.contribution.dtype), mask_NL)
    return lax.stop_gradient(adv_NL + terms.contribution)
