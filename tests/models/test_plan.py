"""The memory plan against XLA's own account of the real training step, and the command."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sdjax.models.config import ModelConfig, dense_config_json
from sdjax.models.plan import main, verdict
from sdjax.models.qwen3_5_config import FULL, LINEAR, Qwen35Config, write_config
from sdjax.models.shapes import SHAPES
from sdjax.train.memory import (
    ALWAYS,
    HEAD,
    LAYERS,
    ROLLOUT,
    Workload,
    layer_kinds,
    parameter_bytes,
    plan,
    stored_activations,
)

ROOT = Path(__file__).parents[2]

HYBRID = Qwen35Config(
    model_type="qwen3_5", vocab_size=8192, hidden_size=256, intermediate_size=768, layers=8, heads=4, kv_heads=2,
    head_dim=64, max_positions=4096, partial_rotary_factor=0.25, tie_embeddings=True,
    layer_types=(LINEAR, LINEAR, LINEAR, FULL) * 2, linear_key_heads=4, linear_value_heads=4, linear_key_dim=64,
    linear_value_dim=64, conv_kernel=4,
)  # fmt: skip
# Small layers under a large vocabulary: the head holds most.
LARGE_HEAD = dataclasses.replace(
    HYBRID, vocab_size=32768, intermediate_size=256, layers=4, layer_types=(LINEAR, LINEAR, LINEAR, FULL),
    linear_key_heads=2, linear_value_heads=2, tie_embeddings=False,
)  # fmt: skip
DENSE = ModelConfig(
    model_type="qwen3", vocab_size=8192, hidden_size=256, intermediate_size=768, layers=6, heads=4, kv_heads=2,
    head_dim=64, max_positions=4096, tie_embeddings=True, qk_norm=True,
)  # fmt: skip
STEP = ["--pack_length=1024", "--loss_slots=256"]
CASES = {
    "fsdp": (HYBRID, ["--devices=8", *STEP], LAYERS),
    "large head": (LARGE_HEAD, ["--devices=8", "--pack_length=128", "--loss_slots=128", "--pack_rows=32"], HEAD),
    "dense": (DENSE, ["--mesh=1,4,2", *STEP], LAYERS),
}


def _checkpoint(directory, config):
    """A directory with nothing but a config.json."""
    write = write_config if isinstance(config, Qwen35Config) else dense_config_json
    (directory / "config.json").write_text(json.dumps(write(config, "float32")))
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_formula_is_near_what_xla_needs(name, tmp_path):
    config, options, phase = CASES[name]
    # float32, which a CPU computes as it is written.
    options = [f"--model={_checkpoint(tmp_path, config)}", *options, "--compute_dtype=float32", "--compile", "--json"]
    command = [sys.executable, "-m", "sdjax.models.plan", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    of = {p: sum(part["bytes"] for part in found["parts"] if part["phase"] == p) for p in (LAYERS, HEAD)}
    assert max(of, key=of.__getitem__) == phase
    parts = {part["name"]: part["bytes"] for part in found["parts"]}
    gradient, update = found["compiled"]["gradient"], found["compiled"]["update"]
    # Arguments: parameters and gradients, and little else; the update has both moments too and works in place.
    state = parts["parameters"] + parts["Adam moments"] + parts["gradients"]
    assert 0 <= gradient["argument"] - parts["parameters"] - parts["gradients"] < 2**20
    assert 0 <= update["argument"] - state < 2**16 and max(gradient["output"], update["output"]) < 2**20
    assert update["temporary"] < gradient["temporary"]
    assert of[phase] == pytest.approx(gradient["temporary"], rel=0.1)
    assert state + of[phase] == pytest.approx(update["argument"] + gradient["temporary"], rel=0.1)


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3.5-0.8b", 0.752), ("qwen3.5-2b", 1.881), ("qwen3.5-4b", 4.205), ("qwen3.5-9b", 8.953)]
)
def test_published_shapes_have_the_published_sizes(name, billions):
    w = Workload(SHAPES[name])
    assert parameter_bytes(w) == 4 * w.model().num_params()
    assert w.model().num_params() / 1e9 == pytest.approx(billions, abs=1e-3)


def test_states_and_keys_of_a_slot():
    def engine(config, slots, context):
        parts = plan(Workload(config, pack_length=64, slots=slots, context=context)).parts
        return {part.name: part.bytes for part in parts if part.name.startswith("engine")}

    config = dataclasses.replace(SHAPES["qwen3.5-2b"], vocab_size=512)
    one, two = engine(config, 1, 1000), engine(config, 2, 2000)
    assert one["engine: keys and values"] == 12_288_000 and two["engine: keys and values"] == 4 * 12_288_000
    # 16 states of 128 x 128 float32 in each of 18 layers, and three tokens of 6,144 channels in bfloat16.
    assert one["engine: recurrent states"] == 18 * (16 * 128 * 128 * 4 + 3 * 6144 * 2)
    assert two["engine: recurrent states"] == 2 * one["engine: recurrent states"]
    assert not engine(config, 0, 1000)


@pytest.mark.parametrize("config", [HYBRID, DENSE], ids=["hybrid", "dense"])
def test_parts_follow_what_they_depend_on(config):
    base = Workload(config, fsdp=4, pack_rows=4, pack_length=64)
    change = lambda **changes: dataclasses.replace(base, **changes)  # noqa: E731
    assert parameter_bytes(change(fsdp=2, pack_rows=2)) == pytest.approx(2 * parameter_bytes(base), rel=1e-2)
    assert stored_activations(change(pack_rows=8)) == 2 * stored_activations(base)
    kept, half = layer_kinds(base), layer_kinds(change(tensor=2))
    assert all(b.weights < 0.51 * a.weights and b.kept < 0.9 * a.kept for a, b in zip(kept, half, strict=True))
    assert plan(change(references=2)).total - plan(base).total == parameter_bytes(base)
    # A prefill and the gradient are never at work together: the larger counts.
    one_row = plan(change(pack_rows=1, pack_length=16, loss_slots=1))
    weights = next(part.bytes for part in one_row.parts if part.name == "engine: weights")
    assert one_row.of(ROLLOUT) == weights and one_row.total == one_row.of(ALWAYS) + max(one_row.working, weights)
    assert plan(change(slots=0)).of(ROLLOUT) == 0


def test_what_is_stored_grows_with_each_step_towards_storing_everything():
    modes = (Workload(DENSE, pack_length=256, remat=remat) for remat in ("full", "dots", "none"))
    full, dots, everything = (stored_activations(w) for w in modes)
    assert full == DENSE.layers * 256 * DENSE.hidden_size * 2 and full < dots < everything


def test_the_command_prints_a_verdict(capsys, tmp_path):
    model = f"--model={_checkpoint(tmp_path, DENSE)}"
    assert main([model, "--devices=2", "--pack_length=128"]) == 0
    out = capsys.readouterr().out
    assert "Adam moments" in out and "fits" in out and "does not fit" not in out
    assert main([model, "--pack_length=128", "--gpu_gib=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"].startswith("does not fit") and found["workload"]["fsdp"] == 1


def test_a_config_file_fills_in_what_is_not_given(capsys, tmp_path):
    model = f"--model={_checkpoint(tmp_path, DENSE)}"
    config = f"--config={ROOT / 'experiments' / 'quickstart.py'}:grpo"
    assert main([model, config, "--slots=3", "--json"]) == 0
    w = json.loads(capsys.readouterr().out)["workload"]
    from sdjax.models.plan import _run_config

    train = _run_config(config.removeprefix("--config=")).train
    assert (w["pack_rows"], w["pack_length"], w["loss_slots"]) == (train.pack_rows, train.pack_length, train.loss_slots)
    assert w["slots"] == 3 and w["compute_dtype"] == "float32" and w["attention"] == "xla"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--mesh=1,8"], "write --mesh=data,fsdp,tensor"),
        (["--mesh=1,4,1", "--devices=8"], "1 x 4 x 1 is not one of 8 devices"),
        (["--devices=8", "--pack_rows=12"], "12 packed rows do not divide"),
        (["--mesh=1,1,3"], "mesh.tensor = 3 does not divide num_attention_heads = 4"),
        (["--config=nowhere.py"], "nowhere.py is no config file"),
        (["--model=nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_planned_is_named(options, named, capsys, tmp_path):
    assert main([f"--model={_checkpoint(tmp_path, DENSE)}", *options]) in (1, 2)
    assert named in capsys.readouterr().err


def test_the_verdict_says_what_jax_must_be_told():
    assert verdict(50.0, 80.0) == "fits: 30.0 of 80 GiB are left"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION to at least 0.89" in verdict(70.0, 80.0)
    assert verdict(90.5, 80.0) == "does not fit: 10.5 GiB too much for 80 GiB"
