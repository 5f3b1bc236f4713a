"""Mesh and sharding rules: one table from logical axis names to mesh axes."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sdjax.errors import ConfigError

# Logical axis of a parameter -> mesh axis. An axis that does not divide stays whole.
RULES = {"embed": "fsdp", "vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"}
BATCH = PartitionSpec(("data", "fsdp"))


def make_mesh(data: int, fsdp: int, tensor: int) -> Mesh:
    """A mesh over the first ``data * fsdp * tensor`` devices."""
    wanted = data * fsdp * tensor
    devices = jax.devices()
    if wanted > len(devices):
        raise ConfigError(
            f"the mesh {data} x {fsdp} x {tensor} needs {wanted} devices, {len(devices)} are there.",
            "lower mesh.data, mesh.fsdp or mesh.tensor.",
        )
    return Mesh(np.array(devices[:wanted]).reshape(data, fsdp, tensor), ("data", "fsdp", "tensor"))


def parameter_shardings(mesh: Mesh, logical_axes: Any, params: Any) -> Any:
    """NamedShardings for a parameter tree; ``logical_axes`` mirrors it with tuples of logical axis names."""

    def one(axes: tuple[str | None, ...], leaf: Any) -> NamedSharding:
        spec = []
        for name, size in zip(axes, leaf.shape, strict=True):
            axis = RULES.get(name) if name else None
            spec.append(axis if axis and size % mesh.shape[axis] == 0 and axis not in spec else None)
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(one, logical_axes, params, is_leaf=lambda x: isinstance(x, tuple))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a packed micro-batch are split over the data and fsdp axes."""
    return NamedSharding(mesh, BATCH)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
