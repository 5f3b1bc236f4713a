"""Buckets of weights hold exactly what an exported checkpoint holds, whatever lies where."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from sdjax.models.config import ModelConfig
from sdjax.models.dense import DenseModel
from sdjax.models.hf import save_checkpoint
from sdjax.models.qwen3_5 import Qwen35Model
from sdjax.models.qwen3_5_config import FULL, LINEAR, Qwen35Config
from sdjax.rollout import sglang_buckets
from sdjax.rollout.sglang_sync import served

SIZES = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 8,
    "max_positions": 64,
}  # fmt: skip
LINEAR_SIZES = {
    "linear_key_heads": 2, "linear_value_heads": 4, "linear_key_dim": 4, "linear_value_dim": 6, "conv_kernel": 4,
}  # fmt: skip
HYBRID = Qwen35Config(
    model_type="qwen3_5", layer_types=(LINEAR, FULL) * 2, tie_embeddings=False, **SIZES, **LINEAR_SIZES
)
MODELS = {
    "qwen3": DenseModel(ModelConfig(model_type="qwen3", qk_norm=True, tie_embeddings=True, **SIZES)),
    "llama": DenseModel(ModelConfig(model_type="llama", tie_embeddings=False, **SIZES)),
    "qwen3_5": Qwen35Model(HYBRID),
}
LARGEST = 4 * 31 * 16  # bytes of the embedding in float32


def random_params(model):
    random = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(random.standard_normal(x.shape), jnp.float32), model.shapes())


def everything(model, params, dtype, bucket_bytes):
    plan = sglang_buckets.plan(model, dtype, bucket_bytes)
    return {name: np.asarray(value) for bucket in plan for name, value in sglang_buckets.tensors(bucket, params)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", MODELS)
def test_buckets_hold_what_an_export_holds(family, dtype, tmp_path):
    model = MODELS[family]
    params = random_params(model)
    save_checkpoint(tmp_path, model, served(model, params, dtype))
    wanted = load_file(tmp_path / "model.safetensors")
    found = everything(model, params, dtype, 2000)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and np.array_equal(found[name], value), name


def test_a_state_keeps_its_exact_decay():
    found = everything(MODELS["qwen3_5"], random_params(MODELS["qwen3_5"]), "bfloat16", 2**30)
    exact = {name for name, value in found.items() if value.dtype == np.float32}
    assert exact and all(name.endswith(("A_log", "dt_bias")) for name in exact)
    assert {value.dtype for value in found.values()} == {np.dtype("float32"), np.dtype(ml_dtypes.bfloat16)}


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(MODELS)), st.integers(1, 2 * LARGEST))
def test_every_tensor_is_in_one_bucket_of_the_asked_size(family, bucket_bytes):
    plan = sglang_buckets.plan(MODELS[family], "bfloat16", bucket_bytes)
    names = [entry.name for bucket in plan for entry in bucket]
    assert len(names) == len(set(names))
    assert set(names) == {e.name for bucket in sglang_buckets.plan(MODELS[family], "bfloat16") for e in bucket}
    for bucket in plan:
        assert len(bucket) == 1 or sum(entry.nbytes for entry in bucket) <= bucket_bytes
        begin = 0
        for entry in bucket:
            assert begin % entry.dtype.itemsize == 0
            begin += entry.nbytes


PROGRAM = """
import jax, numpy as np
from jax.sharding import Mesh
from sdjax import sharding
from sdjax.rollout import sglang_buckets
from tests.rollout.test_sglang_buckets import MODELS, random_params

assert jax.device_count() == 8
for name, model in MODELS.items():
    params = random_params(model)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), sharding.AXES)
    spread = jax.device_put(params, sharding.parameter_shardings(mesh, model.logical_axes(), params))
    for bucket in sglang_buckets.plan(model, "bfloat16", 2000):
        whole = dict(sglang_buckets.tensors(bucket, params))
        for key, value in sglang_buckets.tensors(bucket, spread):
            assert len(value.addressable_shards) == 8, (name, key)
            for shard in value.addressable_shards:
                assert np.array_equal(np.asarray(shard.data), np.asarray(whole[key])), (name, key, shard.device)
"""


def test_every_device_of_a_mesh_gets_whole_tensors():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, timeout=300)


def test_layers_share_one_program():
    model = MODELS["qwen3"]
    params = random_params(model)
    sglang_buckets._assemble.clear_cache()
    everything(model, params, "bfloat16", 2**30)
    one_layer = sum("layers.0." in e.name for bucket in sglang_buckets.plan(model, "bfloat16") for e in bucket)
    assert sglang_buckets._assemble._cache_size() <= one_layer + 2  # embedding and last norm
