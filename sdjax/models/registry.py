"""Maps ``model_type`` of a config.json to the family that computes it. A new family is one entry here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sdjax.errors import ModelError
from sdjax.models.base import Model
from sdjax.models.config import ModelConfig, dense_config, dense_config_json
from sdjax.models.dense import DenseModel, Tensor, dense_tensors


@dataclass(frozen=True)
class Family:
    """make: (config, compute dtype) -> model. read_config, write_config: from and to config.json (writing takes the
    dtype's name too). tensors: all tensors of a checkpoint."""

    make: Callable[[ModelConfig, Any], Model]
    read_config: Callable[[dict[str, Any]], ModelConfig]
    write_config: Callable[[ModelConfig, str], dict[str, Any]]
    tensors: Callable[[ModelConfig], list[Tensor]]


_DENSE = Family(DenseModel, dense_config, dense_config_json, dense_tensors)
FAMILIES: dict[str, Family] = {"llama": _DENSE, "qwen2": _DENSE, "qwen3": _DENSE}


def family_of(model_type: Any) -> Family:
    """Returns the family of ``model_type``; raises ModelError naming those that exist."""
    if model_type not in FAMILIES:
        raise ModelError(
            f"config.json: model_type is {model_type!r}; sdjax computes {', '.join(sorted(FAMILIES))}.",
            "use a checkpoint of one of these families, or add the family to sdjax/models/registry.py.",
        )
    return FAMILIES[model_type]
