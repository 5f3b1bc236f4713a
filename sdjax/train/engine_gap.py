"""How far the engine's log-probabilities are from the trainer's, and what the loss makes of it."""

import math
from collections.abc import Sequence

import numpy as np

from sdjax import losses
from sdjax.config import RolloutConfig, TrainConfig
from sdjax.errors import EngineError
from sdjax.train.rows import Row


def engine_logps(rows: Sequence[Row], old_NL: np.ndarray) -> np.ndarray:
    """[N, L] as the engine reported them; the trainer's where it has none: padding, and rows drawn under another
    prompt."""
    logps_NL = old_NL.copy()
    for i, row in enumerate(rows):
        if not row.extra:
            logps_NL[i, : len(row.turn.response)] = row.turn.engine_logps
    return logps_NL


def measure(rows: Sequence[Row], old_NL: np.ndarray, limits: RolloutConfig, step: int) -> dict[str, float]:
    """Metrics of the gap over all tokens that the engine drew under the plain prompt.

    Raises:
      EngineError: the mean gap is beyond ``rollout.stop_gap``.
    """
    gaps = np.concatenate(
        [row.turn.engine_logps - old_NL[i, : len(row.turn.response)] for i, row in enumerate(rows) if not row.extra]
    )
    ratio = np.exp(np.clip(-gaps, -20, 20))
    record = {
        "engine/logp_gap_abs_mean": float(np.abs(gaps).mean()),
        "engine/logp_gap_abs_max": float(np.abs(gaps).max()),
        "engine/kl_sample_train_k3": float((ratio - 1 + gaps).mean()),
    }
    gap = record["engine/logp_gap_abs_mean"]
    if not math.isfinite(gap) or gap > limits.stop_gap:
        raise EngineError(
            f"step {step}: engine and trainer log-probabilities differ by {gap:.3g} nats on average "
            f"(rollout.stop_gap = {limits.stop_gap}).",
            "the engine runs other weights, another dtype or another temperature; the last checkpoint is intact.",
        )
    return record


def weights(
    rows: Sequence[Row], old_NL: np.ndarray, mask_NL: np.ndarray, train: TrainConfig
) -> tuple[np.ndarray | None, dict[str, float]]:
    """Token weights of the surrogate as ``train.mismatch`` says (None: off), and how many tokens they touch."""
    if train.mismatch == "off":
        return None, {}
    logps_NL = engine_logps(rows, old_NL)
    found = losses.mismatch_weight(old_NL, logps_NL, mask_NL, kind=train.mismatch, cap=train.mismatch_cap)
    weight_NL = np.asarray(found, np.float32)
    tokens = weight_NL[mask_NL]
    bounded = (tokens >= train.mismatch_cap) | (tokens == 0)
    return weight_NL, {
        "engine/mismatch_weight_mean": float(tokens.mean()),
        "engine/mismatch_bounded_frac": float(bounded.mean()),
    }
