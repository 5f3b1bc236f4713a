"""The convolution kernels, interpreted, against plain XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdjax.models.conv_pallas import pallas_conv
from sdjax.models.delta_pallas_launch import Launch, Tuning
from sdjax.models.short_conv import packed_conv

TUNING = Tuning(conv=Launch(16), interpret=True)


def _inputs(rows, length, channels, taps, dtype, seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    cuts = np.sort(rng.choice(np.arange(1, length), size=(rows, 3)))
    segment = (np.arange(length)[None, None] >= cuts[..., None]).sum(axis=1).astype(np.int32)
    segment[0] = np.arange(length) % 7 // 3 + 10 * (np.arange(length) // 7)  # segments shorter than the kernel
    return normal(rows, length, channels), normal(taps, channels), jnp.asarray(segment)


@pytest.mark.parametrize("length, channels, taps", [(64, 32, 4), (150, 48, 4), (70, 24, 3), (5, 16, 2)])
def test_kernels_equal_xla_with_gradients(length, channels, taps):
    x, kernel, segment = _inputs(3, length, channels, taps, jnp.float32)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=x.shape), jnp.float32)

    def gradient(conv):
        return jax.jit(jax.value_and_grad(lambda x, k: jnp.sum(conv(x, k, segment) * weight), (0, 1)))(x, kernel)

    found, wanted = gradient(lambda *a: pallas_conv(*a, tuning=TUNING)), gradient(packed_conv)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_kernels_round_as_xla_does_in_half_precision():
    x, kernel, segment = _inputs(2, 100, 32, 4, jnp.bfloat16)
    found, wanted = pallas_conv(x, kernel, segment, tuning=TUNING), packed_conv(x, kernel, segment)
    assert found.dtype == jnp.bfloat16
    different = np.mean(np.asarray(found, np.float32) != np.asarray(wanted, np.float32))
    assert different < 0.01  # sums in another order may round to the neighbour
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(wanted, np.float32), rtol=1e-2, atol=1e-2)


def test_no_token_reads_another_segment():
    x, kernel, segment = _inputs(2, 90, 16, 4, jnp.float32)
    other = jnp.where((segment == segment[:, 40:41])[..., None], x, jnp.nan)
    found = np.asarray(pallas_conv(other, kernel, segment, tuning=TUNING))
    own = np.asarray(segment == segment[:, 40:41])
    assert np.isfinite(found[own]).all()
    np.testing.assert_allclose(found[own], np.asarray(packed_conv(x, kernel, segment))[own], rtol=2e-5, atol=2e-5)
