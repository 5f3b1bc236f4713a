"""The GRPO core: invariants of the advantage, gradients of the surrogate, estimators against the exact KL."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .batches import make_batch
from .jitted import losses
from .kernels import run_advantage, run_loss

seeds = st.integers(0, 2**32 - 1)


def test_three_turns_by_hand():
    # Two trajectories of one group; the failed one has an invalid action in its second turn.
    score = losses.row_score(np.array([10.0, 0.0, 0.0]), np.array([True, True, False]), c_inv=0.1)
    adv = losses.group_advantages(score, np.array([4, 4, 4]))
    values = np.array([10.0, 0.0, -0.1])
    np.testing.assert_allclose(adv, (values - values.mean()) / (values.std(ddof=1) + 1e-6), rtol=1e-12)


@settings(max_examples=20, deadline=None)
@given(seed=seeds, shift=st.floats(-50, 50))
def test_a_constant_added_to_a_group_changes_nothing(seed, shift):
    b = make_batch(seed)
    group = b.group[b.ok][seed % b.ok.sum()]
    members = b.ok & (b.group == group)
    if members.sum() < 2:
        return
    moved = b.replace(score=np.where(members, b.score + shift, b.score))
    np.testing.assert_allclose(run_advantage("group_row", moved), run_advantage("group_row", b), atol=1e-10)


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_group_sums_vanish(seed):
    b = make_batch(seed)
    adv = run_advantage("group_nostd", b)[:, 0]
    for group in set(b.group[b.ok]):
        members = b.ok & (b.group == group)
        if members.sum() > 1:
            assert abs(adv[members].sum()) < 1e-10


@pytest.mark.parametrize("value", [0.0, 10.0, 9.9, -0.1, 1e4])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_flat_group_is_exactly_zero(value, dtype):
    score = np.full(7, value, dtype)
    for norm_std in (True, False):
        adv = losses.group_advantages(score, np.zeros(7, int), norm_std=norm_std)
        assert adv.dtype == dtype
        assert not np.any(adv)


def test_a_flat_group_stays_in_the_denominator_and_keeps_its_kl():
    b = make_batch(13)
    flat = b.ok & (b.group == b.group[b.ok & ~b.success][0])
    adv = np.where(flat, 0.0, b.adv)
    out, grad = run_loss("clipped_surrogate", b.replace(adv=adv))
    assert out.count == b.mask.sum() and not grad[flat].any()
    _, grad = run_loss("reference_kl", b)
    assert grad[b.mask & flat[:, None]].all()


def test_a_single_row_group_keeps_its_score():
    adv = losses.group_advantages(np.array([10.0, 3.0]), np.array([0, 1]))
    np.testing.assert_allclose(adv, np.array([10.0, 3.0]) / (1 + 1e-6), rtol=1e-14)


def test_small_spread_on_large_scores_in_single_precision():
    score = np.array([10.0, 10.0, 9.9, 10.0, 9.9], np.float32)
    want = (score.astype(float) - score.astype(float).mean()) / (score.astype(float).std(ddof=1) + 1e-6)
    np.testing.assert_allclose(losses.group_advantages(score, np.zeros(5, int)), want, atol=2e-5)


def test_trajectory_statistics_weigh_trajectories_equally():
    score = np.array([10.0, 10.0, 10.0, 0.0, 4.0])
    adv = losses.group_advantages(
        score,
        np.zeros(5, int),
        trajectory_N=np.array([1, 1, 1, 2, 3]),
        turn_N=np.array([2, 0, 1, 0, 0]),
        stats="trajectory",
    )
    values = np.array([10.0, 0.0, 4.0])
    np.testing.assert_allclose(adv, (score - values.mean()) / (values.std(ddof=1) + 1e-6), rtol=1e-12)


def test_trajectory_statistics_read_the_earliest_turn():
    # The penalty of the second turn must not enter the statistics.
    adv = losses.group_advantages(
        np.array([-0.1, 0.0, 10.0]),
        np.zeros(3, int),
        trajectory_N=np.array([7, 7, 9]),
        turn_N=np.array([1, 0, 0]),
        stats="trajectory",
    )
    np.testing.assert_allclose(adv, (np.array([-0.1, 0.0, 10.0]) - 5) / (np.sqrt(50) + 1e-6), rtol=1e-12)


def test_statistics_need_their_ids():
    with pytest.raises(ValueError, match="trajectory_N"):
        losses.group_advantages(np.zeros(2), np.zeros(2, int), stats="trajectory")
    with pytest.raises(ValueError, match="use"):
        losses.group_advantages(np.zeros(2), np.zeros(2, int), stats="median")


def test_a_bad_score_reaches_its_own_group_only():
    adv = losses.group_advantages(np.array([np.nan, 1.0, 0.0, 1.0]), np.array([0, 0, 1, 1]))
    assert np.isnan(adv[:2]).all() and np.isfinite(adv[2:]).all()


def _surrogate(log_ratio, adv, **options):
    def loss(x):
        x = jnp.reshape(x, (1, 1))
        return losses.clipped_surrogate(x, jnp.zeros((1, 1)), jnp.full((1, 1), adv), jnp.ones((1, 1), bool), **options)

    (_, out), grad = jax.value_and_grad(lambda x: (loss(x).total, loss(x)), has_aux=True)(jnp.asarray(log_ratio))
    return float(out.total), float(grad), out


@pytest.mark.parametrize(
    "ratio, adv, want, gradient",
    [
        (1.1, 2.0, -2.2, -2.2),
        (1.3, 2.0, -2.4, 0.0),  # pushed up enough
        (0.5, 2.0, -1.0, -1.0),  # may come back
        (1.3, -2.0, 2.6, 2.6),  # may come back
        (0.5, -2.0, 1.6, 0.0),  # pushed down enough
        (3.5, -2.0, 6.0, 0.0),  # dual clip
        (1.0, 0.0, 0.0, 0.0),
        (1.0, 2.0, -2.0, -2.0),
    ],
)
def test_surrogate_branches(ratio, adv, want, gradient):
    value, grad, _ = _surrogate(np.log(ratio), adv)
    assert value == pytest.approx(want, abs=1e-12)
    assert grad == pytest.approx(gradient, abs=1e-12)


def test_surrogate_metrics_and_asymmetric_clip():
    _, grad, out = _surrogate(np.log(1.25), 1.0, clip_high=0.3)
    assert out.metrics["clip_sum"] == 0 and grad != 0
    _, grad, out = _surrogate(np.log(1.35), 1.0, clip_high=0.3)
    assert out.metrics["clip_sum"] == 1 and grad == 0
    _, _, out = _surrogate(np.log(4.0), -1.0)
    assert out.metrics["dual_clip_sum"] == 1
    assert out.metrics["kl_old_sum"] == pytest.approx(-np.log(4.0))


@pytest.mark.parametrize("adv", [-1.0, 1.0])
def test_an_enormous_ratio_stays_finite(adv):
    value, grad, _ = _surrogate(500.0, adv)
    assert np.isfinite(value) and grad == 0


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_k3_is_zero_only_for_equal_policies(seed):
    b = make_batch(seed)
    same, grad = run_loss("reference_kl", b.replace(lR=b.lS))
    assert same.total == 0 and not grad.any()
    assert run_loss("reference_kl", b)[0].total > 0


@pytest.mark.parametrize("d, capped", [(2.60, False), (2.62, True), (-10.99, False), (-11.01, True)])
def test_the_cap_of_k3_gates_its_gradient(d, capped):
    def loss(x):
        return losses.reference_kl(x[None, None], jnp.zeros((1, 1)), jnp.ones((1, 1), bool)).total

    value, grad = jax.value_and_grad(loss)(jnp.asarray(-d))
    if capped:
        assert value == 10 and grad == 0
    else:
        assert value < 10
        assert grad == pytest.approx(1 - np.exp(d))


@settings(max_examples=20, deadline=None)
@given(seed=seeds, scale=st.floats(0.1, 30), temperature=st.sampled_from([0.7, 1.0]))
def test_entropy_is_within_its_bounds(seed, scale, temperature):
    z = scale * np.random.default_rng(seed).standard_normal((3, 4, 6))
    mask = np.ones((3, 4), bool)
    p = np.exp(z / temperature - np.max(z / temperature, axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    want = -(p * np.log(np.maximum(p, 1e-300))).sum()
    got = losses.token_entropy(z, mask, temperature=temperature)
    np.testing.assert_allclose(got.total, want, rtol=1e-9, atol=1e-9)
    assert -1e-12 <= got.mean <= np.log(6)


def test_uniform_logits_have_maximal_entropy():
    got = losses.token_entropy(np.full((1, 2, 5), 3.0), np.array([[True, True]]))
    assert got.mean == pytest.approx(np.log(5))


def test_entropy_ignores_masked_logits():
    z = np.random.default_rng(0).standard_normal((2, 3, 5))
    mask = np.array([[True, True, False], [True, False, False]])
    dirty = np.where(mask[..., None], z, np.nan)
    value, grad = jax.value_and_grad(lambda x: losses.token_entropy(x, mask).total)(jnp.asarray(dirty))
    assert value == losses.token_entropy(z, mask).total
    assert np.isfinite(grad).all() and not np.any(grad[~mask])
    h = 1e-6
    bump = np.zeros_like(z)
    bump[0, 1, 2] = h
    up, down = (float(losses.token_entropy(z + s * bump, mask).total) for s in (1, -1))
    assert grad[0, 1, 2] == pytest.approx((up - down) / (2 * h), rel=1e-6)


# --- estimators on a policy of five tokens --------------------------------------------------------------------------


def _expected_gradient(kernel, logits):
    """Gradient to the logits, averaged over the student's own samples with the exact probabilities."""
    p = jax.nn.softmax(logits)
    tokens = jnp.arange(5)
    mask = jnp.ones((1, 1), bool)

    def sampled(z, token):
        return kernel(jax.nn.log_softmax(z)[token][None, None], token, mask).total

    grads = jax.vmap(jax.grad(sampled), in_axes=(None, 0))(logits, tokens)
    return p @ grads


LOGITS = np.array([0.3, -0.5, 1.0, 0.1, -1.2])
TEACHER = np.array([0.1, 0.4, 0.6, -0.3, -0.9])


def _kl(p_logits, q_logits):
    p, q = jax.nn.log_softmax(p_logits), jax.nn.log_softmax(q_logits)
    return jnp.sum(jnp.exp(p) * (p - q))


def _at(logits, token):
    return jax.nn.log_softmax(logits)[token][None, None]


def _student_kl_gradient():
    return jax.grad(_kl)(LOGITS, TEACHER)


def test_k3_estimates_the_student_kl_but_has_the_gradient_of_the_other():
    p = jax.nn.softmax(LOGITS)
    mask = jnp.ones((1, 1), bool)
    values = [losses.reference_kl(_at(LOGITS, t), _at(TEACHER, t), mask).total for t in range(5)]
    assert sum(p * jnp.array(values)) == pytest.approx(_kl(LOGITS, TEACHER))
    got = _expected_gradient(lambda lS, t, m: losses.reference_kl(lS, _at(TEACHER, t), m), LOGITS)
    np.testing.assert_allclose(got, jax.grad(lambda z: _kl(TEACHER, z))(LOGITS), atol=1e-12)
    assert np.abs(got - _student_kl_gradient()).max() > 1e-2


@pytest.mark.parametrize("name", ["reverse_kl_opsd", "fa_sd", "skill_sd"])
def test_these_estimators_have_the_gradient_of_the_student_kl(name):
    kernels = {
        "reverse_kl_opsd": lambda lS, t, m: losses.reverse_kl_opsd(lS, _at(TEACHER, t), m),
        "fa_sd": lambda lS, t, m: losses.fa_sd(lS, _at(TEACHER, t), m, jnp.ones(1, bool)),
        "skill_sd": lambda lS, t, m: losses.skill_sd(lS, _at(TEACHER, t), _at(LOGITS, t), m),
    }
    np.testing.assert_allclose(_expected_gradient(kernels[name], LOGITS), _student_kl_gradient(), atol=1e-12)


def test_grpo_opsd_has_no_expected_gradient_on_policy():
    got = _expected_gradient(lambda lS, t, m: losses.sdar(lS, _at(TEACHER, t), m, beta=0.0), LOGITS)
    np.testing.assert_allclose(got, 0, atol=1e-12)
