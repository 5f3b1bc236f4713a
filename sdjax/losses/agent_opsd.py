"""AgentOPSD: a belief in success, updated turn by turn from the teacher's evidence, shifts credit between turns."""

import dataclasses
from typing import Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdjax.losses import masked as mk

PRIOR_CLIP = 1e-4
BELIEF_CLIP = 1e-6
EPS_Z = 1e-6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AgentOpsdTerms:
    """What AgentOPSD computes on the way to its weight; `[N]` for turns, `[N, L]` for tokens; 0 on padding.

    evidence: sum over the turn (or the one token) of lT - lO, nats.
    belief: B in [1e-6, 1 - 1e-6] after this evidence.
    increment: q, the change of B.
    z: increment, standardised over the trajectory's turns (the row's tokens).
    weight: clip(1 + band sign(A) z, 1 - band, 1 + band).
    """

    evidence: jax.Array
    belief: jax.Array
    increment: jax.Array
    z: jax.Array
    weight: jax.Array


def prior_success(outcome_N, group_N, trajectory_N, ok_N) -> jax.Array:
    """Default prior (D8): mean outcome over the trajectories of the row's group, `[N]`, unclipped; 0 on padding.

    Args:
      outcome_N: `[N]` normalised outcome of the row's trajectory, in [0, 1].
      group_N, trajectory_N: `[N]` int; trajectory ids are unique over the batch.
      ok_N: `[N]` bool, real rows.
    """
    return _prior(outcome_N, group_N, trajectory_N, jnp.arange(jnp.shape(ok_N)[0]), ok_N)


def prior_released(score_N, group_N, trajectory_N, turn_N, ok_N) -> jax.Array:
    """The released prior (D8 switch): mean over the trajectories of the group of the score of their earliest turn."""
    return _prior(score_N, group_N, trajectory_N, turn_N, ok_N)


def _prior(value_N, group_N, trajectory_N, key_N, ok_N):
    (value_N,) = mk.as_floats(value_N)
    chex.assert_rank([value_N, group_N, trajectory_N, key_N, ok_N], 1)
    chex.assert_equal_shape([value_N, group_N, trajectory_N, key_N, ok_N])
    ok_N = mk.as_bool(ok_N)
    one_per_trajectory_N = ok_N & mk.first_in_segment(jnp.asarray(key_N), mk.segment_ids(trajectory_N, ok_N))
    group_N = mk.segment_ids(group_N, ok_N)
    source_N = jnp.where(one_per_trajectory_N, group_N, ok_N.shape[0])
    mean = mk.segment_mean(mk.masked(value_N, ok_N), source_N)
    return lax.stop_gradient(mk.masked(mean[group_N], ok_N))


def _decayed_sum(evidence, keep, axis: int):
    """c_k = keep_k c_{k-1} + evidence_k along an axis; keep = 0 starts anew."""

    def join(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    return lax.associative_scan(join, (keep, evidence), axis=axis)[1]


def _increment(now, before):
    """sigma(now) - sigma(before). Near 1 the difference of the complements keeps the digits."""
    high = now + before > 0
    return jnp.where(
        high,
        jax.nn.sigmoid(-before) - jax.nn.sigmoid(-now),
        jax.nn.sigmoid(now) - jax.nn.sigmoid(before),
    )


def _log_odds(prior_N, ok_N):
    prior_N = jnp.clip(jnp.where(ok_N, prior_N, 0.5), PRIOR_CLIP, 1 - PRIOR_CLIP)
    return jnp.log(prior_N) - jnp.log1p(-prior_N)


def _clip_log_odds(x):
    bound = float(np.log1p(-BELIEF_CLIP) - np.log(BELIEF_CLIP))
    return jnp.clip(x, -bound, bound)


def _turn_terms(gap_NL, prior_N, trajectory_N, turn_N, ok_N, gamma):
    rows = ok_N.shape[0]
    evidence_N = jnp.sum(gap_NL, axis=1)
    trajectory_N = mk.segment_ids(trajectory_N, ok_N)
    order_N = jnp.lexsort((turn_N, trajectory_N))
    sorted_N = trajectory_N[order_N]
    starts_N = jnp.concatenate([jnp.ones(1, bool), sorted_N[1:] != sorted_N[:-1]])[:rows]
    start_odds_N = _log_odds(prior_N, ok_N)[order_N]
    keep_N = jnp.where(starts_N, 0, gamma).astype(gap_NL.dtype)
    odds_N = start_odds_N + _decayed_sum(evidence_N[order_N], keep_N, axis=0)
    odds_N = _clip_log_odds(odds_N)
    before_N = jnp.where(starts_N, start_odds_N, jnp.roll(odds_N, 1))

    back_N = jnp.zeros(rows, order_N.dtype).at[order_N].set(jnp.arange(rows, dtype=order_N.dtype))
    q_N = mk.masked(_increment(odds_N, before_N)[back_N], ok_N)
    mean = mk.segment_mean(q_N, trajectory_N)
    std = mk.segment_std(q_N, trajectory_N)
    z_N = (q_N - mean[trajectory_N]) / (std[trajectory_N] + EPS_Z)
    return evidence_N, jax.nn.sigmoid(odds_N[back_N]), q_N, z_N


def _token_terms(gap_NL, prior_N, mask_NL, ok_N, gamma):
    start_odds_N1 = _log_odds(prior_N, ok_N)[:, None]
    # Masked slots hand the sum on unchanged, so that the previous valid token is the neighbour.
    keep_NL = jnp.where(mask_NL, gamma, 1).astype(gap_NL.dtype)
    odds_NL = _clip_log_odds(start_odds_N1 + _decayed_sum(gap_NL, keep_NL, axis=1))
    # Before the first valid token the sum is 0, and the prior's clip is the narrower one.
    before_NL = jnp.concatenate([start_odds_N1, odds_NL[:, :-1]], axis=1)
    q_NL = mk.masked(_increment(odds_NL, before_NL), mask_NL)
    mean_N1 = mk.masked_mean(q_NL, mask_NL, axis=1)[:, None]
    var_N1 = mk.masked_var(q_NL, mask_NL, axis=1)[:, None]
    # The 1e-6 under the root is 1e-3 in q: with the prior at its clip the weights stay near 1 [off].
    return gap_NL, jax.nn.sigmoid(odds_NL), q_NL, (q_NL - mean_N1) / (jnp.sqrt(var_N1 + EPS_Z) + EPS_Z)


def agent_opsd_terms(
    adv_N,
    lT_NL,
    lO_NL,
    mask_NL,
    trajectory_N,
    turn_N,
    prior_N,
    *,
    granularity: Literal["turn", "token"] = "turn",
    gamma: float = 1.0,
    band: float = 0.2,
) -> AgentOpsdTerms:
    """AgentOPSD's weight and its intermediates; arguments as for `agent_opsd_advantages`."""
    adv_N, lT_NL, lO_NL, prior_N = mk.as_floats(adv_N, lT_NL, lO_NL, prior_N)
    chex.assert_rank([adv_N, lT_NL, lO_NL, mask_NL, trajectory_N, turn_N, prior_N], [1, 2, 2, 2, 1, 1, 1])
    chex.assert_equal_shape([lT_NL, lO_NL, mask_NL])
    chex.assert_equal_shape_prefix([lT_NL, adv_N, trajectory_N, turn_N, prior_N], 1)
    mask_NL = mk.as_bool(mask_NL)
    ok_N = jnp.any(mask_NL, axis=1)
    sign_N = jnp.sign(mk.masked(adv_N, ok_N))
    gap_NL = mk.gap(lT_NL, lO_NL, mask_NL)
    if granularity == "turn":
        keep, sign = ok_N, sign_N
        terms = _turn_terms(gap_NL, prior_N, trajectory_N, jnp.asarray(turn_N), ok_N, gamma)
    elif granularity == "token":
        keep, sign = mask_NL, sign_N[:, None]
        terms = _token_terms(gap_NL, prior_N, mask_NL, ok_N, gamma)
    else:
        raise ValueError(f'granularity is {granularity!r}; use "turn" or "token".')
    evidence, belief, increment, z = (mk.masked(x, keep) for x in terms)
    weight = mk.masked(jnp.clip(1 + band * sign * z, 1 - band, 1 + band), keep)
    return lax.stop_gradient(AgentOpsdTerms(evidence, belief, increment, z, weight))


def agent_opsd_weight(adv_N, lT_NL, lO_NL, mask_NL, trajectory_N, turn_N, prior_N, **options) -> jax.Array:
    """AgentOPSD's weight spread over the tokens, `[N, L]`, 0 off the mask; arguments as for `agent_opsd_terms`."""
    weight = agent_opsd_terms(adv_N, lT_NL, lO_NL, mask_NL, trajectory_N, turn_N, prior_N, **options).weight
    return mk.masked(weight[:, None] if weight.ndim == 1 else weight, mk.as_bool(mask_NL))


def agent_opsd_advantages(
    adv_N,
    lT_NL,
    lO_NL,
    mask_NL,
    trajectory_N,
    turn_N,
    prior_N,
    *,
    granularity: Literal["turn", "token"] = "turn",
    gamma: float = 1.0,
    lam: float = 0.5,
    band: float = 0.2,
) -> jax.Array:
    """AgentOPSD's advantage A ((1 - lam) + lam w).

    Source: "AgentOPSD: Recursive Self-Distillation for Agentic Reinforcement Learning", arXiv 2608.05987 [off],
    methods 6.3; gamma = 0.95 and turns everywhere in the paper [3p, dig].

    Args:
      adv_N: `[N]` the row's GRPO advantage.
      lT_NL: `[N, L]` log-probability of the sampled token under the privileged prompt, nats.
      lO_NL: `[N, L]` the same under the plain prompt, same weights, nats.
      mask_NL: `[N, L]` bool, valid tokens; a row without any is padding.
      trajectory_N: `[N]` int, unique over the batch; rows may come in any order.
      turn_N: `[N]` int turn index, each at most once per trajectory.
      prior_N: `[N]` unclipped prior of success, see `prior_success` and `prior_released`.
      granularity: "turn": evidence is the sum over a turn, beliefs run over the trajectory. "token": evidence per
        token, beliefs run over the valid tokens of one row.
      gamma: decay of earlier evidence.
      lam: share of the reweighted advantage; may be traced.
      band: half width of the weight's band around 1.

    Returns:
      `[N, L]` advantage, 0 off the mask; |Ahat / A - 1| <= lam band. Exactly A for a single turn (token), at lam = 0
      and at lT = lO.

    Raises:
      ValueError: unknown `granularity`.

    Gradient: none; compute once per global step. Non-finite gaps on valid tokens count as 0 (count them with
    `nonfinite_tokens`). Deviation: D8 (prior), D9.
    """
    weight_NL = agent_opsd_weight(
        adv_N,
        lT_NL,
        lO_NL,
        mask_NL,
        trajectory_N,
        turn_N,
        prior_N,
        granularity=granularity,
        gamma=gamma,
        band=band,
    )
    mask_NL = mk.as_bool(mask_NL)
    adv_NL = mk.masked(jnp.asarray(adv_N, weight_NL.dtype)[:, None], mask_NL)
    return lax.stop_gradient(adv_NL * (1 + jnp.asarray(lam, weight_NL.dtype) * mk.masked(weight_NL - 1, mask_NL)))
