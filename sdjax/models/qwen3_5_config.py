"""Configuration of Qwen3.5, read from and written to config.json.

A checkpoint is either text-only (``qwen3_5_text``) or a vision-language model (``qwen3_5``) whose ``text_config``
describes the decoder. Only the decoder is computed. The rest of a vision-language config.json is carried along, because
engines serve the vision-language form.
"""

import itertools
import json
from dataclasses import dataclass
from typing import Any

from sdjax.errors import ModelError
from sdjax.models.config import ModelConfig, read_rope, require_ints, text_config, token_ids

LINEAR, FULL = "linear_attention", "full_attention"
# What a text-only checkpoint is exported with: the smallest vision tower, without weights.
_NO_VISION: dict[str, Any] = {
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
    "vision_config": {
        "model_type": "qwen3_5_vision",
        "depth": 1,
        "hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 128,
        "patch_size": 16,
        "num_position_embeddings": 16,
    },
}
_WRAPPER_KEYS = tuple(_NO_VISION)
# Numbers of config.json and our names for them.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_positions",
    "linear_num_key_heads": "linear_key_heads",
    "linear_num_value_heads": "linear_value_heads",
    "linear_key_head_dim": "linear_key_dim",
    "linear_value_head_dim": "linear_value_dim",
    "linear_conv_kernel_dim": "conv_kernel",
}


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(ModelConfig):
    """Shape of a hybrid decoder: gated attention layers (the inherited sizes) and Gated DeltaNet layers.

    layer_types: LINEAR or FULL for each layer. mrope_section: how many frequencies turn with time, height and width,
    which are one number in text. wrapper: JSON of the vision-language keys around the text model.
    """

    layer_types: tuple[str, ...]
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    conv_kernel: int
    mrope_section: tuple[int, ...] = ()
    wrapper: str = json.dumps(_NO_VISION, sort_keys=True)

    def __post_init__(self):
        super().__post_init__()
        names = ("linear_key_heads", "linear_value_heads", "linear_key_dim", "linear_value_dim", "conv_kernel")
        for name in names:
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}.", "use a positive number in config.json.")
        if self.linear_value_heads % self.linear_key_heads:
            raise ModelError(
                f"{self.linear_value_heads} value heads cannot share {self.linear_key_heads} key heads evenly.",
                "make linear_num_value_heads a multiple of linear_num_key_heads.",
            )
        if len(self.layer_types) != self.layers or set(self.layer_types) != {LINEAR, FULL}:
            raise ModelError(
                f"layer_types has {len(self.layer_types)} entries of the kinds {sorted(set(self.layer_types))} for "
                f"{self.layers} layers.",
                f"list {LINEAR} or {FULL} for each layer, at least one of each.",
            )
        if self.rotary_dim % 2 or self.rotary_dim < 2:
            raise ModelError(
                f"partial_rotary_factor {self.partial_rotary_factor} rotates {self.rotary_dim} of {self.head_dim} "
                "dimensions.",
                "use a factor that gives an even number of dimensions (RoPE rotates pairs).",
            )

    def numbers(self, kind: str) -> tuple[int, ...]:
        """Numbers of the layers of one kind, ascending."""
        return tuple(i for i, layer_type in enumerate(self.layer_types) if layer_type == kind)

    @property
    def period(self) -> int:
        """Length of the shortest pattern of kinds that the layers repeat."""
        fits = lambda n: self.layers % n == 0 and self.layer_types == self.layer_types[:n] * (self.layers // n)  # noqa: E731
        return next(n for n in range(1, self.layers + 1) if fits(n))

    def runs(self) -> list[tuple[str, int, int]]:
        """(kind, begin, end) of the runs of equal layers in one period; begin and end count layers of that kind."""
        seen = {LINEAR: 0, FULL: 0}
        found = []
        for kind, run in itertools.groupby(self.layer_types[: self.period]):
            begin = seen[kind]
            seen[kind] += len(list(run))
            found.append((kind, begin, seen[kind]))
        return found


def _reject_unsupported(raw: dict[str, Any], text: dict[str, Any]) -> None:
    checks = {
        "hidden_act": text.get("hidden_act", "silu") in ("silu", "swish"),
        "attention_bias": not text.get("attention_bias", False),
        "attn_output_gate": text.get("attn_output_gate", True) is True,
        "use_sliding_window": not text.get("use_sliding_window", False),
        "num_experts": not text.get("num_experts"),
        "quantization_config": not (raw.get("quantization_config") or text.get("quantization_config")),
    }
    bad = [name for name, supported in checks.items() if not supported]
    if bad:
        raise ModelError(
            "config.json asks for what the Qwen3.5 decoder does not compute: "
            + ", ".join(f"{name}={text.get(name, raw.get(name))!r}" for name in bad)
            + ".",
            "use an unquantised dense Qwen3.5 checkpoint.",
        )


def _layer_types(text: dict[str, Any], layers: int) -> tuple[str, ...]:
    if text.get("layer_types"):
        return tuple(text["layer_types"])
    interval = text.get("full_attention_interval")
    if not isinstance(interval, int) or interval < 1:
        raise ModelError("config.json has neither layer_types nor full_attention_interval.", "restore config.json.")
    return tuple(LINEAR if (i + 1) % interval else FULL for i in range(layers))


def read_config(raw: dict[str, Any]) -> Qwen35Config:
    """Builds the configuration from a text-only or a vision-language config.json. Raises ModelError."""
    text = text_config(raw)
    _reject_unsupported(raw, text)
    sizes: dict[str, Any] = dict(require_ints(text, tuple(_SIZES)))
    theta, scaling = read_rope(text)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if scaling is not None or "rope_theta" not in rope | text:
        raise ModelError("config.json scales RoPE or has no rope_theta.", "use a checkpoint with default RoPE.")
    wrapper = {name: raw[name] for name in _WRAPPER_KEYS if name in raw} if text is not raw else {}
    eos = text.get("eos_token_id") if raw.get("eos_token_id") is None else raw["eos_token_id"]
    return Qwen35Config(
        model_type="qwen3_5",
        **{ours: sizes[theirs] for theirs, ours in _SIZES.items()},
        layer_types=_layer_types(text, sizes["num_hidden_layers"]),
        rope_theta=theta,
        partial_rotary_factor=float(rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))),
        rms_eps=float(text.get("rms_norm_eps", 1e-6)),
        # The wrapper's flag is the one that its class obeys.
        tie_embeddings=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        initializer_range=float(text.get("initializer_range", 0.02)),
        bos_token_id=text.get("bos_token_id"),
        eos_token_ids=token_ids(eos),
        pad_token_id=text.get("pad_token_id"),
        mrope_section=tuple(rope.get("mrope_section") or ()),
        wrapper=json.dumps(_NO_VISION | wrapper, sort_keys=True),
    )


def write_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Returns a vision-language config.json, the form that transformers and SGLang load."""
    assert isinstance(config, Qwen35Config)
    rope = {
        "rope_type": "default",
        "rope_theta": config.rope_theta,
        "partial_rotary_factor": config.partial_rotary_factor,
    }
    if config.mrope_section:
        rope |= {"mrope_section": list(config.mrope_section), "mrope_interleaved": True}
    eos = list(config.eos_token_ids)
    text: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
        "layer_types": list(config.layer_types),
        "rms_norm_eps": config.rms_eps,
        "rope_parameters": rope,
        "partial_rotary_factor": config.partial_rotary_factor,  # SGLang reads it here, transformers in rope_parameters
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 0,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.initializer_range,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
        "pad_token_id": config.pad_token_id,
        "torch_dtype": dtype,
    }
    if config.layer_types == _layer_types({"full_attention_interval": config.period}, config.layers):
        text["full_attention_interval"] = config.period  # SGLang reads this one instead of layer_types
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        **json.loads(config.wrapper),
        "text_config": text,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
    }
