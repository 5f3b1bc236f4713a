"""Model configuration read from, and written to, a Hugging Face ``config.json``.

A key that would change the computation and that sdjax does not implement is an error: a checkpoint that loads is
computed as its authors meant it.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdjax.errors import ModelError

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3 frequency scaling: low frequencies are divided by ``factor``, with a smooth transition."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a dense decoder, and what other families share with it.

    Every number comes from the checkpoint; none is known by model name.
    """

    model_type: str  # as in config.json; sdjax/models/registry.py maps it to a family
    vocab_size: int  # rows of the embedding, which may exceed the tokenizer's size
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = 1.0  # share of each head that RoPE rotates
    rms_eps: float = 1e-6
    tie_embeddings: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k (Qwen3)
    qkv_bias: bool = False  # Qwen2; Llama with attention_bias
    o_bias: bool = False  # Llama with attention_bias
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}.", "use a positive number in config.json.")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.heads} attention heads cannot share {self.kv_heads} key/value heads evenly.",
                "make num_attention_heads a multiple of num_key_value_heads.",
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}.", "use an even head_dim (RoPE rotates pairs).")

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of each head that RoPE rotates."""
        return int(self.head_dim * self.partial_rotary_factor)


def read_json(path: Path) -> dict[str, Any]:
    """Reads one JSON object of a checkpoint directory; raises ModelError naming the file."""
    if not path.is_file():
        raise ModelError(f"{path} does not exist.", "point to a Hugging Face checkpoint directory that contains it.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ModelError(f"{path} is not valid JSON: {e}.", "restore the file from the checkpoint's source.") from e
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object.", "restore the file from the checkpoint's source.")
    return value


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns what describes the language model: ``text_config`` of a vision-language config.json, or all of it."""
    text = raw.get("text_config")
    return text if isinstance(text, dict) else raw


def require_ints(raw: dict[str, Any], names: Sequence[str]) -> dict[str, int]:
    """Returns the entries ``names``; raises ModelError naming those that are missing or no whole numbers."""
    missing = [name for name in names if not isinstance(raw.get(name), int)]
    if missing:
        raise ModelError(f"config.json lacks the whole numbers {', '.join(missing)}.", "restore config.json.")
    return {name: raw[name] for name in names}


def read_rope(raw: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Returns (theta, scaling) from either spelling: ``rope_parameters`` (newer) or ``rope_theta``/``rope_scaling``."""
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = dict(raw.get(key) or {})
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(
            f"config.json: {key}.rope_type is {kind!r}; sdjax computes 'default' and 'llama3'.",
            "use a checkpoint without long-context RoPE scaling.",
        )
    missing = [n for n in ("factor", "low_freq_factor", "high_freq_factor") if n not in rope]
    if missing:
        raise ModelError(f"config.json: {key} lacks {', '.join(missing)}.", "restore the keys of llama3 scaling.")
    original = rope.get("original_max_position_embeddings", raw.get("max_position_embeddings", 0))
    scaling = RopeScaling(
        float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"]), int(original)
    )
    return theta, scaling


def _reject_unsupported(raw: dict[str, Any]) -> None:
    layer_types = set(raw.get("layer_types") or ["full_attention"])
    checks = {
        "hidden_act": raw.get("hidden_act", "silu") in ("silu", "swish"),
        "mlp_bias": not raw.get("mlp_bias", False),
        "use_sliding_window": not raw.get("use_sliding_window", False),
        "layer_types": layer_types == {"full_attention"},
        "partial_rotary_factor": float(raw.get("partial_rotary_factor") or 1.0) == 1.0,
        "quantization_config": not raw.get("quantization_config"),
    }
    bad = [name for name, supported in checks.items() if not supported]
    if bad:
        raise ModelError(
            "config.json asks for what the dense decoder does not compute: "
            + ", ".join(f"{name}={raw.get(name)!r}" for name in bad)
            + ".",
            "use an unquantised Llama, Qwen2 or Qwen3 checkpoint with full attention and SiLU.",
        )


def token_ids(value: Any) -> tuple[int, ...]:
    """Returns the ids of a config.json entry that is a number, a list or absent."""
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list | tuple) else (int(value),)


def dense_config(raw: dict[str, Any]) -> ModelConfig:
    """Builds the configuration of a Llama, Qwen2 or Qwen3 checkpoint from its config.json."""
    _reject_unsupported(raw)
    require_ints(
        raw,
        (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        ),
    )
    theta, scaling = read_rope(raw)
    model_type, heads = raw["model_type"], raw["num_attention_heads"]
    bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        model_type=model_type,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        max_positions=raw["max_position_embeddings"],
        rope_theta=theta,
        rope_scaling=scaling,
        rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=model_type == "qwen3",
        qkv_bias=True if model_type == "qwen2" else bias,
        o_bias=False if model_type == "qwen2" else bias,
        initializer_range=float(raw.get("initializer_range", 0.02)),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=token_ids(raw.get("eos_token_id")),
        pad_token_id=raw.get("pad_token_id"),
    )


def dense_config_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Returns the config.json of a dense decoder, readable by transformers 4 and 5 and by SGLang."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        s = config.rope_scaling
        rope |= {
            "rope_type": "llama3",
            "factor": s.factor,
            "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor,
            "original_max_position_embeddings": s.original_max_positions,
        }
    eos = list(config.eos_token_ids)
    raw: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.initializer_range,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
        "pad_token_id": config.pad_token_id,
        "torch_dtype": dtype,
    }
    if config.rope_scaling is not None:
        raw["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    if config.model_type != "qwen2":
        raw["attention_bias"] = config.qkv_bias
    return raw


def rope_frequencies(config: ModelConfig) -> list[float]:
    """Returns the ``rotary_dim / 2`` rotation frequencies in radians per position (Llama 3 scaling applied)."""
    frequencies = [config.rope_theta ** (-2 * i / config.rotary_dim) for i in range(config.rotary_dim // 2)]
    s = config.rope_scaling
    if s is None:
        return frequencies
    scaled = []
    for f in frequencies:
        # Number of turns a frequency makes inside the original context decides how much it is slowed down.
        turns = s.original_max_positions * f / (2 * math.pi)
        keep = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        keep = min(1.0, max(0.0, keep))
        scaled.append(keep * f + (1 - keep) * f / s.factor)
    return scaled
