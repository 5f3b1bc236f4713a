"""Safetensors files of a checkpoint directory, read and written one tensor at a time.

The library writes a file from a complete dictionary in memory. A shard of a large model is gigabytes, so here it is
written tensor by tensor; reading is the library's.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from sdjax.errors import ModelError
from sdjax.models.config import read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": jnp.dtype("float32"), "BF16": jnp.dtype("bfloat16"), "F16": jnp.dtype("float16")}


@dataclass(frozen=True)
class Header:
    """Where a stored tensor is and what it looks like. dtype: safetensors' name of it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Item:
    """A tensor to be written; ``read`` returns its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize


def open_shard(path: Path) -> Any:
    """Opens a safetensors file, to be used in a ``with`` statement. Raises ModelError naming a damaged file."""
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as e:
        raise ModelError(f"{path} is truncated or not a safetensors file: {e}.", "download the file again.") from e


def read_headers(directory: Path) -> dict[str, Header]:
    """Returns all tensors of the directory by name. Raises ModelError naming a missing or damaged file."""
    if (directory / INDEX).is_file():
        weight_map = read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(
                f"{directory / INDEX} has no weight_map.", "restore the file from the checkpoint's source."
            )
        names = sorted(set(weight_map.values()))
    elif (directory / WEIGHTS).is_file():
        names = [WEIGHTS]
    else:
        raise ModelError(f"{directory} holds neither {WEIGHTS} nor {INDEX}.", "download the safetensors weights.")
    headers: dict[str, Header] = {}
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise ModelError(f"{directory / name}, named by {INDEX}, does not exist.", "download the missing shard.")
        with open_shard(directory / name) as file:
            for key in file.keys():  # noqa: SIM118  not a dict
                stored = file.get_slice(key)
                headers[key] = Header(directory / name, stored.get_dtype(), tuple(stored.get_shape()))
    return headers


def dtype_name(dtype: Any, owner: str) -> str:
    """Returns safetensors' name of a dtype; raises ModelError for one that checkpoints must not have."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:  # no dtype at all
        found = dtype
    for name, known in DTYPES.items():
        if found == known:
            return name
    raise ModelError(f"{owner} has dtype {found}.", f"use one of {', '.join(map(str, DTYPES.values()))}.")


def split(items: Iterable[Item], limit: int) -> Iterator[list[Item]]:
    """Splits tensors into files of at most ``limit`` bytes (a larger tensor gets its own)."""
    shard: list[Item] = []
    size = 0
    for item in items:
        if shard and size + item.nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(item)
        size += item.nbytes
    yield shard


def write_shard(path: Path, items: Sequence[Item]) -> None:
    """Writes one safetensors file, holding one tensor in memory at a time."""
    # Wide dtypes first, as the library does: readers map tensors in place, so each must lie at a multiple of its size.
    items = sorted(items, key=lambda item: -DTYPES[item.dtype].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for item in items:
        begin, end = end, end + item.nbytes
        header[item.name] = {"dtype": item.dtype, "shape": list(item.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for item in items:
            value = np.ascontiguousarray(item.read())
            assert value.nbytes == item.nbytes, item.name
            file.write(value.reshape(-1).view(np.uint8).data)
