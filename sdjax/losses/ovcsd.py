"""OVCSD: one verified teacher action against the failed students' actions, and a KL on the verified suffix."""

import chex
import jax
import jax.numpy as jnp
from jax import lax

from sdjax.losses import masked as mk
from sdjax.losses.types import TokenSum

# Floor of the residual bucket's probability.
MIN_REST = 1e-6


def ovcsd_trigger(return_N, success_N, group_N, trajectory_N, ok_N, *, eps: float = 1e-6) -> jax.Array:
    """Rows of groups that have no success and no spread [3p, methods 6.6 step 1].

    Args:
      return_N: `[N]` episode return of the row's trajectory (on graded returns pass the success flag).
      success_N: `[N]` bool, the row's trajectory succeeded.
      group_N, trajectory_N: `[N]` int; trajectory ids are unique over the batch.
      ok_N: `[N]` bool, real rows.
      eps: largest sample standard deviation over trajectories that counts as none.

    Returns:
      `[N]` bool, False on padding rows.
    """
    (return_N,) = mk.as_floats(return_N)
    chex.assert_rank([return_N, success_N, group_N, trajectory_N, ok_N], 1)
    chex.assert_equal_shape([return_N, success_N, group_N, trajectory_N, ok_N])
    success_N, ok_N = mk.as_bool(success_N), mk.as_bool(ok_N)
    return_N = mk.masked(return_N, ok_N)
    group_N = mk.segment_ids(group_N, ok_N)
    first_N = ok_N & mk.first_in_segment(jnp.arange(ok_N.shape[0]), mk.segment_ids(trajectory_N, ok_N))
    std = mk.segment_std(return_N, jnp.where(first_N, group_N, ok_N.shape[0]), ddof=1)
    wins = mk.segment_sum((success_N & ok_N).astype(jnp.int32), group_N)
    return ok_N & (wins[group_N] == 0) & (std[group_N] <= eps)


def ovcsd_contrast(adv_NL, site_N, is_teacher_N, action_mask_NL, triggered_N) -> jax.Array:
    """OVCSD's advantage: +sqrt(M) for the teacher's action at a site, -1 / sqrt(M) for each of the M students' there.

    Source: "From Scoring to Acting: Outcome-Verified Comparative Self-Distillation for LLM Agents", arXiv 2607.27937
    [3p], methods 6.6 steps 5 and 6.

    Args:
      adv_NL: `[N, L]` GRPO advantage per token, 0 off the mask.
      site_N: `[N]` int site of the row, -1 for none; arbitrary ids.
      is_teacher_N: `[N]` bool, the row is the teacher's action of its site.
      action_mask_NL: `[N, L]` bool, valid tokens of the action; a row without any belongs to no site.
      triggered_N: `[N]` bool, the row belongs to a triggered group (suffix rows included).

    Returns:
      `[N, L]` advantage: rows of a site get the contrast on their action tokens and 0 elsewhere, other rows of
      triggered groups 0, all others `adv_NL`. Contrasts of a site sum to 0. Nothing triggered gives `adv_NL` itself.

    Gradient: none; compute once per global step. Deviation: none.
    """
    (adv_NL,) = mk.as_floats(adv_NL)
    chex.assert_rank([adv_NL, site_N, is_teacher_N, action_mask_NL, triggered_N], [2, 1, 1, 2, 1])
    chex.assert_equal_shape([adv_NL, action_mask_NL])
    chex.assert_equal_shape_prefix([adv_NL, site_N, is_teacher_N, triggered_N], 1)
    action_mask_NL, is_teacher_N = mk.as_bool(action_mask_NL), mk.as_bool(is_teacher_N)
    at_site_N = (jnp.asarray(site_N) >= 0) & jnp.any(action_mask_NL, axis=1)
    site_N = mk.segment_ids(site_N, at_site_N)
    students = mk.segment_sum((at_site_N & ~is_teacher_N).astype(adv_NL.dtype), site_N)
    root_N = jnp.sqrt(students)[site_N]
    contrast_N = jnp.where(is_teacher_N, root_N, -1 / jnp.maximum(root_N, 1))
    contrast_NL = mk.masked(contrast_N[:, None], action_mask_NL)
    plain_NL = mk.masked(adv_NL, ~mk.as_bool(triggered_N)[:, None])
    return lax.stop_gradient(jnp.where(at_site_N[:, None], contrast_NL, plain_NL))


def ovcsd_suffix_weight(suffix_site_N, suffix_mask_NL) -> jax.Array:
    """Weight of each suffix token, 1 / (sites with a suffix * tokens of the site's suffix) [3p, methods 6.6 step 7].

    Args:
      suffix_site_N: `[N]` int site whose suffix the row belongs to, -1 for none; arbitrary ids.
      suffix_mask_NL: `[N, L]` bool, tokens in scope (action tokens by default).

    Returns:
      `[N, L]` weight, 0 off the scope; sums to 1 over the whole global step (to 0 without suffix). Compute it there and
      hand each mini-batch its own rows.
    """
    chex.assert_rank([suffix_site_N, suffix_mask_NL], [1, 2])
    chex.assert_equal_shape_prefix([suffix_site_N, suffix_mask_NL], 1)
    suffix_mask_NL = mk.as_bool(suffix_mask_NL)
    in_suffix_N = (jnp.asarray(suffix_site_N) >= 0) & jnp.any(suffix_mask_NL, axis=1)
    site_N = mk.segment_ids(suffix_site_N, in_suffix_N)
    dtype = jnp.result_type(float)
    tokens = mk.segment_sum(mk.masked_count(suffix_mask_NL, axis=1, dtype=dtype), site_N)
    sites = mk.masked_count(tokens[:-1] > 0, dtype=dtype)
    weight_N = 1 / (jnp.maximum(sites, 1) * jnp.maximum(tokens[site_N], 1))
    return lax.stop_gradient(mk.masked(weight_N[:, None], suffix_mask_NL & in_suffix_N[:, None]))


def suffix_forward_kl(teacher_topk_logp_NLK, student_topk_logp_NLK, weight_NL) -> TokenSum:
    """Forward KL(teacher || student) over the teacher's top-k tokens and one bucket for the rest.

    Source: arXiv 2607.27937 [3p], methods 6.6 step 7. The bucket keeps the KL non-negative; k = V gives the full KL.

    Args:
      teacher_topk_logp_NLK: `[N, L, K]` the teacher's k largest log-probabilities under the privileged prompt, nats.
      student_topk_logp_NLK: `[N, L, K]` the student's log-probabilities of the same tokens, nats.
      weight_NL: `[N, L]` weight per token, see `ovcsd_suffix_weight`; 0 masks the token.

    Returns:
      TokenSum whose **total** is the loss, in nats: the weight already normalises over the whole global step. count is
      the number of tokens with a weight; metric kl_sum (unweighted nats).

    Gradient: weight (-q_k + p_k q_rest / p_rest) to the student's log-probabilities; the bucket's part is 0 where the
    rest of the student's or the teacher's mass is below 1e-6. A non-finite student value with teacher mass gives NaN or
    inf. Deviation: none.
    """
    teacher_NLK, student_NLK, weight_NL = mk.as_floats(teacher_topk_logp_NLK, student_topk_logp_NLK, weight_NL)
    chex.assert_rank([teacher_NLK, student_NLK, weight_NL], [3, 3, 2])
    chex.assert_equal_shape([teacher_NLK, student_NLK])
    chex.assert_equal_shape_prefix([teacher_NLK, weight_NL], 2)
    mask_NL = weight_NL != 0
    teacher_NLK = lax.stop_gradient(mk.masked(teacher_NLK, mask_NL[..., None]))
    student_NLK = mk.masked(student_NLK, mask_NL[..., None])

    q_NLK = jnp.exp(teacher_NLK)
    # A teacher probability of 0 contributes 0, not 0 * inf.
    has_mass_NLK = ~(q_NLK == 0)
    topk_NL = jnp.sum(q_NLK * (mk.masked(teacher_NLK, has_mass_NLK) - mk.masked(student_NLK, has_mass_NLK)), axis=-1)
    q_rest_NL, p_rest_NL = _rest(teacher_NLK), _rest(student_NLK)
    kl_NL = topk_NL + q_rest_NL * (jnp.log(q_rest_NL) - jnp.log(p_rest_NL))
    return mk.token_sum(lax.stop_gradient(weight_NL) * mk.masked(kl_NL, mask_NL), mask_NL, {"kl": kl_NL})


def _rest(logp_NLK) -> jax.Array:
    """1 - sum of the probabilities, at least 1e-6; no gradient at the floor."""
    rest_NL = 1 - jnp.sum(jnp.exp(logp_NLK), axis=-1)
    return jnp.where(rest_NL > MIN_REST, rest_NL, jnp.where(jnp.isnan(rest_NL), rest_NL, MIN_REST))
