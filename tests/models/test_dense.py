"""The dense decoder against itself: packed rows, padding, caches, gradients, sharding names."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@functools.cache
def _model(config=BASE):
    """A model with every parameter random: fresh scales are ones and fresh biases zeros, which would hide mistakes."""
    model = DenseModel(config)
    params = model.init(jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.1 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return model, jax.tree.unflatten(tree, noisy)


@functools.cache
def _forward(config=BASE):
    model, params = _model(config)
    return jax.jit(lambda t, p, s: model.logits(params, model.hidden(params, t, p, s)))


def _plain(tokens_BT, config=BASE):
    """Logits of rows without padding or packing."""
    shape = tokens_BT.shape
    position_BT = np.broadcast_to(np.arange(shape[1]), shape)
    return np.asarray(_forward(config)(tokens_BT, position_BT, np.ones(shape, np.int32)))


def _tokens(seed, *shape):
    return np.random.default_rng(seed).integers(0, BASE.vocab_size, shape).astype(np.int32)


def _close(found, wanted, rel=1e-4):
    assert np.abs(found - wanted).max() <= rel * np.abs(wanted).max()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(0, 4), st.integers(0, 2**16))
def test_packed_row_equals_separate_rows(lengths, padding, seed):
    width = 32
    lengths = [n for i, n in enumerate(lengths) if sum(lengths[: i + 1]) + padding <= width]
    tokens, position, segment = (np.zeros((1, width), np.int32) for _ in range(3))
    rows = np.zeros((6, 12), np.int32)
    begin = padding  # padding in front as well as behind
    for i, n in enumerate(lengths):
        rows[i, :n] = _tokens(seed + i, n)
        tokens[0, begin : begin + n], position[0, begin : begin + n] = rows[i, :n], np.arange(n)
        segment[0, begin : begin + n] = i + 1
        begin += n
    packed = np.asarray(_forward()(tokens, position, segment))
    separate = _plain(rows)
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
    assert np.abs(before[:, 12:] - after[:, 12:]).max(axis=-1).min() > 1e-4


@pytest.mark.parametrize("pad_id", [0, -100, 10**6])
@pytest.mark.parametrize("config", [BASE, QWEN2], ids=["qwen3", "qwen2"])
def test_padding_never_leaks(pad_id, config):
    model, params = _model(config)
    tokens = np.where(_tokens(1, 2, 16) == 0, 1, _tokens(1, 2, 16))
    segment = np.ones((2, 16), np.int32)
    segment[0, :5] = segment[1, 9:] = 0
    position = np.maximum(np.cumsum(segment, axis=1) - 1, 0)
    padded = np.where(segment == 0, pad_id, tokens)
    poisoned = params | {"embedding": params["embedding"].at[0].set(jnp.nan)}

    def loss(p, t):
        hidden = model.hidden(p, t, position, segment)
        return jnp.where(segment, jnp.sum(hidden**2, axis=-1), 0).sum(), hidden

    (value, hidden), gradient = jax.value_and_grad(loss, has_aux=True)(poisoned, padded)
    clean = loss(params, tokens)[0]
    np.testing.assert_allclose(value, clean, rtol=1e-6)
    assert np.isfinite(hidden).all()
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


def test_query_chunks_change_nothing(monkeypatch):
    model, params = _model()
    tokens = _tokens(2, 2, 40)
    segment = np.repeat([1, 2, 3, 4], 10)[None].repeat(2, 0)
    position = np.arange(10)[None].repeat(2, 0)[:, np.arange(40) % 10]

    def loss(p):
        return jnp.sum(model.logits(p, model.hidden(p, tokens, position, segment)) ** 2)

    whole, whole_gradient = jax.value_and_grad(loss)(params)
    monkeypatch.setattr(attention, "QUERY_CHUNK", 16)
    parts, parts_gradient = jax.value_and_grad(loss)(params)
    np.testing.assert_allclose(parts, whole, rtol=1e-5)
    jax.tree.map(lambda a, b: _close(np.asarray(a), np.asarray(b)), parts_gradient, whole_gradient)


def test_remat_gives_the_same_gradient():
    model, params = _model()
    tokens, segment = _tokens(3, 2, 12), np.ones((2, 12), np.int32)
    position = np.arange(12)[None].repeat(2, 0)
    gradients = [
        jax.grad(lambda p, r=remat: jnp.sum(model.hidden(p, tokens, position, segment, remat=r) ** 2))(params)
        for remat in (False, True)
    ]
    jax.tree.map(lambda a, b: _close(np.asarray(a), np.asarray(b), 1e-5), *gradients)


@functools.cache
def _extend(config, context=None):
    model, params = _model(config)

    def run(cache, tokens, start, length):
        hidden, cache = model.extend(params, cache, tokens, start, length, context=context)
        return model.logits(params, hidden), cache

    return jax.jit(run, donate_argnums=0)


@pytest.mark.parametrize("config", [BASE, QWEN2], ids=["qwen3", "qwen2"])
def test_ragged_prefill_and_decoding_equal_the_full_forward(config):
    model, _ = _model(config)
    lengths, steps = np.array([3, 17, 8, 1]), 40
    tokens = _tokens(4, 4, 60)
    full = _plain(tokens, config)
    cache = model.init_cache(4, 64)
    logits, cache = _extend(config)(cache, tokens[:, :20], np.zeros(4, np.int32), lengths)
    for row, n in enumerate(lengths):
        _close(np.asarray(logits)[row, :n], full[row, :n])
    for step in range(steps):
        at = lengths + step
        logits, cache = _extend(config)(cache, tokens[np.arange(4), at][:, None], at, np.ones(4, np.int32))
        _close(np.asarray(logits)[:, 0], full[np.arange(4), at])


def test_prefill_in_pieces_and_a_bounded_context_equal_the_full_forward():
    model, _ = _model()
    tokens = _tokens(5, 2, 30)
    full = _plain(tokens)
    cache = model.init_cache(2, 64)
    for begin in (0, 10, 20):
        logits, cache = _extend(BASE, 30)(cache, tokens[:, begin : begin + 10], np.full(2, begin), np.full(2, 10))
        _close(np.asarray(logits), full[:, begin : begin + 10])


def test_invalid_tokens_and_rows_leave_everything_else_alone():
    model, _ = _model()
    tokens = _tokens(6, 3, 8)
    _, cache = _extend(BASE)(model.init_cache(3, 16), tokens, np.zeros(3, np.int32), np.array([8, 5, 8]))
    before = jax.tree.map(np.array, cache)
    new = np.array([[1, -7, 10**6, 2], [3, 4, 5, 6], [7, 8, 9, 10]], np.int32)
    # Row 0: one valid token. Row 1: none. Row 2: four, of which the last falls behind the end of its part.
    logits, cache = _extend(BASE)(cache, new, np.array([8, 5, 8]), np.array([1, 0, 4]))
    after = jax.tree.map(np.array, cache)
    changed = np.abs(after.k - before.k).max(axis=(0, 3, 4)) > 0
    wanted = np.zeros((3, 16), bool)
    wanted[0, 8] = wanted[2, 8:12] = True
    np.testing.assert_array_equal(changed, wanted)
    assert np.isfinite(logits).all()
    full = _plain(np.concatenate([tokens[2:], new[2:]], axis=1))
    _close(np.asarray(logits)[2], full[0, 8:])


def test_tokens_behind_the_end_of_the_cache_are_dropped():
    model, _ = _model()
    _, cache = _extend(BASE)(model.init_cache(1, 8), _tokens(7, 1, 12), np.zeros(1, np.int32), np.array([12]))
    full = model.init_cache(1, 8)
    _, full = _extend(BASE)(full, _tokens(7, 1, 12)[:, :8], np.zeros(1, np.int32), np.array([8]))
    np.testing.assert_allclose(cache.k, full.k, atol=1e-6)


def test_cache_rows_are_forked_and_placed():
    model, _ = _model()
    tokens = _tokens(8, 2, 6)
    _, small = _extend(BASE)(model.init_cache(2, 8), tokens, np.zeros(2, np.int32), np.array([6, 6]))
    big = model.init_cache(4, 16).put(jnp.array([3, 0, 9]), small.take(jnp.array([1, 1, 0])))
    np.testing.assert_array_equal(big.k[:, 3, :8], small.k[:, 1])
    np.testing.assert_array_equal(big.v[:, 0, :8], small.v[:, 1])
    assert not np.any(big.k[:, 1:3]) and (big.rows, big.length) == (4, 16)


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
    again = model.init(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, again, model.init(jax.random.key(0)))


def test_bfloat16_compute_stays_near_and_returns_float32_logits():
    model, params = _model()
    half = DenseModel(BASE, jnp.bfloat16)
    tokens, segment, position = _tokens(9, 1, 24), np.ones((1, 24), np.int32), np.arange(24)[None]
    hidden = half.hidden(params, tokens, position, segment)
    logits = half.logits(params, hidden)
    assert hidden.dtype == jnp.bfloat16 and logits.dtype == jnp.float32
    _close(np.asarray(logits), _plain(tokens), rel=0.05)
    assert half.init_cache(1, 8).k.dtype == jnp.bfloat16


def test_masked_logits_have_no_probability_and_a_finite_entropy():
    mask = np.array([True, False, True])
    logits = masked_logits(jnp.array([[1.0, 50.0, 2.0]]), mask)
    logp = jax.nn.log_softmax(logits)
    np.testing.assert_allclose(np.exp(logp)[0, [0, 2]], jax.nn.softmax(jnp.array([1.0, 2.0])), rtol=1e-6)
    assert np.exp(logp)[0, 1] == 0 and np.isfinite(-(jnp.exp(logp) * logp).sum())
    assert np.isfinite(jax.grad(lambda x: jax.nn.logsumexp(masked_logits(x, mask)))(jnp.ones(3))).all()
