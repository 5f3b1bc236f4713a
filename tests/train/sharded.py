"""One GRPO step of a tiny model on a mesh of virtual devices, and what its program sends between them.

Run by tests in a process of its own, because the number of devices is fixed when JAX starts:
``python -m tests.train.sharded OUT FAMILY MESH...`` with meshes such as 1,8,1 writes OUT/<mesh>.npz. Other forms: OUT
FAMILY compile MESH REMAT, and OUT placement.
"""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdjax import sharding
from sdjax.config import TrainConfig
from sdjax.methods.base import Coefficients, RowBatch
from sdjax.methods.registry import MethodConfig, config_class
from sdjax.models import hf
from sdjax.models.base import Model
from sdjax.models.config import ModelConfig
from sdjax.models.dense import DenseModel
from sdjax.models.hf import save_checkpoint
from sdjax.models.qwen3_5 import Qwen35Model
from sdjax.models.qwen3_5_config import FULL, LINEAR, Qwen35Config
from sdjax.train.checkpoints import Checkpoints
from sdjax.train.optimize import Optimizer
from sdjax.train.packing import Sequences
from sdjax.train.teacher_weights import Reference, TeacherWeights
from sdjax.train.update import Updater

ROOT = Path(__file__).parents[2]
LEARNING_RATE = 1e-4
N, L, VOCAB = 24, 6, 50  # a vocabulary that no mesh divides
TRAIN = TrainConfig(minibatch_rows=N, pack_length=48, pack_rows=8, loss_slots=12, kl_coef=0.05, entropy_coef=0.01)
# No two weights have the same shape, whole or halved, so that a shape in a program tells what it is.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 104, "heads": 12, "kv_heads": 4, "head_dim": 12,
    "max_positions": 128, "eos_token_ids": (0,), "pad_token_id": 0, "initializer_range": 0.1,
    "rms_eps": 1e-2,  # a random state gives outputs near 0, whose norm would blow rounding up
}  # fmt: skip


def make_model(family: str, dtype: str = "float32") -> Model:
    """A model whose heads and sizes all divide by 8 along fsdp and by 4 along tensor."""
    if family == "dense":
        config = ModelConfig("qwen2", layers=3, tie_embeddings=True, qkv_bias=True, o_bias=True, **SIZES)
        return DenseModel(config, dtype)
    linear = {"linear_key_heads": 4, "linear_value_heads": 8, "linear_key_dim": 7, "linear_value_dim": 10}
    kinds = (LINEAR, LINEAR, FULL) * 2
    more = {"layers": len(kinds), "layer_types": kinds, "conv_kernel": 4, "partial_rotary_factor": 0.5}
    return Qwen35Model(Qwen35Config(model_type="qwen3_5", tie_embeddings=False, **more, **linear, **SIZES), dtype)


def place(model: Model, mesh: tuple[int, int, int]) -> tuple[Model, Any, Any]:
    """The model on a mesh, with its parameters and the mesh."""
    devices = sharding.make_mesh(*mesh)
    places = sharding.parameter_shardings(devices, model.logical_axes(), model.shapes())
    params = jax.device_put(model.init(jax.random.key(0)), places)
    return dataclasses.replace(model, mesh=devices if devices.size > 1 else None), params, devices


def make_step(model: Model, mesh: Any, train: TrainConfig = TRAIN) -> tuple[Updater, Optimizer]:
    method = MethodConfig("grpo", config_class("grpo")()).build()
    updater = Updater(model, method, train, 0.8, np.arange(VOCAB) != 3)
    return updater, Optimizer(updater, train, mesh)


def make_data(seed: int = 0) -> tuple[RowBatch, np.ndarray, Sequences]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, L + 1, N)
    mask = np.arange(L) < lengths[:, None]
    draw = lambda size: rng.integers(4, VOCAB, size).astype(np.int32)  # noqa: E731
    sequences = Sequences([draw(p) for p in rng.integers(3, 20, N)], [draw(r) for r in lengths])
    noise = np.where(mask, rng.normal(-3, 0.5, (N, L)), np.nan).astype(np.float32)
    adv, zeros = rng.normal(size=N).astype(np.float32), np.zeros(N)
    batch = RowBatch(
        group_N=np.arange(N) // 4, trajectory_N=np.arange(N) // 2, turn_N=np.arange(N) % 2, ok_N=np.ones(N, bool),
        valid_N=np.ones(N, bool), return_N=zeros, outcome_N=zeros, success_N=zeros.astype(bool), score_N=zeros,
        adv_N=adv, mask_NL=mask, old_NL=noise, reference_NL=noise,
    )  # fmt: skip
    return batch, np.where(mask, adv[:, None], 0).astype(np.float32), sequences


def step(family: str, mesh: tuple[int, int, int]) -> dict[str, np.ndarray]:
    """Scores, loss and gradient of one mini-batch, and the parameters after its update."""
    model, params, devices = place(make_model(family), mesh)
    updater, optimizer = make_step(model, devices)
    batch, adv_NL, sequences = make_data()
    state = updater.init(params)
    old_NL = optimizer.score(params, sequences, (N, L))
    batch = dataclasses.replace(batch, old_NL=old_NL, reference_NL=old_NL + 0.1)
    fields = {"old": batch.old_NL, "reference": batch.reference_NL, "adv": adv_NL}
    scales = optimizer._scales(batch, np.arange(N), Coefficients(), 1)
    zeros = jax.tree.map(jnp.zeros_like, params)
    grads, sums = optimizer._accumulate(params, zeros, np.arange(N), batch, fields, sequences, scales)
    state, _ = optimizer.update(
        state, batch, adv_NL, sequences, Coefficients(), step=1, seed=0, learning_rate=LEARNING_RATE
    )
    for tree in (grads, state["params"], state["opt"][0].mu):
        wrong = jax.tree.map(lambda x, p: x.sharding.is_equivalent_to(p.sharding, x.ndim), tree, params)
        assert all(jax.tree.leaves(wrong)), "gradients and moments lie where the parameters lie"
    found = {"scores": old_NL, "loss": np.asarray(sums["loss"])}
    for name, tree in (("grads", grads), ("params", state["params"])):
        found |= {f"{name}/{jax.tree_util.keystr(path)}": np.asarray(x) for path, x in _leaves(tree)}
    return found


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(jax.device_get(tree))[0]


def load_weights(folder: Path) -> None:
    """A checkpoint is read straight onto a mesh: no device ever holds more than its part of anything."""
    model = make_model("qwen3_5")
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda x: random.standard_normal(x.shape).astype(np.float32), model.shapes())
    save_checkpoint(folder, model, params)
    largest: list[float] = []
    set_layer = hf._set_layer

    def spy(stack, value, index, place):
        for x in (stack, value):
            assert len(x.addressable_shards) == 8
            largest.append(max(shard.data.size for shard in x.addressable_shards) / x.size)
        assert value.ndim == stack.ndim - 1
        return set_layer(stack, value, index, place)

    for mesh, part in (((1, 8, 1), 1 / 8), ((2, 2, 2), 1 / 4), ((1, 2, 4), 1 / 8)):
        devices = sharding.make_mesh(*mesh)
        places = sharding.parameter_shardings(devices, model.logical_axes(), model.shapes())
        for dtype in (None, "bfloat16"):
            largest.clear()
            hf._set_layer = spy
            loaded = hf.load_params(folder, model, dtype=dtype, shardings=places)
            hf._set_layer = set_layer
            wide = [x for x in largest if x <= part]
            assert len(wide) > len(largest) // 3  # the others are norms, and gates that only "tensor" divides
            plain = hf.load_params(folder, model, dtype=dtype)
            for x, y, place in zip(*map(jax.tree.leaves, (loaded, plain, places)), strict=True):
                assert x.sharding == place and x.dtype == y.dtype
                np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
            kernel = loaded["linear_layers"]["mlp"]["gate"]["kernel"]
            assert {shard.data.size / kernel.size for shard in kernel.addressable_shards} == {part}


def move_checkpoints(folder: Path) -> None:
    """A state saved on one mesh is restored, bit for bit, onto others and onto one device."""
    saved = None
    for number, mesh in enumerate(((1, 8, 1), (1, 4, 2), (1, 1, 1), (2, 2, 2))):
        model, params, devices = place(make_model("dense"), mesh)
        state = make_step(model, devices)[0].init(params)
        checkpoints = Checkpoints(folder, keep=5, asynchronous=False)
        if saved is None:
            random = np.random.default_rng(1)
            drawn = jax.tree.map(lambda x: random.normal(size=x.shape).astype(x.dtype), state)  # noqa: B023
            state = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), drawn, state)
            saved = jax.device_get(state)
        else:
            like, state = state, checkpoints.restore(number - 1, checkpoints.abstract(state))
            for x, y, z in zip(*map(jax.tree.leaves, (state, saved, like)), strict=True):
                assert x.sharding.is_equivalent_to(z.sharding, x.ndim)
                assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
        checkpoints.save(number, state, {"step": number})
        checkpoints.close()


def park_reference() -> None:
    """Weights in host memory score bit for bit as on the devices, and are divided there too."""
    model, params, devices = place(make_model("dense"), (1, 4, 2))
    _, optimizer = make_step(model, devices)
    sequences = make_data()[2]
    expected = optimizer.score(params, sequences, (N, L))
    host = Reference(params, "host")
    assert {x.sharding.memory_kind for x in jax.tree.leaves(host._waiting)} == {"pinned_host"}
    for x, y in zip(*map(jax.tree.leaves, (host._waiting, params))):
        assert x.sharding.spec == y.sharding.spec
    for reference in (host, Reference(params, "device")):
        moved = reference.on_device()
        assert {x.sharding.memory_kind for x in jax.tree.leaves(moved)} == {"device"}
        assert optimizer.score(moved, sequences, (N, L)).tobytes() == expected.tobytes()
    weights = TeacherWeights("init", 0.9)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(weights.current(None, host))} == {"device"}


def compile_gradient(family: str, mesh: tuple[int, int, int], remat: str) -> None:
    """Compiles the gradient of a micro-batch with bfloat16 products; XLA_FLAGS say where the program is written."""
    model, params, devices = place(make_model(family, "bfloat16"), mesh)
    train = dataclasses.replace(TRAIN, remat=remat)
    updater, optimizer = make_step(model, devices, train)
    batch, adv_NL, sequences = make_data()
    packed = optimizer.pack(sequences, range(N))[0]
    fields = {"old": batch.old_NL, "reference": batch.reference_NL, "adv": adv_NL}
    values = optimizer.put({name: packed.gather(x) for name, x in fields.items()})
    scales = optimizer._scales(batch, np.arange(N), Coefficients(), 1)
    updater.gradient.lower(params, params, optimizer.put(packed.device_arrays()), values, scales).compile()


def collectives(program: str) -> list[tuple[str, str, tuple[int, ...]]]:
    """(operation, dtype, shape) of every array that an HLO program receives from other devices."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
    found = []
    for line in program.splitlines():
        operation = re.search(rf"= (.*?) ({kinds})(?:-start)?\(", line)
        if operation:
            arrays = re.findall(r"([a-z]+[0-9]*)\[([0-9,]*)\]", operation[1])
            found += [(operation[2], kind, tuple(int(n) for n in shape.split(",") if n)) for kind, shape in arrays]
    return found


def run(arguments: list[str], *, devices: int = 8, flags: str = "", module: str = "tests.train.sharded") -> str:
    """Runs this module (or another) in a process with so many virtual devices; returns what it printed."""
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices} {flags}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    if flags:  # a program that comes from the cache is not written
        environment |= {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def main(out: str, family: str, *rest: str) -> None:
    if family == "placement":
        load_weights(Path(out) / "model")
        move_checkpoints(Path(out) / "checkpoints")
        park_reference()
        return
    if rest[0] == "compile":
        compile_gradient(family, _mesh(rest[1]), rest[2])
        return
    for name in rest:
        np.savez(Path(out) / f"{name}.npz", **step(family, _mesh(name)))


def _mesh(text: str) -> tuple[int, int, int]:
    data, fsdp, tensor = map(int, text.split(","))
    return data, fsdp, tensor


if __name__ == "__main__":
    main(*sys.argv[1:])
