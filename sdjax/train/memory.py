"""How much memory one device needs to train a model: formulas, and what XLA says of the same step.

Nothing is allocated. Everything that lies on a device between two calls is counted exactly. What the gradient needs
while it runs is counted where it is largest: in the backward pass of one layer, or in the vocabulary head. All numbers
are bytes of one device.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from sdjax import sharding
from sdjax.config import TrainConfig
from sdjax.methods.base import Method
from sdjax.models.attention import QUERY_CHUNK
from sdjax.models.base import Model
from sdjax.models.config import ModelConfig
from sdjax.models.cudnn import MAX_SEGMENTS
from sdjax.models.qwen3_5_config import FULL, LINEAR, Qwen35Config
from sdjax.models.registry import family_of
from sdjax.train.head import CHUNK_TOKENS
from sdjax.train.update import Scales, Updater

_FLOAT32 = 4
# When something is held: always, in the backward pass of the layers, while the head runs, or in a rollout.
ALWAYS, LAYERS, HEAD, ROLLOUT = "always", "layers", "head", "rollout"


@dataclass(frozen=True)
class Workload:
    """What runs on the devices.

    data, fsdp, tensor: the mesh. dtype: of parameters and Adam moments. pack_rows, pack_length, loss_slots, remat: as
    in the ``train`` config. references: frozen or averaged copies of the parameters that lie on the devices. slots,
    context, cache_dtype: of the embedded engine; 0 slots: there is none.
    """

    config: ModelConfig
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    dtype: str = "float32"
    compute_dtype: str = "bfloat16"
    attention: str = "cudnn"
    pack_rows: int = 1
    pack_length: int = 8192
    loss_slots: int = 1024
    remat: Literal["none", "dots", "full"] = "full"
    references: int = 1
    slots: int = 64
    context: int = 2560
    cache_dtype: str = "bfloat16"

    @property
    def rows(self) -> int:
        """Packed rows of one device."""
        return -(-self.pack_rows // (self.data * self.fsdp))

    @property
    def compute_bytes(self) -> int:
        return jnp.dtype(self.compute_dtype).itemsize

    def model(self) -> Model:
        return family_of(self.config.model_type).make(self.config, self.compute_dtype)

    def mesh(self) -> AbstractMesh:
        return AbstractMesh((self.data, self.fsdp, self.tensor), sharding.AXES)


@dataclass(frozen=True)
class Part:
    """One line of a plan. phase: when it is there."""

    name: str
    bytes: int
    phase: str
    note: str = ""


@dataclass(frozen=True)
class Plan:
    parts: tuple[Part, ...]

    def of(self, phase: str) -> int:
        return sum(part.bytes for part in self.parts if part.phase == phase)

    @property
    def working(self) -> int:
        """What the gradient needs beside its arguments: its larger phase."""
        return max(self.of(LAYERS), self.of(HEAD))

    @property
    def total(self) -> int:
        return self.of(ALWAYS) + max(self.working, self.of(ROLLOUT))


def plan(w: Workload) -> Plan:
    """All parts of one device's memory. Raises ConfigError for a mesh that does not divide the model."""
    sharding.check_divides(w.mesh(), w.model().axis_sizes())
    return Plan((*_resident(w), *_engine(w), *_layers(w), *_head(w)))


def parameter_bytes(w: Workload, names: tuple[str, ...] | None = None) -> int:
    """Parameters of one device as they are divided over the mesh, all or those below ``names``, in ``w.dtype``."""
    model, mesh, total = w.model(), w.mesh(), 0
    shapes, axes = model.shapes(), model.logical_axes()
    for name in names or tuple(shapes):
        leaves = jax.tree.leaves(axes[name], is_leaf=lambda x: isinstance(x, tuple))
        for leaf, own_axes in zip(jax.tree.leaves(shapes[name]), leaves, strict=True):
            spec = sharding.parameter_spec(mesh, own_axes, leaf.shape)
            parts = (1 if axis is None else mesh.shape[axis] for axis in spec)
            total += int(np.prod([n // k for n, k in zip(leaf.shape, parts, strict=True)], dtype=np.int64))
    return total * jnp.dtype(w.dtype).itemsize


def _resident(w: Workload) -> list[Part]:
    size = parameter_bytes(w)
    return [
        Part("parameters", size, ALWAYS, f"{w.dtype}, what the optimizer changes"),
        Part("Adam moments", 2 * size, ALWAYS, "two of each parameter"),
        Part("gradients", size, ALWAYS, "added up over micro-batches"),
        Part("reference and teacher", w.references * size, ALWAYS, f"{w.references} further parameter sets"),
    ]


def _engine(w: Workload) -> list[Part]:
    """The embedded engine: all parameters in the compute dtype on every device, slots divided over data and fsdp."""
    if not w.slots:
        return []
    model, parts = w.model(), w.data * w.fsdp
    weights = model.num_params() * w.compute_bytes
    slots = w.slots // parts if w.slots % parts == 0 else w.slots
    cache = jax.eval_shape(lambda: model.init_cache(slots, w.context, w.cache_dtype))
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    kv = size((cache.k, cache.v))
    return [
        Part("engine: weights", weights, ALWAYS, f"{w.compute_dtype}, all on each device"),
        Part("engine: keys and values", kv, ALWAYS, f"{slots} slots of {w.context} tokens"),
        Part("engine: recurrent states", size(cache) - kv, ALWAYS, "states and convolution tails"),
        Part("engine: layers stacked", weights, ROLLOUT, "by a prefill; its activations are not counted"),
    ]


@dataclass(frozen=True)
class Layer:
    """One layer on one device. weights: whole along fsdp, in the compute dtype. kept: what its backward pass reads
    beside them. stored: what ``remat`` stores of it between forward and backward pass."""

    kind: str
    weights: int
    kept: int
    stored: int


def layer_kinds(w: Workload) -> tuple[Layer, ...]:
    """Each kind of layer of the model, by JAX's own account of what its derivative reads.

    The difference of two abstract models of which one has one more such layer; heads and channels are divided over
    ``tensor`` as on a device. A compiler that fuses well keeps less.
    """
    # The rest has no part in it, and tracing takes seconds.
    return _layer_kinds(dataclasses.replace(w, loss_slots=0, references=0, slots=0, context=0))


@functools.cache
def _layer_kinds(w: Workload) -> tuple[Layer, ...]:
    if not isinstance(w.config, Qwen35Config):
        changes = {"layer": ({"layers": 1}, {"layers": 2})}
    else:
        types = {LINEAR: (LINEAR, LINEAR, FULL), FULL: (LINEAR, FULL, FULL)}
        base = {"layers": 2, "layer_types": (LINEAR, FULL)}
        changes = {kind: (base, {"layers": 3, "layer_types": value}) for kind, value in types.items()}
    found = []
    for kind, (less, more) in changes.items():
        a, b = (_one_device(w, change) for change in (less, more))
        weights = (b.num_params() - a.num_params()) * w.compute_bytes
        kept, stored = (_residuals(w, b, remat) - _residuals(w, a, remat) - weights for remat in ("none", w.remat))
        found.append(Layer(kind, weights, kept, stored))
    return tuple(found)


def _one_device(w: Workload, change: dict[str, Any]) -> Model:
    c, t = w.config, w.tensor
    sizes = {"heads": c.heads // t, "kv_heads": c.kv_heads // t, "intermediate_size": c.intermediate_size // t}
    if isinstance(c, Qwen35Config):
        sizes |= {"linear_key_heads": c.linear_key_heads // t, "linear_value_heads": c.linear_value_heads // t}
    return family_of(c.model_type).make(dataclasses.replace(c, **sizes, **change), w.compute_dtype)


def _residuals(w: Workload, model: Model, remat: str) -> int:
    """Bytes that the derivative of ``hidden`` keeps, parameters included."""
    tokens = jax.ShapeDtypeStruct((w.rows, w.pack_length), jnp.int32)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, w.compute_dtype), model.shapes())

    def derivative(params: Any, tokens: Any) -> Any:
        return jax.vjp(lambda p: model.hidden(p, tokens, tokens, tokens, remat=remat), params)[1]

    leaves = jax.tree.leaves(jax.eval_shape(derivative, params, tokens))
    return sum(int(np.prod(x.shape, dtype=np.int64)) * x.dtype.itemsize for x in leaves)


def stored_activations(w: Workload) -> int:
    """What all layers store between forward and backward pass.

    Layers of a repeating pattern are scanned run by run, and the run at hand has its part a second time.
    """
    kinds = {layer.kind: layer.stored for layer in layer_kinds(w)}
    c = w.config
    if not isinstance(c, Qwen35Config):
        return c.layers * kinds["layer"]
    run = max((end - begin) * kinds[kind] for kind, begin, end in c.runs())
    return sum(kinds[kind] for kind in c.layer_types) + run


def attention_bytes(w: Workload) -> int:
    """Working memory of the backward pass of one attention layer.

    "xla": scores, exponentials, probabilities and the derivatives of the last two for one chunk of queries, float32.
    "cudnn": half-precision partial results for each segment that a row may have; 1.0 GiB at 8,192 tokens, 8 heads of
    256 and 8 segments, measured on an H200.
    """
    c, heads = w.config, w.config.heads // w.tensor
    if w.attention == "cudnn":
        return 4 * w.rows * MAX_SEGMENTS * w.pack_length * heads * c.head_dim * 2
    return 5 * w.rows * heads * min(QUERY_CHUNK, w.pack_length) * w.pack_length * _FLOAT32


def live_layer(w: Workload) -> tuple[Layer, int]:
    """The layer whose backward pass holds most, and its working memory beside what the layer kept.

    The MLP is first: three activations of its width. Attention comes when the six that the MLP had kept are gone.
    """
    mlp = 3 * w.rows * w.pack_length * (w.config.intermediate_size // w.tensor) * w.compute_bytes
    kinds = layer_kinds(w)
    working = {layer: max(mlp, 0 if layer.kind == LINEAR else attention_bytes(w) - 2 * mlp) for layer in kinds}
    layer = max(kinds, key=lambda layer: layer.kept + 2 * layer.weights + working[layer])
    return layer, working[layer]


def _layers(w: Workload) -> list[Part]:
    c, tokens = w.config, w.rows * w.pack_length
    layer, working = live_layer(w)
    head = "embedding" if c.tie_embeddings else "head"
    # Without recomputation the activations of the layer at hand are among those that are stored.
    kept = 0 if w.remat == "none" else layer.kept
    states = (tokens + w.rows * w.loss_slots) * c.hidden_size * w.compute_bytes
    return [
        Part("gradients of the micro-batch", parameter_bytes(w), LAYERS, "before they are added"),
        Part("stored activations", stored_activations(w), LAYERS, f"remat {w.remat!r}, {c.layers} layers"),
        Part("gathered layer", 2 * layer.weights, LAYERS, "its weights and their gradient"),
        Part("live layer", kept, LAYERS, f"{layer.kind}: what its derivative reads"),
        Part("work inside the layer", working, LAYERS, f"MLP, or attention by {w.attention}"),
        Part("gradient of the head", 2 * parameter_bytes(w, (head,)) + states, LAYERS, "to its weight and to states"),
    ]


def _head(w: Workload) -> list[Part]:
    """The head: each device has rows of the weight and sees a chunk of the tokens of its fsdp group."""
    c, slots = w.config, w.rows * w.loss_slots
    vocab = math.ceil(math.ceil(c.vocab_size / w.tensor) / w.fsdp)
    chunk = min(slots, max(1, CHUNK_TOKENS // w.fsdp)) * w.fsdp
    weight = vocab * c.hidden_size * (2 * w.compute_bytes + 2 * _FLOAT32)
    return [
        Part("stored activations", stored_activations(w), HEAD, f"remat {w.remat!r}, {c.layers} layers"),
        Part("head: logits", 3 * chunk * vocab * _FLOAT32, HEAD, f"{chunk} tokens x {vocab} ids, three times"),
        Part("head: weight", weight, HEAD, "in the compute dtype, its gradient in float32, each twice"),
        Part("head: states", 4 * slots * c.hidden_size * w.compute_bytes, HEAD, f"{slots} loss slots"),
    ]


# --- what XLA says ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """XLA's account of one program on one device. output: without what reuses an argument."""

    argument: int
    output: int
    temporary: int


def compile_step(w: Workload, method: Method, mesh: Mesh) -> dict[str, Compiled]:
    """Compiles the gradient of one micro-batch and the update for ``mesh``, from shapes alone.

    On the CPU backend bfloat16 is computed in float32, and its temporaries are as large as those of float32.
    """
    model = dataclasses.replace(w.model(), mesh=mesh if mesh.size > 1 else None)
    train = TrainConfig(pack_rows=w.pack_rows, pack_length=w.pack_length, loss_slots=w.loss_slots, remat=w.remat)
    updater = Updater(model, method, train, 1.0, np.ones(w.config.vocab_size, bool))
    batch, small = sharding.batch_sharding(mesh), sharding.replicated(mesh)
    places = sharding.parameter_shardings(mesh, model.logical_axes(), model.shapes())
    spec = lambda shape, dtype, place: jax.ShapeDtypeStruct(shape, dtype, sharding=place)  # noqa: E731
    params = jax.tree.map(lambda x, place: spec(x.shape, w.dtype, place), model.shapes(), places)
    wide, short = (w.pack_rows, w.pack_length), (w.pack_rows, w.loss_slots)
    inputs = {name: spec(wide, jnp.int32, batch) for name in ("tokens_BT", "position_BT", "segment_BT")}
    inputs |= {name: spec(short, jnp.int32, batch) for name in ("source_BM", "target_BM")}
    inputs["mask_BM"] = spec(short, jnp.bool_, batch)
    fields = {name: spec(short, jnp.float32, batch) for name in ("old", "reference", "adv")}
    scalar = spec((), jnp.float32, small)
    scales = Scales(scalar, scalar, scalar, scalar)
    gradient = updater.gradient.lower(params, params, inputs, fields, scales).compile()
    state = jax.eval_shape(updater.init, params)
    moments = jax.tree.map(lambda x: spec(x.shape, x.dtype, small), state["opt"])
    moments = (moments[0]._replace(mu=params, nu=params), *moments[1:])
    state = {**jax.tree.map(lambda x: spec(x.shape, x.dtype, small), state), "params": params, "opt": moments}
    apply = updater.apply.lower(state, params, scalar).compile()
    return {"gradient": _account(gradient), "update": _account(apply)}


def _account(compiled: Any) -> Compiled:
    found = compiled.memory_analysis()
    return Compiled(
        argument=found.argument_size_in_bytes,
        output=found.output_size_in_bytes - found.alias_size_in_bytes,
        temporary=found.temp_size_in_bytes,
    )
