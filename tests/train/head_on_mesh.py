"""The head on eight virtual devices against one device. Run as a program by ``test_head.py``; prints JSON.

For each mesh (data, fsdp, tensor): relative errors of the head alone and of whole gradients, and how many numbers the
largest array has that the compiled head gathers.
"""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from sdjax import sharding
from sdjax.config import TrainConfig
from sdjax.methods import registry
from sdjax.models.dense import DenseModel
from sdjax.models.qwen3_5 import Qwen35Model
from sdjax.train.head import Head
from sdjax.train.packing import Sequences, Shape, pack
from sdjax.train.update import Scales, Updater
from tests.train.head_cases import VOCAB, dense_config, hybrid_config, problem, weighted_loss

MESHES = [(1, 8, 1), (1, 4, 2), (1, 2, 4), (2, 2, 2)]
SCALES = Scales(*map(jnp.float32, (0.02, 0.01, 0.005, 0.01)))
FIELDS = ("old", "reference", "adv", "skills")


def error(found, want) -> float:
    """Largest difference over all leaves, relative to the largest value."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True))
    scale = max(float(np.abs(y).max()) for _, y in pairs)
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in pairs) / scale


@functools.cache
def head_results(mesh, vocab: int, tokens: int):
    head = Head(0.7, mesh, tokens)
    p = problem(vocab, K=3)
    if mesh is not None:
        rows = sharding.batch_sharding(mesh)
        spec = sharding.parameter_spec(mesh, ("vocab", "embed"), p.weight.shape)
        hidden, pick, mask, slots = jax.device_put((p.hidden, p.pick, p.mask, p.slots), rows)
        p = p._replace(hidden=hidden, pick=pick, mask=mask, slots=slots)
        p = p._replace(weight=jax.device_put(p.weight, NamedSharding(mesh, spec)))

    def run(weight, hidden, p):
        loss = lambda w, h: head.loss(weighted_loss, w, p.allowed, h, p.pick, p.mask, p.slots, p.shared)  # noqa: E731
        value = jax.value_and_grad(loss, (0, 1), has_aux=True)(weight, hidden)
        score = head.score(weight, p.allowed, hidden, p.pick[..., 0], p.mask)
        return value, score, head.top(weight, p.allowed, hidden, p.mask, k=7)

    compiled = jax.jit(run).lower(p.weight, p.hidden, p).compile()
    return jax.device_get(compiled(p.weight, p.hidden, p)), compiled.as_text()


def compare_head(mesh, vocab: int, tokens: int) -> dict:
    (((loss, aux), grads), score, top), text = head_results(mesh, vocab, tokens)
    (((loss_1, aux_1), grads_1), score_1, top_1), _ = head_results(None, vocab, tokens)
    results = re.findall(r" = (.*?) all-gather(?:-start)?\(", text)  # one array or several
    gathered = [
        np.prod([int(n) for n in shape.split(",")]) for x in results for shape in re.findall(r"\[([\d,]+)\]", x)
    ]
    return {
        "loss": abs(loss / loss_1 - 1),
        "aux": error(aux, aux_1),
        "gradient": error(grads, grads_1),
        "score": error(np.maximum(score, -100), np.maximum(score_1, -100)),  # forbidden tokens have about -1e30
        "top": error(top[1], top_1[1]),
        "ids": bool((top[0] == top_1[0]).all()),
        "gathered": int(max(gathered)),
    }


def packed_batch():
    rng = np.random.default_rng(0)
    ids = lambda low, high: rng.integers(1, VOCAB, rng.integers(low, high)).astype(np.int32)  # noqa: E731
    sequences = Sequences([ids(3, 12) for _ in range(20)], [ids(1, 7) for _ in range(20)])
    (batch,) = pack(sequences, range(20), Shape(8, 64, 16, 7))
    fields = {name: rng.normal(-3, 0.5, batch.mask_BM.shape).astype(np.float32) for name in FIELDS}
    return batch.device_arrays(), {k: np.where(batch.mask_BM, v, np.nan) for k, v in fields.items()}


def gradient(model, mesh):
    if mesh is not None:
        model = dataclasses.replace(model, mesh=mesh)
    params = model.init(jax.random.key(0))
    batch, fields = packed_batch()
    if mesh is not None:
        params = jax.device_put(params, sharding.parameter_shardings(mesh, model.logical_axes(), params))
        batch, fields = jax.device_put((batch, fields), sharding.batch_sharding(mesh))
    updater = Updater(model, registry.make("sdar"), TrainConfig(), 0.7, np.arange(VOCAB) < VOCAB - 3)
    zeros = jax.tree.map(jnp.zeros_like, params)
    grads, sums = updater.gradient(params, zeros, batch, fields, SCALES)
    return jax.device_get((sums["loss"], grads))


def compare_models(meshes: dict) -> dict:
    # ``test_sharding.py`` has whole steps of the other two kinds of head, on every mesh.
    cases = {
        "dense untied": (DenseModel(dense_config(tied=False)), MESHES[2]),
        "qwen3_5 tied": (Qwen35Model(hybrid_config(tied=True)), MESHES[3]),
    }
    out = {}
    for name, (model, shape) in cases.items():
        (loss_1, grads_1), (loss, grads) = gradient(model, None), gradient(model, meshes[shape])
        out[f"{name} {shape}"] = {"loss": abs(loss / loss_1 - 1), "gradient": error(grads, grads_1)}
    return out


def main() -> None:
    meshes = {shape: sharding.make_mesh(*shape) for shape in MESHES}
    # 512 divides over everything, 51 over nothing; 8 tokens make several chunks, 2,048 one.
    heads = {f"{shape} 512": compare_head(meshes[shape], 512, tokens=8) for shape in MESHES[:3]}
    heads["(2, 2, 2) 51"] = compare_head(meshes[2, 2, 2], 51, tokens=2048)
    print(json.dumps({"head": heads, "models": compare_models(meshes)}, default=float))


if __name__ == "__main__":
    main()
