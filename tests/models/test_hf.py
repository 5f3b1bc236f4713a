"""Checkpoint directories: bit-exact round trips, and clear refusals of damaged or foreign ones."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sdjax.errors import ModelError
from sdjax.models import hf, load_checkpoint
from sdjax.models.config import ModelConfig, dense_config, dense_config_json
from sdjax.models.dense import DenseModel
from sdjax.models.hf import load_model, load_params, save_checkpoint
from sdjax.models.shards import write_shard

CONFIG = ModelConfig(
    model_type="qwen2",
    vocab_size=31,
    hidden_size=16,
    intermediate_size=24,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=4,
    max_positions=64,
    qkv_bias=True,
    eos_token_ids=(2, 3),
)


@pytest.fixture
def checkpoint(tmp_path):
    """(directory, model, parameters with distinct values everywhere)."""
    model = DenseModel(CONFIG)
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda x: random.standard_normal(x.shape).astype(np.float32), model.shapes())
    return save_checkpoint(tmp_path / "checkpoint", model, params), model, params


def _same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)
    assert [x.dtype for x in jax.tree.leaves(a)] == [x.dtype for x in jax.tree.leaves(b)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard_bytes", [2**30, 3000])
def test_round_trip_is_bit_exact(checkpoint, tmp_path, dtype, shard_bytes):
    _, model, params = checkpoint
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    out = save_checkpoint(tmp_path / "out", model, params, max_shard_bytes=shard_bytes)
    assert ((out / hf.INDEX).is_file(), (out / hf.WEIGHTS).is_file()) == (shard_bytes == 3000, shard_bytes != 3000)
    assert load_model(out) == model
    _same(load_params(out, model), params)
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == dtype


def test_loading_converts_to_the_asked_dtype(checkpoint):
    directory, model, params = checkpoint
    loaded = load_params(directory, model, dtype="bfloat16")
    _same(loaded, jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.bfloat16), params))


def test_saving_again_replaces_shards_and_index(checkpoint, tmp_path):
    _, model, params = checkpoint
    save_checkpoint(tmp_path / "out", model, params, max_shard_bytes=3000)
    other = jax.tree.map(lambda x: x + 1, params)
    save_checkpoint(tmp_path / "out", model, other)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    _same(load_params(tmp_path / "out", model), jax.tree.map(jnp.asarray, other))


def test_a_failed_export_leaves_the_old_checkpoint(checkpoint, monkeypatch):
    directory, model, params = checkpoint
    before = {p.name: p.read_bytes() for p in directory.iterdir()}
    calls = []

    def full_disk(path, items):
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"a part")
            raise OSError(28, "No space left on device")
        write_shard(path, items)

    monkeypatch.setattr(hf, "write_shard", full_disk)
    with pytest.raises(ModelError, match="No space left"):
        save_checkpoint(directory, model, params, max_shard_bytes=3000)
    assert {p.name: p.read_bytes() for p in directory.iterdir()} == before


def test_tokenizer_files_travel_with_an_export(tiny_dir, tmp_path):
    model, params, tokenizer = load_checkpoint(tiny_dir)
    save_checkpoint(tmp_path / "out", model, params, tokenizer_from=tiny_dir)
    again_model, again_params, again_tokenizer = load_checkpoint(tmp_path / "out")
    assert again_model == model and again_tokenizer.render_chat("hi 1") == tokenizer.render_chat("hi 1")
    _same(again_params, params)


def _rewrite(directory, change):
    values = load_file(directory / hf.WEIGHTS)
    change(values)
    save_file(values, directory / hf.WEIGHTS)


def test_all_wrong_tensors_are_named_at_once(checkpoint):
    directory, model, _ = checkpoint

    def change(values):
        del values["model.layers.1.mlp.up_proj.weight"]
        values["model.layers.2.mlp.up_proj.weight"] = np.zeros((24, 16), np.float32)
        values["model.norm.weight"] = np.zeros((17,), np.float32)

    _rewrite(directory, change)
    with pytest.raises(ModelError) as error:
        load_params(directory, model)
    text = str(error.value)
    assert "missing model.layers.1.mlp.up_proj.weight [24, 16]" in text
    assert "unexpected model.layers.2.mlp.up_proj.weight" in text
    assert "model.norm.weight has shape [17], config.json wants [16]" in text


def test_derived_buffers_and_an_equal_tied_head_are_accepted_a_different_one_is_not(tiny_dir, tmp_path):
    directory = shutil.copytree(tiny_dir, tmp_path / "tied")
    model = load_model(directory)

    def add(values):
        values["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
        values["lm_head.weight"] = values["model.embed_tokens.weight"].copy()

    _rewrite(directory, add)
    _same(load_params(directory, model), load_params(tiny_dir, model))
    _rewrite(directory, lambda values: values["lm_head.weight"].__setitem__((0, 0), 7.0))
    with pytest.raises(ModelError, match=r"lm_head\.weight differs"):
        load_params(directory, model)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_weights_name_the_file(checkpoint, keep):
    directory, model, _ = checkpoint
    data = (directory / hf.WEIGHTS).read_bytes()
    (directory / hf.WEIGHTS).write_bytes(data[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated"):
        load_params(directory, model)


@pytest.mark.parametrize("dtype", ["int8", "float64", "float8_e4m3fn", "bfloat15"])
def test_a_dtype_that_is_not_computed_is_refused(checkpoint, dtype):
    directory, model, _ = checkpoint
    with pytest.raises(ModelError, match=f"loaded has dtype {dtype}. To fix: use one of float32, bfloat16, float16"):
        load_params(directory, model, dtype=dtype)
    with pytest.raises(ModelError, match=f"computed has dtype {dtype}"):
        load_model(directory, compute_dtype=dtype)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, np.int8, np.int64])
def test_stored_dtypes_that_are_not_computed_are_all_named(checkpoint, dtype):
    directory, model, _ = checkpoint
    names = ["model.norm.weight", "model.layers.1.self_attn.k_proj.bias"]
    _rewrite(directory, lambda values: values.update({n: values[n].astype(dtype) for n in names}))
    with pytest.raises(ModelError) as error:
        load_params(directory, model)
    for name in names:
        assert str(error.value).count(f"{name} has the unsupported dtype") == 1


def test_missing_files_are_named(checkpoint, tmp_path):
    directory, model, params = checkpoint
    with pytest.raises(ModelError, match=r"nowhere.config\.json does not exist"):
        load_model(tmp_path / "nowhere")
    (directory / hf.WEIGHTS).unlink()
    with pytest.raises(ModelError, match="holds neither"):
        load_params(directory, model)
    save_checkpoint(directory, model, params, max_shard_bytes=3000)
    shard = sorted(directory.glob("model-*"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        load_params(directory, model)
    (directory / "config.json").write_text("{not json")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_model(directory)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": None},
            "rope_scaling.rope_type is 'yarn'",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"head_dim": 5}, "head_dim"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_a_config_that_would_be_computed_wrongly_is_refused(checkpoint, change, named):
    directory, _, _ = checkpoint
    raw = json.loads((directory / "config.json").read_text()) | change
    (directory / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=named):
        load_model(directory)


def test_config_round_trip_and_both_rope_spellings():
    raw = dense_config_json(CONFIG, "float32")
    assert dense_config(raw) == CONFIG
    old = {k: v for k, v in raw.items() if k != "rope_parameters"} | {"rope_theta": 123.0, "rope_scaling": None}
    assert dense_config(old).rope_theta == 123.0
    new = {k: v for k, v in raw.items() if k != "rope_theta"}
    assert dense_config(new).rope_theta == CONFIG.rope_theta
    llama3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = dense_config(old | {"rope_scaling": llama3 | {"original_max_position_embeddings": 8192}})
    assert scaled.rope_scaling is not None and scaled.rope_scaling.original_max_positions == 8192
    assert dense_config(dense_config_json(scaled, "float32")) == scaled
