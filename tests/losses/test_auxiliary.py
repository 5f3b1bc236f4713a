"""Identities of the auxiliary losses; each test states one property of the method."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .batches import make_batch
from .jitted import losses
from .kernels import run_loss

seeds = st.integers(0, 2**32 - 1)


def _icsd(b, **options):
    return losses.icsd_terms(b.lS, b.lT, b.lO, b.adv, b.mask, **options)


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_the_teacher_does_not_enter_the_gradient_of_grpo_opsd(seed):
    b, other = make_batch(seed), make_batch(seed + 1)
    _, grad = run_loss("grpo_opsd", b)
    _, same = run_loss("grpo_opsd", b.replace(lT=np.where(b.mask, np.nan_to_num(other.lT) - 1, np.nan)))
    np.testing.assert_array_equal(grad, same)
    np.testing.assert_array_equal(grad, np.where(b.mask, -0.5, 0))


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_sdar_gate(seed):
    b = make_batch(seed)
    out, grad = run_loss("sdar", b)
    gate = np.asarray(losses.sdar_gate(b.lS, b.lT, b.mask))
    assert ((gate > 0) & (gate < 1))[b.mask].all() and not gate[~b.mask].any()
    np.testing.assert_allclose(grad, -gate)
    means = out.metric_means()
    assert means["gate"] == pytest.approx(gate[b.mask].mean())
    assert means["gate_active"] == pytest.approx((b.lT > b.lS)[b.mask].mean())
    assert means["gap"] == pytest.approx((b.lT - b.lS)[b.mask].mean())


def test_sdar_with_an_open_gate_is_minus_the_sampled_reverse_kl():
    b = make_batch(2)
    b = b.replace(lT=b.lS + np.abs(b.lT - b.lS) + 1.0)
    out = losses.sdar(b.lS, b.lT, b.mask, beta=500.0)
    assert out.total == pytest.approx(-(b.lS - b.lT)[b.mask].sum())


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_skill_sd_gradient_is_rho_ell(seed):
    b = make_batch(seed)
    out, grad = run_loss("skill_sd", b)
    ell, rho = b.lS - b.lT, np.exp(b.lS - b.lO)
    np.testing.assert_allclose(grad[b.mask], (rho * ell)[b.mask], rtol=1e-10, atol=1e-12)
    assert out.total >= 0
    k3 = np.exp(-ell) - 1 + ell
    assert out.metrics["k3_max"] == pytest.approx(k3[b.mask].max())
    assert out.metrics["rho_max"] == pytest.approx(rho[b.mask].max())


@pytest.mark.parametrize(
    "name", ["sdar", "grpo_opsd", "skill_sd", "icsd", "icsd_turn", "pcsd", "reverse_kl_opsd", "fa_sd"]
)
def test_equal_teacher_and_student_have_value_zero(name):
    b = make_batch(4)
    out, grad = run_loss(name, b.replace(lT=b.lS))
    assert out.total == 0
    if name in ("skill_sd", "reverse_kl_opsd", "fa_sd"):
        assert not grad.any()


def test_skill_sd_clamps_gate_only_their_own_factor():
    mask = np.ones((1, 2), bool)
    lS, lT, lO = np.array([[-30.0, -1.0]]), np.array([[-5.0, -2.0]]), np.array([[-30.0, -13.0]])

    grad = jax.grad(lambda x: losses.skill_sd(x, lT, lO, mask).total)(lS)
    ell = lS - lT
    # First token: exp(-ell) is a constant, so k3' = 1 (from + ell) and rho keeps its gradient. Second: rho is constant.
    k3 = np.array([np.exp(20.0) - 1 + ell[0, 0], np.exp(-ell[0, 1]) - 1 + ell[0, 1]])
    np.testing.assert_allclose(grad[0, 0], 1 * (1 + k3[0]), rtol=1e-10)
    np.testing.assert_allclose(grad[0, 1], np.exp(10.0) * (1 - np.exp(-ell[0, 1])), rtol=1e-10)


@pytest.mark.parametrize("calibration", ["minibatch", "turn"])
@settings(max_examples=20, deadline=None)
@given(seed=seeds, scale=st.sampled_from([0.05, 0.6, 6.0]))
def test_icsd_conserves_mass_and_orders_influence(calibration, seed, scale):
    b = make_batch(seed, scale=scale)
    terms = jax.tree.map(np.asarray, _icsd(b, calibration=calibration))
    np.testing.assert_allclose(terms.weight.sum(axis=1), terms.gate.sum(axis=1), rtol=1e-12)
    assert (terms.weight >= 0).all()
    phi, u = terms.calibration[b.mask], terms.influence[b.mask]
    assert ((phi >= 0) & (phi <= 1)).all()
    if calibration == "minibatch":
        assert (np.diff(phi[np.argsort(u, kind="stable")]) >= -1e-12).all()
    # For A < 0 the tokens that oppose the objective are exactly those outside C, so their mass cannot change.
    opposed = b.mask & (np.where(b.ok, b.adv, 0) < 0)[:, None] & (terms.gap < 0)
    np.testing.assert_array_equal(terms.weight[opposed], terms.gate[opposed])
    np.testing.assert_array_equal(terms.ambiguous, opposed)


def test_icsd_without_advantage_is_sdar():
    b = make_batch(3)
    for name in ("icsd", "icsd_turn"):
        out, grad = run_loss(name, b.replace(adv=np.where(b.ok, 0.0, np.nan)))
        want, want_grad = run_loss("sdar", b)
        np.testing.assert_allclose(out.total, want.total, rtol=1e-12)
        np.testing.assert_allclose(grad, want_grad, rtol=1e-12)


def test_icsd_keeps_the_gate_where_no_mass_is_left():
    mask = np.ones((1, 3), bool)
    lS, lT = np.zeros((1, 3)), np.full((1, 3), -400.0)
    terms = losses.icsd_terms(lS, lT, lS, np.ones(1), mask)
    np.testing.assert_array_equal(terms.weight, terms.gate)


def test_icsd_median_is_the_lower_one():
    # u = A rho gap = -3, -1, 2, 4: the lower median is -1, below it one value at distance 2, above it mean 8 / 3.
    gaps = np.array([[-3.0, -1.0, 2.0, 4.0]])
    terms = losses.icsd_terms(np.zeros((1, 4)), gaps, np.zeros((1, 4)), np.ones(1), np.ones((1, 4), bool))
    assert terms.mu == -1 and terms.b_lo == 2 and terms.b_hi == pytest.approx((0 + 3 + 5) / 3)
    np.testing.assert_allclose(terms.calibration[0, :2], [0.5 * np.exp(-1), 0.5], rtol=1e-7)


def test_icsd_reports_the_opposed_mass():
    b = make_batch(12)
    out, _ = run_loss("icsd", b)
    terms = jax.tree.map(np.asarray, _icsd(b))
    assert out.metrics["opposed_before_sum"] == pytest.approx(terms.gate[terms.influence < 0].sum())
    assert out.metrics["opposed_after_sum"] == pytest.approx(terms.weight[terms.influence < 0].sum())
    assert out.metric_means()["mu"] == pytest.approx(terms.mu[0, 0])


def test_icsd_refuses_an_unknown_calibration():
    b = make_batch(1)
    with pytest.raises(ValueError, match="turn"):
        losses.icsd(b.lS, b.lT, b.lO, b.adv, b.mask, calibration="batch")


@settings(max_examples=20, deadline=None)
@given(seed=seeds, gamma=st.floats(0, 3))
def test_pcsd_with_a_window_of_one_is_sdar(seed, gamma):
    b = make_batch(seed)
    weight = losses.pcsd_terms(b.lS, b.lT, b.mask, window=1, gamma=gamma).weight
    np.testing.assert_allclose(weight, losses.sdar_gate(b.lS, b.lT, b.mask), rtol=1e-12)


@settings(max_examples=20, deadline=None)
@given(seed=seeds, shift=st.floats(-5, 5))
def test_pcsd_ignores_a_constant_gap(seed, shift):
    b = make_batch(seed)
    terms = losses.pcsd_terms(b.lS, b.lT, b.mask)
    moved = losses.pcsd_terms(b.lS, b.lT + shift, b.mask)
    np.testing.assert_allclose(moved.kappa, terms.kappa, atol=1e-9)
    np.testing.assert_allclose(moved.trend, terms.trend, atol=1e-9)
    assert ((np.asarray(terms.weight) >= 0) & (np.asarray(terms.weight) <= 1)).all()


@pytest.mark.parametrize("slope, attenuated", [(0.3, False), (-0.3, True)])
def test_pcsd_attenuates_declining_support_only(slope, attenuated):
    gaps = slope * np.arange(10.0)[None]
    terms = losses.pcsd_terms(np.zeros((1, 10)), gaps, np.ones((1, 10), bool))
    np.testing.assert_allclose(terms.slope[0, 2:], slope, rtol=1e-10)
    np.testing.assert_array_equal(terms.slope[0, :2], 0)
    assert (terms.trend[0, 2:] < 1).all() == attenuated
    if not attenuated:
        assert (terms.trend == 1).all()


def test_pcsd_with_equal_gaps_is_sdar():
    lT = np.full((2, 6), 0.7)
    mask = np.ones((2, 6), bool)
    terms = losses.pcsd_terms(np.zeros((2, 6)), lT, mask)
    assert not np.any(terms.kappa) and (terms.trend == 1).all()
    np.testing.assert_array_equal(terms.weight, losses.sdar_gate(np.zeros((2, 6)), lT, mask))


def test_pcsd_windows_stay_inside_their_row():
    b = make_batch(14)
    before = losses.pcsd_terms(b.lS, b.lT, b.mask)
    row = int(np.argmax(b.mask.sum(axis=1)))
    lT = b.lT.copy()
    lT[row] = lT[row][::-1]  # the same values, so that the statistics of the mini-batch change little
    after = losses.pcsd_terms(b.lS, lT, b.mask)
    others = np.arange(len(b.ok)) != row
    np.testing.assert_allclose(after.slope[others], before.slope[others], atol=1e-12)


def test_pcsd_refuses_an_empty_window():
    b = make_batch(1)
    with pytest.raises(ValueError, match="at least 1"):
        losses.pcsd(b.lS, b.lT, b.mask, window=0)


def test_fa_sd_gradient_and_count():
    b = make_batch(15)
    feedback = np.arange(len(b.ok)) % 3 == 0
    keep = b.mask & feedback[:, None]

    def loss(x):
        return losses.fa_sd(x, b.lT, b.mask, feedback)

    grad = jax.grad(lambda x: loss(x).mean)(b.lS)
    assert loss(b.lS).count == keep.sum()
    np.testing.assert_allclose(grad[keep], ((b.lS - b.lT) / keep.sum())[keep], rtol=1e-9)
    assert not np.any(grad[~keep])


def test_fa_sd_without_feedback_is_zero():
    b = make_batch(15)
    out = losses.fa_sd(b.lS, b.lT, b.mask, np.zeros(len(b.ok), bool))
    assert out.mean == out.count == 0


def test_fa_sd_cap_needs_the_old_policy():
    b = make_batch(15)
    with pytest.raises(ValueError, match="lO_NL"):
        losses.fa_sd(b.lS, b.lT, b.mask, b.ok, is_cap=2.0)


def test_feedback_needs_another_winner():
    success = np.array([True, True, False, True, False, False])
    group = np.array([0, 0, 0, 1, 1, 2])
    trajectory = np.array([5, 5, 6, 7, 8, 9])
    ok = np.array([True] * 5 + [False])
    got = losses.has_feedback(success, group, trajectory, ok)
    np.testing.assert_array_equal(got, [False, False, True, False, True, False])
