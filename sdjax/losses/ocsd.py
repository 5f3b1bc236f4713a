"""OCSD: on the turns the policy was least sure of, reweight by how much the next observation speaks for each token."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdjax.losses import masked as mk


def ocsd_select(lO_NL, mask_NL, trajectory_N, turn_N, eligible_N, *, rho: float = 0.2) -> tuple[jax.Array, jax.Array]:
    """Turns whose two views are worth scoring: per trajectory the least likely max(1, ceil(rho K)) eligible turns.

    Args: as for `ocsd_advantages`.

    Returns:
      `[N]` bool selection and `[N]` mean negative log-likelihood of the turn (nats, 0 for padding rows).
    """
    (lO_NL,) = mk.as_floats(lO_NL)
    chex.assert_rank([lO_NL, mask_NL, trajectory_N, turn_N, eligible_N], [2, 2, 1, 1, 1])
    chex.assert_equal_shape([lO_NL, mask_NL])
    chex.assert_equal_shape_prefix([lO_NL, trajectory_N, turn_N, eligible_N], 1)
    mask_NL = mk.as_bool(mask_NL)
    rows = mask_NL.shape[0]
    ok_N = jnp.any(mask_NL, axis=1)
    eligible_N = mk.as_bool(eligible_N) & ok_N
    nll_N = -mk.masked_mean(lO_NL, mask_NL, axis=1)

    trajectory_N = mk.segment_ids(trajectory_N, ok_N)
    order_N = jnp.lexsort((jnp.asarray(turn_N), -nll_N, ~eligible_N, trajectory_N))
    start = mk.segment_min(jnp.arange(rows), trajectory_N[order_N])
    rank_N = jnp.zeros(rows, jnp.int32).at[order_N].set(jnp.arange(rows, dtype=jnp.int32))
    rank_N -= start[trajectory_N].astype(jnp.int32)
    # A table, because rho * K in float32 falls on the wrong side of an integer (0.2 * 5 > 1).
    budget = np.array([max(1, math.ceil(rho * k - 1e-9)) for k in range(rows + 1)], np.int32)
    turns_N = mk.segment_count(trajectory_N, jnp.int32)[trajectory_N]
    selected_N = eligible_N & (rank_N < jnp.asarray(budget)[turns_N])
    return lax.stop_gradient((selected_N, nll_N))


def ocsd_advantages(
    adv_N,
    lF_NL,
    lA_NL,
    lO_NL,
    mask_NL,
    trajectory_N,
    turn_N,
    eligible_N,
    *,
    beta: float = 0.5,
    rho: float = 0.2,
) -> jax.Array:
    """OCSD's advantage A (1 + beta sign(A) tanh((lF - lA) / 2)) on selected turns, A elsewhere.

    Source: "Agentic Reinforcement Learning with Observation-Calibrated Self-Distillation", arXiv 2608.04788 [dig];
    eligibility, ties and rounding [our], methods 6.2.

    Args:
      adv_N: `[N]` the row's GRPO advantage.
      lF_NL: `[N, L]` log-probability of the sampled token with the next observation in the prompt, nats. Read on
        selected rows only.
      lA_NL: `[N, L]` the same with that observation ablated, nats.
      lO_NL: `[N, L]` the same under the plain prompt, nats; ranks the turns.
      mask_NL: `[N, L]` bool, valid tokens; a row without any is padding.
      trajectory_N: `[N]` int, unique over the batch. K counts all real rows of a trajectory.
      turn_N: `[N]` int turn index; ties go to the earlier turn.
      eligible_N: `[N]` bool, the turn was followed by an observation.
      beta: strength, in [0, 1].
      rho: share of the turns of a trajectory to select (Python number).

    Returns:
      `[N, L]` advantage, 0 off the mask; factor in [1 - beta, 1 + beta]. Exactly A where lF = lA.

    Gradient: none; compute once per global step. Non-finite gaps on selected tokens count as 0 (count them with
    `nonfinite_tokens`). Deviation: none (there is no public code).
    """
    adv_N, lF_NL, lA_NL, lO_NL = mk.as_floats(adv_N, lF_NL, lA_NL, lO_NL)
    chex.assert_rank([adv_N, lF_NL, lA_NL], [1, 2, 2])
    chex.assert_equal_shape([lF_NL, lA_NL, lO_NL, mask_NL])
    chex.assert_equal_shape_prefix([adv_N, lF_NL], 1)
    selected_N, _ = ocsd_select(lO_NL, mask_NL, trajectory_N, turn_N, eligible_N, rho=rho)
    mask_NL = mk.as_bool(mask_NL)
    adv_NL = mk.masked(adv_N[:, None], mask_NL)
    q_NL = jnp.tanh(mk.gap(lF_NL, lA_NL, mask_NL & selected_N[:, None]) / 2)
    return lax.stop_gradient(adv_NL * (1 + beta * jnp.sign(adv_NL) * q_NL))
