"""Logits against transformers, for every variant of the dense family."""

import jax
import numpy as np
import pytest

from sdjax.models.hf import load_model, load_params, save_checkpoint

torch = pytest.importorskip("torch", reason="transformers' models need torch, a test dependency")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "llama-gqa-tied": ("LlamaConfig", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-mha-untied-bias": ("LlamaConfig", {"num_key_value_heads": 4, "attention_bias": True}),
    "llama3-rope": ("LlamaConfig", {"num_key_value_heads": 1, "rope_parameters": LLAMA3}),
    "qwen2-untied": ("Qwen2Config", {"num_key_value_heads": 2, "rms_norm_eps": 1e-5}),
    "qwen3-tied": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 12, "tie_word_embeddings": True}),
}


def _reference(name):
    config_name, changes = VARIANTS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**SIZES | changes)
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter += 0.05 * torch.randn_like(parameter)  # fresh norms and biases would hide mistakes
    return reference


def _reference_logits(reference, tokens):
    with torch.no_grad():
        return reference(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers_both_ways(name, tmp_path):
    reference = _reference(name)
    reference.save_pretrained(tmp_path / "theirs")
    tokens = np.random.default_rng(0).integers(0, 97, (2, 150)).astype(np.int32)
    wanted = _reference_logits(reference, tokens)

    model = load_model(tmp_path / "theirs")
    params = load_params(tmp_path / "theirs", model)
    position, segment = np.arange(150)[None].repeat(2, 0), np.ones((2, 150), np.int32)
    logits = jax.jit(lambda p: model.logits(p, model.hidden(p, tokens, position, segment)))(params)
    assert np.abs(np.asarray(logits) - wanted).max() <= 1e-4 * np.abs(wanted).max()

    save_checkpoint(tmp_path / "ours", model, params)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto").eval()
    assert again.dtype == torch.float32
    np.testing.assert_array_equal(_reference_logits(again, tokens), wanted)


def test_bfloat16_export_loads_in_transformers(tmp_path):
    reference = _reference("qwen3-tied")
    reference.save_pretrained(tmp_path / "theirs")
    model = load_model(tmp_path / "theirs")
    params = load_params(tmp_path / "theirs", model, dtype="bfloat16")
    save_checkpoint(tmp_path / "ours", model, params)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    wanted = reference.to(torch.bfloat16).state_dict()
    assert again.dtype == torch.bfloat16
    assert all(torch.equal(value, wanted[name]) for name, value in again.state_dict().items())
