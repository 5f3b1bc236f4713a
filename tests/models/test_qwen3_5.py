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
def _gradient(model, remat="none"):
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


def test_recomputation_another_recurrence_and_written_out_layers_change_no_gradient():
    model, params = _model()
    rows = [_tokens(6 + i, n) for i, n in enumerate((40, 9, 44))]
    inputs, _ = _packed(rows, 2)
    whole, whole_gradient = _gradient(model)(params, *inputs)
    other = dataclasses.replace(model, delta_rule="xla_associative")
    for changed, remat in ((other, "full"), (dataclasses.replace(model, scan_layers=False), "dots")):
        found, gradient = _gradient(changed, remat=remat)(params, *inputs)
        np.testing.assert_allclose(found, whole, rtol=1e-5)
        jax.tree.map(lambda a, b: _close(np.asarray(a), np.asarray(b), 3e-4), gradient, whole_gradient)


@functools.cache
def _decode(config):
    model, params = _model(config)
    params = model.unstack(params)

    def run(cache, token, position, active):
        hidden, cache = model.decode(params, cache, token, position, active)
        return model.logits(params, hidden), cache

    return jax.jit(run)


ROWS, NEW, LENGTH = 4, 70, 120  # a prefill call has more than one chunk; decoding goes on in a cache of LENGTH


def _prefill(config, tokens, lengths):
    """Logits of ROWS new sequences of at most NEW tokens, and their cache by layer, with space for LENGTH tokens."""
    model, params = _model(config)
    hidden, cache = jax.jit(model.prefill)(params, tokens, lengths)
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, LENGTH - NEW), (0, 0), (0, 0))) for x in (cache.k, cache.v))
    return np.asarray(model.logits(params, hidden)), dataclasses.replace(cache, k=k, v=v).by_layer()


@CONFIGS
def test_ragged_prefill_and_decoding_equal_the_full_forward(config):
    lengths, steps = np.array([2, 17, 55, 1]), 40
    tokens = _tokens(4, 4, SHAPE[1])
    full = _plain(tokens, config)
    logits, cache = _prefill(config, tokens[:, :NEW], lengths)
    for row, n in enumerate(lengths):
        _close(logits[row, :n], full[row, :n])
    for step in range(steps):
        at = lengths + step
        logits, cache = _decode(config)(cache, tokens[np.arange(4), at], at, np.ones(4, bool))
        _close(np.asarray(logits), full[np.arange(4), at])


def test_prefill_leaves_nothing_of_padding_in_the_cache():
    tokens, lengths = _tokens(8, ROWS, NEW), np.array([2, 17, 55, 0])
    _, cache = _prefill(BASE, tokens, lengths)
    _, other = _prefill(BASE, np.where(np.arange(NEW) < lengths[:, None], tokens, 10**6), lengths)
    jax.tree.map(np.testing.assert_array_equal, cache, other)
    assert not any(np.any(x[3]) for x in jax.tree.leaves(cache))


def test_inactive_rows_and_rows_beyond_the_tokens_keep_their_cache():
    tokens = _tokens(6, ROWS, 8)
    _, cache = _prefill(BASE, np.pad(tokens, ((0, 0), (0, NEW - 8))), np.array([8, 5, 8, 7]))
    new, position = np.array([1, 10**6, 7]), np.array([8, 5, 8])
    logits, after = _decode(BASE)(cache, new, position, np.array([True, False, True]))
    for before, now in zip(jax.tree.leaves(cache), jax.tree.leaves(after)):
        changed = np.abs(np.asarray(before - now)).reshape(ROWS, -1).max(axis=1) > 0
        np.testing.assert_array_equal(changed, [True, False, True, False])
    assert np.isfinite(logits).all()
    _close(np.asarray(logits)[2], _plain(np.concatenate([tokens[2], new[2:]])[None])[0, 8])


def test_unstacked_parameters_are_stacked_again():
    model, params = _model()
    jax.tree.map(np.testing.assert_array_equal, model.stack(model.unstack(params)), params)
    mixer = Qwen35Model(BASE, jnp.bfloat16).unstack(params)["linear_layers"][0]["mixer"]
    assert mixer["A_log"].dtype == mixer["norm"].dtype == jnp.float32 and mixer["conv_q"].dtype == jnp.bfloat16


def test_cache_rows_are_taken_several_times():
    model, _ = _model()
    small = jax.tree.map(lambda x: jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape), model.init_cache(2, 8))
    taken = small.take(jnp.array([1, 1, 0]))
    assert isinstance(taken, HybridCache)
    np.testing.assert_array_equal(taken.state, np.asarray(small.state)[:, [1, 1, 0]])
    np.testing.assert_array_equal(taken.tails.v, np.asarray(small.tails.v)[:, [1, 1, 0]])
    assert (taken.rows, taken.length) == (3, 8)


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
