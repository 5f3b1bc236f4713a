"""The decoding kernel, interpreted, against attention over the whole cache in plain XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdjax.errors import ModelError
from sdjax.models.attention import decode_attention
from sdjax.models.decode_kernel import decode_attention as kernel

LENGTH = 70  # of the cache: no multiple of the kernel's block


def _inputs(heads, kv_heads, dtype, rows=5, cache_rows=7, size=16):
    rng = np.random.default_rng(heads)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    new = normal(rows, 1, heads, size), normal(rows, 1, kv_heads, size), normal(rows, 1, kv_heads, size)
    return *new, normal(cache_rows, LENGTH, kv_heads, size), normal(cache_rows, LENGTH, kv_heads, size)


@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (9, 3), (32, 1), (4, 4)])
def test_kernel_equals_xla_at_every_length(heads, kv_heads):
    inputs = _inputs(heads, kv_heads, jnp.float32)
    active = jnp.ones(5, bool)
    for position in ([1, 15, 16, 17, 69], [31, 32, 33, 63, 64]):
        found = kernel(*inputs, jnp.array(position), active, block=16, interpret=True)
        wanted = decode_attention(*inputs, jnp.array(position), active)
        for a, b in zip(found, wanted):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_kernel_writes_nothing_for_inactive_rows_and_behind_the_end():
    inputs = _inputs(6, 2, jnp.float32)
    position, active = jnp.array([3, 9, 20, LENGTH, 5]), jnp.array([True, False, True, True, False])
    out, k, v = kernel(*inputs, position, active, block=16, interpret=True)
    changed = np.abs(np.asarray(k - inputs[3])).max(axis=(2, 3)) > 0
    wanted = np.zeros((7, LENGTH), bool)
    wanted[0, 3] = wanted[2, 20] = True
    np.testing.assert_array_equal(changed, wanted)
    np.testing.assert_array_equal(np.abs(np.asarray(v - inputs[4])).max(axis=(2, 3)) > 0, wanted)
    assert np.isfinite(out).all()


def test_kernel_never_reads_a_position_that_a_row_has_not_reached():
    q, new_k, new_v, k, v = _inputs(6, 2, jnp.float32)
    position, active = jnp.array([3, 9, 20, 40, 5]), jnp.ones(5, bool)
    unseen = jnp.arange(LENGTH)[None] >= jnp.concatenate([position, jnp.zeros(2, int)])[:, None]
    poisoned = [jnp.where(unseen[..., None, None], jnp.nan, x) for x in (k, v)]
    found, _, _ = kernel(q, new_k, new_v, *poisoned, position, active, block=16, interpret=True)
    wanted, _, _ = decode_attention(q, new_k, new_v, k, v, position, active)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_kernel_in_half_precision_stays_near():
    inputs = _inputs(9, 3, jnp.bfloat16)
    position, active = jnp.array([1, 15, 40, 64, 69]), jnp.ones(5, bool)
    found, *_ = kernel(*inputs, position, active, block=32, interpret=True)
    assert found.dtype == jnp.bfloat16
    wanted, *_ = decode_attention(*(x.astype(jnp.float32) for x in inputs), position, active)
    error = jnp.linalg.norm(found.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)
    assert 1e-5 < float(error) < 1e-2


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="older JAX cannot lower for a GPU that is not there")
def test_kernel_lowers_for_a_hopper_gpu():
    shape = jax.ShapeDtypeStruct
    new = [shape((128, 1, heads, 64), jnp.bfloat16) for heads in (9, 3, 3)]
    cache = [shape((160, 2600, 3, 64), jnp.bfloat16)] * 2
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        traced = kernel.trace(*new, *cache, shape((128,), jnp.int32), shape((128,), jnp.bool_))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "decode_attention" in text


def test_heads_that_the_kernel_lacks_are_refused():
    inputs = _inputs(4, 2, jnp.float32, size=24)
    with pytest.raises(ModelError, match="not 24"):
        kernel(*inputs, jnp.ones(5, int), jnp.ones(5, bool))
