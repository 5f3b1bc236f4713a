"""A small random batch of turns with everything that breaks a method: padding rows, NaN off the mask, flat groups."""

import dataclasses

import jax
import numpy as np

from sdjax import losses
from sdjax.methods.base import RowBatch
from tests.losses import batches

VIEWS = ("skills", "future_full", "future_ablated", "sibling", "guide")


def make_batch(seed: int = 0, *, scale: float = 0.6, teacher_is_student: bool = False) -> RowBatch:
    """``scale``: typical gap between two log-probabilities, nats. Every view has its own values and context rows."""
    b = batches.make_batch(seed, scale=scale)
    adv_N = jax.jit(losses.group_advantages)(b.score, b.group, ok_N=b.ok)
    rng = np.random.default_rng(seed)
    float32 = lambda x: np.asarray(x, np.float32)  # noqa: E731
    ints = lambda x: np.asarray(x, np.int32)  # noqa: E731
    noise = {name: np.where(b.mask, b.lO + scale * rng.standard_normal(b.mask.shape), np.nan) for name in VIEWS}
    views = {name: float32(b.lO if teacher_is_student else noise[name]) for name in VIEWS}
    succeeded = np.where(b.ok, b.success, False).astype(bool)
    feedback = np.asarray(losses.has_feedback(succeeded, b.group, b.trajectory, b.ok))
    contrast = np.asarray(losses.has_contrast(succeeded, b.group, b.ok))
    eligible = np.asarray(b.eligible, bool) & b.ok
    context = dict(zip(VIEWS, (b.ok, eligible, eligible, feedback, contrast)))
    return RowBatch(
        group_N=ints(b.group),
        trajectory_N=ints(b.trajectory),
        turn_N=ints(b.turn),
        ok_N=b.ok,
        valid_N=np.asarray(b.action_valid, bool),
        return_N=float32(np.where(b.ok, b.ret, 0)),
        outcome_N=float32(np.where(b.ok, b.ret / 10, 0)),
        success_N=succeeded,
        score_N=float32(np.where(b.ok, b.score, 0)),
        adv_N=np.asarray(adv_N),
        mask_NL=b.mask,
        old_NL=float32(b.lO),
        reference_NL=float32(b.lR),
        views=views,
        context=context,
    )


def fields_of(batch: RowBatch, adv_NL: np.ndarray) -> dict[str, np.ndarray]:
    return {"old": batch.old_NL, "reference": batch.reference_NL, "adv": adv_NL, **batch.views}


def with_views(batch: RowBatch, **views: np.ndarray) -> RowBatch:
    return dataclasses.replace(batch, views={**batch.views, **views})
