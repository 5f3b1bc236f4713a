"""Export of a run: what comes out is what was trained, loads elsewhere, and takes little memory."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdjax.config import resolved
from sdjax.errors import CheckpointError, ConfigError, ModelError, RunDirError
from sdjax.models import hf, load_checkpoint, load_model, load_params, resolve_checkpoint
from sdjax.train.checkpoints import Checkpoints
from sdjax.train.export import export
from sdjax.train.update import Updater
from tests.models.test_gguf import _write as write_gguf
from tests.models.test_qwen3_5_training import _checkpoint as qwen35_checkpoint
from tests.train.tiny_run import run, tiny_checkpoint, tiny_config

ROOT = Path(__file__).parents[2]


def _same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)
    assert [x.dtype for x in jax.tree.leaves(a)] == [x.dtype for x in jax.tree.leaves(b)]


def _saved_run(path, model_path, params):
    """A run directory with checkpoints 0 and 3, without a training."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(resolved(tiny_config(model_path))))
    checkpoints = Checkpoints((path / "checkpoints").absolute(), keep=2, asynchronous=False)
    for step in (0, 3):
        moved = jax.tree.map(lambda x, step=step: x + step, params)
        state = {"params": moved, "updates": jnp.int32(step)}
        checkpoints.save(step, state, {"step": step})
    checkpoints.close()
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(run directory, base checkpoint, base parameters) of a dense model."""
    directory = tmp_path_factory.mktemp("export")
    base = tiny_checkpoint(directory / "base")
    params = load_params(base, load_model(base))
    return _saved_run(directory / "run", base, params), base, params


# ---- trained runs ----


@pytest.fixture(scope="module", params=["dense", "qwen3_5"])
def trained(request, tmp_path_factory):
    """(run directory, base checkpoint) after two updates."""
    directory = tmp_path_factory.mktemp("trained")
    base = tiny_checkpoint(directory / "base") if request.param == "dense" else qwen35_checkpoint(directory)
    run(tiny_config(base, steps=2), directory / "run")
    return directory / "run", base


def _trained_params(path, base, start):
    """As a resumed run reads them."""
    config = tiny_config(base, steps=2)
    allowed = np.ones(len(start["embedding"]), bool)
    updater = Updater(load_model(base), config.method.build(), config.train, 1.0, allowed)
    checkpoints = Checkpoints((path / "checkpoints").absolute(), keep=2, asynchronous=False)
    found = checkpoints.restore(2, updater.init(start))["params"]
    checkpoints.close()
    return found


@pytest.mark.slow
def test_a_trained_policy_is_exported_bit_for_bit_and_computes_the_same_in_transformers(trained, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    path, base = trained
    before, start, tokenizer = load_checkpoint(base)
    out = export(path, step=None, out=tmp_path / "out", dtype="float32")
    model, params, again = load_checkpoint(out)
    assert model == before and again.render_chat("hi 1") == tokenizer.render_chat("hi 1")
    assert again.stop_ids == tokenizer.stop_ids
    _same(params, _trained_params(path, base, start))
    assert not np.array_equal(params["embedding"], start["embedding"])
    facts = json.loads((out / "export.json").read_text())
    assert facts["step"] == 2 and facts["dtype"] == "float32"

    tokens = np.random.default_rng(0).integers(0, len(params["embedding"]), (2, 70)).astype(np.int32)
    position, segment = np.arange(70)[None].repeat(2, 0), np.ones((2, 70), np.int32)
    logits = jax.jit(lambda p: model.logits(p, model.hidden(p, tokens, position, segment)))(params)
    kind = (
        transformers.Qwen3_5ForCausalLM if model.config.model_type == "qwen3_5" else transformers.AutoModelForCausalLM
    )
    reference = kind.from_pretrained(out, dtype="auto").eval()
    with torch.no_grad():
        wanted = reference(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    assert reference.dtype == torch.float32
    assert np.abs(np.asarray(logits) - wanted).max() <= 1e-4 * np.abs(wanted).max()


# ---- checkpoints without a training ----


def test_the_newest_step_or_any_other(small, tmp_path):
    path, base, params = small
    model = load_model(base)
    _same(load_params(export(path, step=0, out=tmp_path / "0", dtype="float32"), model), params)
    newest = load_params(export(path, step=None, out=tmp_path / "new", dtype="float32"), model)
    _same(newest, jax.tree.map(lambda x: x + 3, params))


@pytest.mark.slow
def test_the_command_writes_half_precision_below_the_run(small, tmp_path):
    path = shutil.copytree(small[0], tmp_path / "run")
    command = [sys.executable, "-m", "sdjax.main", "--mode=export", f"--workdir={path}", "--step=0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    out = path / "export" / "step_000000"
    assert "export" in done.stdout and [p.name for p in out.parent.iterdir()] == [out.name]
    half = load_params(out, load_model(out))
    _same(half, jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), small[2]))
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert again.returncode == 2 and "not empty" in again.stderr and "Traceback" not in again.stderr


def test_a_gguf_base_gives_an_ordinary_llama_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(tmp_path / "m.gguf")
    base = resolve_checkpoint(tmp_path / "m.gguf")
    params = load_params(base, load_model(base), dtype="float32")
    path = _saved_run(tmp_path / "run", tmp_path / "m.gguf", params)
    out = export(path, step=0, out=tmp_path / "out", dtype="float32")
    model, again, tokenizer = load_checkpoint(out)
    _same(again, params)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert tokenizer.decode(tokenizer.encode("go to shelf 12")) == "go to shelf 12" and model == load_model(base)


def test_tensors_of_a_vision_tower_come_from_the_base(tmp_path):
    from safetensors.numpy import load_file, save_file

    base = qwen35_checkpoint(tmp_path)
    values = load_file(base / hf.WEIGHTS)
    tower = {"model.visual.patch_embed.proj.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}
    save_file(values | tower, base / hf.WEIGHTS)
    path = _saved_run(tmp_path / "run", base, load_params(base, load_model(base)))
    written = load_file(export(path, step=3, out=None) / hf.WEIGHTS)
    assert written.keys() == (values | tower).keys()
    np.testing.assert_array_equal(written[next(iter(tower))], next(iter(tower.values())))
    assert written["model.language_model.layers.0.linear_attn.A_log"].dtype == np.float32
    assert written["model.language_model.embed_tokens.weight"].dtype == jnp.bfloat16


def test_bad_requests_name_what_is_there(small, tmp_path):
    path, _, _ = small
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7 \(it has 0, 3\)"):
        export(path, step=7, out=tmp_path / "out")
    with pytest.raises(RunDirError, match="no run directory"):
        export(tmp_path / "nowhere", step=None, out=None)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        export(path, step=3, out=tmp_path / "full")
    (tmp_path / "empty").mkdir()
    export(path, step=3, out=tmp_path / "empty")
    assert (tmp_path / "full" / "precious").read_text() == "x" and (tmp_path / "empty" / "config.json").is_file()


def test_a_base_that_is_gone_or_another_model_is_named(small, tmp_path):
    _, base, params = small
    moved = _saved_run(tmp_path / "run", tmp_path / "gone", params)
    with pytest.raises(ModelError, match="gone"):
        export(moved, step=3, out=None)
    other = shutil.copytree(base, tmp_path / "gone")
    raw = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(raw | {"intermediate_size": 48}))
    with pytest.raises(CheckpointError, match=r"layers\.mlp.*\[1, .*32.*wants"):
        export(moved, step=3, out=None)
    (other / "config.json").write_text(json.dumps(raw | {"model_type": "qwen2"}))
    with pytest.raises(CheckpointError, match=r"layers\.attn\.k\.bias.*cannot be read"):
        export(moved, step=3, out=None)
    assert not (moved / "export").exists() or not any((moved / "export").iterdir())


def test_a_damaged_checkpoint_is_named_and_leaves_nothing(small, tmp_path):
    path, _, _ = small
    damaged = shutil.copytree(path, tmp_path / "run")
    for file in (damaged / "checkpoints" / "3" / "state" / "ocdbt.process_0" / "d").iterdir():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        export(damaged, step=3, out=tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_a_full_disk_leaves_nothing(small, tmp_path, monkeypatch):
    path, _, _ = small

    def full_disk(path, items):
        path.write_bytes(b"a part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf, "write_shard", full_disk)
    with pytest.raises(ModelError, match="No space left"):
        export(path, step=3, out=tmp_path / "out")
    assert not list(tmp_path.iterdir())


MEMORY = """
import functools, json, pathlib, sys
import jax, jax.numpy as jnp
from sdjax.config import resolved
from sdjax.models.hf import save_checkpoint
from sdjax.models.qwen3_5 import Qwen35Model
from sdjax.models.qwen3_5_config import FULL, LINEAR, Qwen35Config
from sdjax.train import export
from sdjax.train.checkpoints import Checkpoints
from tests.train.tiny_run import tiny_config

directory, mode = pathlib.Path(sys.argv[1]), sys.argv[2]

def memory(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) / 1024

if mode == "write":
    model = Qwen35Model(Qwen35Config(
        model_type="qwen3_5", vocab_size=16384, hidden_size=512, intermediate_size=2048, layers=16, heads=4, kv_heads=2,
        head_dim=64, max_positions=64, layer_types=(LINEAR, FULL) * 8, linear_key_heads=2, linear_value_heads=4,
        linear_key_dim=64, linear_value_dim=64, conv_kernel=4, tie_embeddings=True))
    params = jax.tree.map(lambda x: jnp.ones(x.shape, "float32"), model.shapes())
    save_checkpoint(directory / "base", model, params)
    (directory / "run").mkdir()
    (directory / "run" / "config.json").write_text(json.dumps(resolved(tiny_config(directory / "base"))))
    checkpoints = Checkpoints(directory / "run" / "checkpoints", keep=1, asynchronous=False)
    checkpoints.save(0, {"params": params}, {"step": 0})
    checkpoints.close()
    print(sum(x.nbytes for x in jax.tree.leaves(params)) / 2**20)
else:
    export.save_checkpoint = functools.partial(save_checkpoint, max_shard_bytes=32 * 2**20)
    export._CACHE_BYTES = 8 * 2**20
    run = lambda name: export.export(directory / "run", step=0, out=directory / name, dtype="float32")
    run("first")  # imports and thread pools take memory as well
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = memory("VmRSS")
    run("second")
    print(memory("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure peak memory")
def test_an_export_holds_one_tensor_in_memory(tmp_path):
    def run(mode):
        command = [sys.executable, "-c", MEMORY, str(tmp_path), mode]
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return float(done.stdout)

    size, peak = run("write"), run("export")
    largest = max(path.stat().st_size for path in (tmp_path / "second").glob("model-*")) / 2**20
    bound = 1.3 * largest + 48  # the whole model would not fit
    assert size > 1.5 * bound and peak < bound, (size, peak, largest)
