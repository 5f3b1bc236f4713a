"""OVCSD: trigger, contrast at a site, suffix weights and the top-k KL with its residual bucket."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from . import reference
from .batches import make_batch
from .jitted import losses

seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_trigger_equals_the_reference(seed):
    b = make_batch(seed)
    got = losses.ovcsd_trigger(b.ret, b.success, b.group, b.trajectory, b.ok)
    np.testing.assert_array_equal(got, reference.ovcsd_trigger(b))
    assert got.any()


def test_trigger_needs_no_success_and_no_spread():
    ret = np.array([0.0, 0, 3, 0, 0, 10])
    success = np.array([False, False, False, False, False, True])
    group = np.array([0, 0, 1, 1, 2, 2])
    got = losses.ovcsd_trigger(ret, success, group, np.arange(6), np.ones(6, bool))
    np.testing.assert_array_equal(got, [True, True, False, False, False, False])


def _augmented(seed):
    """Rows of a triggered group with two sites, an untriggered group and a padding row whose ids collide."""
    rng = np.random.default_rng(seed)
    site = np.array([4, 4, 4, -1, 9, 9, -1, -1, 4])
    teacher = np.array([False, False, False, False, False, True, False, False, True])
    teacher[2] = True
    triggered = np.array([True, True, True, True, True, True, False, False, True])
    mask = np.arange(6) < rng.integers(1, 7, 9)[:, None]
    mask[8] = False
    action = mask & (rng.random(mask.shape) < 0.6)
    action[:, 0] = mask[:, 0]
    adv = np.where(mask, rng.standard_normal(9)[:, None], np.nan)
    return adv, site, teacher, action, triggered, mask


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_contrast(seed):
    adv, site, teacher, action, triggered, mask = _augmented(seed)
    got = np.asarray(losses.ovcsd_contrast(np.where(mask, adv, 0), site, teacher, action, triggered))
    want = {0: -1 / np.sqrt(2), 1: -1 / np.sqrt(2), 2: np.sqrt(2), 3: 0.0, 4: -1.0, 5: 1.0}
    for row, value in want.items():
        np.testing.assert_allclose(got[row], np.where(action[row], value, 0), rtol=1e-12)
    for s in (4, 9):
        assert sum(got[i, 0] for i in np.flatnonzero((site == s) & mask.any(axis=1))) == pytest.approx(0, abs=1e-12)
    np.testing.assert_array_equal(got[6:8], np.where(mask, adv, 0)[6:8])
    assert not got[8].any()


def test_an_untriggered_batch_is_grpo():
    adv, _, _, action, _, mask = _augmented(1)
    adv = np.where(mask, adv, 0)
    none = np.zeros(9, bool)
    np.testing.assert_array_equal(losses.ovcsd_contrast(adv, np.full(9, -1), none, action, none), adv)


def test_contrast_is_the_grpo_advantage_of_one_success():
    students = 3
    values = np.array([1.0] + [0.0] * students)
    site, teacher = np.zeros(4, int), np.array([True, False, False, False])
    ones = np.ones((4, 1), bool)
    got = losses.ovcsd_contrast(np.zeros((4, 1)), site, teacher, ones, np.ones(4, bool))
    np.testing.assert_allclose(got[:, 0], (values - values.mean()) / values.std(), rtol=1e-12)


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_suffix_weights_give_every_site_the_same_share(seed):
    rng = np.random.default_rng(seed)
    site = np.array([-1, 3, 3, 8, 5, -1, 3, 0])
    mask = rng.random((8, 5)) < 0.7
    mask[4] = False  # a site without suffix tokens does not count
    weight = np.asarray(losses.ovcsd_suffix_weight(site, mask))
    used = [s for s in (0, 3, 5, 8) if mask[site == s].any()]
    for s in used:
        rows = site == s
        assert weight[rows].sum() == pytest.approx(1 / len(used))
        assert len(set(weight[rows][mask[rows]])) == 1
    assert not weight[site < 0].any() and not weight[~mask].any()


def test_no_suffix_no_weight():
    assert not losses.ovcsd_suffix_weight(np.full(3, -1), np.ones((3, 2), bool)).any()


def _top_k(seed, k, vocabulary=9):
    rng = np.random.default_rng(seed)
    teacher, student = (jax.nn.log_softmax(2 * rng.standard_normal((3, 4, vocabulary))) for _ in range(2))
    top, ids = jax.lax.top_k(teacher, k)
    weight = np.where(rng.random((3, 4)) < 0.8, rng.random((3, 4)), 0)
    return top, jnp.take_along_axis(student, ids, axis=-1), weight, teacher, student


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_suffix_kl_equals_the_reference_and_is_positive(seed):
    top, student, weight, _, _ = _top_k(seed, 4)
    f, _ = reference.suffix_forward_kl(np.asarray(top), np.asarray(student), weight)
    out = losses.suffix_forward_kl(top, student, weight)
    np.testing.assert_allclose(out.total, f(np.asarray(student)), rtol=1e-9)
    assert out.total > 0 and out.count == (weight != 0).sum()
    assert losses.suffix_forward_kl(top, top, weight).total == 0


def test_suffix_kl_gradient_is_the_central_difference():
    top, student, weight, _, _ = _top_k(3, 4)
    f, _ = reference.suffix_forward_kl(np.asarray(top), np.asarray(student), weight)
    grad = jax.grad(lambda x: losses.suffix_forward_kl(top, x, weight).total)(student)
    x, h = np.asarray(student), 1e-6
    for index in map(tuple, np.argwhere(np.ones(x.shape, bool))[::5]):
        bump = np.zeros_like(x)
        bump[index] = h
        assert grad[index] == pytest.approx((f(x + bump) - f(x - bump)) / (2 * h), rel=1e-5, abs=1e-8)


def test_suffix_kl_with_the_whole_vocabulary_is_the_full_kl():
    top, student, weight, teacher, full = _top_k(5, 9)
    want = (weight * np.sum(np.exp(teacher) * (teacher - full), axis=-1)).sum()
    np.testing.assert_allclose(losses.suffix_forward_kl(top, student, weight).total, want, rtol=1e-6)
    grad = jax.grad(lambda x: losses.suffix_forward_kl(top, x, weight).total)(student)
    np.testing.assert_allclose(grad, -weight[..., None] * np.exp(top), rtol=1e-9)


def test_suffix_kl_ignores_masked_slots_and_the_teacher_gets_no_gradient():
    top, student, weight, _, _ = _top_k(6, 4)
    off = (weight == 0)[..., None]
    assert off.any()
    dirty = [jnp.where(off, jnp.nan, x) for x in (top, student)]

    def loss(t, s):
        return losses.suffix_forward_kl(t, s, weight).total

    value, (to_teacher, to_student) = jax.value_and_grad(loss, argnums=(0, 1))(*dirty)
    assert value == loss(top, student)
    assert not np.any(to_teacher)
    np.testing.assert_array_equal(to_student, jax.grad(loss, argnums=1)(top, student))


def test_suffix_kl_residual_has_no_gradient_at_its_floor():
    top = jnp.log(jnp.array([[[0.5, 0.3]]]))
    student = jnp.log(jnp.array([[[0.6, 0.4 - 1e-9]]]))
    grad = jax.grad(lambda x: losses.suffix_forward_kl(top, x, jnp.ones((1, 1))).total)(student)
    np.testing.assert_allclose(grad, -np.exp(top), rtol=1e-12)


def test_a_teacher_probability_of_zero_contributes_nothing():
    top, student, weight, _, _ = _top_k(8, 4)
    index = tuple(np.argwhere(weight != 0)[0])
    lost = top.at[*index, 3].set(-np.inf)
    almost = top.at[*index, 3].set(-200.0)
    for bad_student in (student, student.at[*index, 3].set(-np.inf)):
        out, grad = jax.value_and_grad(lambda x: losses.suffix_forward_kl(lost, x, weight).total)(bad_student)
        assert np.isfinite(out) and np.isfinite(grad).all()
    want = losses.suffix_forward_kl(almost, student, weight).total
    np.testing.assert_allclose(losses.suffix_forward_kl(lost, student, weight).total, want, rtol=1e-12)


def test_suffix_kl_does_not_hide_a_bad_student():
    top, student, weight, _, _ = _top_k(6, 4)
    index = tuple(np.argwhere(weight != 0)[0])
    for bad in (np.nan, -np.inf):
        assert not np.isfinite(losses.suffix_forward_kl(top, student.at[*index, 0].set(bad), weight).total)
