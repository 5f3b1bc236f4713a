"""Qwen3.5 against transformers: logits, gradients, padding, packed rows, prefill and decoding, for all shapes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdjax.models.hf import load_model, load_params, save_checkpoint
from sdjax.models.registry import family_of
from sdjax.models.tensors import assemble, layout

torch = pytest.importorskip("torch", reason="transformers' models need torch, a test dependency")
transformers = pytest.importorskip("transformers")

VOCAB, T = 61, 150
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
FAMILIES = {
    "equal-heads-tied": {"tie_word_embeddings": True},
    "more-value-heads": {"num_key_value_heads": 1, "linear_num_value_heads": 4, "linear_value_head_dim": 12},
    "mha-conv3-interval2-tied": {
        "num_key_value_heads": 4, "linear_num_value_heads": 6, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
}  # fmt: skip
LENGTHS = (37, 70, 1, 29, 13)  # of packed rows: they begin inside chunks, and one is a single token


@functools.cache
def _reference(name):
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(**SIZES | FAMILIES[name])
    reference = transformers.Qwen3_5ForCausalLM(config).float().eval()
    with torch.no_grad():
        for key, parameter in reference.named_parameters():
            # Fresh norms, gates and biases would hide mistakes. Moderate weights: transformers is no more exact than we
            # are, and larger ones would blow the rounding of both up beyond the tolerance.
            noise = torch.randn_like(parameter)
            if "norm" in key:
                parameter += 0.2 * noise
            elif "A_log" in key:
                # Slow decay: what leaks over a border must not be forgotten before anybody reads it.
                parameter.copy_(torch.log(0.1 * torch.rand_like(parameter) + 0.002))
            elif "conv1d" in key:
                parameter.copy_(0.4 * noise)
            elif "dt_bias" in key:
                parameter.copy_(noise)
            else:
                scale = 1.0 if "embed" in key or "lm_head" in key else 0.3
                parameter.copy_(scale * parameter.shape[-1] ** -0.5 * noise)
    return reference


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """(transformers' model, ours, our parameters)."""
    directory = tmp_path_factory.mktemp(request.param)
    reference = _reference(request.param)
    reference.save_pretrained(directory)
    model = load_model(directory)
    return reference, model, load_params(directory, model)


def _theirs(reference, tokens, mask=None):
    with torch.no_grad():
        mask = None if mask is None else torch.tensor(mask)
        return reference(torch.tensor(tokens, dtype=torch.long), attention_mask=mask, use_cache=False).logits.numpy()


@functools.cache
def _forward(model):
    return jax.jit(lambda params, *inputs: model.logits(params, model.hidden(params, *inputs)))


def _ours(model, params, tokens, segment=None, position=None):
    segment = np.ones(tokens.shape, np.int32) if segment is None else segment
    position = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape) if position is None else position
    return np.asarray(_forward(model)(params, tokens, position, segment))


def _tokens(seed, rows=2, length=T):
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, length)).astype(np.int32)


def _close(found, wanted, rel=1e-4):
    assert np.linalg.norm(found - wanted) <= rel * np.linalg.norm(wanted)


def test_logits_equal_transformers_both_ways(pair, tmp_path):
    reference, model, params = pair
    tokens = _tokens(0)
    wanted = _theirs(reference, tokens)
    assert wanted.std() > 0.2
    _close(_ours(model, params, tokens), wanted)
    save_checkpoint(tmp_path, model, params)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    np.testing.assert_array_equal(_theirs(again.eval(), tokens), wanted)


@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_padding_equals_transformers(pair, side):
    reference, model, params = pair
    tokens, mask = _tokens(1), np.ones((2, T), np.int32)
    mask[0, slice(0, 60) if side == "left" else slice(90, None)] = 0
    wanted = _theirs(reference, tokens, mask)
    position = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    _close(_ours(model, params, tokens, mask, position)[mask == 1], wanted[mask == 1])


def _packed():
    """A packed row and a row of padding, so that all forward passes have one shape; and the packed sequences."""
    tokens, segment, position = _tokens(2), np.zeros((2, T), np.int32), np.zeros((2, T), np.int32)
    segment[0] = np.repeat(np.arange(1, 6), LENGTHS)
    position[0] = np.concatenate([np.arange(n) for n in LENGTHS])
    begins = np.cumsum((0, *LENGTHS[:-1]))
    return tokens, segment, position, [tokens[:1, b : b + n] for b, n in zip(begins, LENGTHS)]


def test_packed_rows_equal_separate_runs_of_transformers(pair):
    reference, model, params = pair
    tokens, segment, position, separate = _packed()
    wanted = np.concatenate([_theirs(reference, part)[0] for part in separate])
    _close(_ours(model, params, tokens, segment, position)[0], wanted)


def test_gradients_of_packed_rows_equal_those_of_transformers(pair):
    reference, model, params = pair
    tokens, segment, position, separate = _packed()
    reference.zero_grad()
    total = torch.zeros(())
    for part in separate:
        part = torch.tensor(part, dtype=torch.long)
        logps = torch.log_softmax(reference(part, use_cache=False).logits[0, :-1], -1)
        total = total + logps.gather(1, part[0, 1:, None]).sum()
    total.backward()
    theirs = {name: parameter.grad.numpy() for name, parameter in reference.named_parameters()}

    @jax.jit
    def ours(params):
        logits = model.logits(params, model.hidden(params, tokens, position, segment, remat="full"))
        logps = jnp.take_along_axis(jax.nn.log_softmax(logits[0, :-1]), tokens[0, 1:, None], axis=1)[:, 0]
        return jnp.where(segment[0, 1:] == segment[0, :-1], logps, 0).sum()

    value, gradient = jax.value_and_grad(ours)(params)
    np.testing.assert_allclose(float(value), float(total.detach()), rtol=1e-5)
    stored = layout(family_of("qwen3_5").tensors(model.config), gradient, "model.")
    assert set(stored) == set(theirs)
    for name, wanted in theirs.items():
        assert np.any(wanted), name
        _close(assemble(stored[name], gradient), wanted)


def test_ragged_prefill_and_forty_steps_equal_transformers(pair):
    reference, model, params = pair
    lengths, steps = np.array([61, 100], np.int32), 40
    tokens = _tokens(3)
    wanted = _theirs(reference, tokens)

    hidden, cache = jax.jit(model.prefill)(params, tokens[:, :100], lengths)
    logits = np.asarray(model.logits(params, hidden))
    _close(logits[0, :61], wanted[0, :61])
    _close(logits[1], wanted[1, :100])
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, T - 100), (0, 0), (0, 0))) for x in (cache.k, cache.v))
    cache, layers = dataclasses.replace(cache, k=k, v=v).by_layer(), model.unstack(params)

    @jax.jit
    def decode(cache, token, position):
        hidden, cache = model.decode(layers, cache, token, position, jnp.ones(2, bool))
        return model.logits(layers, hidden), cache

    for step in range(steps):
        at = lengths + step
        logits, cache = decode(cache, tokens[np.arange(2), at], at)
        _close(np.asarray(logits), wanted[np.arange(2), at])
