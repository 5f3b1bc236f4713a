"""A checkpoint in pieces: its tensors in the names and the layout of Hugging Face, made on the device, some at a time.

No more than one bucket beside the parameters exists at once, whatever the size of the model.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sdjax.models.base import Model, Params
from sdjax.models.registry import family_of
from sdjax.models.tensors import Stored, Tensor, get, layout

BUCKET_BYTES = 2**30


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint. dtype: as it is sent."""

    name: str
    stored: Stored
    dtype: Any

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.stored.shape, dtype=np.int64)) * self.dtype.itemsize


def plan(model: Model, dtype: Any, bucket_bytes: int = BUCKET_BYTES) -> list[list[Entry]]:
    """All tensors of ``model``'s checkpoint, cut into buckets of at most ``bucket_bytes``; a larger tensor is alone.

    They are sent in ``dtype``, except for those that no checkpoint holds in less than float32. Wide types come first in
    each bucket: its receiver views the bytes in place, so each tensor must begin at a multiple of its item size.
    """
    family = family_of(model.config.model_type)
    found = layout(family.tensors(model.config), model.shapes(), family.prefixes[0])
    entries = []
    for name, stored in found.items():
        exact = any(part.tensor.float32 for part in stored.parts)
        entries.append(Entry(name, stored, jnp.promote_types(dtype, jnp.float32) if exact else jnp.dtype(dtype)))
    buckets: list[list[Entry]] = []
    size = bucket_bytes + 1
    for entry in entries:
        if size + entry.nbytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(entry)
        size += entry.nbytes
    return [sorted(bucket, key=lambda entry: -entry.dtype.itemsize) for bucket in buckets]


def tensors(bucket: list[Entry], params: Params) -> Iterator[tuple[str, jax.Array]]:
    """The tensors of one bucket by name, whole on every device that holds a part of ``params``."""
    for entry in bucket:
        parts = entry.stored.parts
        arrays = tuple(get(params, part.tensor.path) for part in parts)
        # Layers of a stack are picked by a traced number: one program serves all of them.
        index = None if parts[0].index is None else np.int32(parts[0].index)
        kinds = tuple(part.tensor for part in parts)
        yield entry.name, _assemble(arrays, index, kinds, entry.dtype, _replicated(arrays[0]))


def _replicated(array: jax.Array) -> NamedSharding | None:
    sharding = array.sharding
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None


@functools.partial(jax.jit, static_argnames=("kinds", "dtype", "sharding"))
def _assemble(
    arrays: tuple[jax.Array, ...],
    index: jax.Array | None,
    kinds: tuple[Tensor, ...],
    dtype: Any,
    sharding: NamedSharding | None,
) -> jax.Array:
    values = []
    for array, kind in zip(arrays, kinds, strict=True):
        value = array if index is None else jax.lax.dynamic_index_in_dim(array, index, keepdims=False)
        # Cast before anything moves between devices: that is half the bytes.
        values.append(kind.to_checkpoint(value.astype(dtype)))
    whole = values[0] if len(values) == 1 else jnp.concatenate(values)
    return whole if sharding is None else jax.lax.with_sharding_constraint(whole, sharding)
