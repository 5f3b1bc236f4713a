"""The chunked gated delta rule against the recurrence that defines it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdjax.models.delta_rule import (
    associative_recurrence,
    chunked_delta_rule,
    delta_step,
    scan_recurrence,
    unit_lower_inverse,
)

T, KEY_HEADS, VALUE_HEADS, KEYS, VALUES = 75, 2, 4, 8, 6
LENGTHS = (20, 1, 2, 30, 22)


def _inputs(seed=0, rows=2):
    random = np.random.default_rng(seed)
    normal = lambda *shape: random.standard_normal((rows, T, *shape)).astype(np.float32)  # noqa: E731
    q, k, v = normal(KEY_HEADS, KEYS), normal(KEY_HEADS, KEYS), normal(VALUE_HEADS, VALUES)
    # Slow decay: what leaks over a border must not be forgotten before anybody reads it.
    g, beta = -0.02 * np.exp(normal(VALUE_HEADS)), 1 / (1 + np.exp(-normal(VALUE_HEADS)))
    state = random.standard_normal((rows, VALUE_HEADS, KEYS, VALUES)).astype(np.float32)
    segment = np.repeat(np.arange(len(LENGTHS)), LENGTHS)[None].repeat(rows, 0).astype(np.int32)
    segment[1] = 7  # the second row is one segment
    return [jnp.asarray(x, jnp.float32) for x in (q, k, v, g, beta)], jnp.asarray(segment), jnp.asarray(state)


def _token_by_token(inputs, segment, state):
    """The definition, with a fresh state at the begin of each segment but the first."""
    same = jnp.pad(segment[:, 1:] == segment[:, :-1], ((0, 0), (1, 0)), constant_values=True)

    def step(state, token):
        *inputs, same = token
        o, state = delta_step(*inputs, jnp.where(same[:, None, None, None], state, 0.0))
        return state, o

    last, outputs = jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (*inputs, same)))
    return jnp.moveaxis(outputs, 0, 1), last


def _definition(q, k, v, g, beta, state):
    """One head, in float64 and in the words of the paper."""
    out = []
    for t in range(T):
        q_t = q[t] / np.sqrt((q[t] ** 2).sum() + 1e-6) * KEYS**-0.5
        k_t = k[t] / np.sqrt((k[t] ** 2).sum() + 1e-6)
        state = np.exp(g[t]) * state
        state = state + beta[t] * np.outer(k_t, v[t] - state.T @ k_t)
        out.append(state.T @ q_t)
    return np.stack(out), state


def test_one_token_is_the_definition():
    inputs, segment, state = _inputs()
    found, last = _token_by_token(inputs, segment, state)
    for head in range(VALUE_HEADS):
        heads = (head // 2, head // 2, head, head, head)  # value heads share key heads in order
        wide = [np.asarray(x[1, :, h], np.float64) for x, h in zip(inputs, heads)]
        wanted, wanted_last = _definition(*wide, np.asarray(state[1, head], np.float64))
        np.testing.assert_allclose(found[1, :, head], wanted, atol=2e-6)
        np.testing.assert_allclose(last[1, head], wanted_last, atol=2e-6)


@pytest.mark.parametrize("recurrence", [scan_recurrence, associative_recurrence])
@pytest.mark.parametrize("chunk", [16, 64])
def test_chunks_equal_token_by_token_with_values_and_gradients(recurrence, chunk):
    inputs, segment, state = _inputs()

    def loss(function, inputs, state):
        out, last = function(inputs, state)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(last)), (out, last)

    def chunked(inputs, state):
        return chunked_delta_rule(*inputs, segment, state, recurrence=recurrence, chunk=chunk)

    run = lambda function: jax.jit(jax.grad(functools.partial(loss, function), argnums=(0, 1), has_aux=True))  # noqa: E731
    found = run(chunked)(inputs, state)
    wanted = run(lambda inputs, state: _token_by_token(inputs, segment, state))(inputs, state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, wanted)


def test_tokens_without_strength_and_decay_change_no_state():
    (q, k, v, g, beta), segment, state = _inputs()
    segment = np.zeros_like(segment)
    silent = np.arange(T)[None, :, None] >= 41
    g, beta = np.where(silent, 0, g).astype(np.float32), np.where(silent, 0, beta).astype(np.float32)
    _, last = jax.jit(chunked_delta_rule)(q, k, v, g, beta, segment, state)
    _, short = jax.jit(chunked_delta_rule)(*(x[:, :41] for x in (q, k, v, g, beta, segment)), state)
    np.testing.assert_allclose(last, short, atol=1e-6)
    _, kept = delta_step(q[:, 0], k[:, 0], v[:, 0], 0 * g[:, 0], 0 * beta[:, 0], state)
    np.testing.assert_array_equal(kept, state)


@pytest.mark.parametrize("size", [1, 2, 64])
def test_the_inverse_survives_correlated_keys(size):
    random = np.random.default_rng(0)
    keys = np.ones((size, 16)) + 0.01 * random.standard_normal((size, 16))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    a = np.tril(keys @ keys.T, -1)
    found = unit_lower_inverse(jnp.asarray(a, jnp.float32), jax.lax.Precision.HIGHEST)
    np.testing.assert_allclose(found, np.linalg.inv(np.eye(size) + a), atol=1e-5)


def test_half_precision_operands_stay_near():
    inputs, segment, state = _inputs()
    half = [jnp.asarray(x, jnp.bfloat16) for x in inputs[:3]]
    found, last = jax.jit(chunked_delta_rule)(*half, *inputs[3:], segment, state)
    wanted, _ = jax.jit(chunked_delta_rule)(*inputs, segment, state)
    assert found.dtype == last.dtype == jnp.float32
    assert 1e-5 < np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 0.02
