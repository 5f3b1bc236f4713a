"""Hugging Face checkpoint directories: read and written tensor by tensor.

A checkpoint whose tensors do not match its config.json is refused with all differences named at once. Writing and
reading back is bit-exact, and what is written loads in ``transformers`` and SGLang.
"""

import functools
import json
import os
import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sdjax.errors import ModelError
from sdjax.models.base import Model, Params
from sdjax.models.config import read_json
from sdjax.models.registry import Family, family_of
from sdjax.models.shards import (
    DTYPES,
    INDEX,
    WEIGHTS,
    Header,
    Item,
    dtype_name,
    open_shard,
    read_headers,
    split,
    write_shard,
)
from sdjax.models.tensors import Part, Stored, assemble, get, layout, put

MAX_SHARD_BYTES = 4 * 2**30
COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
# Buffers that old exporters stored and that every reader recomputes.
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)
_HEAD = "lm_head.weight"
_COMPARED_ROWS = 4096


def load_model(directory: str | Path, *, compute_dtype: Any = "float32") -> Model:
    """Builds the model that ``directory/config.json`` describes (no weights are read). Raises ModelError."""
    dtype_name(compute_dtype, "what is to be computed")
    raw = read_json(Path(directory) / "config.json")
    family = family_of(raw.get("model_type"))
    return family.make(family.read_config(raw), compute_dtype)


def load_params(directory: str | Path, model: Model, *, dtype: Any = None, shardings: Any = None) -> Params:
    """Reads the weights of ``directory`` for ``model``; ``dtype`` None keeps the stored dtype.

    Each tensor goes to its device on its own: host memory beyond the result is one shard, mapped, and one tensor.
    shardings: a NamedSharding for each parameter (None: the default device). Of each tensor a device is given its part
    alone, and a process reads the parts of its own devices alone.
    Raises ModelError naming the damaged file, or all missing, unexpected and mis-shaped tensors.
    """
    directory, family = Path(directory), family_of(model.config.model_type)
    if dtype is not None:
        dtype_name(dtype, "what is to be loaded")
    headers, shapes = read_headers(directory), model.shapes()
    tensors = family.tensors(model.config)
    wanted = layout(tensors, shapes, family.prefix(headers))
    _check(directory, headers, wanted, family, tied=model.config.tie_embeddings)
    dtypes = _dtypes(headers, wanted, dtype)
    params: dict[tuple[str, ...], jax.Array] = {}
    by_file = sorted(wanted, key=lambda name: headers[name].file)
    for file, names in groupby(by_file, key=lambda name: headers[name].file):
        with open_shard(file) as shard:
            for name in names:
                stored = shard.get_slice(name)
                for part in wanted[name].parts:
                    path = part.tensor.path
                    shape, place = get(shapes, path).shape, None if shardings is None else get(shardings, path)
                    if part.index is None:
                        params[path] = _placed(part, stored, shape, dtypes[path], place)
                        continue
                    value = _placed(part, stored, shape[1:], dtypes[path], None if place is None else _layer(place))
                    if path not in params:
                        params[path] = jnp.zeros(shape, dtypes[path], device=place)
                    # Waiting keeps the copies of later tensors from piling up behind slow transfers.
                    params[path] = jax.block_until_ready(_set_layer(params[path], value, part.index, place))
    tree: Params = {}
    for tensor in tensors:
        put(tree, tensor.path, params[tensor.path])
    return tree


def save_checkpoint(
    directory: str | Path,
    model: Model,
    params: Params,
    *,
    tokenizer_from: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Writes config.json and safetensors in the parameters' dtypes, with one tensor in host memory at a time.

    tokenizer_from: the checkpoint that the weights were trained from. Its tokenizer files are copied, and so are the
    tensors that sdjax does not compute with and that engines need to load the model (a vision tower).

    All shards are written under temporary names first, so a failed export (a full disk) leaves an older checkpoint in
    ``directory`` as it was. Raises ModelError when the directory cannot be written.
    """
    directory = Path(directory)
    family = family_of(model.config.model_type)
    base = None if tokenizer_from is None else Path(tokenizer_from)
    items = [*_own_items(family, model, params), *(() if base is None else _foreign_items(family, base))]
    shards = list(split(items, max_shard_bytes))
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    names = [WEIGHTS] if len(shards) == 1 else names
    temporary = [directory / (name + ".tmp") for name in names]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, shard in zip(temporary, shards, strict=True):
            write_shard(path, shard)
        # From here on only renames and small files: config.json goes first and comes last.
        for stale in (directory / "config.json", directory / INDEX, *directory.glob("model*.safetensors")):
            stale.unlink(missing_ok=True)
        for path in temporary:
            os.replace(path, path.with_suffix(""))
        if len(shards) > 1:
            weight_map = {item.name: name for name, shard in zip(names, shards) for item in shard}
            index = {"metadata": {"total_size": sum(item.nbytes for item in items)}}
            write_json(directory / INDEX, index | {"weight_map": dict(sorted(weight_map.items()))})
        if base is not None and base != directory:
            for name in COMPANION_FILES:
                if (base / name).is_file():
                    shutil.copyfile(base / name, directory / name)
        dtype = jnp.dtype(params["embedding"].dtype).name
        write_json(directory / "config.json", family.write_config(model.config, dtype))
    except OSError as e:
        for path in temporary:
            path.unlink(missing_ok=True)
        raise ModelError(f"cannot write to {directory}: {e}.", "free some disk space or use another directory.") from e
    return directory


def write_json(path: Path, value: Any) -> None:
    """Writes JSON so that the file is either absent, old or complete."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _layer(sharding: NamedSharding) -> NamedSharding:
    """Where one layer of a stack lies."""
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def _placed(part: Part, stored: Any, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding | None) -> jax.Array:
    """Reads one layer of a parameter onto its devices."""
    if sharding is None:
        return jnp.asarray(part.read(stored, (slice(None),) * len(shape)), dtype)
    seen: dict[tuple[Any, ...], np.ndarray] = {}

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        key = tuple((axis.start, axis.stop) for axis in index)
        if key not in seen:  # devices along "data" hold the same part
            seen[key] = part.read(stored, index).astype(dtype)
        return seen[key]

    return jax.make_array_from_callback(shape, sharding, read)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _set_layer(stack: jax.Array, value: jax.Array, index: int, sharding: NamedSharding | None) -> jax.Array:
    stack = stack.at[index].set(value)
    return stack if sharding is None else jax.lax.with_sharding_constraint(stack, sharding)


def _dtypes(headers: dict[str, Header], wanted: dict[str, Stored], dtype: Any) -> dict[tuple[str, ...], Any]:
    """Returns the dtype of each parameter: as asked, or the widest of its stored layers."""
    found: dict[tuple[str, ...], Any] = {}
    for name, stored in wanted.items():
        here = DTYPES[headers[name].dtype]
        for part in stored.parts:
            path = part.tensor.path
            if dtype is None:
                found[path] = jnp.promote_types(found.get(path, here), here)
            else:
                found[path] = jnp.promote_types(dtype, jnp.float32) if part.tensor.float32 else jnp.dtype(dtype)
    return found


def _check(
    directory: Path, headers: dict[str, Header], wanted: dict[str, Stored], family: Family, *, tied: bool
) -> None:
    problems = [f"missing {name} {list(stored.shape)}" for name, stored in wanted.items() if name not in headers]
    for name, header in headers.items():
        if name.endswith(_DERIVED_SUFFIXES) or name.startswith((*family.kept, *family.dropped)):
            continue
        if name == _HEAD and tied:
            # Some exporters store the tied head as well; only a different one would be ignored silently.
            embedding = next((n for n in wanted if n.endswith("embed_tokens.weight")), None)
            if embedding not in headers or not _equal(header, name, headers[embedding], embedding):
                problems.append(f"{_HEAD} differs from the embedding although tie_word_embeddings is true")
        elif name not in wanted:
            problems.append(f"unexpected {name}")
        elif header.shape != wanted[name].shape:
            problems.append(f"{name} has shape {list(header.shape)}, config.json wants {list(wanted[name].shape)}")
        elif header.dtype not in DTYPES:
            problems.append(f"{name} has the unsupported dtype {header.dtype}, not one of {', '.join(DTYPES)}")
    if problems:
        raise ModelError(
            f"the tensors in {directory} do not match its config.json: {'; '.join(problems)}.",
            "use config.json and unquantised weights of the same checkpoint.",
        )


def _equal(a: Header, a_name: str, b: Header, b_name: str) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    with open_shard(a.file) as a_file, open_shard(b.file) as b_file:
        a_slice, b_slice = a_file.get_slice(a_name), b_file.get_slice(b_name)
        begins = range(0, a.shape[0], _COMPARED_ROWS)
        pieces = (slice(begin, min(begin + _COMPARED_ROWS, a.shape[0])) for begin in begins)
        return all(np.array_equal(a_slice[piece], b_slice[piece]) for piece in pieces)


def _own_items(family: Family, model: Model, params: Params) -> Iterator[Item]:
    """The model's parameters in the checkpoint's layout."""
    for name, stored in layout(family.tensors(model.config), params, family.prefixes[0]).items():
        path = stored.parts[0].tensor.path
        dtype = dtype_name(get(params, path).dtype, "parameter " + ".".join(path))
        yield Item(name, dtype, stored.shape, lambda stored=stored: assemble(stored, params))


def _foreign_items(family: Family, base: Path) -> Iterator[Item]:
    """Tensors of ``base``, where it has weights, that belong to the family but not to our model."""
    if not family.kept or not any((base / name).is_file() for name in (WEIGHTS, INDEX)):
        return
    for name, header in read_headers(base).items():
        if name.startswith(family.kept):
            yield Item(name, header.dtype, header.shape, lambda name=name, header=header: _read(name, header))


def _read(name: str, header: Header) -> np.ndarray:
    with open_shard(header.file) as file:
        return file.get_tensor(name)
