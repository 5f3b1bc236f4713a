"""The kernels of the delta rule against plain XLA and against the definition in float64, interpreted on the CPU."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

from sdjax.errors import ConfigError, ModelError
from sdjax.models import delta_kernels
from sdjax.models.delta_pallas import pallas_delta_rule, pallas_delta_step
from sdjax.models.delta_pallas_launch import CHUNK, Launch, Tuning
from sdjax.models.delta_pallas_recurrence import pallas_recurrence
from sdjax.models.delta_rule import chunked_delta_rule, delta_step, scan_recurrence

INTERPRET = Tuning(interpret=True)
NAMES = ("dq", "dk", "dv", "dg", "dbeta", "dstate", "out", "last")
RULES = {name: delta_kernels.delta_kernels(f"{name}_interpret").rule for name in ("pallas", "pallas_recurrence")}
# Chunks end at 64 and 128: segments end inside, at, and one token around them, and one segment has a single token.
BORDERS = (20, 21, 64, 65, 100, 128)


def make_inputs(T=150, key_heads=2, heads=4, keys=16, values=32, rows=2, seed=0, dtype=jnp.float32, decay=0.05):
    random = np.random.default_rng(seed)
    normal = lambda *shape: random.standard_normal((rows, T, *shape), np.float32)  # noqa: E731
    qkv = [jnp.asarray(normal(*s), dtype) for s in ((key_heads, keys), (key_heads, keys), (heads, values))]
    gates = [jnp.asarray(-decay * np.exp(normal(heads))), jnp.asarray(1 / (1 + np.exp(-normal(heads))))]
    segment = np.searchsorted(BORDERS, np.arange(T), side="right")[None].repeat(rows, 0)
    segment[1:] = 7  # other rows are one segment
    state = jnp.asarray(random.standard_normal((rows, heads, keys, values), np.float32))
    return [*qkv, *gates], jnp.asarray(segment, jnp.int32), state


def results(rule, inputs, segment, state):
    """Gradients of a function of all outputs, and the outputs."""

    def loss(inputs, state):
        out, last = rule(*inputs, segment, state)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(last)), (out, last)

    return jax.tree.leaves(jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(inputs, state))


def distance(found, wanted):
    found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def token_by_token(inputs, segment, state):
    """The rule in its definition, in the dtype of its inputs, with a fresh state at the begin of each segment."""
    q, k, v, g, beta = inputs
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
def test_values_and_all_gradients_equal_xla_and_the_float64_definition(name):
    inputs, segment, state = make_inputs()
    found = results(RULES[name], inputs, segment, state)
    wanted = results(chunked_delta_rule, inputs, segment, state)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in (*inputs, state)]
        rule = lambda q, k, v, g, beta, segment, state: token_by_token((q, k, v, g, beta), segment, state)  # noqa: E731
        exact = [np.asarray(x) for x in results(rule, wide[:5], segment, wide[5])]
    for key, a, b, c in zip(NAMES, found, wanted, exact, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, key
        assert distance(a, b) < 2e-6 and distance(a, c) < 2e-6, key


@pytest.mark.parametrize("name", RULES)
def test_half_precision_is_as_near_to_float32_as_xla_is(name):
    inputs, segment, state = make_inputs(dtype=jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in inputs]
    found = results(RULES[name], inputs, segment, state)
    peer = results(chunked_delta_rule, inputs, segment, state)
    wanted = results(chunked_delta_rule, wide, segment, state)
    for key, a, b, c in zip(NAMES, found, peer, wanted, strict=True):
        assert a.dtype == b.dtype, key
        assert distance(a, c) < max(1.6 * distance(b, c), 3e-3), key


def test_the_gate_of_a_fast_decaying_head_has_no_difference_of_large_numbers():
    inputs, segment, state = make_inputs(dtype=jnp.bfloat16, decay=8.0)
    wanted = results(chunked_delta_rule, [x.astype(jnp.float32) for x in inputs], segment, state)
    found = results(RULES["pallas"], inputs, segment, state)
    assert distance(found[3], wanted[3]) < 0.01


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 2), min_size=1, max_size=140), st.integers(0, 100))
def test_any_segments_and_lengths(steps, seed):
    inputs, _, state = make_inputs(len(steps), 1, 2, seed=seed, rows=1)
    segment = jnp.asarray([np.cumsum(np.array(steps) == 0)], jnp.int32)
    found = jax.jit(RULES["pallas"])(*inputs, segment, state)
    wanted = jax.jit(chunked_delta_rule)(*inputs, segment, state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, wanted)


def test_without_a_state_and_with_other_launches():
    inputs, segment, state = make_inputs(rows=1)
    launch = Launch(16, 8, 1, keys=8)
    tuning = Tuning(*[launch] * 7, interpret=True)
    found = jax.jit(functools.partial(pallas_delta_rule, tuning=tuning))(*inputs, segment)
    wanted = jax.jit(chunked_delta_rule)(*inputs, segment, 0 * state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, wanted)
    gradients = results(functools.partial(pallas_delta_rule, tuning=tuning), inputs, segment, state)
    for a, b in zip(gradients, results(chunked_delta_rule, inputs, segment, state), strict=True):
        assert distance(a, b) < 2e-6


def test_tokens_without_strength_and_decay_change_no_state():
    (q, k, v, g, beta), segment, state = make_inputs(rows=1)
    segment = jnp.zeros_like(segment)
    silent = jnp.arange(q.shape[1])[None, :, None] >= 41
    g, beta = jnp.where(silent, 0, g), jnp.where(silent, 0, beta)
    _, last = jax.jit(RULES["pallas"])(q, k, v, g, beta, segment, state)
    _, short = jax.jit(RULES["pallas"])(*(x[:, :41] for x in (q, k, v, g, beta, segment)), state)
    np.testing.assert_allclose(last, short, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_recurrence_alone(dtype):
    random = np.random.default_rng(3)
    normal = lambda *shape: jnp.asarray(0.3 * random.standard_normal((1, 2, *shape), np.float32))  # noqa: E731
    w, u, k, state = normal(3, CHUNK, 16), normal(3, CHUNK, 32), normal(3, CHUNK, 16), normal(16, 32)
    decay = jnp.asarray(random.random((1, 2, 3), np.float32))
    arguments = (w.astype(dtype), u, k.astype(dtype), decay, state)

    def pulled(function):
        out, pull = jax.vjp(function, *arguments)
        return *out, *pull(jax.tree.map(jnp.cos, out))

    found = pulled(functools.partial(pallas_recurrence, tuning=INTERPRET))
    for a, b in zip(found, pulled(scan_recurrence), strict=True):
        assert a.dtype == b.dtype
        assert distance(a, b) < (1e-6 if dtype == jnp.float32 else 0.01)


def test_one_token_equals_xla_and_a_silent_row_keeps_its_state_to_the_bit():
    (q, k, v, g, beta), _, state = make_inputs(1, rows=3)
    silent = jnp.arange(3)[:, None] == 1
    token = [q[:, 0], k[:, 0], v[:, 0], jnp.where(silent, 0, g[:, 0]), jnp.where(silent, 0, beta[:, 0])]
    step = jax.jit(functools.partial(pallas_delta_step, tuning=INTERPRET))
    (out, after), (wanted, wanted_after) = step(*token, state), delta_step(*token, state)
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
            (lambda *x: results(whole.rule, x[:5], *x[5:]), (*inputs, segment, state), 6),
            (lambda *x: results(recurrence.rule, x[:5], *x[5:]), (*inputs, segment, state), 2),
            (whole.step, (*token, state), 1),
        ):
            lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
            assert lowered.as_text().count("__gpu$xla.gpu.triton") == kernels


def test_what_the_kernels_lack_is_said():
    inputs, segment, state = make_inputs(64, keys=24, rows=1)
    with pytest.raises(ModelError, match="key heads of 24.*delta_rule"):
        delta_kernels.delta_kernels("pallas").rule(*inputs, segment, state)
    with pytest.raises(ModelError, match="value heads of 8"):
        pallas_delta_step(*(x[:, 0] for x in make_inputs(1, values=8)[0]), make_inputs(1, values=8)[2])
    with pytest.raises(ModelError, match="pallas_recurrence"):
        delta_kernels.delta_kernels("triton")


def test_the_choice_of_the_implementation():
    assert delta_kernels.resolve("auto", "bfloat16") == "xla"
    assert delta_kernels.resolve("xla_associative", "float32") == "xla_associative"
    with pytest.raises(ConfigError, match="backend is cpu"):
        delta_kernels.resolve("pallas", "bfloat16")


def on_mesh(data: int, fsdp: int, tensor: int, rows: int, heads: int):
    """Everything that a divided kernel returns, as one list of arrays."""
    mesh = sharding.make_mesh(data, fsdp, tensor)
    kernels = delta_kernels.delta_kernels("pallas_interpret", mesh)
    inputs, segment, state = make_inputs(70, heads // 2, heads, rows=rows)
    found = results(kernels.rule, inputs, segment, state)
    found += jax.jit(kernels.rule)(*inputs, segment)
    found += jax.jit(kernels.step)(*(x[:, 0] for x in inputs), state)
    q, k, v = (jnp.tile(x[:, :, :2], (1, 1, n, 1)) for x, n in zip(inputs[:3], (4, 2, 2), strict=True))
    v = v[..., : q.shape[-1]]

    def attend(q, k, v):
        return jnp.sum(jnp.sin(packed_attention(q, k, v, segment, mesh=mesh, implementation="xla_divided")))

    return found + list(jax.jit(jax.grad(attend, argnums=(0, 1, 2)))(q, k, v))
