"""Qwen3.5 checkpoints: both naming schemes, shards, dtypes, exports, streaming, and refusals."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sdjax.errors import ModelError
from sdjax.models import hf, load_checkpoint
from sdjax.models.hf import load_model, load_params, save_checkpoint
from sdjax.models.qwen3_5 import Qwen35Model
from sdjax.models.qwen3_5_config import FULL, LINEAR, Qwen35Config, read_config, write_config
from sdjax.models.tiny import write_tiny_checkpoint

torch = pytest.importorskip("torch", reason="transformers' models need torch, a test dependency")
transformers = pytest.importorskip("transformers")

CONFIG = Qwen35Config(
    model_type="qwen3_5",
    vocab_size=31,
    hidden_size=16,
    intermediate_size=24,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=8,
    max_positions=64,
    rope_theta=1e5,
    partial_rotary_factor=0.5,
    layer_types=(LINEAR, FULL) * 2,
    linear_key_heads=2,
    linear_value_heads=4,
    linear_key_dim=4,
    linear_value_dim=6,
    conv_kernel=4,
    mrope_section=(1, 1, 0),
    eos_token_ids=(2, 3),
)
VISION = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 16, "patch_size": 4,
    "num_position_embeddings": 4,
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path):
    """(directory, model, parameters with distinct values everywhere)."""
    model = Qwen35Model(CONFIG)
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda x: random.standard_normal(x.shape).astype(np.float32), model.shapes())
    return save_checkpoint(tmp_path / "checkpoint", model, params), model, params


def _same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)
    assert [x.dtype for x in jax.tree.leaves(a)] == [x.dtype for x in jax.tree.leaves(b)]


def _rewrite(directory, change):
    values = load_file(directory / hf.WEIGHTS)
    change(values)
    save_file(values, directory / hf.WEIGHTS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "mixed"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_bytes", [2**30, 3000])
def test_round_trip_is_bit_exact(tmp_path, dtype, tied, shard_bytes):
    model = Qwen35Model(dataclasses.replace(CONFIG, tie_embeddings=tied))
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda x: random.standard_normal(x.shape).astype(np.float32), model.shapes())
    small = {"embedding", "full_layers"} if dtype == "mixed" else set(params) if dtype == "bfloat16" else set()
    params |= {name: jax.tree.map(lambda x: x.astype(jnp.bfloat16), params[name]) for name in small & set(params)}
    out = save_checkpoint(tmp_path, model, params, max_shard_bytes=shard_bytes)
    assert (out / hf.INDEX).is_file() == (shard_bytes == 3000)
    assert load_model(out) == model
    loaded = load_params(out, model)
    _same(loaded, params)
    again = save_checkpoint(tmp_path / "again", model, loaded, max_shard_bytes=shard_bytes)
    for path in out.glob("model*"):
        assert path.read_bytes() == (again / path.name).read_bytes()


def test_gates_are_never_converted_to_half_precision(checkpoint):
    directory, model, params = checkpoint
    loaded = load_params(directory, model, dtype="bfloat16")
    mixer = loaded["linear_layers"]["mixer"]
    for name in ("A_log", "dt_bias"):
        np.testing.assert_array_equal(mixer[name], params["linear_layers"]["mixer"][name])
    assert {mixer["norm"].dtype, loaded["embedding"].dtype, mixer["q"]["kernel"].dtype} == {jnp.dtype("bfloat16")}


def test_gates_stored_in_half_precision_are_accepted(checkpoint):
    directory, model, _ = checkpoint

    def change(values):
        for name in [n for n in values if n.endswith(("A_log", "linear_attn.norm.weight"))]:
            values[name] = values[name].astype(ml_dtypes.bfloat16)

    _rewrite(directory, change)
    mixer = load_params(directory, model)["linear_layers"]["mixer"]
    assert mixer["A_log"].dtype == mixer["norm"].dtype == jnp.bfloat16 and mixer["dt_bias"].dtype == jnp.float32
    assert load_params(directory, model, dtype="float32")["linear_layers"]["mixer"]["A_log"].dtype == jnp.float32


def _vision_language(path, tied, shard_size="1GB"):
    """A vision-language checkpoint as transformers writes it, with a second-token predictor beside it."""
    torch.manual_seed(1)
    text = write_config(dataclasses.replace(CONFIG, tie_embeddings=tied), "float32")["text_config"]
    config = transformers.Qwen3_5Config(
        text_config=text, vision_config=VISION, image_token_id=20, video_token_id=21, vision_start_token_id=22,
        vision_end_token_id=23, tie_word_embeddings=tied,
    )  # fmt: skip
    reference = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    reference.save_pretrained(path, max_shard_size=shard_size)
    return reference


@pytest.mark.parametrize("tied", [False, True])
def test_vision_language_and_text_only_checkpoints_are_the_same_model(tmp_path, tied):
    reference = _vision_language(tmp_path / "vl", tied, "20KB")
    assert (tmp_path / "vl" / hf.INDEX).is_file()
    text = transformers.Qwen3_5ForCausalLM(reference.config.get_text_config())
    text.load_state_dict({n.replace("language_model.", ""): v for n, v in reference.state_dict().items()}, strict=False)
    text.save_pretrained(tmp_path / "text")
    names = set(load_file(tmp_path / "text" / hf.WEIGHTS))
    assert "model.layers.0.linear_attn.A_log" in names and ("lm_head.weight" in names) != tied

    models = {name: load_model(tmp_path / name) for name in ("vl", "text")}
    assert isinstance(models["text"].config, Qwen35Config)
    assert dataclasses.replace(models["vl"].config, wrapper=models["text"].config.wrapper) == models["text"].config
    params = {name: load_params(tmp_path / name, model) for name, model in models.items()}
    _same(params["vl"], params["text"])

    # An export goes under the vision-language names, and takes the tower and its configuration along.
    out = save_checkpoint(tmp_path / "out", models["vl"], params["vl"], tokenizer_from=tmp_path / "vl")
    again, info = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    for name, value in reference.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    config = json.loads((out / "config.json").read_text())
    assert config["vision_config"]["intermediate_size"] == 64 and config["image_token_id"] == 20
    assert load_model(out) == models["vl"]


def test_a_text_only_checkpoint_is_exported_under_the_names_engines_load(checkpoint):
    directory, _, _ = checkpoint
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"] and config["vision_config"]["depth"] == 1
    assert config["text_config"]["full_attention_interval"] == 2
    model = transformers.AutoModelForImageTextToText.from_config(
        transformers.AutoConfig.from_pretrained(directory), dtype=torch.float32
    )
    wanted = {name: tuple(v.shape) for name, v in model.state_dict().items() if not name.startswith("model.visual.")}
    assert {name: v.shape for name, v in load_file(directory / hf.WEIGHTS).items()} == wanted


def test_the_second_token_predictor_is_ignored_and_not_exported(checkpoint, tmp_path):
    directory, model, params = checkpoint
    _rewrite(directory, lambda values: values.update({"mtp.fc.weight": np.zeros((4, 4), np.float32)}))
    loaded = load_params(directory, model)
    _same(loaded, jax.tree.map(jnp.asarray, params))
    out = save_checkpoint(tmp_path / "out", model, loaded, tokenizer_from=directory)
    assert not [name for name in load_file(out / hf.WEIGHTS) if name.startswith("mtp.")]


def test_all_wrong_tensors_are_named_at_once(checkpoint):
    directory, model, _ = checkpoint
    layer = "model.language_model.layers."

    def change(values):
        del values[layer + "1.self_attn.q_norm.weight"], values[layer + "2.linear_attn.A_log"]
        values[layer + "1.linear_attn.A_log"] = np.zeros(4, np.float32)
        values[layer + "0.linear_attn.in_proj_qkv.weight"] = np.zeros((39, 16), np.float32)
        values[layer + "0.linear_attn.conv1d.weight"] = np.zeros((40, 4), np.float32)
        values["model.language_model.norm.weight"] = np.zeros(16, np.int8)

    _rewrite(directory, change)
    with pytest.raises(ModelError) as error:
        load_params(directory, model)
    text = str(error.value)
    assert f"missing {layer}1.self_attn.q_norm.weight [8]" in text
    assert f"missing {layer}2.linear_attn.A_log [4]" in text
    assert f"unexpected {layer}1.linear_attn.A_log" in text
    assert f"{layer}0.linear_attn.in_proj_qkv.weight has shape [39, 16], config.json wants [40, 16]" in text
    assert f"{layer}0.linear_attn.conv1d.weight has shape [40, 4], config.json wants [40, 1, 4]" in text
    assert "model.language_model.norm.weight has the unsupported dtype I8" in text


def test_names_of_the_other_scheme_are_unexpected(checkpoint):
    directory, model, _ = checkpoint
    _rewrite(directory, lambda values: values.update({"model.norm.weight": np.zeros(16, np.float32)}))
    with pytest.raises(ModelError, match=r"unexpected model\.norm\.weight"):
        load_params(directory, model)


def test_parameters_of_a_dtype_without_checkpoints_are_refused(checkpoint, tmp_path):
    _, model, params = checkpoint
    params = params | {"embedding": params["embedding"].astype(np.float64)}
    with pytest.raises(ModelError, match="parameter embedding has dtype float64"):
        save_checkpoint(tmp_path / "out", model, params)


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_a_truncated_shard_is_named(checkpoint, keep):
    directory, model, params = checkpoint
    save_checkpoint(directory, model, params, max_shard_bytes=3000)
    shard = sorted(directory.glob("model-*"))[2]
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(ModelError, match=f"{shard.name} is truncated"):
        load_params(directory, model)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"num_experts": 8}, "num_experts"),
        ({"linear_conv_kernel_dim": None, "head_dim": None}, "head_dim, linear_conv_kernel_dim"),
        ({"linear_num_value_heads": 3}, "3 value heads cannot share 2 key heads"),
        ({"layer_types": ["full_attention"] * 4}, "at least one of each"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "2 entries"),
        ({"layer_types": None, "full_attention_interval": None}, "full_attention_interval"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "default"}}, "no rope_theta"),
        ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.1}}, "rotates 0 of 8"),
    ],
)
def test_a_config_that_would_be_computed_wrongly_is_refused(checkpoint, change, named):
    raw = write_config(CONFIG, "float32")
    raw["text_config"] |= change
    with pytest.raises(ModelError, match=named):
        read_config(raw)


def test_another_architecture_is_refused(checkpoint):
    directory, _, _ = checkpoint
    raw = json.loads((directory / "config.json").read_text()) | {"model_type": "qwen3_5_moe"}
    (directory / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=r"'qwen3_5_moe'; sdjax computes llama, qwen2, qwen3, qwen3_5"):
        load_model(directory)


def test_config_round_trip():
    assert read_config(write_config(CONFIG, "float32")) == CONFIG
    irregular = dataclasses.replace(CONFIG, layer_types=(FULL, LINEAR, LINEAR, FULL), mrope_section=())
    raw = write_config(irregular, "float32")
    assert "full_attention_interval" not in raw["text_config"] and read_config(raw) == irregular
    interval = {"layer_types": None, "full_attention_interval": 2}
    raw = write_config(CONFIG, "float32")
    assert read_config(raw | {"text_config": raw["text_config"] | interval}) == CONFIG


def test_a_tiny_checkpoint_is_complete(tmp_path):
    sizes = {"vocab_size": 300, "hidden": 32, "layers": 5, "heads": 4, "kv_heads": 2, "intermediate": 48}
    written = write_tiny_checkpoint(tmp_path, ["go to shelf 12"] * 3, model_type="qwen3_5", **sizes)
    model, params, tokenizer = load_checkpoint(tmp_path)
    assert model == written and isinstance(model.config, Qwen35Config)
    assert model.config.layer_types == (LINEAR, LINEAR, LINEAR, FULL, FULL)
    assert model.num_params() == sum(x.size for x in jax.tree.leaves(params))
    assert tokenizer.stop_ids and tokenizer.sampling_mask_V.shape == (300,)


STREAM = """
import sys
import jax, jax.numpy as jnp
from sdjax.models.hf import load_model, load_params, save_checkpoint
from sdjax.models.qwen3_5 import Qwen35Model
from sdjax.models.qwen3_5_config import FULL, LINEAR, Qwen35Config

directory, mode = sys.argv[1:]

def memory(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) / 1024

def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return memory("VmRSS")

if mode == "write":
    model = Qwen35Model(Qwen35Config(
        model_type="qwen3_5", vocab_size=16384, hidden_size=512, intermediate_size=2048, layers=16, heads=4, kv_heads=2,
        head_dim=64, max_positions=64, layer_types=(LINEAR, FULL) * 8, linear_key_heads=2, linear_value_heads=4,
        linear_key_dim=64, linear_value_dim=64, conv_kernel=4))
    params = jax.tree.map(lambda x: jnp.ones(x.shape, "bfloat16"), model.shapes())
    before = forget_peak()
    save_checkpoint(directory, model, params, max_shard_bytes=24 * 2**20)
    print(memory("VmHWM") - before)
else:
    model = load_model(directory)
    load_params(directory, model)  # compiles, which takes memory as well
    before = forget_peak()
    params = load_params(directory, model)
    size = sum(x.nbytes for x in jax.tree.leaves(params)) / 2**20
    print(memory("VmHWM") - before - size, size)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure peak memory")
def test_import_and_export_hold_one_shard_in_memory(tmp_path):
    def run(mode):
        command = [sys.executable, "-c", STREAM, str(tmp_path), mode]
        # glibc would keep freed blocks of this size for later, which says nothing about what the code holds.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return [float(x) for x in done.stdout.split()]

    (written,), (read, size) = run("write"), run("read")
    largest = max(path.stat().st_size for path in tmp_path.glob("model-*")) / 2**20
    bound = 1.3 * largest + 32  # the whole model would not fit
    assert size > 1.5 * bound and max(written, read) < bound, (written, read, size, largest)


def test_engines_find_the_rotary_factor_where_they_look():
    text = write_config(CONFIG, "float32")["text_config"]
    assert text["partial_rotary_factor"] == text["rope_parameters"]["partial_rotary_factor"] == 0.5
    assert read_config(write_config(CONFIG, "float32")).partial_rotary_factor == 0.5
