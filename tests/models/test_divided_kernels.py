"""Kernels that the compiler cannot divide itself, over eight devices: values and gradients of one device."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import functools
import jax, jax.numpy as jnp, numpy as np
from sdjax import sharding
from sdjax.models import attention
from sdjax.models.delta_kernels import delta_kernels
from tests.models.test_delta_pallas import make_inputs, results

assert jax.device_count() == 8
attend = functools.partial(attention.packed_attention, implementation="xla")
behind = functools.partial(attention.prefixed_attention, implementation="xla")

def everything(mesh, rule, step, inputs, segment, state):
    divided = functools.partial(sharding.over_batch_and_heads, mesh=mesh)
    packed = divided(attend, inputs=attention.PACKED_AXES[0], outputs=attention.PACKED_AXES[1])
    prefixed = divided(behind, inputs=attention.PREFIXED_AXES[0], outputs=attention.PREFIXED_AXES[1])
    q, k, v, g, beta = inputs
    own = (k, v[..., : k.shape[-1]], k)  # more heads of queries than of keys
    total = lambda q, k, v: jnp.sum(jnp.sin(packed(q, k, v, segment)))
    return (
        results(rule, inputs, segment, state),
        rule(*inputs, segment),
        step(*(x[:, 0] for x in inputs), state),
        jax.grad(total, argnums=(0, 1, 2))(own[1], own[0], own[2]),
        prefixed(own[1], own[0], own[2], segment, own[0], own[2], jnp.full(len(k), 5)),
    )

# A mesh, rows, key heads, value heads: all divide, rows do not, heads do not.
for sizes, rows, keys, values in (
    ((8, 1, 1), 8, 1, 2), ((1, 4, 2), 4, 2, 4), ((1, 2, 4), 3, 4, 8), ((2, 2, 2), 4, 1, 2)
):
    mesh = sharding.make_mesh(*sizes)
    inputs, segment, state = make_inputs(64, keys, values, 16, 16, rows=rows)
    place = lambda x: jax.device_put(x, sharding.batch_sharding(mesh)) if rows % (sizes[0] * sizes[1]) == 0 else x
    kernels, plain = delta_kernels("pallas_interpret", mesh), delta_kernels("xla")
    run = lambda mesh, kernels: jax.jit(functools.partial(everything, mesh, kernels.rule, kernels.step))
    found = run(mesh, kernels)(*jax.tree.map(place, (inputs, segment, state)))
    wanted = run(None, plain)(inputs, segment, state)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(jnp.abs(b).max())))
    if rows % (sizes[0] * sizes[1]) == 0:
        assert found[1][0].sharding.shard_shape(found[1][0].shape)[0] == rows // (sizes[0] * sizes[1])

# Rows of a cache that are more than those of the step stay whole: parts would not belong together.
mesh = sharding.make_mesh(1, 8, 1)
add = sharding.over_batch_and_heads(lambda x, y: y.at[: len(x)].add(x), mesh, ["B-", "B-"], ["B-"])
x, y = jnp.arange(16.0).reshape(8, 2), jnp.ones((16, 2))
np.testing.assert_array_equal(jax.jit(add)(x, y), y.at[:8].add(x))
print("equal")
"""


def test_eight_devices_give_values_and_gradients_of_one():
    root = Path(__file__).parents[2]
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": str(root)}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | flags, cwd=root, timeout=600)
    assert done.returncode == 0 and done.stdout.strip() == "equal", done.stderr[-3000:]
