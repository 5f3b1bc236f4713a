"""Gradients do not depend on how a mini-batch is cut: micro-batches, packing, paths, devices."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sdjax import sharding
from sdjax.config import TrainConfig
from sdjax.methods import registry
from sdjax.methods.base import Coefficients, RowBatch
from sdjax.methods.sdar import Sdar
from sdjax.models.config import ModelConfig
from sdjax.models.dense import DenseModel
from sdjax.train.optimize import Optimizer, learning_rate, minibatches
from sdjax.train.packing import Sequences
from sdjax.train.update import Updater

N, L, VOCAB = 24, 6, 50
TRAIN = TrainConfig(minibatch_rows=N, pack_length=64, pack_rows=2, loss_slots=24, kl_coef=0.05, entropy_coef=0.01)
COEFFICIENTS = Coefficients(auxiliary=0.3)


def make_model():
    return DenseModel(
        ModelConfig(
            model_type="qwen3",
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=32,
            layers=2,
            heads=4,
            kv_heads=2,
            head_dim=4,
            max_positions=128,
            tie_embeddings=True,
            eos_token_ids=(0,),
            pad_token_id=0,
            qk_norm=True,
        )
    )


def make_data(seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, L + 1, N)
    mask = np.arange(L) < lengths[:, None]
    noise = lambda scale: np.where(mask, rng.normal(-3, scale, (N, L)), np.nan).astype(np.float32)  # noqa: E731
    sequences = Sequences(
        [rng.integers(1, VOCAB, p).astype(np.int32) for p in rng.integers(3, 20, N)],
        [rng.integers(1, VOCAB, r).astype(np.int32) for r in lengths],
    )
    adv = rng.normal(size=N).astype(np.float32)
    zeros = np.zeros(N)
    batch = RowBatch(
        group_N=np.arange(N) // 4,
        trajectory_N=np.arange(N) // 2,
        turn_N=np.arange(N) % 2,
        ok_N=np.ones(N, bool),
        valid_N=np.ones(N, bool),
        return_N=zeros,
        outcome_N=zeros,
        success_N=zeros.astype(bool),
        score_N=zeros,
        adv_N=adv,
        mask_NL=mask,
        old_NL=noise(0.5),
        reference_NL=noise(0.5),
        views={"skills": noise(0.5)},
    )
    return batch, np.where(mask, adv[:, None], 0).astype(np.float32), sequences


class CoupledSdar(Sdar):
    """SDAR through the two-pass path; not registered."""

    name = "coupled_sdar"
    separable = False


def gradient(train=TRAIN, method=None, mesh=(1, 1, 1), minibatch=None):
    """Gradient of one whole mini-batch, as float64 leaves."""
    model = make_model()
    mesh = sharding.make_mesh(*mesh)
    params = model.init(jax.random.key(0))
    params = jax.device_put(params, sharding.parameter_shardings(mesh, model.logical_axes(), params))
    updater = Updater(model, method or Sdar(Sdar.Config()), train, 1.0, np.ones(VOCAB, bool))
    optimizer = Optimizer(updater, train, mesh)
    batch, adv, sequences = make_data()
    fields = {"old": batch.old_NL, "reference": batch.reference_NL, "adv": adv, **batch.views}
    grads = jax.tree.map(jnp.zeros_like, params)
    parts = list(optimizer._slices(np.arange(N) if minibatch is None else minibatch))
    for part in parts:
        scales = optimizer._scales(batch, part, COEFFICIENTS, len(parts))
        grads, sums = optimizer._accumulate(params, grads, part, batch, fields, sequences, scales)
    return jax.device_get(grads), sums


def assert_same(a, b, tolerance=1e-6):
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(a))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance * max(scale, 1.0), rtol=0)


@pytest.mark.parametrize(("length", "rows", "slots"), [(32, 1, 12), (512, 1, 256), (64, 8, 24), (48, 3, 48)])
def test_micro_batch_split_does_not_change_the_gradient(length, rows, slots):
    other = dataclasses.replace(TRAIN, pack_length=length, pack_rows=rows, loss_slots=slots)
    (a, sums_a), (b, sums_b) = gradient(), gradient(other)
    assert_same(a, b)
    assert float(sums_a["loss"]) == pytest.approx(float(sums_b["loss"]), rel=1e-5)
    assert float(sums_a["tokens"]) == float(sums_b["tokens"])


def test_two_pass_path_equals_one_pass_path():
    (a, sums_a), (b, sums_b) = gradient(), gradient(method=CoupledSdar(Sdar.Config()))
    assert_same(a, b)
    assert float(sums_a["kl"]) == pytest.approx(float(sums_b["kl"]), rel=1e-5)


def test_micro_aggregation_differs_and_equals_the_mean_of_the_parts():
    micro = dataclasses.replace(TRAIN, agg="micro", micro_rows=8)
    whole, _ = gradient(micro)
    parts = [gradient(micro, minibatch=np.arange(i, i + 8))[0] for i in range(0, N, 8)]
    assert_same(whole, jax.tree.map(lambda *x: sum(x) / len(x), *parts))
    with pytest.raises(AssertionError):
        assert_same(whole, gradient()[0])


def test_coefficient_zero_is_exactly_grpo():
    train = dataclasses.replace(TRAIN)
    model = make_model()
    results = []
    for method, coefficients in (
        (registry.MethodConfig("grpo", registry.config_class("grpo")()).build(), Coefficients()),
        (Sdar(Sdar.Config(coef=0.0)), Sdar(Sdar.Config(coef=0.0)).coefficients(1, 10)),
    ):
        updater = Updater(model, method, train, 1.0, np.ones(VOCAB, bool))
        optimizer = Optimizer(updater, train, sharding.make_mesh(1, 1, 1))
        state = updater.init(model.init(jax.random.key(0)))
        batch, adv, sequences = make_data()
        state, _ = optimizer.update(state, batch, adv, sequences, coefficients, step=1, seed=0, learning_rate=1e-3)
        results.append(jax.device_get(state["params"]))
    for x, y in zip(*map(jax.tree.leaves, results)):
        np.testing.assert_array_equal(x, y)


def test_update_is_adamw_with_global_norm_clipping():
    model = make_model()
    updater = Updater(model, Sdar(Sdar.Config()), TRAIN, 1.0, np.ones(VOCAB, bool))
    params = model.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    draw = lambda scale: jax.tree.map(lambda p: jnp.asarray(scale * rng.normal(size=p.shape), p.dtype), params)  # noqa: E731
    grads = [draw(0.01), draw(3.0)]
    peer = optax.chain(
        optax.clip_by_global_norm(TRAIN.grad_clip),
        optax.adamw(1e-3, b1=TRAIN.beta1, b2=TRAIN.beta2, weight_decay=TRAIN.weight_decay),
    )
    expected, peer_state = params, peer.init(params)
    state = updater.init(params)
    for g in grads:
        updates, peer_state = peer.update(g, peer_state, expected)
        expected = optax.apply_updates(expected, updates)
        state, _ = updater.apply(state, g, jnp.float32(1e-3))
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(state["params"])):
        np.testing.assert_allclose(x, y, atol=1e-6)
    assert int(state["updates"]) == 2 and int(state["skipped"]) == 0


def test_a_non_finite_gradient_changes_nothing_and_is_counted():
    model = make_model()
    updater = Updater(model, Sdar(Sdar.Config()), TRAIN, 1.0, np.ones(VOCAB, bool))
    state = updater.init(model.init(jax.random.key(0)))
    before = jax.device_get(state)
    grads = jax.tree.map(jnp.ones_like, state["params"])
    grads["embedding"] = grads["embedding"].at[0, 0].set(jnp.nan)
    state, norm = updater.apply(state, grads, jnp.float32(1e-3))
    assert not np.isfinite(float(norm)) and int(state["skipped"]) == 1 and int(state["updates"]) == 0
    for x, y in zip(
        jax.tree.leaves((before["params"], before["opt"])), jax.tree.leaves((state["params"], state["opt"]))
    ):
        np.testing.assert_array_equal(x, y)


def test_masked_nan_in_old_reference_and_teacher_never_reaches_a_gradient():
    grads, sums = gradient()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads)) and np.isfinite(float(sums["loss"]))


def test_minibatches_cover_every_row_once():
    plain = list(minibatches(10, dataclasses.replace(TRAIN, minibatch_rows=4), seed=1, step=1))
    assert [list(m) for m in plain] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    shuffled = dataclasses.replace(TRAIN, minibatch_rows=4, minibatch_order="shuffle")
    draws = [np.concatenate(list(minibatches(10, shuffled, seed=1, step=s))) for s in (1, 1, 2)]
    assert sorted(draws[0]) == list(range(10))
    np.testing.assert_array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[0], draws[2])


def test_learning_rate_is_zero_in_the_first_warm_up_step():
    train = dataclasses.replace(TRAIN, steps=100, warmup_share=0.1, learning_rate=1.0)
    assert [learning_rate(train, s) for s in (1, 2, 6, 11, 100)] == pytest.approx([0.0, 0.1, 0.5, 1.0, 1.0])
    assert learning_rate(dataclasses.replace(train, warmup_share=0.0), 1) == 1.0


@pytest.mark.parametrize("mesh", ["8,1,1", "2,4,1", "1,4,2"])
def test_eight_devices_give_the_gradient_of_one(mesh, tmp_path):
    script = (
        "import sys, numpy as np, jax, dataclasses\n"
        "from tests.train.test_update import gradient, TRAIN\n"
        f"g, s = gradient(dataclasses.replace(TRAIN, pack_rows=8), mesh=({mesh}))\n"
        "np.savez(sys.argv[1], *jax.tree.leaves(g), loss=s['loss'], devices=len(jax.devices()))\n"
    )
    out = tmp_path / "g.npz"
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(root),
    }
    subprocess.run([sys.executable, "-c", script, str(out)], check=True, env=environment, cwd=root)
    saved = np.load(out)
    expected, sums = gradient(dataclasses.replace(TRAIN, pack_rows=8))
    assert saved["devices"] == 8
    assert float(saved["loss"]) == pytest.approx(float(sums["loss"]), rel=1e-6)
    assert_same(expected, [saved[f"arr_{i}"] for i in range(len(jax.tree.leaves(expected)))])
