"""Masked statistics, segments with arbitrary ids, and the sum type."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdjax.losses import TokenSum, micro_token_mean, nonfinite_tokens, token_mean
from sdjax.losses import masked as mk

seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_statistics_equal_those_of_the_selected_values(seed):
    rng = np.random.default_rng(seed)
    mask = rng.random((4, 7)) < 0.6
    x = np.where(mask, rng.standard_normal((4, 7)) + 3, np.nan)
    kept = x[mask]
    assert mk.masked_sum(x, mask) == pytest.approx(kept.sum())
    assert mk.masked_mean(x, mask) == pytest.approx(kept.mean())
    assert mk.masked_var(x, mask) == pytest.approx(kept.var())
    assert mk.masked_var(x, mask, ddof=1) == pytest.approx(kept.var(ddof=1))
    assert mk.masked_max(x, mask) == kept.max()
    assert mk.lower_median(x, mask) == np.sort(kept)[(len(kept) - 1) // 2]
    rows = [x[i][mask[i]] for i in range(4)]
    want = [np.sort(r)[(len(r) - 1) // 2] if len(r) else 0 for r in rows]
    np.testing.assert_array_equal(mk.lower_median(x, mask, axis=1), want)
    np.testing.assert_allclose(mk.masked_mean(x, mask, axis=1), [r.mean() if len(r) else 0 for r in rows])


def test_nothing_selected_is_zero():
    x, mask = np.full((2, 3), np.nan), np.zeros((2, 3), bool)
    for statistic in (mk.masked_sum, mk.masked_mean, mk.masked_var, mk.masked_max, mk.lower_median, token_mean):
        assert statistic(x, mask) == 0


def test_the_gradient_of_a_masked_slot_is_zero_even_behind_a_singularity():
    x = jnp.array([1.0, jnp.nan, 0.0])
    grad = jax.grad(lambda x: mk.masked_sum(jnp.log(jnp.where(x > 0, x, 1.0)), jnp.array([True, False, True])))(x)
    assert np.isfinite(grad).all()


def test_a_second_pass_removes_the_rounding_of_the_mean():
    x = np.full(1000, 9.9, np.float32)
    assert mk.masked_mean(x, np.ones(1000, bool)) == np.float32(9.9)


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_segments_with_arbitrary_ids(seed):
    rng = np.random.default_rng(seed)
    ids = rng.choice([-7, 0, 3, 2**30, 12], 9)
    ok = rng.random(9) < 0.8
    x = np.where(ok, rng.standard_normal(9), 0.0)
    seg = mk.segment_ids(ids, ok)
    assert (np.asarray(seg)[~ok] == 9).all()
    members = [ok & (ids == i) for i in ids]
    for got, f in (
        (mk.segment_sum(x, seg), np.sum),
        (mk.segment_mean(x, seg), np.mean),
        (mk.segment_std(x, seg), np.std),
        (mk.segment_count(seg), len),
    ):
        for i in np.flatnonzero(ok):
            assert got[seg[i]] == pytest.approx(f(x[members[i]]), abs=1e-12)


def test_sample_deviation_of_one_value_is_zero():
    assert not np.any(mk.segment_std(np.array([5.0, 7.0]), np.array([0, 1]), ddof=1))


def test_first_in_segment():
    key = np.array([3, 1, 1, 0, 5])
    seg = np.array([0, 0, 0, 1, 1])
    np.testing.assert_array_equal(mk.first_in_segment(key, seg), [False, True, False, True, False])


def test_micro_aggregation_counts_an_empty_chunk_as_zero():
    x = np.array([[1.0, 3.0], [5.0, np.nan], [np.nan, np.nan]])
    mask = np.isfinite(x)
    assert micro_token_mean(x, mask, rows=1) == pytest.approx((2 + 5 + 0) / 3)
    assert micro_token_mean(x, mask, rows=2) == pytest.approx((3 + 0) / 2)
    assert token_mean(x, mask) == pytest.approx(3)


def test_nonfinite_tokens_counts_each_valid_token_once():
    a = np.array([[np.nan, np.inf, 1.0]])
    b = np.array([[np.nan, 1.0, np.nan]])
    assert nonfinite_tokens(np.array([[True, True, False]]), a, b) == 2


def test_token_sums_add_and_keep_maxima():
    a = TokenSum(jnp.asarray(2.0), jnp.asarray(4.0), {"gate_sum": jnp.asarray(1.0), "rho_max": jnp.asarray(3.0)})
    b = TokenSum(jnp.asarray(1.0), jnp.asarray(1.0), {"gate_sum": jnp.asarray(0.5), "rho_max": jnp.asarray(2.0)})
    both = a + b
    assert both.mean == pytest.approx(3 / 5)
    assert both.metric_means() == {"gate": pytest.approx(0.3), "rho_max": 3.0}
    with pytest.raises(ValueError, match="one kernel"):
        _ = a + TokenSum(jnp.asarray(1.0), jnp.asarray(1.0), {})


def test_token_sum_is_a_tree():
    a = TokenSum(jnp.ones(()), jnp.ones(()), {"x_sum": jnp.ones(())})
    doubled = jax.jit(lambda s: jax.tree.map(lambda x: 2 * x, s))(a)
    assert doubled.total == doubled.metrics["x_sum"] == 2
