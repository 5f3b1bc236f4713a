"""Writes the policy of a checkpoint as a Hugging Face directory that engines and transformers load.

The weights are read from the checkpoint layer by layer while the new files are written, so host memory holds one tensor
and never the model. Optimizer state is not read at all.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from sdjax import config as config_lib
from sdjax.errors import CheckpointError, ConfigError, ModelError, RunDirError
from sdjax.models import load_model, resolve_checkpoint, save_checkpoint
from sdjax.models.hf import write_json
from sdjax.models.registry import family_of

# Rows of the embedding that are converted at a time, and what decoded pieces of the checkpoint may take in memory.
_ROWS = 8192
_CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class StoredArray:
    """A parameter on disk that looks like an array: indexing reads one layer, ``np.asarray`` all of it."""

    name: str
    store: Any
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.store.shape)

    def __getitem__(self, part: int | slice) -> np.ndarray:
        try:
            return self.store[part].read().result().astype(self.dtype)
        except ValueError as error:  # what tensorstore raises for files that are gone or cut
            raise CheckpointError(f"{self.name} cannot be read: {error}", "export another --step.") from error

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        out = np.empty(self.shape, self.dtype)
        for begin in range(0, len(out), _ROWS):
            end = min(begin + _ROWS, len(out))
            out[begin:end] = self[begin:end]
        return out


def export(run: Path, *, step: int | None, out: Path | None, dtype: str = "bfloat16") -> Path:
    """Writes checkpoint ``step`` (None: the newest) of the run to ``out`` (None: below the run) and returns the path.

    dtype: "bfloat16" or "float32" of the written weights; float32 is exactly what was trained. Parameters that must not
    be rounded stay float32. The run is only read, so it may go on.

    Raises:
      RunDirError: ``run`` holds no run. CheckpointError: it has no such step, or the files of it are damaged.
      ConfigError: ``out`` is not empty. ModelError: the checkpoint that training started from is gone, is another
      model, or the disk is full; nothing is left behind then.
    """
    config, plain = _config(run)
    folder, step = _step_folder(run, step)
    out = run / "export" / f"step_{step:06d}" if out is None else out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty.", "name another --out, or remove it.")
    base = _base(config.model.path)
    model = load_model(base)
    params = _stored_params(folder, model, jnp.dtype(dtype))
    # A directory appears under its name when it is complete.
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        save_checkpoint(partial, model, params, tokenizer_from=base)
        facts = {"run": str(run.absolute()), "name": config.name, "step": step, "dtype": dtype, "base": str(base)}
        write_json(partial / "export.json", facts | {"config_sha256": config_lib.fingerprint(plain)})
        partial.replace(out)
    except OSError as error:
        raise ModelError(f"cannot write to {out}: {error}.", "free some disk space or name another --out.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def _config(run: Path) -> tuple[config_lib.RunConfig, dict[str, Any]]:
    path = run / "config.json"
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunDirError(f"{run} is no run directory ({error}).", "give the --workdir of a run.") from error
    return config_lib.load(plain), plain


def _step_folder(run: Path, step: int | None) -> tuple[Path, int]:
    """Orbax renames a checkpoint to its number when it is complete, so a number is a complete checkpoint."""
    folder = run / "checkpoints"
    steps = sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else []
    if not steps or (step is not None and step not in steps):
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointError(
            f"{run} has {wanted} (it has {', '.join(map(str, steps)) or 'none'}).",
            "use a --step that exists; save.every and save.keep say which are kept.",
        )
    step = steps[-1] if step is None else step
    return folder / str(step), step


def _base(path: str) -> Path:
    """The checkpoint that training started from: its config.json, tokenizer and foreign tensors go along."""
    base = resolve_checkpoint(path)
    if not (base / "config.json").is_file():
        raise ModelError(
            f"the run started from {path}, which is gone: tokenizer and configuration come from there.",
            "bring that directory back to its place; weights are not needed except those of a vision tower.",
        )
    return base


def _stored_params(folder: Path, model: Any, dtype: Any) -> Any:
    """The parameter tree of ``model`` with arrays that are read from the checkpoint when they are asked for."""
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    state = folder / "state"
    unrounded = {t.path for t in family_of(model.config.model_type).tensors(model.config) if t.float32}

    def one(path: tuple[Any, ...], shape: Any) -> StoredArray:
        names = tuple(key.key for key in path)
        name = f"parameter {'.'.join(names)} of {folder}"
        source = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{state.absolute()}/"}}
        spec = {"driver": "zarr", "kvstore": source | {"path": f"params.{'.'.join(names)}/"}}
        try:
            store = tensorstore.open(spec, open=True, read=True, context=context).result()
        except ValueError as error:
            raise CheckpointError(
                f"{name} cannot be read: {error}",
                "the checkpoint is damaged or of another model; export another --step.",
            ) from error
        if tuple(store.shape) != shape.shape:
            raise CheckpointError(
                f"{name} is {list(store.shape)}, the model that the run started from wants {list(shape.shape)}.",
                "model.path of the run now names another model; bring the old one back.",
            )
        return StoredArray(name, store, jnp.promote_types(dtype, jnp.float32) if names in unrounded else dtype)

    return jax.tree.map_with_path(one, model.shapes())
