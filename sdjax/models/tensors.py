"""How the tensors of a Hugging Face checkpoint correspond to our parameters."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Tensor:
    """One of our parameters and the checkpoint tensors that it is made of.

    Parameters with the same name are row blocks of one checkpoint tensor, in the order in which they are listed.

    name: the checkpoint's name, with ``{layer}`` where it has one tensor for each layer and we have a stack, and with
      ``{prefix}`` where checkpoints differ.
    path: ours, in the parameter tree.
    transpose: the last two axes are swapped.
    layers: the checkpoint's number of each layer in our stack (None: 0, 1, 2, ...).
    unit_axis: an axis of size 1 that only the checkpoint has.
    float32: never converted to a smaller dtype.
    """

    name: str
    path: tuple[str, ...]
    transpose: bool = False
    layers: tuple[int, ...] | None = None
    unit_axis: int | None = None
    float32: bool = False

    @property
    def stacked(self) -> bool:
        return "{layer}" in self.name

    def to_checkpoint(self, value: Any) -> Any:
        """One layer of our parameter (numpy or JAX) in the checkpoint's layout."""
        value = value.T if self.transpose else value
        if self.unit_axis is not None:
            value = value.reshape(*value.shape[: self.unit_axis], 1, *value.shape[self.unit_axis :])
        return value

    def from_checkpoint(self, value: Any) -> Any:
        """Rows of a checkpoint tensor in our layout."""
        if self.unit_axis is not None:
            value = value.reshape(*value.shape[: self.unit_axis], *value.shape[self.unit_axis + 1 :])
        return value.T if self.transpose else value


@dataclass(frozen=True)
class Part:
    """One layer of one parameter: rows ``begin`` to ``end`` of a checkpoint tensor. index: layer in our stack."""

    tensor: Tensor
    index: int | None
    begin: int
    end: int

    def read(self, stored: Any, index: tuple[slice, ...]) -> np.ndarray:
        """Reads the part ``index`` of this layer, in our layout. stored: a tensor of which slices can be read."""
        tensor = self.tensor
        where = list(index[::-1] if tensor.transpose else index)
        if tensor.unit_axis is not None:
            where.insert(tensor.unit_axis, slice(None))
        begin, end, _ = where[0].indices(self.end - self.begin)
        return tensor.from_checkpoint(stored[(slice(self.begin + begin, self.begin + end), *where[1:])])


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint. shape: as stored."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def get(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def layout(tensors: Iterable[Tensor], tree: Any, prefix: str) -> dict[str, Stored]:
    """Returns all tensors of a checkpoint by name. tree: parameters or their shapes."""
    found: dict[str, Stored] = {}
    for tensor in tensors:
        shape = tuple(get(tree, tensor.path).shape)
        # A view of nothing: only its shape is wanted.
        one = tensor.to_checkpoint(np.broadcast_to(np.int8(0), shape[1:] if tensor.stacked else shape)).shape
        layers = tensor.layers or range(shape[0])
        for index, layer in enumerate(layers) if tensor.stacked else [(None, 0)]:
            name = tensor.name.format(prefix=prefix, layer=layer)
            above = found.get(name, Stored((0, *one[1:]), ()))
            rows = above.shape[0] + one[0]
            part = Part(tensor, index, above.shape[0], rows)
            found[name] = Stored((rows, *one[1:]), (*above.parts, part))
    return found


def assemble(stored: Stored, params: Any) -> np.ndarray:
    """Returns one checkpoint tensor, made of our parameters, in host memory."""
    values = []
    for part in stored.parts:
        array = get(params, part.tensor.path)
        value = np.asarray(array if part.index is None else array[part.index])
        values.append(part.tensor.to_checkpoint(value))
    return np.ascontiguousarray(values[0] if len(values) == 1 else np.concatenate(values))
