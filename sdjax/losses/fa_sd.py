"""FA-SD: KL(student || teacher) in score-function form on rows that have feedback; replaces the surrogate."""

import chex
import jax
import jax.numpy as jnp
from jax import lax

from sdjax.losses import masked as mk
from sdjax.losses.types import TokenSum

MAX_LOG_RHO = 20.0


def has_feedback(success_N, group_N, trajectory_N, ok_N) -> jax.Array:
    """`[N]` bool: another trajectory of the row's group succeeded [our, methods 6.7].

    Args:
      success_N: `[N]` bool, the row's trajectory succeeded.
      group_N, trajectory_N: `[N]` int; trajectory ids are unique over the batch.
      ok_N: `[N]` bool, real rows.
    """
    chex.assert_rank([success_N, group_N, trajectory_N, ok_N], 1)
    chex.assert_equal_shape([success_N, group_N, trajectory_N, ok_N])
    success_N, ok_N = mk.as_bool(success_N), mk.as_bool(ok_N)
    group_N, trajectory_N = mk.segment_ids(group_N, ok_N), mk.segment_ids(trajectory_N, ok_N)
    first_N = mk.first_in_segment(jnp.arange(ok_N.shape[0]), trajectory_N)
    wins = mk.segment_sum((success_N & first_N & ok_N).astype(jnp.int32), group_N)
    return ok_N & (wins[group_N] > success_N.astype(jnp.int32))


def fa_sd(lS_NL, lT_NL, mask_NL, feedback_N, *, lO_NL=None, is_cap: float | None = None) -> TokenSum:
    """FA-SD's loss w lS with w = sg(lS - lT), times min(rho, is_cap) if a cap is given.

    Source: "Why Does Feedback-Augmented Self-Distillation Fail to Improve Retrieval-Interleaved Search Agents?",
    arXiv 2607.17558 [dig]; single-sample form from SDPO's public code [off], methods 6.7.

    Args:
      lS_NL: `[N, L]` log-probability of the sampled token under the current student, nats.
      lT_NL: `[N, L]` the same under the teacher with the successful sibling in its prompt, nats.
      mask_NL: `[N, L]` bool, valid tokens.
      feedback_N: `[N]` or `[N, L]` bool, rows (tokens) with feedback; the others enter neither sum nor count.
      lO_NL: `[N, L]` log-probability under the weights at the start of the global step; needed with `is_cap`.
      is_cap: cap of the detached ratio exp(lS - lO); None leaves the ratio out.

    Returns:
      TokenSum; metrics feedback_sum (1 per token, so its mean is 1 where there is feedback), gap_sum (lT - lS, nats),
      nonfinite_tokens. Only the gradient has a meaning. Without feedback total and count are 0: skip the update.

    Raises:
      ValueError: `is_cap` without `lO_NL`.

    Gradient: w, or w min(rho, is_cap). Non-finite gaps on valid tokens count as 0; a non-finite lS - lO gives NaN.
    Deviation: D9 (lS - lO clamped to +-20).
    """
    lS_NL, lT_NL = mk.as_floats(lS_NL, lT_NL)
    chex.assert_rank([lS_NL, lT_NL, mask_NL], 2)
    chex.assert_equal_shape([lS_NL, lT_NL, mask_NL])
    feedback_NL = mk.as_bool(feedback_N)
    feedback_NL = feedback_NL[:, None] if feedback_NL.ndim == 1 else feedback_NL
    chex.assert_equal_shape_prefix([lS_NL, feedback_NL], 1)
    mask_NL = mk.as_bool(mask_NL) & feedback_NL
    gap_NL = lax.stop_gradient(mk.gap(lT_NL, lS_NL, mask_NL))
    weight_NL = -gap_NL
    safe_lS_NL = mk.masked(lS_NL, mask_NL & jnp.isfinite(lS_NL))
    if is_cap is not None:
        if lO_NL is None:
            raise ValueError("is_cap needs lO_NL, the log-probabilities at the start of the global step.")
        (lO_NL,) = mk.as_floats(lO_NL)
        chex.assert_equal_shape([lS_NL, lO_NL])
        log_rho_NL = lax.stop_gradient(mk.masked(lS_NL, mask_NL) - mk.masked(lO_NL, mask_NL))
        weight_NL *= jnp.minimum(jnp.exp(jnp.clip(log_rho_NL, -MAX_LOG_RHO, MAX_LOG_RHO)), is_cap)
        weight_NL = mk.poison(weight_NL, log_rho_NL, mask_NL)
    return mk.token_sum(
        weight_NL * safe_lS_NL,
        mask_NL,
        {"feedback": mask_NL, "gap": gap_NL},
        nonfinite_tokens=mk.nonfinite_tokens(mask_NL, lS_NL, lT_NL),
    )
