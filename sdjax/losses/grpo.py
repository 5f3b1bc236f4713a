"""The GRPO core: score, group advantage, dual-clip surrogate, KL to the reference, entropy.

Used unchanged as the baseline and inside every other method. Source: "DeepSeekMath", arXiv 2402.03300; multi-turn
lineage GiGPO, arXiv 2505.10978; constants [off].
"""

from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jax import lax
from jax.nn import logsumexp, softmax

from sdjax.losses import masked as mk
from sdjax.losses.types import TokenSum

# Below this spread a group is flat (D6); it is also far below any difference that an environment can produce.
FLAT_STD = 1e-6
# exp overflows float32 near 88.7. Both clip bounds lie far inside, so the clamp changes no value (D9).
MAX_LOG_RATIO = 80.0


def row_score(return_N, valid_N, *, c_inv: float) -> jax.Array:
    """Row score s = R - c_inv (1 - v): the invalid-action penalty touches that turn's row only [off, methods 3.1].

    Args:
      return_N: `[N]` episode return of the row's trajectory, reward units.
      valid_N: `[N]` bool, the row's action was valid.
      c_inv: penalty in reward units.

    Returns:
      `[N]` score.
    """
    (return_N,) = mk.as_floats(return_N)
    chex.assert_rank([return_N, valid_N], 1)
    return return_N - jnp.where(mk.as_bool(valid_N), 0, c_inv).astype(return_N.dtype)


def group_advantages(
    score_N,
    group_N,
    *,
    ok_N=None,
    trajectory_N=None,
    turn_N=None,
    stats: Literal["row", "trajectory"] = "row",
    norm_std: bool = True,
    eps: float = 1e-6,
) -> jax.Array:
    """GRPO advantage A = (s - mean_g) / (sd_g + eps), sample standard deviation.

    Source: arXiv 2402.03300 (outcome supervision) as released for multi-turn rows [off], methods 3.1.

    Args:
      score_N: `[N]` row score, reward units.
      group_N: `[N]` int task group, arbitrary ids in any order.
      ok_N: `[N]` bool, real rows (default: all). Other rows enter no statistic and get 0.
      trajectory_N: `[N]` int, unique over the batch; needed for ``stats="trajectory"`` only.
      turn_N: `[N]` int turn index; needed for ``stats="trajectory"`` only.
      stats: "row": the set of a group is all its turn rows, so long trajectories weigh more [off]. "trajectory": one
        value per trajectory, the score of its earliest turn.
      norm_std: False drops the denominator.
      eps: added to the standard deviation, reward units.

    Returns:
      `[N]` advantage. A group with one value has mean 0 and sd 1; a flat group (sd < 1e-6) gives exactly 0.

    Raises:
      ValueError: unknown `stats`, or "trajectory" without trajectories and turns.

    Gradient: none; compute once per global step over the complete batch. Deviation: D1, D6.
    """
    (score_N,) = mk.as_floats(score_N)
    chex.assert_rank([score_N, group_N], 1)
    chex.assert_equal_shape([score_N, group_N])
    ok_N = jnp.ones(score_N.shape, bool) if ok_N is None else mk.as_bool(ok_N)
    chex.assert_equal_shape([score_N, ok_N])
    in_stats_N = ok_N
    if stats == "trajectory":
        if trajectory_N is None or turn_N is None:
            raise ValueError('stats="trajectory" needs trajectory_N and turn_N.')
        chex.assert_equal_shape([score_N, trajectory_N, turn_N])
        in_stats_N = ok_N & mk.first_in_segment(jnp.asarray(turn_N), mk.segment_ids(trajectory_N, ok_N))
    elif stats != "row":
        raise ValueError(f'stats is {stats!r}; use "row" or "trajectory".')

    score_N = mk.masked(score_N, ok_N)
    group_N = mk.segment_ids(group_N, ok_N)
    # A row outside the statistics goes to the dump segment but still reads its own group's result.
    source_N = jnp.where(in_stats_N, group_N, score_N.shape[0])
    n = mk.segment_count(source_N, score_N.dtype)
    low = mk.segment_min(score_N, source_N)
    mean = mk.segment_mean(score_N - low[source_N], source_N)
    std = jnp.where(n == 1, 1, mk.segment_std(score_N, source_N, ddof=1))
    # Subtracting the group's minimum first keeps the digits of a small spread around a large score.
    centered_N = jnp.where(n[group_N] == 1, score_N, (score_N - low[group_N]) - mean[group_N])
    adv_N = centered_N / (std[group_N] + eps) if norm_std else centered_N
    return lax.stop_gradient(mk.masked(adv_N, ok_N & ~(std[group_N] < FLAT_STD)))


def clipped_surrogate(
    lS_NL, lO_NL, adv_NL, mask_NL, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 3.0
) -> TokenSum:
    """PPO surrogate with dual clip, L = max(-A r, -A clip(r)), bounded by -A c_dual where A < 0.

    Source: arXiv 2402.03300, clip and dual clip as released [off], methods 3.2.

    Args:
      lS_NL: `[N, L]` log-probability of the sampled token under the current student, nats.
      lO_NL: `[N, L]` the same under the weights at the start of the global step, nats.
      adv_NL: `[N, L]` advantage per token.
      mask_NL: `[N, L]` bool, valid tokens.
      clip_low, clip_high: the ratio r = exp(lS - lO) is clipped to [1 - clip_low, 1 + clip_high].
      dual_clip: bound on the loss of negative advantages, in multiples of |A|.

    Returns:
      TokenSum; metrics clip_sum and dual_clip_sum (indicators), kl_old_sum (lO - lS, nats).

    Gradient: -A r where the unclipped branch is active, else 0. A non-finite input on a valid token gives NaN.
    Deviation: D9 (exponent clamped at 80).
    """
    lS_NL, lO_NL, adv_NL = mk.as_floats(lS_NL, lO_NL, adv_NL)
    chex.assert_rank([lS_NL, lO_NL, adv_NL, mask_NL], 2)
    chex.assert_equal_shape([lS_NL, lO_NL, adv_NL, mask_NL])
    mask_NL = mk.as_bool(mask_NL)
    lS_NL = mk.masked(lS_NL, mask_NL)
    lO_NL = lax.stop_gradient(mk.masked(lO_NL, mask_NL))
    adv_NL = lax.stop_gradient(mk.masked(adv_NL, mask_NL))

    ratio_NL = jnp.exp(jnp.minimum(lS_NL - lO_NL, MAX_LOG_RATIO))
    unclipped_NL = -adv_NL * ratio_NL
    clipped_NL = lax.stop_gradient(-adv_NL * jnp.clip(ratio_NL, 1 - clip_low, 1 + clip_high))
    is_clipped_NL = clipped_NL > unclipped_NL
    loss_NL = jnp.where(is_clipped_NL, clipped_NL, unclipped_NL)
    is_dual_NL = (adv_NL < 0) & (loss_NL > -adv_NL * dual_clip)
    loss_NL = jnp.where(is_dual_NL, -adv_NL * dual_clip, loss_NL)
    loss_NL = mk.poison(loss_NL, lS_NL, mask_NL, lO_NL, adv_NL)
    return mk.token_sum(loss_NL, mask_NL, {"clip": is_clipped_NL, "dual_clip": is_dual_NL, "kl_old": lO_NL - lS_NL})


def reference_kl(lS_NL, lR_NL, mask_NL) -> TokenSum:
    """KL to the frozen initial policy by the k3 estimator, exp(d) - d - 1 with d = lR - lS, capped at 10.

    Source: arXiv 2402.03300, eq. 4, caps as released [off], methods 3.3.

    Args:
      lS_NL: `[N, L]` log-probability of the sampled token under the current student, nats.
      lR_NL: `[N, L]` the same under the reference, nats.
      mask_NL: `[N, L]` bool, valid tokens.

    Returns:
      TokenSum in nats; metric kl_capped_sum (indicator).

    Gradient: 1 - exp(d) inside the cap, 0 outside (d > 2.61 or d < -11). In expectation over the student's own samples
    that is the gradient of KL(reference || student), not of KL(student || reference); the value is an unbiased estimate
    of the latter. A non-finite input on a valid token gives NaN. Deviation: D9 (d clamped to +-20).
    """
    lS_NL, lR_NL = mk.as_floats(lS_NL, lR_NL)
    chex.assert_rank([lS_NL, lR_NL, mask_NL], 2)
    chex.assert_equal_shape([lS_NL, lR_NL, mask_NL])
    mask_NL = mk.as_bool(mask_NL)
    lS_NL = mk.masked(lS_NL, mask_NL)
    lR_NL = lax.stop_gradient(mk.masked(lR_NL, mask_NL))
    d_NL = jnp.clip(lR_NL - lS_NL, -20, 20)
    k3_NL = jnp.expm1(d_NL) - d_NL
    capped_NL = k3_NL > 10
    loss_NL = mk.poison(jnp.where(capped_NL, 10, k3_NL), lS_NL, mask_NL, lR_NL)
    return mk.token_sum(loss_NL, mask_NL, {"kl_capped": capped_NL})


def token_entropy(logits_NLV, mask_NL, *, temperature: float = 1.0) -> TokenSum:
    """Entropy of the next-token distribution over the full vocabulary, H = logsumexp(z) - sum softmax(z) z.

    Source: [off], methods 3.4.

    Args:
      logits_NLV: `[N, L, V]` logits before division by the temperature.
      mask_NL: `[N, L]` bool, valid tokens.
      temperature: the rollout temperature, z = logits / temperature.

    Returns:
      TokenSum in nats, each token in [0, log V]; no metrics.

    Gradient: to the logits, softmax(z) (mean z - z) / temperature. A non-finite logit on a valid token propagates.
    Deviation: none.
    """
    (logits_NLV,) = mk.as_floats(logits_NLV)
    chex.assert_rank([logits_NLV, mask_NL], [3, 2])
    chex.assert_equal_shape_prefix([logits_NLV, mask_NL], 2)
    mask_NL = mk.as_bool(mask_NL)
    z_NLV = mk.masked(logits_NLV, mask_NL[..., None]) / temperature
    entropy_NL = logsumexp(z_NLV, axis=-1) - jnp.sum(softmax(z_NLV, axis=-1) * z_NLV, axis=-1)
    return mk.token_sum(entropy_NL, mask_NL, {})
