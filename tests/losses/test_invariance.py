"""Rules that hold for every kernel: masks, padding, order, split, transformation by jit and vmap, non-finite input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdjax import losses

from . import reference
from .batches import make_batch
from .kernels import (
    ADVANTAGES,
    LOSSES,
    ROWWISE_LOSSES,
    VARIANTS,
    as_dict,
    run_advantage,
    run_loss,
    run_loss_with_all_gradients,
)

seeds = st.integers(0, 2**32 - 1)


def assert_close(got, want, rtol=1e-10, atol=1e-12, name=""):
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, err_msg=name)


def assert_same_loss(got, want):
    for name in want.metrics:
        assert_close(got.metrics[name], want.metrics[name], name=name)
    assert_close(got.total, want.total)
    np.testing.assert_array_equal(got.count, want.count)


def assert_metrics_follow_the_rule(out):
    for name, value in out.metrics.items():
        assert name.endswith(("_sum", "_tokens", "_max")), name
        assert np.isfinite(value), name


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_masked_slots_change_no_loss(name, poison):
    b = make_batch(5)
    want, want_grad = run_loss(name, b.filled(0.0))
    got, grad = run_loss(name, b.filled(poison))
    assert_same_loss(got, want)
    assert_metrics_follow_the_rule(got)
    np.testing.assert_array_equal(grad, want_grad)
    assert not grad[~b.mask].any()


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_masked_slots_change_no_advantage(name, poison):
    b = make_batch(5)
    got = run_advantage(name, b.filled(poison))
    np.testing.assert_array_equal(got, run_advantage(name, b.filled(0.0)))
    assert not got[~b.mask].any()


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=10, deadline=None)
@given(seed=seeds, order=st.permutations(range(24)))
def test_row_order_does_not_change_a_loss(name, seed, order):
    b, order = make_batch(seed), np.array(order)
    want, want_grad = run_loss(name, b)
    got, grad = run_loss(name, b.permuted(order))
    assert_same_loss(got, want)
    assert_close(grad, want_grad[order])


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(max_examples=10, deadline=None)
@given(seed=seeds, order=st.permutations(range(24)))
def test_advantages_follow_the_rows(name, seed, order):
    b, order = make_batch(seed), np.array(order)
    # 1e-8: the increments of a saturated belief are smaller than the rounding of their sum.
    np.testing.assert_allclose(run_advantage(name, b.permuted(order)), run_advantage(name, b)[order], atol=1e-8)


@pytest.mark.parametrize("name", ROWWISE_LOSSES)
@settings(max_examples=10, deadline=None)
@given(seed=seeds, first=st.lists(st.booleans(), min_size=24, max_size=24))
def test_micro_batches_add_up(name, seed, first):
    b, first = make_batch(seed), np.array(first)[:, None]
    if name.startswith("fa_sd"):
        # Who has feedback is decided over the whole step, so the split is between groups.
        first = first[np.searchsorted(np.unique(b.group), b.group)]
    want, want_grad = run_loss(name, b)
    parts = [run_loss(name, b.replace(mask=b.mask & part)) for part in (first, ~first)]
    assert_same_loss(parts[0][0] + parts[1][0], want)
    assert_close(parts[0][1] + parts[1][1], want_grad)


def _feedback_NL(b):
    return np.broadcast_to(reference.has_feedback(b)[:, None], b.mask.shape)


def test_the_declared_separable_losses_accept_any_layout():
    b = make_batch(8)
    adv_NL = np.broadcast_to(b.adv[:, None], b.mask.shape)
    arguments = {
        "clipped_surrogate": (b.lS, b.lO, adv_NL, b.mask),
        "reference_kl": (b.lS, b.lR, b.mask),
        "sdar": (b.lS, b.lT, b.mask),
        "reverse_kl_opsd": (b.lS, b.lT, b.mask),
        "skill_sd": (b.lS, b.lT, b.lO, b.mask),
        "fa_sd": (b.lS, b.lT, b.mask, _feedback_NL(b)),
    }
    others = {"suffix_forward_kl", "token_entropy"}
    assert set(arguments) | others == losses.SEPARABLE
    assert not losses.SEPARABLE & losses.COUPLED
    for name, args in arguments.items():
        kernel = getattr(losses, name)
        packed = jax.jit(kernel)(*(np.reshape(x, (2, -1)) for x in args))
        assert_same_loss(packed, run_loss(name, b)[0])


@pytest.mark.parametrize("name", LOSSES)
def test_losses_under_jit_and_vmap_with_another_padding(name):
    small = [make_batch(seed) for seed in (1, 2)]
    large = [as_dict(b.padded(7, 3)) for b in small]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *large)
    kernel = LOSSES[name]
    got = jax.jit(jax.vmap(kernel))(stacked, stacked["lS"])
    want = [run_loss(name, b)[0] for b in small]
    assert_same_loss(got, jax.tree.map(lambda *x: jnp.stack(x), *want))


@pytest.mark.parametrize("name", [n for n in ADVANTAGES if n not in VARIANTS])
def test_advantages_under_jit_and_vmap_with_another_padding(name):
    small = [make_batch(seed) for seed in (1, 2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *[as_dict(b.padded(7, 3)) for b in small])
    got = np.asarray(jax.jit(jax.vmap(ADVANTAGES[name]))(stacked))
    for i, b in enumerate(small):
        rows, length = b.mask.shape
        np.testing.assert_allclose(got[i, :rows, :length], run_advantage(name, b), rtol=1e-9, atol=1e-9)
        assert not got[i, rows:].any() and not got[i, :, length:].any()


@pytest.mark.parametrize("name", LOSSES)
def test_an_empty_batch_gives_zero(name):
    b = make_batch(3)
    out, grad = run_loss(name, b.replace(mask=np.zeros_like(b.mask), ok=np.zeros_like(b.ok)))
    assert out.total == out.count == out.mean == 0
    assert not grad.any()
    assert not any(out.metrics.values())


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_empty_batch_gives_zero_advantages(name):
    b = make_batch(3)
    assert not run_advantage(name, b.replace(mask=np.zeros_like(b.mask), ok=np.zeros_like(b.ok))).any()


def _with(b, field, index, value):
    x = getattr(b, field).copy()
    x[index] = value
    return b.replace(**{field: x})


# Losses whose token with a non-finite teacher must behave as if teacher and student agreed.
GAP_LOSSES = sorted(set(LOSSES) - {"clipped_surrogate", "reference_kl"})


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", GAP_LOSSES)
def test_a_bad_teacher_value_counts_as_gap_zero(name, bad):
    b = make_batch(6)
    index = tuple(np.argwhere(b.mask & b.success[:, None])[4])
    want, _ = run_loss(name, _with(b, "lT", index, b.lS[index]))
    got, grad = run_loss(name, _with(b, "lT", index, bad))
    assert want.metrics["nonfinite_tokens"] == 0
    assert got.metrics["nonfinite_tokens"] == 1
    assert_close(got.total, want.total)
    assert got.count == want.count
    assert np.isfinite(grad).all() and grad[index] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["rlsd", "ocsd", "agent_turn", "agent_token", "grsd"])
def test_a_bad_teacher_value_leaves_the_advantage_as_with_gap_zero(name, bad):
    b = make_batch(6)
    fields = ("lF", "lA") if name == "ocsd" else ("lT", "lO")
    for index in map(tuple, np.argwhere(b.mask)[::17]):
        want = run_advantage(name, _with(b, fields[0], index, getattr(b, fields[1])[index]))
        np.testing.assert_allclose(run_advantage(name, _with(b, fields[0], index, bad)), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_teacher_value_keeps_the_plain_advantage_in_adrs(bad):
    b = make_batch(6)
    index = tuple(np.argwhere(b.mask & (b.adv > 0)[:, None])[3])
    got = run_advantage("adrs", _with(b, "lT", index, bad))
    assert np.isfinite(got).all()
    assert got[index] == b.adv[index[0]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name, field",
    [
        ("clipped_surrogate", "lO"),
        ("clipped_surrogate", "lS"),
        ("reference_kl", "lR"),
        ("reference_kl", "lS"),
        ("skill_sd", "lO"),
        ("fa_sd_is", "lO"),
    ],
)
def test_a_bad_value_behind_a_clamp_is_not_hidden(name, field, bad):
    b = make_batch(7)
    candidates = b.mask & (b.ok & (b.adv != 0))[:, None]
    if name == "fa_sd_is":
        groups = [g for g in set(b.group[b.ok]) if b.success[b.ok & (b.group == g)].any()]
        failed = b.ok & ~b.success & np.isin(b.group, groups)
        candidates = b.mask & failed[:, None]
    index = tuple(np.argwhere(candidates)[2])
    out, grad = run_loss(name, _with(b, field, index, bad))
    assert np.isnan(out.total)
    assert np.isnan(grad[index])
    others = np.ones(grad.shape, bool)
    others[index] = False
    assert np.isfinite(grad[others]).all()


def test_half_precision_inputs_are_computed_in_float32():
    b = make_batch(9).filled(0.0)
    lS, lT = (jnp.asarray(x, jnp.bfloat16) for x in (b.lS, b.lT))
    out = losses.sdar(lS, lT, b.mask)
    want = losses.sdar(lS.astype(jnp.float32), lT.astype(jnp.float32), b.mask)
    assert out.total.dtype == jnp.float32
    assert out.total == want.total


@pytest.mark.parametrize("name", LOSSES)
def test_only_the_student_receives_a_gradient(name):
    _, grads = run_loss_with_all_gradients(name, make_batch(10))
    assert grads.pop("lS").any()
    for field, grad in grads.items():
        assert not grad.any(), field


def test_shape_mistakes_are_refused():
    b = make_batch(1)
    with pytest.raises(AssertionError):
        losses.sdar(b.lS, b.lT[:, :-1], b.mask)
    with pytest.raises(AssertionError):
        losses.rlsd_advantages(b.adv[:-1], b.lT, b.lO, b.mask, lam=0.5)
    with pytest.raises(AssertionError):
        losses.clipped_surrogate(b.lS, b.lO, b.adv, b.mask)
