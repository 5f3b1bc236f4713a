"""GRSD: rows that the group's own reflection guide makes more (or less) likely carry more (or less) advantage."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
from jax import lax

from sdjax.losses import masked as mk

EPS = 1e-6
MIN_MULTIPLIER = 0.1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GrsdTerms:
    """What GRSD computes on the way to its multiplier; `[N]` each, 0 on padding.

    gap: D, mean over the row's tokens of lT - lO, nats.
    normalised: qn, expm1(sign(A) D) over its mean size in the group; 0 without contrast.
    multiplier: factor on A.
    """

    gap: jax.Array
    normalised: jax.Array
    multiplier: jax.Array


def has_contrast(success_N, group_N, ok_N) -> jax.Array:
    """`[N]` bool: the row's group has a success and a failure (mx) [off, methods 6.4].

    Args:
      success_N: `[N]` bool, the row's trajectory succeeded.
      group_N: `[N]` int.
      ok_N: `[N]` bool, real rows.
    """
    chex.assert_rank([success_N, group_N, ok_N], 1)
    chex.assert_equal_shape([success_N, group_N, ok_N])
    success_N, ok_N = mk.as_bool(success_N), mk.as_bool(ok_N)
    group_N = mk.segment_ids(group_N, ok_N)
    wins = mk.segment_sum(success_N.astype(jnp.int32), group_N)
    losses = mk.segment_sum((~success_N).astype(jnp.int32), group_N)
    return ok_N & (wins[group_N] > 0) & (losses[group_N] > 0)


def grsd_terms(
    adv_N,
    lT_NL,
    lO_NL,
    mask_NL,
    group_N,
    contrast_N,
    *,
    lam: float = 0.5,
    eta: float = 0.0,
    g_max: float = 0.2,
) -> GrsdTerms:
    """GRSD's multiplier and its intermediates; arguments as for `grsd_advantages`."""
    adv_N, lT_NL, lO_NL = mk.as_floats(adv_N, lT_NL, lO_NL)
    chex.assert_rank([adv_N, lT_NL, lO_NL, mask_NL, group_N, contrast_N], [1, 2, 2, 2, 1, 1])
    chex.assert_equal_shape([lT_NL, lO_NL, mask_NL])
    chex.assert_equal_shape_prefix([lT_NL, adv_N, group_N, contrast_N], 1)
    mask_NL = mk.as_bool(mask_NL)
    ok_N = jnp.any(mask_NL, axis=1)
    adv_N = mk.masked(adv_N, ok_N)

    gap_N = mk.masked_mean(mk.gap(lT_NL, lO_NL, mask_NL), mask_NL, axis=1)
    e_N = jnp.expm1(jnp.clip(jnp.sign(adv_N) * gap_N, -20, 20))
    group_N = mk.segment_ids(group_N, ok_N)
    normalised_N = e_N / (mk.segment_mean(jnp.abs(e_N), group_N)[group_N] + EPS)
    normalised_N = mk.masked(normalised_N, ok_N & mk.as_bool(contrast_N))
    g_N = jnp.clip(mk.masked(normalised_N, jnp.abs(normalised_N) > eta), -g_max, g_max)
    multiplier_N = jnp.maximum(1 + jnp.asarray(lam, g_N.dtype) * g_N, MIN_MULTIPLIER)
    return lax.stop_gradient(GrsdTerms(gap_N, normalised_N, mk.masked(multiplier_N, ok_N)))


def grsd_multiplier(adv_N, lT_NL, lO_NL, mask_NL, group_N, contrast_N, **options) -> jax.Array:
    """GRSD's factor on A, `[N]`, 0 on padding rows; arguments as for `grsd_advantages`."""
    return grsd_terms(adv_N, lT_NL, lO_NL, mask_NL, group_N, contrast_N, **options).multiplier


def grsd_advantages(
    adv_N,
    lT_NL,
    lO_NL,
    mask_NL,
    group_N,
    contrast_N,
    *,
    lam: float = 0.5,
    eta: float = 0.0,
    g_max: float = 0.2,
) -> jax.Array:
    """GRSD's advantage A max(1 + lam clip(qn, -g_max, g_max), 0.1) in groups with contrast, A elsewhere.

    Source: "Group-Reflective Self-Distillation for Agentic Reinforcement Learning", arXiv 2607.28076 [off],
    methods 6.4.

    Args:
      adv_N: `[N]` the row's GRPO advantage.
      lT_NL: `[N, L]` log-probability of the sampled token with the group's guide in the prompt, nats.
      lO_NL: `[N, L]` the same under the plain prompt, same weights, nats.
      mask_NL: `[N, L]` bool, valid tokens; a row without any is padding.
      group_N: `[N]` int task group.
      contrast_N: `[N]` bool (mx), the group has a guide; see `has_contrast`.
      lam: strength; may be traced.
      eta: dead zone, |qn| at or below it has no effect.
      g_max: bound on |qn|.

    Returns:
      `[N, L]` advantage, 0 off the mask; multiplier in [max(0.1, 1 - lam g_max), 1 + lam g_max].

    Gradient: none; compute once per global step. Non-finite gaps on valid tokens count as 0 (count them with
    `nonfinite_tokens`). Deviation: D9; D10 concerns the reflection loss, which is not part of this kernel.
    """
    multiplier_N = grsd_multiplier(adv_N, lT_NL, lO_NL, mask_NL, group_N, contrast_N, lam=lam, eta=eta, g_max=g_max)
    adv_N = jnp.asarray(adv_N, multiplier_N.dtype)
    mask_NL = mk.as_bool(mask_NL)
    return lax.stop_gradient(mk.masked(adv_N[:, None], mask_NL) * multiplier_N[:, None])
