"""The dense decoder against itself: packed rows, padding, caches, gradients, sharding names."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdjax.errors import ConfigError
from sdjax.models import attention
from sdjax.models.base import masked_logits
from sdjax.models.config import ModelConfig
from sdjax.models.dense import DenseModel

BASE = ModelConfig(
    model_type="qwen3",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=12,
    max_positions=128,
    qk_norm=True,
    initializer_range=0.2,
)
QWEN2 = ModelConfig(
    model_type="qwen2",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    layers=2,
    heads=4,
    kv_heads=1,
    head_dim=8,
    max_positions=128,
    qkv_bias=True,
    tie_embeddings=True,
    initializer_range=0.2,
)


SHAPE = (6, 64)  # every full forward pass has this shape, so that each model is compiled once


def _randomized(params):
    """Every parameter random: fresh scales are ones and fresh biases zeros, which would hide mistakes."""
    random = np.random.default_rng(1)
    return jax.tree.map(lambda x: x + 0.1 * random.standard_normal(x.shape).astype(np.float32), params)


@functools.cache
def _model(config=BASE):
    model = DenseModel(config)
    return model, _randomized(model.init(jax.random.key(0)))


@functools.cache
def _forward(model):
    return jax.jit(lambda params, *inputs: model.logits(params, model.hidden(params, *inputs)))


@functools.cache
def _gradient(config, remat="none"):
    """Loss over the valid states, and its gradient."""
    model, _ = _model(config)

    def loss(params, tokens, position, segment):
        hidden = model.hidden(params, tokens, position, segment, remat=remat)
        return jnp.where(segment, jnp.sum(hidden**2, axis=-1), 0).sum()

    return jax.jit(jax.value_and_grad(loss))


def _inputs(rows):
    """(tokens, position, segment) of plain rows, padded to ``SHAPE``."""
    tokens, segment = np.zeros(SHAPE, np.int32), np.zeros(SHAPE, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], segment[i, : len(row)] = row, 1
    return tokens, np.broadcast_to(np.arange(SHAPE[1], dtype=np.int32), SHAPE), segment


def _plain(rows, config=BASE):
    """Logits [6, 64, V] of rows without packing."""
    model, params = _model(config)
    return np.asarray(_forward(model)(params, *_inputs(rows)))


def _tokens(seed, *shape):
    return np.random.default_rng(seed).integers(0, BASE.vocab_size, shape).astype(np.int32)


def _close(found, wanted, rel=1e-4):
    assert np.abs(found - wanted).max() <= rel * np.abs(wanted).max()


def _packed(lengths, padding, seed):
    """One packed row and the same sequences as separate rows. Padding lies in front and behind."""
    tokens, position, segment = (np.zeros(SHAPE, np.int32) for _ in range(3))
    rows, begin = [], padding
    for i, n in enumerate(lengths):
        rows.append(_tokens(seed + i, n))
        tokens[0, begin : begin + n], position[0, begin : begin + n] = rows[i], np.arange(n)
        segment[0, begin : begin + n] = i + 1
        begin += n
    return rows, (tokens, position, segment)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=6), st.integers(0, 4), st.integers(0, 2**16))
def test_packed_row_equals_separate_rows(lengths, padding, seed):
    model, params = _model()
    rows, inputs = _packed(lengths, padding, seed)
    packed, separate = np.asarray(_forward(model)(params, *inputs)), _plain(rows)
    begin = padding
    for i, n in enumerate(lengths):
        _close(packed[0, begin : begin + n], separate[i, :n])
        begin += n


def test_a_token_sees_only_its_past():
    tokens = _tokens(0, 1, 20)
    changed = tokens.copy()
    changed[0, 12] = (changed[0, 12] + 1) % BASE.vocab_size
    before, after = _plain(tokens), _plain(changed)
    np.testing.assert_array_equal(before[:, :12], after[:, :12])
    assert np.abs(before[0, 12:20] - after[0, 12:20]).max(axis=-1).min() > 1e-4


@pytest.mark.parametrize("pad_id", [0, -100, 10**6])
@pytest.mark.parametrize("config", [BASE, QWEN2], ids=["qwen3", "qwen2"])
def test_padding_never_leaks(pad_id, config):
    model, params = _model(config)
    _, (tokens, position, segment) = _packed([7, 9], 3, seed=5)
    tokens = np.where((segment != 0) & (tokens == 0), 1, tokens)
    poisoned = params | {"embedding": params["embedding"].at[0].set(jnp.nan)}
    padded = np.where(segment == 0, pad_id, tokens)
    # A tied head has the poisoned row as well; its one logit is left out.
    found = np.asarray(_forward(model)(poisoned, padded, position, segment))[..., 1:]
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, np.asarray(_forward(model)(params, tokens, position, segment))[..., 1:])
    if config is BASE:
        value, gradient = _gradient(config)(poisoned, padded, position, segment)
        assert np.isfinite(value) and all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


def test_recomputation_and_query_chunks_change_no_gradient(monkeypatch):
    _, params = _model()
    _, inputs = _packed([20, 9, 14], 2, seed=6)
    whole, whole_gradient = _gradient(BASE)(params, *inputs)
    monkeypatch.setattr(attention, "QUERY_CHUNK", 24)
    parts, parts_gradient = _gradient(BASE, remat="full")(params, *inputs)
    np.testing.assert_allclose(parts, whole, rtol=1e-5)
    jax.tree.map(lambda a, b: _close(np.asarray(a), np.asarray(b)), parts_gradient, whole_gradient)


def test_written_out_layers_and_an_unknown_recomputation():
    model, params = _model()
    tokens, position, segment = _packed([20, 9, 14], 2, seed=6)[1]
    written = dataclasses.replace(model, scan_layers=False)
    run = lambda m, remat: m.hidden(params, tokens, position, segment, remat=remat)  # noqa: E731
    _close(np.asarray(run(written, "dots")), np.asarray(run(model, "none")))
    with pytest.raises(ConfigError, match="remat is 'some'"):
        run(model, "some")


@functools.cache
def _decode(config, context=None):
    model, params = _model(config)
    params = model.unstack(params)

    def run(cache, token, position, active):
        hidden, cache = model.decode(params, cache, token, position, active, context=context)
        return model.logits(params, hidden), cache

    return jax.jit(run)


ROWS, NEW, LENGTH = 4, 20, 64  # rows and tokens of a prefill call, positions of the cache that decoding goes on in


def _prefill(config, tokens, lengths):
    """Logits of ROWS new sequences of at most NEW tokens, and their cache by layer, with space for LENGTH tokens."""
    model, params = _model(config)
    hidden, cache = jax.jit(model.prefill)(params, tokens, lengths)
    longer = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, LENGTH - NEW), (0, 0), (0, 0))), cache)
    return np.asarray(model.logits(params, hidden)), longer.by_layer()


@pytest.mark.parametrize(
    "config, context", [(BASE, None), (QWEN2, None), (BASE, 60)], ids=["qwen3", "qwen2", "context"]
)
def test_ragged_prefill_and_decoding_equal_the_full_forward(config, context):
    lengths, steps = np.array([3, 17, 8, 1]), 40
    tokens = _tokens(4, ROWS, 60)
    full = _plain(tokens, config)
    logits, cache = _prefill(config, tokens[:, :NEW], lengths)
    for row, n in enumerate(lengths):
        _close(logits[row, :n], full[row, :n])
    for step in range(steps):
        at = lengths + step
        logits, cache = _decode(config, context)(cache, tokens[np.arange(4), at], at, np.ones(4, bool))
        _close(np.asarray(logits), full[np.arange(4), at])


def _written(before, after):
    """[rows, length] bool: positions that changed in any layer."""
    return np.any([np.abs(np.asarray(a - b)).max(axis=(2, 3)) > 0 for a, b in zip(before, after)], axis=0)


def test_inactive_rows_and_rows_beyond_the_tokens_keep_their_cache():
    tokens = _tokens(6, ROWS, 8)
    _, cache = _prefill(BASE, np.pad(tokens, ((0, 0), (0, NEW - 8))), np.array([8, 5, 8, 7]))
    new, position = np.array([1, 10**6, 7]), np.array([8, 5, 8])
    logits, after = _decode(BASE)(cache, new, position, np.array([True, False, True]))
    wanted = np.zeros((ROWS, LENGTH), bool)
    wanted[0, 8] = wanted[2, 8] = True
    np.testing.assert_array_equal(_written(cache.k, after.k), wanted)
    np.testing.assert_array_equal(_written(cache.v, after.v), wanted)
    assert np.isfinite(logits).all()
    _close(np.asarray(logits)[2], _plain(np.concatenate([tokens[2], new[2:]])[None])[0, 8])


def test_tokens_behind_the_end_of_the_cache_are_dropped():
    _, cache = _prefill(BASE, _tokens(7, ROWS, NEW), np.full(ROWS, NEW))
    _, after = _decode(BASE)(
        cache, np.ones(ROWS, int), np.array([LENGTH - 1, LENGTH, LENGTH + 3, 20]), np.ones(ROWS, bool)
    )
    wanted = np.zeros((ROWS, LENGTH), bool)
    wanted[0, LENGTH - 1] = wanted[3, 20] = True
    np.testing.assert_array_equal(_written(cache.k, after.k), wanted)


def test_unstacked_parameters_are_stacked_again_and_vectors_stay_in_full_precision():
    model, params = _model()
    jax.tree.map(np.testing.assert_array_equal, model.stack(model.unstack(params)), params)
    half = DenseModel(BASE, jnp.bfloat16).unstack(params)
    assert {x.dtype.name for x in jax.tree.leaves(half) if x.ndim > 1} == {"bfloat16"}
    assert {x.dtype.name for x in jax.tree.leaves(half) if x.ndim == 1} == {"float32"}


def test_cache_rows_are_taken_several_times():
    model, _ = _model()
    small = jax.tree.map(lambda x: jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape), model.init_cache(2, 8))
    taken = small.take(jnp.array([1, 1, 0]))
    np.testing.assert_array_equal(taken.k, np.asarray(small.k)[:, [1, 1, 0]])
    assert (taken.rows, taken.length) == (3, 8)


def test_logical_axes_match_every_parameter():
    for config in (BASE, QWEN2):
        model, params = _model(config)
        axes = model.logical_axes()
        jax.tree.map(lambda x, a: x.ndim == len(a) or pytest.fail(str(a)), params, axes)
        names = {n for a in jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple)) for n in a}
        assert names <= {"vocab", "embed", "heads", "kv_heads", "mlp", "layers", None}


def test_model_is_a_static_argument_and_counts_parameters():
    model, params = _model()
    assert hash(model) == hash(DenseModel(BASE, jnp.float32)) and model == DenseModel(BASE)
    assert model != DenseModel(BASE, jnp.bfloat16)
    assert model.num_params() == sum(x.size for x in jax.tree.leaves(params))
    assert model.init(jax.random.key(0), jnp.bfloat16)["embedding"].dtype == jnp.bfloat16


def test_bfloat16_compute_stays_near_and_returns_float32_logits():
    _, params = _model()
    half, rows = DenseModel(BASE, jnp.bfloat16), _tokens(9, 2, 24)
    logits = np.asarray(_forward(half)(params, *_inputs(rows)))
    assert logits.dtype == np.float32 and half.init_cache(1, 8).k.dtype == jnp.bfloat16
    error = np.abs(logits[:2, :24] - _plain(rows)[:2, :24]).max() / np.abs(_plain(rows)).max()
    assert 1e-5 < error < 0.05


def test_masked_logits_have_no_probability_and_a_finite_entropy():
    mask = np.array([True, False, True])
    logits = masked_logits(jnp.array([[1.0, 50.0, 2.0]]), mask)
    logp = jax.nn.log_softmax(logits)
    np.testing.assert_allclose(np.exp(logp)[0, [0, 2]], jax.nn.softmax(jnp.array([1.0, 2.0])), rtol=1e-6)
    assert np.exp(logp)[0, 1] == 0 and np.isfinite(-(jnp.exp(logp) * logp).sum())
    assert np.isfinite(jax.grad(lambda x: jax.nn.logsumexp(masked_logits(x, mask)))(jnp.ones(3))).all()
