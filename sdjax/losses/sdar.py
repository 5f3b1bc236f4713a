"""SDAR and its relatives without a gate: GRPO+OPSD (beta = 0) and the true reverse-KL variant."""

import chex
import jax
import jax.numpy as jnp
from jax import lax

from sdjax.losses import masked as mk
from sdjax.losses.types import TokenSum


def _inputs(lS_NL, lT_NL, mask_NL):
    lS_NL, lT_NL = mk.as_floats(lS_NL, lT_NL)
    chex.assert_rank([lS_NL, lT_NL, mask_NL], 2)
    chex.assert_equal_shape([lS_NL, lT_NL, mask_NL])
    return lS_NL, lax.stop_gradient(lT_NL), mk.as_bool(mask_NL)


def sdar_gate(lS_NL, lT_NL, mask_NL, *, beta: float = 5.0) -> jax.Array:
    """SDAR's gate sigma(beta (lT - lS)), `[N, L]`, detached; 0 off the mask, 0.5 where a gap is not finite."""
    lS_NL, lT_NL, mask_NL = _inputs(lS_NL, lT_NL, mask_NL)
    gap_NL = mk.gap(lT_NL, lS_NL, mask_NL)
    return lax.stop_gradient(mk.masked(jax.nn.sigmoid(beta * gap_NL), mask_NL))


def sdar(lS_NL, lT_NL, mask_NL, *, beta: float = 5.0) -> TokenSum:
    """SDAR's gated distillation term, gate (lT - lS); with beta = 0 it is the term of GRPO+OPSD.

    Source: "Self-Distilled Agentic Reinforcement Learning", arXiv 2605.15155 [off, dig], methods 5.2. GRPO+OPSD: idea
    of arXiv 2601.18734 in SDAR's constant-gate form [off, stu], methods 5.1.

    Args:
      lS_NL: `[N, L]` log-probability of the sampled token under the current student, nats.
      lT_NL: `[N, L]` the same under the privileged prompt, nats.
      mask_NL: `[N, L]` bool, valid tokens.
      beta: sharpness of the gate per nat.

    Returns:
      TokenSum in nats, not multiplied by c_aux; metrics gate_sum, gate_active_sum (gate > 0.5), gap_sum (lT - lS),
      nonfinite_tokens.

    Gradient: -gate. The teacher acts through the gate alone; at beta = 0 the gradient is the constant -0.5 and does not
    depend on the teacher (this is the studied method, not a mistake). Non-finite gaps on valid tokens count as 0.
    Deviation: none.
    """
    lS_NL, lT_NL, mask_NL = _inputs(lS_NL, lT_NL, mask_NL)
    gap_NL = mk.gap(lT_NL, lS_NL, mask_NL)
    gate_NL = sdar_gate(lS_NL, lT_NL, mask_NL, beta=beta)
    return mk.token_sum(
        gate_NL * gap_NL,
        mask_NL,
        {"gate": gate_NL, "gate_active": gate_NL > 0.5, "gap": gap_NL},
        nonfinite_tokens=mk.nonfinite_tokens(mask_NL, lS_NL, lT_NL),
    )


def reverse_kl_opsd(lS_NL, lT_NL, mask_NL) -> TokenSum:
    """Reverse KL(student || teacher) in score-function form, sg(lS - lT) lS: GRPO+OPSD with a teacher that acts.

    Source: [our], methods 7; the textbook gradient of the objective of arXiv 2601.18734.

    Args:
      lS_NL: `[N, L]` log-probability of the sampled token under the current student, nats.
      lT_NL: `[N, L]` the same under the privileged prompt, nats.
      mask_NL: `[N, L]` bool, valid tokens.

    Returns:
      TokenSum, not multiplied by c_aux; metrics gap_sum (lT - lS), nonfinite_tokens. Only the gradient has a meaning;
      the value is not a KL (minus gap_sum estimates it).

    Gradient: lS - lT; exact in expectation on-policy. Non-finite gaps on valid tokens count as 0. Deviation: none.
    """
    lS_NL, lT_NL, mask_NL = _inputs(lS_NL, lT_NL, mask_NL)
    gap_NL = mk.gap(lT_NL, lS_NL, mask_NL)
    finite_lS_NL = mk.masked(lS_NL, mask_NL & jnp.isfinite(lS_NL))
    return mk.token_sum(
        -lax.stop_gradient(gap_NL) * finite_lS_NL,
        mask_NL,
        {"gap": gap_NL},
        nonfinite_tokens=mk.nonfinite_tokens(mask_NL, lS_NL, lT_NL),
    )
