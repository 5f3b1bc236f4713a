"""The Qwen3.5 decoder against itself: packed rows, padding, caches, recomputation, sharding names, sizes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdjax.errors import ModelError
from sdjax.models.base import Prefix
from sdjax.models.qwen3_5 import HybridCache, Qwen35Model
from sdjax.models.qwen3_5_config import FULL, LINEAR, Qwen35Config

# A pattern with two periods, runs of two and one layer, more value heads than key heads. The epsilon is larger than
# usual: where q and k of a first token are nearly orthogonal, its output is rounding noise, and the norm behind the
# delta rule would blow that up to full size.
BASE = Qwen35Config(
    model_type="qwen3_5",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    layers=6,
    heads=4,
    kv_heads=2,
    head_dim=12,
    max_positions=256,
    partial_rotary_factor=0.5,
    rms_eps=1e-3,
    initializer_range=0.1,
    layer_types=(LINEAR, LINEAR, FULL) * 2,
    linear_key_heads=2,
    linear_value_heads=4,
    linear_key_dim=8,
    linear_value_dim=6,
    conv_kernel=4,
)
# The pattern does not repeat; it begins with attention.
TIED = dataclasses.replace(
    BASE, tie_embeddings=True, layers=3, layer_types=(FULL, LINEAR, FULL), linear_key_heads=4, conv_kernel=3
)
CONFIGS = pytest.mark.parametrize("config", [BASE, TIED], ids=["untied", "tied"])
# Every full forward pass has this shape, so that each model is compiled once. Three chunks of the delta rule.
SHAPE = (6, 160)


def _randomized(params):
    """Every parameter random: fresh norms, gates and biases would hide mistakes. Slow decay: what leaks over a border
    must not be forgotten before anybody reads it."""
    random = np.random.default_rng(1)
    params = jax.tree.map(lambda x: x + 0.1 * random.standard_normal(x.shape).astype(np.float32), params)
    params["linear_layers"]["mixer"]["A_log"] -= 5.0
    return params


@functools.cache
def _model(config=BASE):
    model = Qwen35Model(config)
    return model, _randomized(model.init(jax.random.key(0)))


@functools.cache
def _forward(model):
    return jax.jit(lambda params, *inputs: model.logits(params, model.hidden(params, *inputs)))


@functools.cache
def _gradient(model, remat=False):
    """Loss over the valid states, and its gradient."""

    def loss(params, tokens, position, segment):
        hidden = model.hidden(params, tokens, position, segment, remat=remat)
        return jnp.where(segment, jnp.sum(hidden**2 + hidden, axis=-1), 0).sum()

    return jax.jit(jax.value_and_grad(loss))


def _inputs(rows):
    """(tokens, position, segment) of plain rows, padded to ``SHAPE``."""
    tokens, segment = np.zeros(SHAPE, np.int32), np.zeros(SHAPE, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], segment[i, : len(row)] = row, 1
    return tokens, np.broadcast_to(np.arange(SHAPE[1], dtype=np.int32), SHAPE), segment


def _plain(rows, config=BASE):
    """Logits [6, 160, V] of rows without packing."""
    model, params = _model(config)
    return np.asarray(_forward(model)(params, *_inputs(rows)))


def _tokens(seed, *shape):
    return np.random.default_rng(seed).integers(0, BASE.vocab_size, shape).astype(np.int32)


def _close(found, wanted, rel=1e-4):
    assert np.abs(found - wanted).max() <= rel * np.abs(wanted).max()


def _packed(rows, padding, order=None, row=0):
    """Rows packed into packed row ``row``, in ``order``, with padding in front, and where each begins."""
    tokens, position, segment = (np.zeros(SHAPE, np.int32) for _ in range(3))
    begins, begin = {}, padding
    for number, i in enumerate(range(len(rows)) if order is None else order, start=1):
        n = len(rows[i])
        tokens[row, begin : begin + n], position[row, begin : begin + n] = rows[i], np.arange(n)
        segment[row, begin : begin + n] = number
        begins[i] = begin
        begin += n
    return (tokens, position, segment), begins


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=5).flatmap(
        lambda lengths: st.tuples(st.just(lengths), st.permutations(range(len(lengths))))
    ),
    st.integers(0, 6),
    st.integers(0, SHAPE[0] - 1),
    st.integers(0, 2**16),
)
def test_packed_row_equals_separate_rows(lengths_and_order, padding, row, seed):
    (lengths, order), (model, params) = lengths_and_order, _model()
    # Id 0 is the padding's, and its embedding is not a number.
    rows = [np.maximum(_tokens(seed + i, n), 1) for i, n in enumerate(lengths)]
    poisoned = params | {"embedding": params["embedding"].at[0].set(jnp.nan)}
    inputs, begins = _packed(rows, padding, order, row)
    packed, separate = np.asarray(_forward(model)(poisoned, *inputs)), _plain(rows)
    for i, n in enumerate(lengths):
        _close(packed[row, begins[i] : begins[i] + n], separate[i, :n])


def test_five_segments_over_chunk_borders_one_of_a_single_token():
    rows = [_tokens(20 + i, n) for i, n in enumerate((50, 37, 1, 44, 20))]
    model, params = _model()
    inputs, begins = _packed(rows, 0)
    packed, separate = np.asarray(_forward(model)(params, *inputs)), _plain(rows)
    for i, row in enumerate(rows):
        _close(packed[0, begins[i] : begins[i] + len(row)], separate[i, : len(row)])


def test_gradients_of_packed_rows_equal_those_of_separate_rows():
    rows = [_tokens(30 + i, n) for i, n in enumerate((50, 37, 1, 44, 20))]
    model, params = _model()
    value, gradient = _gradient(model)(params, *_packed(rows, 0)[0])
    wanted_value, wanted = _gradient(model)(params, *_inputs(rows))
    np.testing.assert_allclose(value, wanted_value, rtol=1e-5)
    jax.tree.map(lambda a, b: _close(np.asarray(a), np.asarray(b), 3e-4), gradient, wanted)


@CONFIGS
def test_a_token_sees_only_its_past(config):
    tokens = _tokens(0, 1, 80)
    changed = tokens.copy()
    changed[0, 12] = (changed[0, 12] + 1) % BASE.vocab_size
    before, after = _plain(tokens, config), _plain(changed, config)
    np.testing.assert_allclose(before[0, :12], after[0, :12], atol=1e-5)
    assert np.abs(before[0, 12:80] - after[0, 12:80]).max(axis=-1).min() > 1e-4


@pytest.mark.parametrize("pad_id", [0, -100, 10**6])
@CONFIGS
def test_padding_never_leaks(pad_id, config):
    model, params = _model(config)
    rows = [np.maximum(_tokens(5 + i, n), 1) for i, n in enumerate((7, 9))]
    (tokens, position, segment), _ = _packed(rows, 3)
    poisoned = params | {"embedding": params["embedding"].at[0].set(jnp.nan)}
    padded = np.where(segment == 0, pad_id, tokens)
    # A tied head has the poisoned row as well; its one logit is left out.
    found = np.asarray(_forward(model)(poisoned, padded, position, segment))[..., 1:]
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, np.asarray(_forward(model)(params, tokens, position, segment))[..., 1:])
    if pad_id == 0 and config is BASE:
        value, gradient = _gradient(model)(poisoned, padded, position, segment)
        assert np.isfinite(value) and all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


def test_recomputation_and_another_recurrence_change_no_gradient():
    model, params = _model()
    rows = [_tokens(6 + i, n) for i, n in enumerate((40, 9, 44))]
    inputs, _ = _packed(rows, 2)
    whole, whole_gradient = _gradient(model)(params, *inputs)
    other = dataclasses.replace(model, delta_rule="xla_associative")
    found, gradient = _gradient(other, remat=True)(params, *inputs)
    np.testing.assert_allclose(found, whole, rtol=1e-5)
    jax.tree.map(lambda a, b: _close(np.asarray(a), np.asarray(b), 3e-4), gradient, whole_gradient)


@functools.cache
def _extend(config, context=None):
    model, params = _model(config)

    def run(cache, tokens, start, length):
        hidden, cache = model.extend(params, cache, tokens, start, length, context=context)
        return model.logits(params, hidden), cache

    return jax.jit(run)


ROWS, NEW = 4, 70  # cache rows and new tokens of every prefill call: more than one chunk


def _prefill(config, tokens, start, length, cache=None, context=None):
    """Extends ``ROWS`` cache rows of 120 positions by ``tokens`` (at most ROWS x NEW)."""
    padded = np.zeros((ROWS, NEW), np.int32)
    padded[: tokens.shape[0], : tokens.shape[1]] = tokens
    starts, lengths = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int32)
    starts[: len(start)], lengths[: len(length)] = start, length
    cache = _model(config)[0].init_cache(ROWS, 120) if cache is None else cache
    logits, cache = _extend(config, context)(cache, padded, starts, lengths)
    return np.asarray(logits), cache


@CONFIGS
def test_ragged_prefill_and_decoding_equal_the_full_forward(config):
    lengths, steps = np.array([2, 17, 55, 1]), 40
    tokens = _tokens(4, 4, SHAPE[1])
    full = _plain(tokens, config)
    logits, cache = _prefill(config, tokens[:, :NEW], np.zeros(4), lengths)
    for row, n in enumerate(lengths):
        _close(logits[row, :n], full[row, :n])
    for step in range(steps):
        at = lengths + step
        logits, cache = _extend(config)(cache, tokens[np.arange(4), at][:, None], at, np.ones(4, np.int32))
        _close(np.asarray(logits)[:, 0], full[np.arange(4), at])


def test_prefill_equals_extending_an_empty_cache():
    (model, params), tokens, lengths = _model(), _tokens(8, ROWS, NEW), np.array([2, 17, 55, 0])
    wanted, extended = _prefill(BASE, tokens, np.zeros(4), lengths, model.init_cache(ROWS, NEW))
    hidden, cache = jax.jit(model.prefill)(params, tokens, lengths)
    logits = np.asarray(model.logits(params, hidden))
    for row, n in enumerate(lengths[:3]):
        _close(logits[row, :n], wanted[row, :n])
    jax.tree.map(lambda a, b: _close(np.asarray(a), np.asarray(b)), cache, extended)


def test_prefill_in_pieces_and_a_bounded_context_equal_the_full_forward():
    tokens = _tokens(5, 2, 90)
    full, cache = _plain(tokens), None
    for begin, end in ((0, 1), (1, 3), (3, 70), (70, 90)):
        piece = tokens[:, begin:end]
        logits, cache = _prefill(BASE, piece, [begin] * 2, [end - begin] * 2, cache, context=96)
        _close(logits[:2, : end - begin], full[:2, begin:end])


def test_a_new_sequence_forgets_the_rows_old_one():
    old, new = _tokens(12, 4, 30), _tokens(13, 4, 20)
    _, used = _prefill(BASE, old, [0] * 4, [30] * 4)
    again, _ = _prefill(BASE, new, [0] * 4, [20] * 4, used)
    fresh, _ = _prefill(BASE, new, [0] * 4, [20] * 4)
    np.testing.assert_array_equal(again[:, :20], fresh[:, :20])


@pytest.mark.parametrize("new", [1, 4])
def test_invalid_tokens_and_rows_leave_everything_else_alone(new):
    tokens = _tokens(6, 3, 8)
    _, cache = _prefill(BASE, tokens, [0, 0, 0], [8, 5, 8])
    more = np.array([[1, -7, 10**6, 2], [3, 4, 5, 6], [7, 8, 9, 10], [1, 1, 1, 1]], np.int32)[:, :new]
    start, length = np.array([8, 5, 8, 0], np.int32), np.array([1, 0, new, 0], np.int32)
    logits, after = _extend(BASE)(cache, more, start, length)
    row_changed = lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(axis=(0, *range(2, a.ndim))) > 0  # noqa: E731
    for before, now in zip(jax.tree.leaves(cache), jax.tree.leaves(after)):
        np.testing.assert_array_equal(row_changed(before, now), [True, False, True, False])
    written = np.abs(np.asarray(after.k) - np.asarray(cache.k)).max(axis=(0, 3, 4)) > 0
    wanted = np.zeros((ROWS, 120), bool)
    wanted[0, 8] = wanted[2, 8 : 8 + new] = True
    np.testing.assert_array_equal(written, wanted)
    assert np.isfinite(logits).all()
    _close(np.asarray(logits)[2], _plain(np.concatenate([tokens[2:], more[2:3]], axis=1))[0, 8 : 8 + new])


def test_cache_rows_are_forked_and_placed():
    model, _ = _model()
    small = jax.tree.map(lambda x: jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape), model.init_cache(2, 8))
    big = model.init_cache(4, 16).put(jnp.array([3, 0, 9]), small.take(jnp.array([1, 1, 0])))
    assert isinstance(big, HybridCache)
    np.testing.assert_array_equal(big.k[:, 3, :8], small.k[:, 1])
    np.testing.assert_array_equal(big.state[:, 0], small.state[:, 1])
    np.testing.assert_array_equal(big.tails.v[:, 3], small.tails.v[:, 1])
    assert not any(np.any(x[:, 1:3]) for x in jax.tree.leaves(big)) and (big.rows, big.length) == (4, 16)


@CONFIGS
def test_logical_axes_match_every_parameter(config):
    model, params = _model(config)
    axes = model.logical_axes()
    jax.tree.map(lambda x, a: x.ndim == len(a) or pytest.fail(str(a)), params, axes)
    names = {n for a in jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple)) for n in a}
    assert names == {"vocab", "embed", "heads", "kv_heads", "mlp", "layers", None}


def test_model_is_a_static_argument():
    model, params = _model()
    assert hash(model) == hash(Qwen35Model(BASE, jnp.float32)) and model == Qwen35Model(BASE)
    assert model != dataclasses.replace(model, delta_rule="xla_associative")
    assert model.num_params() == sum(x.size for x in jax.tree.leaves(params))
    with pytest.raises(ModelError, match="no delta rule 'cuda'"):
        Qwen35Model(BASE, delta_rule="cuda")
    with pytest.raises(ModelError, match="shared prefix"):
        tokens = jnp.zeros((1, 1), jnp.int32)
        model.hidden(params, tokens, tokens, tokens, prefix=Prefix(model.init_cache(1, 1), jnp.ones(1, jnp.int32)))
    assert not model.shares_prefixes


# Sizes of the published models and their text parameters in billions.
SIZES = {
    "2B": ((2048, 6144, 24, 8, 2, 16, True), 1.881),
    "4B": ((2560, 9216, 32, 16, 4, 32, True), 4.205),
    "9B": ((4096, 12288, 32, 16, 4, 32, False), 8.953),
}


@pytest.mark.parametrize("name", SIZES)
def test_parameters_of_the_published_shapes_are_counted(name):
    (hidden, mlp, layers, heads, kv_heads, value_heads, tied), billions = SIZES[name]
    config = dataclasses.replace(
        BASE, vocab_size=248320, hidden_size=hidden, intermediate_size=mlp, layers=layers, heads=heads,
        kv_heads=kv_heads, head_dim=256, layer_types=((LINEAR,) * 3 + (FULL,)) * (layers // 4), linear_key_heads=16,
        linear_value_heads=value_heads, linear_key_dim=128, linear_value_dim=128, tie_embeddings=tied,
    )  # fmt: skip
    assert Qwen35Model(config).num_params() / 1e9 == pytest.approx(billions, abs=1e-3)


def test_half_precision_stays_near_and_keeps_gates_and_states_in_float32():
    _, params = _model()
    half, rows = Qwen35Model(BASE, jnp.bfloat16), _tokens(9, 2, 80)
    logits = np.asarray(_forward(half)(params, *_inputs(rows)))
    assert logits.dtype == np.float32
    error = np.linalg.norm(logits[:2, :80] - _plain(rows)[:2, :80]) / np.linalg.norm(_plain(rows)[:2, :80])
    assert 1e-5 < error < 0.1
    cache = half.init_cache(1, 8)
    assert cache.k.dtype == cache.tails.q.dtype == jnp.bfloat16 and cache.state.dtype == jnp.float32
    small = half.init(jax.random.key(0), jnp.bfloat16)
    mixer = small["linear_layers"]["mixer"]
    assert small["embedding"].dtype == mixer["norm"].dtype == jnp.bfloat16
    assert mixer["A_log"].dtype == mixer["dt_bias"].dtype == jnp.float32
