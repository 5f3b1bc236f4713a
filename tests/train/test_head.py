"""The vocabulary head against plain autodiff of all logits: losses, methods, models, chunks, meshes."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from sdjax import sharding
from sdjax.config import TrainConfig
from sdjax.losses.masked import masked_sum
from sdjax.methods import registry
from sdjax.models.dense import DenseModel
from sdjax.models.embedding import head_weight
from sdjax.models.qwen3_5 import Qwen35Model
from sdjax.train.head import Head
from sdjax.train.optimize import Optimizer
from sdjax.train.packing import Sequences
from sdjax.train.update import Updater, token_loss
from tests.methods.random_batch import fields_of, make_batch
from tests.train.head_cases import VOCAB, dense_config, hybrid_config, plain_stats, problem, weighted_loss

STEP = 30  # inside the window in which ADRS reshapes
NAMES = registry.names()


def one_pass(p, *, temperature=1.0, tokens=2048, function=weighted_loss):
    loss = lambda w, h: Head(temperature, tokens=tokens).loss(function, w, p.allowed, h, *p[3:])  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(p.weight, p.hidden)


def plain(p, *, temperature=1.0, function=weighted_loss):
    def loss(weight, hidden):
        stats = plain_stats(weight, p.allowed, hidden, p.pick, p.mask, temperature)
        return function(stats, p.slots, p.shared)

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(p.weight, p.hidden)


def assert_close(found, want, tolerance=1e-5):
    """Each leaf to a share of its largest value."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max())


# --- the head alone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K", [0, 1, 4])
@pytest.mark.parametrize(("temperature", "tokens"), [(1.0, 2048), (0.6, 7)])
def test_loss_and_gradient_are_those_of_all_logits(K, temperature, tokens):
    p = problem(K=K)
    assert_close(one_pass(p, temperature=temperature, tokens=tokens), plain(p, temperature=temperature))


@functools.cache
def _compiled(tokens: int):
    def run(p):
        loss = lambda w, h: Head(0.6, tokens=tokens).loss(weighted_loss, w, p.allowed, h, *p[3:])  # noqa: E731
        return jax.value_and_grad(loss, (0, 1), has_aux=True)(p.weight, p.hidden)

    return jax.jit(run)


@given(st.lists(st.booleans(), min_size=20, max_size=20))
@settings(max_examples=30, deadline=None)
def test_any_mask_in_any_chunks_gives_the_same(used):
    p = problem(B=4, M=5, mask=np.reshape(used, (4, 5)))
    whole = _compiled(2048)(p)
    for tokens in (3, 8):
        for x, y in zip(jax.tree.leaves(_compiled(tokens)(p)), jax.tree.leaves(whole), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


def test_unused_slots_leave_nothing_and_take_nothing():
    """NaN lies in states and slots off the mask; an empty mask gives zeros."""
    p = problem()
    assert np.isnan(p.hidden).any() and np.isnan(p.slots).any()
    (_, _), (dweight, dhidden) = one_pass(p)
    assert np.isfinite(dweight).all() and (np.asarray(dhidden)[~np.asarray(p.mask)] == 0).all()
    (loss, _), grads = one_pass(problem(mask=np.zeros((8, 5), bool)))
    assert loss == 0 and not any(np.asarray(g).any() for g in grads)


def linear_loss(stats, weight, _):
    """Its derivative lives on forbidden tokens too, and is NaN off the mask where the weight is."""
    return jnp.sum(jnp.where(stats.mask, stats.logp * weight, 0)), None


def test_a_loss_that_is_bad_off_the_mask_does_not_reach_the_weights():
    p = problem()
    assert_close(
        one_pass(p, function=linear_loss)[1],
        one_pass(p._replace(slots=jnp.nan_to_num(p.slots)), function=linear_loss)[1],
        0,
    )


def test_a_bad_state_in_use_is_not_hidden():
    p = problem()
    b, m = np.argwhere(p.mask)[0]
    (loss, _), (dweight, _) = one_pass(p._replace(hidden=p.hidden.at[b, m, 0].set(jnp.nan)))
    assert np.isnan(loss) and np.isnan(dweight).any()


def test_an_id_outside_the_vocabulary_is_not_hidden():
    p = problem()
    b, m = np.argwhere(p.mask)[0]
    for wrong in (-1, VOCAB):
        (loss, _), (dweight, _) = one_pass(p._replace(pick=p.pick.at[b, m].set(wrong)))
        assert np.isnan(loss) and np.isnan(dweight).any()


def test_the_gradient_is_scaled_by_what_stands_behind_the_loss():
    p = problem()

    def loss(weight):
        return 3.0 * Head().loss(weighted_loss, weight, p.allowed, p.hidden, *p[3:])[0]

    assert_close(jax.jit(jax.grad(loss))(p.weight), 3.0 * one_pass(p)[1][0])


def test_forbidden_ids_have_no_gradient_even_if_they_are_picked():
    p = problem()
    allowed, mask = np.asarray(p.allowed), np.asarray(p.mask)
    assert not allowed[np.asarray(p.pick)[mask]].all()
    grads = one_pass(p, function=linear_loss)[1]
    assert not np.asarray(grads[0])[~allowed].any() and np.abs(np.asarray(grads[0])[allowed]).sum(1).all()
    assert_close(grads, plain(p, function=linear_loss)[1])


def test_half_precision_states_and_a_float32_weight():
    """Matrix products of bfloat16, everything else in float32: as close as bfloat16 logit derivatives can be."""
    p = problem(200, D=64)
    rounded = lambda x: x.astype(jnp.bfloat16)  # noqa: E731
    half = p._replace(hidden=rounded(p.hidden))
    (loss, _), (dweight, dhidden) = one_pass(half, tokens=16)
    exact = p._replace(hidden=half.hidden.astype(jnp.float32), weight=rounded(p.weight).astype(jnp.float32))
    (want, _), grads = plain(exact)
    assert dweight.dtype == jnp.float32 and dhidden.dtype == jnp.bfloat16
    assert float(loss) == pytest.approx(float(want), rel=1e-5)
    assert_close((dweight, dhidden), grads, 1e-2)


def test_scores_and_likeliest_tokens_are_those_of_all_logits():
    p = problem()
    head, everything = Head(0.6, tokens=8), jnp.broadcast_to(jnp.arange(VOCAB), (8, 5, VOCAB))
    want = plain_stats(p.weight, p.allowed, p.hidden, everything, p.mask, 0.6).logp
    score = jax.jit(head.score)(p.weight, p.allowed, p.hidden, p.pick, p.mask)
    np.testing.assert_allclose(score, jnp.take_along_axis(want, p.pick[..., None], -1)[..., 0], rtol=1e-5, atol=1e-5)
    ids, logps = jax.jit(functools.partial(head.top, k=6))(p.weight, p.allowed, p.hidden, p.mask)
    want_logps, want_ids = lax.top_k(want, 6)
    np.testing.assert_array_equal(ids, jnp.where(p.mask[..., None], want_ids, 0))
    np.testing.assert_allclose(logps, want_logps, atol=1e-5)


def test_shape_mistakes_are_refused():
    p = problem()
    for wrong in (
        p._replace(allowed=p.allowed[1:]),
        p._replace(hidden=p.hidden[..., 1:]),
        p._replace(mask=p.mask[1:]),
        p._replace(pick=p.pick[:, 1:]),
        p._replace(slots=p.slots[1:]),
    ):
        with pytest.raises(AssertionError):
            one_pass(wrong)


# --- every method, through its own path ------------------------------------------------------------------------------


@functools.cache
def make_model(kind: str):
    model = {
        "dense tied": lambda: DenseModel(dense_config(tied=True)),
        "dense untied": lambda: DenseModel(dense_config(tied=False)),
        "qwen3_5 tied": lambda: Qwen35Model(hybrid_config(tied=True)),
        "qwen3_5 untied": lambda: Qwen35Model(hybrid_config(tied=False)),
    }[kind]()
    return model, model.init(jax.random.key(0))


@pytest.mark.parametrize("kind", ["dense tied", "dense untied", "qwen3_5 tied", "qwen3_5 untied"])
def test_the_logits_of_a_model_are_its_states_times_the_head_weight(kind):
    model, params = make_model(kind)
    hidden = jax.random.normal(jax.random.key(1), (3, 16))
    np.testing.assert_allclose(model.logits(params, hidden), hidden @ head_weight(params).T, atol=1e-5)


ALLOWED = np.arange(VOCAB) < VOCAB - 4


@functools.cache
def make_rows():
    """Rows of all kinds with random tokens."""
    batch = make_batch(3)
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(1, VOCAB - 4, n).astype(np.int32)  # noqa: E731
    return batch, Sequences([draw(rng.integers(2, 9)) for _ in batch.ok_N], [draw(n) for n in batch.mask_NL.sum(1)])


@functools.cache
def plain_passes(kind: str, temperature: float):
    """(log-probabilities [N, L] of the parameters, entropies [N, L]) and the pull-back, one row after its prompt."""
    model, params = make_model(kind)
    batch, sequences = make_rows()
    N, L = batch.mask_NL.shape
    tokens, segment, source = np.zeros((N, 32), np.int32), np.zeros((N, 32), np.int32), np.zeros((N, L), np.int32)
    target = np.zeros((N, L), np.int32)
    for n, (prompt, answer) in enumerate(zip(sequences.prompts, sequences.responses)):
        tokens[n, : len(prompt) + len(answer)] = np.concatenate([prompt, answer])
        segment[n, : len(prompt) + len(answer)] = 1
        source[n] = np.minimum(len(prompt) - 1 + np.arange(L), 31)
        target[n, : len(answer)] = answer
    position = np.broadcast_to(np.arange(32), tokens.shape)

    def forward(params):
        hidden = model.hidden(params, tokens, position, segment)
        picked = jnp.take_along_axis(hidden, source[..., None], axis=1)
        return plain_stats(head_weight(params), ALLOWED, picked, target, batch.mask_NL, temperature)[:2]

    def pull(params, cotangents):
        return jax.vjp(forward, params)[1](cotangents)[0]

    return jax.jit(forward)(params), jax.jit(pull)


def near(old_NL, mask_NL, size, seed):
    noise = np.random.default_rng(seed).normal(size=mask_NL.shape)
    return np.where(mask_NL, old_NL + size * noise, np.nan).astype(np.float32)


def compare_method(name: str, kind: str, temperature: float, entropy: float) -> None:
    model, params = make_model(kind)
    batch, sequences = make_rows()
    (student_NL, entropy_NL), pull = plain_passes(kind, temperature)
    # Old log-probabilities near the student's own, or every ratio would be clipped.
    old_NL = near(student_NL, batch.mask_NL, 0.1, 1)
    views = {view: near(student_NL, batch.mask_NL, 0.5, i + 2) for i, view in enumerate(batch.views)}
    reference_NL = near(student_NL, batch.mask_NL, 0.3, 20)
    batch = dataclasses.replace(batch, old_NL=old_NL, reference_NL=reference_NL, views=views)
    sizes: dict[str, Any] = {"pack_length": 64, "pack_rows": 2, "loss_slots": 24, "minibatch_rows": len(batch.ok_N)}
    train = TrainConfig(remat="none", kl_coef=0.05, **sizes)
    method = registry.make(name)
    coefficients = dataclasses.replace(method.coefficients(STEP, 100), entropy=entropy, kl=0.05)
    fields = fields_of(batch, method.advantages(batch, STEP, 100).adv_NL)
    auxiliary_NL = method.auxiliary_mask(batch)
    if auxiliary_NL is not None:
        fields["auxiliary_mask"] = auxiliary_NL
    optimizer = Optimizer(Updater(model, method, train, temperature, ALLOWED), train, sharding.make_mesh(1, 1, 1))
    rows = np.flatnonzero(batch.ok_N)
    scales = optimizer._scales(batch, rows, coefficients, 1, auxiliary_NL)
    zeros = jax.tree.map(jnp.zeros_like, params)
    grads, sums = optimizer._accumulate(params, zeros, rows, batch, fields, sequences, scales)

    def loss(student_NL, entropy_NL):
        value, _ = token_loss(method, train, student_NL, fields, batch.mask_NL, scales)
        return value - scales.entropy * masked_sum(entropy_NL, batch.mask_NL), value

    (_, value), cotangents = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(student_NL, entropy_NL)
    total = masked_sum(entropy_NL, batch.mask_NL)
    assert float(sums["entropy"]) == pytest.approx(float(total), rel=1e-5)
    expected = value - scales.entropy * total if method.separable else value
    assert float(sums["loss"]) == pytest.approx(float(expected), rel=1e-5, abs=1e-5)
    want = pull(params, cotangents)
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(want))
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("name", NAMES)
def test_every_method_has_the_gradient_of_all_logits(name):
    compare_method(name, "dense tied", 0.7, 0.02)


@pytest.mark.parametrize("name", NAMES)
def test_every_method_with_a_hybrid_model_and_a_head_of_its_own(name):
    compare_method(name, "qwen3_5 untied", 1.3, 0.0)


@pytest.mark.parametrize("kind", ["dense untied", "qwen3_5 tied"])
def test_the_other_kinds_of_head(kind):
    compare_method("grpo", kind, 0.7, 0.02)


# --- on a mesh -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_mesh():
    root = Path(__file__).parents[2]
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "tests.train.head_on_mesh"]
    done = subprocess.run(command, check=True, env=environment, cwd=root, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_divided_head_equals_a_whole_one(on_mesh):
    assert len(on_mesh["head"]) == 4
    for case, errors in on_mesh["head"].items():
        assert errors["loss"] < 1e-6 and errors["aux"] < 1e-6 and errors["ids"], (case, errors)
        assert max(errors[name] for name in ("gradient", "score", "top")) < 1e-5, (case, errors)


@pytest.mark.slow
def test_a_divided_head_gathers_states_and_never_the_weight(on_mesh):
    for case, found in on_mesh["head"].items():
        if case.endswith(" 512"):
            # All states are 8 x 5 x 16 numbers; the weight is 512 x 16, and 8 devices hold 1,024 of them each.
            assert 0 < found["gathered"] <= 640, (case, found)


@pytest.mark.slow
def test_gradients_of_whole_models_do_not_depend_on_the_mesh(on_mesh):
    assert len(on_mesh["models"]) == 2
    for case, errors in on_mesh["models"].items():
        assert errors["loss"] < 1e-6 and errors["gradient"] < 1e-4, (case, errors)
