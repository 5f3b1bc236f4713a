"""The embedded engine with sharded parameters and slots spread over eight devices."""

import os
import subprocess
import sys

import jax
from jax.sharding import Mesh, PartitionSpec

from sdjax.rollout.embedded_steps import rows_sharding

PROGRAM = """
import asyncio, dataclasses
import jax, numpy as np
from sdjax import sharding
from sdjax.models.config import ModelConfig
from sdjax.models.dense import DenseModel
from sdjax.rollout.embedded import EmbeddedEngine
from sdjax.rollout.engine import Request, SamplingParams

assert jax.device_count() == 8
model = DenseModel(ModelConfig(
    model_type="llama", vocab_size=64, hidden_size=32, intermediate_size=32, layers=2, heads=2, kv_heads=2, head_dim=16,
    max_positions=64, tie_embeddings=True, initializer_range=0.4))
params = model.init(jax.random.key(0))
requests = [Request(np.arange(1 + i % 9), i, SamplingParams(1.0, 6)) for i in range(12)]

def draw(model, params, mesh):
    engine = EmbeddedEngine(model, params, stop_ids=[3], sampling_mask_V=np.ones(64, bool), slots=8, max_length=16,
                            prefill_rows=4, decode_chunk=4, mesh=mesh)
    async def run():
        return await asyncio.gather(*(engine.generate(r) for r in requests))
    completions = asyncio.run(run())
    return engine, completions

one, first = draw(model, params, None)
for shape, rows in (((2, 4, 1), 1), ((2, 2, 2), 2)):
    mesh = sharding.make_mesh(*shape)
    spread = jax.device_put(params, sharding.parameter_shardings(mesh, model.logical_axes(), params))
    many, second = draw(dataclasses.replace(model, mesh=mesh), spread, mesh)
    leaf = jax.tree.leaves(many._cache)[0]
    assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {rows}, leaf.sharding
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(many._params))
    for a, b in zip(first, second):
        assert a.tokens.tolist() == b.tokens.tolist(), (a, b)
        np.testing.assert_allclose(a.logps, b.logps, atol=1e-5)
print("equal")
"""


def test_eight_devices_draw_what_one_device_draws():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0 and done.stdout.strip() == "equal", done.stderr[-3000:]


def test_slots_that_do_not_divide_stay_together():
    mesh = Mesh(jax.devices()[:1], ("data",))
    sharding = rows_sharding(mesh, 3)
    assert sharding is not None and sharding.spec == PartitionSpec(("data",))


def test_the_tensor_axis_does_not_split_slots():
    mesh = Mesh([[[jax.devices()[0]]]], ("data", "fsdp", "tensor"))
    sharding = rows_sharding(mesh, 4)
    assert sharding is not None and sharding.spec == PartitionSpec(("data", "fsdp"))
