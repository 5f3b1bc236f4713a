"""The weight of engine against trainer: 1 where they agree, bounded where they do not, and no gradient of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdjax import losses

from .batches import make_batch

KINDS = ("truncate", "mask")
seeds = st.integers(0, 2**32 - 1)


def weight(lO, lE, mask, kind, cap=2.0):
    return np.asarray(losses.mismatch_weight(lO, lE, mask, kind=kind, cap=cap))


@pytest.mark.parametrize("kind", KINDS)
def test_engine_and_trainer_agree(kind):
    b = make_batch(3)
    np.testing.assert_array_equal(weight(b.lO, b.lO, b.mask, kind), b.mask.astype(float))


def test_golden_values():
    lE = np.log([[0.5, 0.5, 0.5, 0.1, 0.3]])
    lO = np.log([[0.5, 0.75, 0.2, 0.4, 0.9]])
    mask = np.array([[True, True, True, True, False]])
    np.testing.assert_allclose(weight(lO, lE, mask, "truncate"), [[1, 1.5, 0.4, 2, 0]], rtol=1e-6)
    np.testing.assert_allclose(weight(lO, lE, mask, "mask"), [[1, 1.5, 0, 0, 0]], rtol=1e-6)
    np.testing.assert_allclose(weight(lO, lE, mask, "mask", cap=5.0), [[1, 1.5, 0.4, 4, 0]], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(seed=seeds, scale=st.sampled_from([0.05, 0.6, 6.0, 200.0]), cap=st.sampled_from([1.0, 1.2, 2.0, 8.0]))
def test_bounds(kind, seed, scale, cap):
    b = make_batch(seed, scale=scale)
    w = weight(b.lO, b.lT, b.mask, kind, cap)
    assert np.isfinite(w).all() and (w >= 0).all() and (w <= cap * (1 + 1e-6)).all()
    assert (w[~b.mask] == 0).all()
    if kind == "mask":
        kept = w[w > 0]
        assert (kept * cap >= 1 - 1e-6).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rubbish_off_the_mask_and_no_rubbish_on_it(kind):
    b = make_batch(5)
    lE = np.where(b.mask, b.lT, np.nan)
    np.testing.assert_array_equal(weight(b.lO, lE, b.mask, kind), weight(b.lO, b.lT, b.mask, kind))
    lE = np.full_like(b.lO, -np.inf)
    np.testing.assert_array_equal(weight(b.lO, lE, b.mask, kind), b.mask.astype(float))


@pytest.mark.parametrize("kind", KINDS)
def test_the_surrogates_gradient_is_the_weighted_one(kind):
    """At the old policy the gradient of each token is -w A; through w itself nothing flows."""
    b = make_batch(7, scale=0.6)
    adv = np.broadcast_to(b.adv[:, None], b.mask.shape)

    def loss(lS):
        w = losses.mismatch_weight(lS, b.lT, b.mask, kind=kind)
        return losses.clipped_surrogate(lS, b.lO, adv * w, b.mask).total

    w = weight(b.lO, b.lT, b.mask, kind)
    got = np.asarray(jax.grad(loss)(jnp.asarray(b.lO)))
    np.testing.assert_allclose(got, np.where(b.mask, -adv * w, 0), rtol=1e-5, atol=1e-7)
    assert (w != 1)[b.mask].any()


def test_an_importance_weight_repairs_the_mean():
    """Over samples of the engine's policy, the weighted mean of any value is that under the trainer's policy."""
    trainer, engine = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    value = np.array([1.0, -2.0, 5.0])
    w = weight(np.log(trainer)[None], np.log(engine)[None], np.ones((1, 3), bool), "truncate")[0]
    assert (engine * w * value).sum() == pytest.approx((trainer * value).sum(), rel=1e-6)
