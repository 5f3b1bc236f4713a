"""Language models: configuration, forward passes, checkpoints and tokenizers."""

import dataclasses
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from sdjax import sharding
from sdjax.models.base import Cache, Model, Params, masked_logits
from sdjax.models.config import ModelConfig
from sdjax.models.hf import load_model, load_params, save_checkpoint
from sdjax.models.tokenizer import Tokenizer

__all__ = [
    "Cache",
    "Model",
    "ModelConfig",
    "Params",
    "Tokenizer",
    "load_checkpoint",
    "load_model",
    "load_params",
    "masked_logits",
    "resolve_checkpoint",
    "save_checkpoint",
]


def resolve_checkpoint(path: str | Path, *, cache_dir: str | Path | None = None) -> Path:
    """Returns a Hugging Face directory for ``path``: itself, or the conversion of a GGUF file or of "smollm2-135m".

    Conversions are kept below ``cache_dir`` (default: sdjax below $XDG_CACHE_HOME or ~/.cache) and made once.
    """
    from sdjax.models import gguf

    if str(path) == gguf.SMOLLM2:
        return gguf.cached_conversion(gguf.find_smollm2(), cache_dir)
    if Path(path).suffix == ".gguf":
        return gguf.cached_conversion(Path(path), cache_dir)
    return Path(path)


def load_checkpoint(
    path: str | Path,
    *,
    dtype: Any = "float32",
    compute_dtype: Any = "float32",
    cache_dir: str | Path | None = None,
    mesh: Mesh | None = None,
) -> tuple[Model, Params, Tokenizer]:
    """Loads model, weights and tokenizer of a Hugging Face directory, a .gguf file or the literal "smollm2-135m".

    dtype: dtype of the parameters (None: as stored). compute_dtype: dtype of matrix products. mesh: devices that the
    parameters are divided over (None: the default device). Raises ModelError, and ConfigError for a mesh that cannot
    divide the model.
    """
    directory = resolve_checkpoint(path, cache_dir=cache_dir)
    model = load_model(directory, compute_dtype=compute_dtype)
    tokenizer = Tokenizer.load(directory, model_vocab_size=model.config.vocab_size)
    if mesh is None:
        return model, load_params(directory, model, dtype=dtype), tokenizer
    sharding.check_divides(mesh, model.axis_sizes())
    places = sharding.parameter_shardings(mesh, model.logical_axes(), model.shapes())
    model = dataclasses.replace(model, mesh=mesh if mesh.size > 1 else None)
    return model, load_params(directory, model, dtype=dtype, shardings=places), tokenizer
