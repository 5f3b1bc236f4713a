"""Mesh and sharding: one table from logical axis names to mesh axes, and everything that follows from it.

Parameters and optimizer state are divided over ``fsdp`` and ``tensor``, the rows of a batch over ``data`` and ``fsdp``.
A layer is computed with its own parameters whole along ``fsdp``: cast to the compute dtype first, gathered one layer at
a time, dropped after use. Along ``tensor`` heads and channels stay divided, also while a layer is computed.
"""

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sdjax.errors import ConfigError

AXES = ("data", "fsdp", "tensor")
# Logical axis of a parameter -> mesh axis that divides it (None: never divided).
RULES: dict[str | None, str | None] = {
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "layers": None,
    None: None,
}
# Stays whole where its mesh axis does not divide it. The size of a vocabulary is a fact of the tokenizer, and rows of
# the embedding are only looked up; its other axis is divided all the same.
OPTIONAL = frozenset({"vocab"})
ROWS = ("data", "fsdp")  # mesh axes that divide the rows of a batch
BATCH = PartitionSpec(ROWS)
KERNEL = "kernel"  # ``checkpoint_name`` of what a hand-written kernel computes for its own derivative


def make_mesh(data: int, fsdp: int, tensor: int) -> Mesh:
    """A mesh over the first ``data * fsdp * tensor`` devices.

    Raises:
      ConfigError: there are fewer, or some process would have no part in it. Warns where devices are left over.
    """
    wanted, devices = data * fsdp * tensor, jax.devices()
    if wanted > len(devices):
        raise ConfigError(
            f"the mesh {data} x {fsdp} x {tensor} needs {wanted} devices, {len(devices)} are there.",
            "lower mesh.data, mesh.fsdp or mesh.tensor.",
        )
    if wanted < len(devices):
        text = f"the mesh {data} x {fsdp} x {tensor} uses {wanted} of {len(devices)} devices."
        if jax.process_count() > 1:
            raise ConfigError(text, "a run over several processes must use the devices of all of them.")
        warnings.warn(f"{text} Raise mesh.fsdp or mesh.data to use all.", stacklevel=2)
    return Mesh(np.array(devices[:wanted]).reshape(data, fsdp, tensor), AXES)


def check_divides(mesh: Mesh | AbstractMesh, sizes: Mapping[str, Mapping[str, int]]) -> None:
    """Refuses a mesh that cannot divide a model.

    sizes: for each logical axis the numbers that its mesh axis must divide, by their names in config.json; for
    attention these are heads and not channels.

    Raises:
      ConfigError: naming each axis, each number, and the largest size of the axis that would do.
    """
    for axis in AXES:
        numbers = {name: n for key, group in sizes.items() if RULES[key] == axis for name, n in group.items()}
        size = mesh.shape[axis]
        wrong = [f"{name} = {n}" for name, n in numbers.items() if n % size]
        if wrong:
            fits = max(n for n in range(1, size + 1) if size % n == 0 and not any(v % n for v in numbers.values()))
            raise ConfigError(
                f"mesh.{axis} = {size} does not divide {', '.join(wrong)} of the model.",
                f"use mesh.{axis} = {fits} and more devices on another axis of the mesh.",
            )


def parameter_spec(mesh: Mesh | AbstractMesh, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
    """Where a parameter with these logical axes lies. Raises ConfigError for an axis that does not divide."""
    spec: list[str | None] = []
    for name, size in zip(axes, shape, strict=True):
        axis = RULES[name]
        divides = axis is None or size % mesh.shape[axis] == 0
        if not divides and name not in OPTIONAL:
            raise ConfigError(
                f"mesh.{axis} = {mesh.shape[axis]} does not divide the axis {name!r} of {size}.",
                f"use a mesh.{axis} that divides it.",
            )
        spec.append(axis if divides else None)
    return PartitionSpec(*spec)


def parameter_shardings(mesh: Mesh, logical_axes: Any, params: Any) -> Any:
    """NamedShardings for a parameter tree; ``logical_axes`` mirrors it with tuples of logical axis names."""

    def one(axes: tuple[str | None, ...], leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, parameter_spec(mesh, axes, leaf.shape))

    return jax.tree.map(one, logical_axes, params, is_leaf=lambda x: isinstance(x, tuple))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a packed micro-batch are split over the data and fsdp axes."""
    return NamedSharding(mesh, BATCH)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def put(x: Any, sharding: NamedSharding) -> jax.Array:
    """Places a host array. Where the mesh spans processes, each of them has the whole array and places its part."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    return jax.make_array_from_callback(np.shape(x), sharding, lambda index: x[index])


def to_memory(params: Any, kind: Literal["device", "host"]) -> Any:
    """Moves parameters to the memory of their devices or of the host, divided as they are.

    Raises:
      ConfigError: this backend keeps no arrays in host memory.
    """
    memory = {"device": "device", "host": "pinned_host"}[kind]
    kinds = {found.kind for device in jax.local_devices()[:1] for found in device.addressable_memories()}
    if memory not in kinds:
        raise ConfigError(
            f"model.reference_memory = {kind!r} needs the memory {memory!r}; this backend has {', '.join(kinds)}.",
            "use model.reference_memory = 'device'.",
        )
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind(memory)), params)


def local_mesh() -> Mesh:
    """The devices of this process alone, all along "data"."""
    devices = jax.local_devices()
    return Mesh(np.array(devices).reshape(len(devices), 1, 1), AXES)


def localize(whole: Any) -> Any:
    """Arrays that lie whole on every device of all processes, as arrays on ``local_mesh`` alone. Nothing is copied."""
    place = replicated(local_mesh())

    def one(x: jax.Array) -> jax.Array:
        return jax.make_array_from_single_device_arrays(x.shape, place, [part.data for part in x.addressable_shards])

    return jax.tree.map(one, whole)


def constrain(mesh: Mesh, x: jax.Array, *spec: Any) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def divides_rows(mesh: Mesh, rows: int) -> bool:
    return rows % (mesh.shape["data"] * mesh.shape["fsdp"]) == 0


def divide_rows(mesh: Mesh | None, x_B: jax.Array) -> jax.Array:
    """Fixes that the rows (first axis) of an activation are divided over the mesh and nothing else of it is.

    Rows that do not divide (few prompts of the engine) are left to the compiler.
    """
    return x_B if mesh is None or not divides_rows(mesh, len(x_B)) else constrain(mesh, x_B, ROWS)


def whole_layer(mesh: Mesh | None, logical_axes: Any, params: Any, dtype: Any) -> Any:
    """Parameters of one layer as it is computed with: whole along fsdp, matrices in ``dtype``.

    They are cast before they are gathered: that is half the bytes. Their gradients are divided again at once.
    """
    if mesh is None:
        return params

    def one(axes: tuple[str | None, ...], x: jax.Array) -> jax.Array:
        spec = parameter_spec(mesh, axes, x.shape)
        if "fsdp" not in spec:
            return x
        if x.ndim > 1 and x.dtype != dtype:
            # Without this constraint the compiler would gather first and cast afterwards.
            x = constrain(mesh, x.astype(dtype), *spec)
        return _gather(mesh, spec, x)

    return jax.tree.map(one, logical_axes, params, is_leaf=lambda x: isinstance(x, tuple))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(mesh: Mesh, spec: PartitionSpec, x: jax.Array) -> jax.Array:
    return constrain(mesh, x, *(None if axis == "fsdp" else axis for axis in spec))


def _gather_forward(mesh: Mesh, spec: PartitionSpec, x: jax.Array) -> tuple[jax.Array, None]:
    return _gather(mesh, spec, x), None


def _gather_backward(mesh: Mesh, spec: PartitionSpec, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    # The transpose of the constraint would add up the gradient of the whole weight on every device.
    return (constrain(mesh, cotangent, *spec),)


_gather.defvjp(_gather_forward, _gather_backward)


def checkpoint_layer(layer: Callable[..., Any], mesh: Mesh | None, *, remat: str) -> Callable[..., Any]:
    """``layer`` with less memory between forward and backward pass: what is not stored is computed again.

    ``"none"`` stores everything; ``"dots"`` the results of matrix products with weights, which cost most to compute;
    ``"full"`` the input alone. On a mesh gathered weights are never stored: those of all layers together would be the
    whole model on every device.

    Raises:
      ConfigError: another ``remat``.
    """
    if remat not in ("none", "dots", "full"):
        raise ConfigError(f"remat is {remat!r}.", 'use "none", "dots" or "full".')
    if remat == "dots":
        policies = jax.checkpoint_policies
        products, kernels = policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(KERNEL)
        return jax.checkpoint(layer, policy=policies.save_from_both_policies(products, kernels))
    if remat == "none" and mesh is not None:
        # ``_gather`` is seen as a call; kernels with a derivative of their own are computed again too.
        gathered = ("sharding_constraint", "custom_vjp_call")
        return jax.checkpoint(layer, policy=lambda primitive, *_, **__: primitive.name not in gathered)
    return jax.checkpoint(layer) if remat == "full" else layer


def over_batch_and_heads(
    function: Callable[..., Any], mesh: Mesh | None, inputs: Sequence[str], outputs: Sequence[str]
) -> Callable[..., Any]:
    """Divides a hand-written kernel over the mesh, which the compiler cannot do: each device calls ``function`` with
    its own rows and heads.

    inputs: for each argument a letter per axis, "B" for rows (divided over data and fsdp), "H" for heads (over tensor)
    and "-" for others; trailing arguments may be left out of a call. outputs: the same for the results. Heads that do
    not divide evenly in every argument, and rows that do not or are not equally many, are whole on every device, which
    then repeats the work of others.
    """
    if mesh is None or mesh.size == 1:
        return function

    def divided(*arrays: jax.Array) -> Any:
        specs = inputs[: len(arrays)]

        def place(letter: str, axes: tuple[str, ...]) -> tuple[str, ...] | None:
            axes = tuple(axis for axis in axes if axis in mesh.axis_names)
            size = math.prod(mesh.shape[axis] for axis in axes)
            sizes = [x.shape[spec.index(letter)] for x, spec in zip(arrays, specs, strict=True) if letter in spec]
            # A part of few rows would not meet its rows in a part of more.
            together = letter == "H" or len(set(sizes)) == 1
            return axes if together and all(n % size == 0 for n in sizes) else None

        places = {"B": place("B", ROWS), "H": place("H", ("tensor",))}
        to_spec = lambda spec: PartitionSpec(*(places.get(letter) for letter in spec))  # noqa: E731
        out_specs = [to_spec(spec) for spec in outputs]
        # Which devices repeat each other is said by the specs; a kernel's outputs cannot carry that.
        return jax.shard_map(
            function,
            mesh=mesh,
            in_specs=tuple(map(to_spec, specs)),
            out_specs=tuple(out_specs) if len(out_specs) > 1 else out_specs[0],
            check_vma=False,
        )(*arrays)

    return divided
