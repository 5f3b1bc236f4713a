"""Maps ``model_type`` of a config.json to the family that computes it. A new family is one entry here."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sdjax.errors import ModelError
from sdjax.models import qwen3_5, qwen3_5_config
from sdjax.models.base import Model
from sdjax.models.config import ModelConfig, dense_config, dense_config_json
from sdjax.models.dense import DenseModel, dense_tensors
from sdjax.models.tensors import Tensor


@dataclass(frozen=True)
class Family:
    """A model family and its checkpoints.

    make: (config, compute dtype) -> model.
    read_config, write_config: from and to config.json (writing takes the dtype's name too).
    tensors: all tensors of a checkpoint that the model computes with.
    prefixes: what ``{prefix}`` in their names may stand for; the first one is written.
    kept: prefixes of tensors that the model does not use and that an export copies.
    dropped: prefixes of tensors that are ignored.
    """

    make: Callable[[Any, Any], Model]
    read_config: Callable[[dict[str, Any]], ModelConfig]
    write_config: Callable[[Any, str], dict[str, Any]]
    tensors: Callable[[Any], list[Tensor]]
    prefixes: tuple[str, ...] = ("model.",)
    kept: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    def prefix(self, names: Iterable[str]) -> str:
        """Returns the first of ``prefixes`` that occurs among the names of a checkpoint."""
        names = list(names)
        return next((p for p in self.prefixes if any(n.startswith(p) for n in names)), self.prefixes[0])


_DENSE = Family(DenseModel, dense_config, dense_config_json, dense_tensors)
_QWEN35 = Family(
    qwen3_5.Qwen35Model,
    qwen3_5_config.read_config,
    qwen3_5_config.write_config,
    qwen3_5.tensors,
    # The order matters: every vision-language name begins with "model." as well.
    prefixes=("model.language_model.", "model."),
    kept=("model.visual.",),
    # The layer that predicts a second token is not trained along and would be stale after an update.
    dropped=("mtp.",),
)
FAMILIES: dict[str, Family] = {
    "llama": _DENSE,
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "qwen3_5": _QWEN35,
    "qwen3_5_text": _QWEN35,
}


def family_of(model_type: Any) -> Family:
    """Returns the family of ``model_type``; raises ModelError naming those that exist."""
    if model_type not in FAMILIES:
        raise ModelError(
            f"config.json: model_type is {model_type!r}; sdjax computes {', '.join(sorted(FAMILIES))}.",
            "use a checkpoint of one of these families, or add the family to sdjax/models/registry.py.",
        )
    return FAMILIES[model_type]
