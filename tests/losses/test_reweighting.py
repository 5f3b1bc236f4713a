"""Identities of the advantage reweightings: when they are GRPO, that signs are kept, and how far they may go."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .batches import make_batch
from .jitted import losses
from .kernels import run_advantage

seeds = st.integers(0, 2**32 - 1)
scales = st.sampled_from([0.05, 0.6, 6.0])
# name -> largest relative change of an advantage with the constants in kernels.py
BANDS = {"rlsd": 0.3 * 0.2, "ocsd": 0.5, "agent_turn": 0.5 * 0.2, "agent_token": 0.5 * 0.2, "grsd": 0.5 * 0.2}


def plain(b):
    return np.where(b.mask, np.where(b.ok, b.adv, 0)[:, None], 0)


@pytest.mark.parametrize("name", BANDS)
@settings(max_examples=20, deadline=None)
@given(seed=seeds, scale=scales)
def test_signs_and_bands(name, seed, scale):
    b = make_batch(seed, scale=scale)
    got, want = run_advantage(name, b), plain(b)
    np.testing.assert_array_equal(np.sign(got), np.sign(want))
    assert (np.abs(got - want) <= BANDS[name] * np.abs(want) * (1 + 1e-12)).all()
    assert np.abs(got - want).max() > 0


@pytest.mark.parametrize("name", BANDS)
@settings(max_examples=10, deadline=None)
@given(seed=seeds)
def test_equal_views_give_grpo(name, seed):
    b = make_batch(seed)
    np.testing.assert_array_equal(run_advantage(name, b.replace(lT=b.lO, lF=b.lA)), plain(b))


def test_strength_zero_gives_grpo():
    b = make_batch(4)
    prior = np.where(b.ok, 0.4, np.nan)
    ids = (b.trajectory, b.turn)
    got = {
        "rlsd": losses.rlsd_advantages(b.adv, b.lT, b.lO, b.mask, lam=0.0),
        "ocsd": losses.ocsd_advantages(b.adv, b.lF, b.lA, b.lO, b.mask, *ids, b.eligible, beta=0.0),
        "agent": losses.agent_opsd_advantages(b.adv, b.lT, b.lO, b.mask, *ids, prior, lam=0.0),
        "grsd": losses.grsd_advantages(b.adv, b.lT, b.lO, b.mask, b.group, b.ok, lam=0.0),
        "adrs": losses.adrs_advantages(b.adv, b.score, b.lT, b.mask, b.group, eta_t=0.0),
    }
    for name, adv in got.items():
        np.testing.assert_array_equal(adv, plain(b), err_msg=name)


def test_scheduled_values_may_be_traced():
    b = make_batch(4).filled(0.0)
    rlsd = functools.partial(losses.rlsd_advantages, b.adv, b.lT, b.lO, b.mask)
    adrs = functools.partial(losses.adrs_advantages, b.adv, b.score, b.lT, b.mask, b.group)
    np.testing.assert_array_equal(rlsd(lam=0.0), plain(b))
    np.testing.assert_array_equal(adrs(eta_t=0.0), plain(b))
    assert np.abs(rlsd(lam=0.5) - plain(b)).max() > 0 and np.abs(adrs(eta_t=0.02) - plain(b)).max() > 0


def test_a_scheduled_value_does_not_change_the_dtype():
    b = make_batch(4).astype(np.float32)
    assert losses.rlsd_advantages(b.adv, b.lT, b.lO, b.mask, lam=np.float64(0.5)).dtype == np.float32


def test_schedules():
    assert [float(losses.rlsd_lam(s)) for s in (0, 50, 100, 101)] == [0.5, 0.25, 0, 0]
    assert [float(losses.adrs_eta(s)) for s in (20, 21, 70, 71)] == [0, 0.02, 0.02, 0]


# --- OCSD -----------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(seed=seeds, rho=st.sampled_from([0.0, 0.2, 0.5, 1.0]))
def test_ocsd_selects_within_its_budget(seed, rho):
    b = make_batch(seed)
    selected, nll = (np.asarray(x) for x in losses.ocsd_select(b.lO, b.mask, b.trajectory, b.turn, b.eligible, rho=rho))
    assert not selected[~(b.ok & b.eligible)].any()
    for t in set(b.trajectory[b.ok]):
        rows = b.ok & (b.trajectory == t)
        budget = max(1, int(np.ceil(rho * rows.sum() - 1e-9)))
        chosen, free = rows & selected, rows & b.eligible & ~selected
        assert chosen.sum() == min(budget, (rows & b.eligible).sum())
        if chosen.any() and free.any():
            assert nll[chosen].min() >= nll[free].max()


def test_ocsd_ties_go_to_the_earlier_turn():
    lO = np.full((3, 2), -1.0)
    mask = np.ones((3, 2), bool)
    selected, _ = losses.ocsd_select(lO, mask, np.zeros(3, int), np.array([2, 1, 0]), np.array([True, True, False]))
    np.testing.assert_array_equal(selected, [False, True, False])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ocsd_budget_is_exact_in_any_precision(dtype):
    lO = -np.arange(1.0, 6.0, dtype=dtype)[:, None]
    ones = np.ones(5, bool)
    selected, _ = losses.ocsd_select(lO, ones[:, None], np.zeros(5, int), np.arange(5), ones, rho=0.2)
    assert selected.sum() == 1


def test_ocsd_reads_the_views_of_selected_rows_only():
    b = make_batch(9)
    selected, _ = losses.ocsd_select(b.lO, b.mask, b.trajectory, b.turn, b.eligible)
    unscored = b.replace(lF=np.where(selected[:, None], b.lF, np.nan), lA=np.where(selected[:, None], b.lA, np.nan))
    np.testing.assert_array_equal(run_advantage("ocsd", unscored), run_advantage("ocsd", b))


# --- AgentOPSD ------------------------------------------------------------------------------------------------------


def _agent_terms(b, prior, **options):
    return jax.tree.map(
        np.asarray,
        losses.agent_opsd_terms(b.adv, b.lT, b.lO, b.mask, b.trajectory, b.turn, prior, **options),
    )


@settings(max_examples=20, deadline=None)
@given(seed=seeds, scale=st.sampled_from([0.05, 0.6, 2.0]))
def test_belief_increments_telescope(seed, scale):
    b = make_batch(seed, scale=scale)
    prior = np.where(b.ok, 0.3, np.nan)
    turn = _agent_terms(b, prior)
    for t in set(b.trajectory[b.ok]):
        rows = np.flatnonzero(b.ok & (b.trajectory == t))
        last = rows[np.argmax(b.turn[rows])]
        np.testing.assert_allclose(turn.increment[rows].sum(), turn.belief[last] - 0.3, atol=1e-12)
    token = _agent_terms(b, prior, granularity="token")
    last_token = np.maximum(b.mask.sum(axis=1) - 1, 0)
    final = token.belief[np.arange(len(b.ok)), last_token]
    np.testing.assert_allclose(token.increment.sum(axis=1)[b.ok], final[b.ok] - 0.3, atol=1e-12)
    np.testing.assert_allclose(turn.evidence[b.ok], [(b.lT - b.lO)[i][b.mask[i]].sum() for i in np.flatnonzero(b.ok)])


def test_a_single_turn_and_a_single_token_keep_their_advantage():
    lT, lO = np.full((1, 3), 0.4), np.zeros((1, 3))
    one = (np.array([3]), np.array([0]), np.array([0.5]))
    for granularity, mask in (("turn", [[True, True, True]]), ("token", [[True, False, False]])):
        mask = np.array(mask)
        got = losses.agent_opsd_advantages(np.array([2.0]), lT, lO, mask, *one, granularity=granularity)
        np.testing.assert_array_equal(got, np.where(mask, 2.0, 0.0))


def test_beliefs_skip_masked_tokens_inside_a_row():
    mask = np.array([[True, False, True, True]])
    lT = np.array([[0.7, np.nan, -1.2, 0.4]])
    options = {"granularity": "token", "gamma": 0.5}
    one = (np.array([3]), np.array([0]), np.array([0.3]))
    zero = np.zeros_like(lT)
    got = losses.agent_opsd_advantages(np.ones(1), lT, zero, mask, *one, **options)
    keep = mask[0]
    want = losses.agent_opsd_advantages(np.ones(1), lT[:, keep], zero[:, keep], mask[:, keep], *one, **options)
    np.testing.assert_allclose(got[:, keep], want, rtol=1e-12)


def test_saturated_beliefs_keep_the_advantage():
    b = make_batch(21)
    far = b.replace(lT=b.lO + 30.0)
    order = np.lexsort((b.turn, b.trajectory))
    got = run_advantage("agent_turn", far)
    # After the first turn the belief sits at its clip: increments 0, all later turns of a trajectory share one weight.
    terms = _agent_terms(far, np.where(b.ok, 0.5, np.nan))
    later = [i for i in order if b.ok[i] and b.turn[i] > 0]
    np.testing.assert_array_equal(terms.increment[later], 0)
    assert np.isfinite(got).all()


def test_beliefs_of_adjacent_turns_by_hand():
    lT = np.array([[0.5, 0.5], [-2.0, 0.0], [1.0, 0.0]])
    lO = np.zeros((3, 2))
    mask = np.array([[True, True], [True, False], [True, True]])
    prior = np.full(3, 0.5)
    ids = (np.zeros(3, int), np.arange(3))
    terms = losses.agent_opsd_terms(np.ones(3), lT, lO, mask, *ids, prior, gamma=0.5)
    c = np.array([1.0, 0.5 * 1.0 - 2.0, 0.5 * -1.5 + 1.0])
    belief = 1 / (1 + np.exp(-c))
    np.testing.assert_allclose(terms.belief, belief, rtol=1e-12)
    q = np.diff(np.concatenate([[0.5], belief]))
    np.testing.assert_allclose(terms.increment, q, rtol=1e-12)
    np.testing.assert_allclose(terms.weight, np.clip(1 + 0.2 * (q - q.mean()) / (q.std() + 1e-6), 0.8, 1.2))


def test_single_precision_keeps_the_digits_near_certainty():
    b = make_batch(22, scale=2.0)
    prior = np.where(b.ok, 0.99, np.nan)
    ids = (b.mask, b.trajectory, b.turn)
    want = losses.agent_opsd_advantages(b.adv, b.lT, b.lO, *ids, prior)
    s = b.astype(np.float32)
    got = losses.agent_opsd_advantages(s.adv, s.lT, s.lO, *ids, prior.astype(np.float32))
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_priors_count_trajectories_once():
    group = np.array([0, 0, 0, 0, 1, 0])
    trajectory = np.array([1, 1, 1, 2, 3, 1])
    turn = np.array([2, 0, 1, 0, 0, 0])
    ok = np.array([True] * 5 + [False])
    outcome = np.array([1.0, 1, 1, 0, 1, np.nan])
    np.testing.assert_allclose(losses.prior_success(outcome, group, trajectory, ok), [0.5] * 4 + [1, 0])
    score = np.array([10.0, 9.9, 10, 0, 10, np.nan])
    np.testing.assert_allclose(losses.prior_released(score, group, trajectory, turn, ok), [4.95] * 4 + [10, 0])


def test_agent_refuses_an_unknown_granularity():
    b = make_batch(1)
    with pytest.raises(ValueError, match="token"):
        _agent_terms(b, b.adv, granularity="row")


# --- GRSD -----------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_grsd_acts_in_groups_with_contrast_only(seed):
    b = make_batch(seed)
    contrast = np.asarray(losses.has_contrast(b.success, b.group, b.ok))
    got = run_advantage("grsd", b)
    np.testing.assert_array_equal(got[~contrast], plain(b)[~contrast])
    assert 0 < contrast.sum() < b.ok.sum()


def test_grsd_multiplier_has_a_floor():
    b = make_batch(5)
    terms = losses.grsd_terms(b.adv, b.lT, b.lO, b.mask, b.group, b.ok, lam=2.0, g_max=3.0)
    multiplier = np.asarray(terms.multiplier)[b.ok]
    assert multiplier.min() == pytest.approx(0.1) and multiplier.max() <= 7.0
    assert not np.any(terms.multiplier[~b.ok])


def test_grsd_dead_zone():
    b = make_batch(5)
    terms = losses.grsd_terms(b.adv, b.lT, b.lO, b.mask, b.group, b.ok, eta=0.8)
    dead = b.ok & (np.abs(terms.normalised) <= 0.8)
    assert dead.any() and (np.asarray(terms.multiplier)[dead] == 1).all()


# --- ADRS -----------------------------------------------------------------------------------------------------------


def _adrs_terms(b, **options):
    terms = losses.adrs_terms(b.score, b.lT, b.mask, b.group, **({"eta_t": 0.02} | options))
    return jax.tree.map(np.asarray, terms)


@settings(max_examples=20, deadline=None)
@given(seed=seeds, scale=scales)
def test_adrs_sums_and_bounds(seed, scale):
    b = make_batch(seed, scale=scale)
    terms = _adrs_terms(b)
    np.testing.assert_allclose(terms.qhat.sum(axis=1), 0, atol=1e-9)
    for group in set(b.group[b.ok]):
        members = b.ok & (b.group == group)
        assert abs(terms.whitened[members].sum()) < 1e-7
    assert (np.abs(terms.contribution) <= terms.bound[:, None]).all() and (terms.bound <= 0.2).all()
    flat = [g for g in set(b.group[b.ok]) if np.ptp(b.score[b.ok & (b.group == g)]) == 0]
    assert not terms.contribution[np.isin(b.group, flat)].any()


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_the_gate_of_adrs_cancels_before_whitening_only(seed):
    b = make_batch(seed)
    soft, hard = _adrs_terms(b, tau=0.0), _adrs_terms(b, tau=0.5)
    assert hard.gate[b.ok].min() > 0.05 or np.ptp(hard.gate[b.ok]) > 0
    strong = (hard.gate > 0.05)[:, None] & b.mask
    np.testing.assert_allclose(hard.contribution[strong], soft.contribution[strong], rtol=0.01, atol=1e-12)
    after = _adrs_terms(b, tau=0.5, gate="after", clip=10.0, adaptive=False)
    ungated = _adrs_terms(b, tau=0.0, gate="after", clip=10.0, adaptive=False)
    want = ungated.contribution * 2 * after.gate[:, None]
    np.testing.assert_allclose(after.contribution, want, rtol=1e-9, atol=1e-12)


def test_adrs_contribution_binds_at_its_clip():
    b = make_batch(3)
    terms = _adrs_terms(b, eta_t=5.0, adaptive=False)
    assert np.abs(terms.contribution).max() == pytest.approx(0.2)


def test_adrs_does_not_turn_rounding_into_an_advantage():
    # All-win group in single precision, at full strength: the released code gives up to 1.6 here.
    rng = np.random.default_rng(0)
    lT = -rng.exponential(1.0, (40, 30)).astype(np.float32)
    mask = np.ones((40, 30), bool)
    zero = np.zeros(40, np.float32)
    got = losses.adrs_advantages(zero, zero + 10, lT, mask, np.zeros(40, int), eta_t=0.02)
    assert not np.any(got)


def test_adrs_refuses_an_unknown_gate():
    b = make_batch(1)
    with pytest.raises(ValueError, match="after"):
        losses.adrs_advantages(
            b.adv,
            b.score,
            b.lT,
            b.mask,
            b.group,
            eta_t=0.0,
            gate="off",
        )
