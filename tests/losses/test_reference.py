"""The kernels equal a plain numpy reference, in value and gradient, on random and on stored batches."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .batches import make_batch
from .golden import load
from .kernels import ADVANTAGES, LOSSES, run_advantage, run_loss
from .reference import REFERENCE_ADVANTAGES, REFERENCE_LOSSES

seeds = st.integers(0, 2**32 - 1)
# From nearly equal teachers to ratios beyond every clamp.
scales = st.sampled_from([0.01, 0.6, 8.0])


def test_every_kernel_has_a_reference():
    assert REFERENCE_LOSSES.keys() == LOSSES.keys()
    assert REFERENCE_ADVANTAGES.keys() == ADVANTAGES.keys()


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=20, deadline=None)
@given(seed=seeds, scale=scales)
def test_loss_value(name, seed, scale):
    b = make_batch(seed, scale=scale)
    f, extras = REFERENCE_LOSSES[name](b)
    out, _ = run_loss(name, b)
    np.testing.assert_allclose(out.total, f(b.lS), rtol=1e-8, atol=1e-8)
    assert out.count == extras.get("count", b.mask.sum())
    assert out.mean == out.total / (out.count + 1e-8)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", [3, 4])
def test_loss_gradient_is_the_central_difference(name, seed):
    b = make_batch(seed, scale=0.8)
    f, _ = REFERENCE_LOSSES[name](b)
    _, grad = run_loss(name, b)
    h = 1e-6
    want = np.zeros_like(grad)
    for index in map(tuple, np.argwhere(b.mask)):
        up, down = b.lS.copy(), b.lS.copy()
        up[index] += h
        down[index] -= h
        want[index] = (f(up) - f(down)) / (2 * h)
    np.testing.assert_allclose(grad, want, rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(max_examples=20, deadline=None)
@given(seed=seeds, scale=scales)
def test_advantage(name, seed, scale):
    b = make_batch(seed, scale=scale)
    # Increments of saturated beliefs are differences of nearly equal numbers in the naive reference.
    atol = 1e-6 if name.startswith("agent") else 1e-8
    np.testing.assert_allclose(run_advantage(name, b), REFERENCE_ADVANTAGES[name](b), rtol=1e-8, atol=atol)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", LOSSES)
def test_stored_loss(name, dtype):
    b, stored = load()
    out, grad = run_loss(name, b.astype(dtype))
    rtol = 1e-9 if dtype == np.float64 else 2e-5
    assert out.total.dtype == out.count.dtype == grad.dtype == dtype
    np.testing.assert_allclose(out.total, stored["losses"][name], rtol=rtol)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_stored_advantage(name, dtype):
    b, stored = load()
    got = run_advantage(name, b.astype(dtype))
    assert got.dtype == dtype
    atol = 1e-9 if dtype == np.float64 else 1e-4 if name.startswith("agent") else 5e-5
    np.testing.assert_allclose(got[b.mask], stored["advantages"][name], rtol=0, atol=atol)
    assert not got[~b.mask].any()


@pytest.mark.parametrize("name", LOSSES)
def test_reference_still_gives_the_stored_loss(name):
    b, stored = load()
    np.testing.assert_allclose(REFERENCE_LOSSES[name](b)[0](b.lS), stored["losses"][name], rtol=1e-11)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_reference_still_gives_the_stored_advantage(name):
    b, stored = load()
    np.testing.assert_allclose(REFERENCE_ADVANTAGES[name](b)[b.mask], stored["advantages"][name], atol=1e-10)
