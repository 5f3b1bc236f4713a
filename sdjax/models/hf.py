"""Hugging Face checkpoint directories: read and written tensor by tensor.

A checkpoint whose tensors do not match its config.json is refused with all differences named at once. Writing and
reading back is bit-exact, and what is written loads in ``transformers`` and SGLang.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sdjax.errors import ModelError
from sdjax.models.base import Model, Params
from sdjax.models.config import read_json
from sdjax.models.dense import Tensor
from sdjax.models.registry import family_of

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 4 * 2**30
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
)
# Buffers that old exporters stored and that every reader recomputes.
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)


def load_model(directory: str | Path, *, compute_dtype: Any = "float32") -> Model:
    """Builds the model that ``directory/config.json`` describes (no weights are read)."""
    raw = read_json(Path(directory) / "config.json")
    family = family_of(raw.get("model_type"))
    return family.make(family.read_config(raw), compute_dtype)


def load_params(directory: str | Path, model: Model, *, dtype: Any = None) -> Params:
    """Reads the weights of ``directory`` for ``model``; ``dtype`` None keeps the stored dtype.

    Host memory beyond the result is one stacked parameter. Raises ModelError naming the damaged file, or all missing,
    unexpected and mis-shaped tensors.
    """
    tensors = family_of(model.config.model_type).tensors(model.config)
    with ExitStack() as stack:
        stored = _open_all(Path(directory), stack)
        _check(Path(directory), stored, model, tensors)
        params: Params = {}
        for tensor, want in zip(tensors, _wanted_shapes(model, tensors), strict=True):
            _set(params, tensor.path, _read(stored, tensor, want, dtype))
    return params


def save_checkpoint(
    directory: str | Path,
    model: Model,
    params: Params,
    *,
    tokenizer_from: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Writes config.json and safetensors in the parameters' dtype; copies tokenizer files from ``tokenizer_from``.

    All shards are written under temporary names first, so a failed export (a full disk) leaves an older checkpoint in
    ``directory`` as it was. Raises ModelError when the directory cannot be written.
    """
    directory = Path(directory)
    family = family_of(model.config.model_type)
    tensors = family.tensors(model.config)
    written: list[Path] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        weight_map = _write_shards(directory, params, list(_shards(params, tensors, max_shard_bytes)), written)
        # From here on only renames and small files: config.json goes first and comes last.
        for stale in (directory / "config.json", directory / INDEX, *directory.glob("model*.safetensors")):
            stale.unlink(missing_ok=True)
        for temporary in written:
            os.replace(temporary, temporary.with_suffix(""))
        if len(written) > 1:
            size = sum(array.nbytes for array in jax.tree.leaves(params))
            write_json(directory / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
        if tokenizer_from is not None:
            for name in TOKENIZER_FILES:
                if (Path(tokenizer_from) / name).is_file() and Path(tokenizer_from) != directory:
                    shutil.copyfile(Path(tokenizer_from) / name, directory / name)
        dtype = jnp.dtype(params["embedding"].dtype).name
        write_json(directory / "config.json", family.write_config(model.config, dtype))
    except (OSError, SafetensorError) as e:
        for temporary in written:
            temporary.unlink(missing_ok=True)
        raise ModelError(f"cannot write to {directory}: {e}.", "free some disk space or use another directory.") from e
    return directory


def write_json(path: Path, value: Any) -> None:
    """Writes JSON so that the file is either absent, old or complete."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _open_all(directory: Path, stack: ExitStack) -> dict[str, Any]:
    """Returns tensor name -> open file."""
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
    stored: dict[str, Any] = {}
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise ModelError(f"{directory / name}, named by {INDEX}, does not exist.", "download the missing shard.")
        try:
            file = stack.enter_context(safe_open(directory / name, framework="np"))
        except (SafetensorError, OSError) as e:
            raise ModelError(
                f"{directory / name} is truncated or not a safetensors file: {e}.", "download the file again."
            ) from e
        stored |= dict.fromkeys(file.keys(), file)
    return stored


def _layer_names(tensor: Tensor, layers: int) -> list[str]:
    return [tensor.name.format(layer=i) for i in range(layers)] if "{layer}" in tensor.name else [tensor.name]


def _get(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _set(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _wanted_shapes(model: Model, tensors: list[Tensor]) -> list[tuple[int, ...]]:
    shapes = model.shapes()
    return [tuple(_get(shapes, t.path).shape) for t in tensors]


def _stored_shape(tensor: Tensor, want: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of one tensor in the checkpoint, from the shape of ours (stacked, [in, out])."""
    one = want[1:] if "{layer}" in tensor.name else want
    return one[::-1] if tensor.transpose else one


def _check(directory: Path, stored: dict[str, Any], model: Model, tensors: list[Tensor]) -> None:
    expected: dict[str, tuple[int, ...]] = {}
    for tensor, want in zip(tensors, _wanted_shapes(model, tensors), strict=True):
        shape = _stored_shape(tensor, want)
        expected |= dict.fromkeys(_layer_names(tensor, model.config.layers), shape)
    problems = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in stored]
    for name, file in stored.items():
        if name.endswith(_DERIVED_SUFFIXES):
            continue
        if name == "lm_head.weight" and model.config.tie_embeddings:
            # Some exporters store the tied head as well; only a different one would be ignored silently.
            embedding = stored.get("model.embed_tokens.weight")
            if embedding is None or not np.array_equal(
                file.get_tensor(name), embedding.get_tensor("model.embed_tokens.weight")
            ):
                problems.append("lm_head.weight differs from the embedding although tie_word_embeddings is true")
        elif name not in expected:
            problems.append(f"unexpected {name}")
        elif tuple(file.get_slice(name).get_shape()) != expected[name]:
            problems.append(
                f"{name} has shape {file.get_slice(name).get_shape()}, config.json wants {list(expected[name])}"
            )
    if problems:
        raise ModelError(
            f"the tensors in {directory} do not match its config.json: {'; '.join(problems)}.",
            "use config.json and weights of the same checkpoint.",
        )


def _read(stored: dict[str, Any], tensor: Tensor, want: tuple[int, ...], dtype: Any) -> jax.Array:
    stacked = "{layer}" in tensor.name
    names = _layer_names(tensor, want[0])
    out: np.ndarray | None = None
    for i, name in enumerate(names):
        value = stored[name].get_tensor(name)
        value = value.T if tensor.transpose else value
        if out is None:
            out = np.empty(want, value.dtype if dtype is None else jnp.dtype(dtype))
        if stacked:
            out[i] = value
        else:
            out[...] = value
    assert out is not None
    return jnp.asarray(out)


def _shards(params: Params, tensors: list[Tensor], limit: int) -> Iterator[list[tuple[Tensor, int]]]:
    """Splits the checkpoint's tensors, as (tensor, layer), into files of at most ``limit`` bytes."""
    shard: list[tuple[Tensor, int]] = []
    size = 0
    for tensor in tensors:
        array = _get(params, tensor.path)
        layers = array.shape[0] if "{layer}" in tensor.name else 1
        for layer in range(layers):
            if shard and size + array.nbytes // layers > limit:
                yield shard
                shard, size = [], 0
            shard.append((tensor, layer))
            size += array.nbytes // layers
    yield shard


def _write_shards(
    directory: Path, params: Params, shards: list[list[tuple[Tensor, int]]], written: list[Path]
) -> dict[str, str]:
    """Writes each shard to NAME.tmp, appended to ``written`` before it is begun; returns tensor name -> file name."""
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        values = {}
        for tensor, layer in shard:
            array = _get(params, tensor.path)
            value = np.asarray(array[layer] if "{layer}" in tensor.name else array)
            values[tensor.name.format(layer=layer)] = np.ascontiguousarray(value.T if tensor.transpose else value)
        weight_map |= dict.fromkeys(values, file_name)
        written.append(directory / (file_name + ".tmp"))
        save_file(values, written[-1], metadata={"format": "pt"})
        written[-1].chmod(0o644)  # the library writes files that only their owner can read
    return dict(sorted(weight_map.items()))
