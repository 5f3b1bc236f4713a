"""The kernels of the delta rule against plain XLA and against the definition in float64, interpreted on the CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

from sdjax.errors import ConfigError, ModelError
from sdjax.models import delta_kernels
from sdjax.models.delta_pallas import pallas_delta_rule, pallas_delta_step
from sdjax.models.delta_pallas_launch import Launch, Tuning
from sdjax.models.delta_rule import chunked_delta_rule, delta_step

NAMES = ("dq", "dk", "dv", "dg", "dbeta", "dstate", "out", "last")
RULES = {name: delta_kernels.delta_kernels(f"{name}_interpret").rule for name in ("pallas", "pallas_recurrence")}
LENGTH = 130
# Chunks end at 64 and 128: segments end inside, at, and one token around them, and one segment has a single token.
BORDERS = (20, 21, 64, 65, 100, 128)


def make_inputs(T=LENGTH, key_heads=1, heads=2, keys=16, values=32, rows=2, seed=0, dtype=jnp.float32, decay=0.05):
    random = np.random.default_rng(seed)
    normal = lambda *shape: random.standard_normal((rows, T, *shape), np.float32)  # noqa: E731
    qkv = [jnp.asarray(normal(*s), dtype) for s in ((key_heads, keys), (key_heads, keys), (heads, values))]
    gates = [jnp.asarray(-decay * np.exp(normal(heads))), jnp.asarray(1 / (1 + np.exp(-normal(heads))))]
    segment = np.searchsorted(BORDERS, np.arange(T), side="right")[None].repeat(rows, 0)
    segment[1:] = 7  # other rows are one segment
    state = jnp.asarray(random.standard_normal((rows, heads, keys, values), np.float32))
    return [*qkv, *gates], jnp.asarray(segment, jnp.int32), state


@functools.partial(jax.jit, static_argnums=0)
def results(rule, inputs, segment, state):
    """Gradients of a function of all outputs, and the outputs."""

    def loss(inputs, state):
        out, last = rule(*inputs, segment, state)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(last)), (out, last)

    return jax.tree.leaves(jax.grad(loss, argnums=(0, 1), has_aux=True)(inputs, state))


def distance(found, wanted):
    found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def definition(q, k, v, g, beta, segment, state):
    """The rule token by token, in the dtype of its inputs, with a fresh state at the begin of each segment."""
    group, size = v.shape[2] // q.shape[2], q.shape[3]
    unit = lambda x: jnp.repeat(x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6), group, axis=2)  # noqa: E731
    same = jnp.pad(segment[:, 1:] == segment[:, :-1], ((0, 0), (1, 0)), constant_values=True)

    def step(state, token):
        q, k, v, g, beta, same = token
        state = jnp.where(same[:, None, None, None], state, 0) * jnp.exp(g)[..., None, None]
        delta = beta[..., None] * (v - jnp.einsum("bhke,bhk->bhe", state, k))
        state = state + k[..., None] * delta[..., None, :]
        return state, jnp.einsum("bhke,bhk->bhe", state, q)

    tokens = [jnp.moveaxis(x, 1, 0) for x in (unit(q) * size**-0.5, unit(k), v, g, beta, same)]
    last, out = jax.lax.scan(step, state, tuple(tokens))
    return jnp.moveaxis(out, 0, 1), last


@pytest.mark.parametrize("name", RULES)
def test_values_and_all_gradients_equal_xla_and_the_definition_in_float64(name):
    inputs, segment, state = make_inputs()
    found = results(RULES[name], inputs, segment, state)
    wanted = results(chunked_delta_rule, inputs, segment, state)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in (*inputs, state)]
        exact = [np.asarray(x) for x in results(definition, wide[:5], segment, wide[5])]
    for key, a, b, c in zip(NAMES, found, wanted, exact, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, key
        assert distance(a, b) < 2e-6 and distance(a, c) < 2e-6, key


@pytest.mark.parametrize("name", RULES)
def test_half_precision_is_as_near_to_float32_as_xla_is(name):
    for decay in (0.05, 8.0):
        inputs, segment, state = make_inputs(dtype=jnp.bfloat16, decay=decay)
        found = results(RULES[name], inputs, segment, state)
        peer = results(chunked_delta_rule, inputs, segment, state)
        wanted = results(chunked_delta_rule, [x.astype(jnp.float32) for x in inputs], segment, state)
        for key, a, b, c in zip(NAMES, found, peer, wanted, strict=True):
            assert a.dtype == b.dtype, key
            # Where decay is fast the gate's gradient must not be a difference of large numbers.
            assert distance(a, c) < max(1.6 * distance(b, c), 3e-3), (key, decay)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, LENGTH - 1), max_size=12), st.integers(0, 100))
def test_any_segments(borders, seed):
    inputs, _, state = make_inputs(seed=seed)
    segment = np.searchsorted(np.sort(borders), np.arange(LENGTH), side="right")
    segment = jnp.asarray(np.stack([segment, segment[::-1]]), jnp.int32)
    found = results(RULES["pallas"], inputs, segment, state)
    for a, b in zip(found, results(chunked_delta_rule, inputs, segment, state), strict=True):
        assert distance(a, b) < 5e-6


def test_tokens_without_strength_and_decay_change_no_state():
    (q, k, v, g, beta), segment, state = make_inputs()
    silent = jnp.arange(LENGTH)[None, :, None] >= 110
    g, beta = jnp.where(silent, 0, g), jnp.where(silent, 0, beta)
    segment = jnp.full_like(segment, 3)
    k_other, v_other = jnp.where(silent[..., None], 9.0, k), jnp.where(silent[..., None], -9.0, v)
    *_, last = results(RULES["pallas"], [q, k, v, g, beta], segment, state)
    *_, other = results(RULES["pallas"], [q, k_other, v_other, g, beta], segment, state)
    np.testing.assert_array_equal(last, other)


def test_other_launches_and_no_state():
    inputs, segment, state = make_inputs(40, rows=1)
    tuning = Tuning(*[Launch(16, 8, 1, keys=8)] * 7, interpret=True)

    def rule(q, k, v, g, beta, segment, _):
        return pallas_delta_rule(q, k, v, g, beta, segment, tuning=tuning)

    found = results(rule, inputs, segment, state)
    for key, a, b in zip(NAMES, found, results(chunked_delta_rule, inputs, segment, 0 * state), strict=True):
        assert key == "dstate" or distance(a, b) < 2e-6, key


def test_one_token_equals_xla_and_a_silent_row_keeps_its_state_to_the_bit():
    (q, k, v, g, beta), _, state = make_inputs(1, rows=3)
    silent = jnp.arange(3)[:, None] == 1
    q, k, v = q[:, 0], k[:, 0], v[:, 0]
    g, beta = jnp.where(silent, 0, g[:, 0]), jnp.where(silent, 0, beta[:, 0])
    out, after = jax.jit(delta_kernels.delta_kernels("pallas_interpret").step)(q, k, v, g, beta, state)
    wanted, wanted_after = delta_step(q, k, v, g, beta, state)
    np.testing.assert_allclose(out, wanted, atol=2e-6)
    np.testing.assert_allclose(after, wanted_after, atol=2e-6)
    np.testing.assert_array_equal(np.asarray(after[1]).view(np.int32), np.asarray(state[1]).view(np.int32))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_kernel_lowers_for_the_accelerator(dtype):
    """Operations and blocks that Triton lacks are found here, without a GPU."""
    inputs, segment, state = make_inputs(128, 1, 2, 64, 64, rows=1, dtype=dtype)
    token = [x[:, 0] for x in inputs]
    whole, recurrence = (delta_kernels.delta_kernels(name) for name in ("pallas", "pallas_recurrence"))
    device = AbstractDevice("NVIDIA H200", None, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        for function, arguments, kernels in (
            (functools.partial(results, whole.rule), (inputs, segment, state), 6),
            (functools.partial(results, recurrence.rule), (inputs, segment, state), 2),
            (whole.step, (*token, state), 1),
        ):
            lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
            assert lowered.as_text().count("__gpu$xla.gpu.triton") == kernels


def test_what_the_kernels_lack_is_said():
    inputs, segment, state = make_inputs(64, keys=24, rows=1)
    with pytest.raises(ModelError, match="key heads of 24"):
        delta_kernels.delta_kernels("pallas").rule(*inputs, segment, state)
    inputs, _, state = make_inputs(1, values=8)
    q, k, v, g, beta = (x[:, 0] for x in inputs)
    with pytest.raises(ModelError, match="value heads of 8"):
        pallas_delta_step(q, k, v, g, beta, state)
    with pytest.raises(ModelError, match="pallas_recurrence"):
        delta_kernels.delta_kernels("triton")


def test_the_choice_of_the_implementation():
    assert delta_kernels.resolve("auto", "bfloat16") == "xla"
    assert delta_kernels.resolve("xla_associative", "float32") == "xla_associative"
    with pytest.raises(ConfigError, match="backend is cpu"):
        delta_kernels.resolve("pallas", "bfloat16")
