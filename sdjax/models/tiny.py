"""Tiny checkpoints made from nothing: for tests, the quickstart and machines without a model hub.

The result is an ordinary Hugging Face directory, so everything downstream is the same code as for a real model. The
same arguments give the same bytes.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from sdjax.errors import ModelError
from sdjax.models.base import Model
from sdjax.models.config import ModelConfig
from sdjax.models.hf import save_checkpoint, write_json
from sdjax.models.qwen3_5_config import FULL, LINEAR, Qwen35Config
from sdjax.models.registry import family_of

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Answer tags are single tokens but not special ones: they belong to the text that environments and people read.
FORMAT_TAGS = ("<think>", "</think>", "<action>", "</action>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# SGLang makes these processors for a Qwen3.5 checkpoint, also where no picture ever comes.
_PROCESSORS: dict[str, dict[str, Any]] = {
    "preprocessor_config.json": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "video_preprocessor_config.json": {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
    },
}


def train_tokenizer(corpus: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains byte-level BPE on ``corpus``; at most ``vocab_size`` ids, special tokens and tags included."""
    smallest = 256 + len(SPECIAL_TOKENS) + len(FORMAT_TAGS)
    if vocab_size < smallest:
        raise ModelError(f"vocab_size {vocab_size} is too small for bytes and tags.", f"use at least {smallest}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(FORMAT_TAGS),
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_pieces(corpus), trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in FORMAT_TAGS])
    return tokenizer


def _pieces(corpus: Iterable[str]) -> Iterator[str]:
    """Cuts texts at tags, so that no merge is spent on what never occurs; adds the template's words to each text."""
    tag = re.compile("|".join(re.escape(t) for t in (*SPECIAL_TOKENS, *FORMAT_TAGS)))
    for text in corpus:
        yield from ("user\n", "assistant\n")
        yield from (part for part in tag.split(text) if part)


def write_tiny_checkpoint(
    out_dir: str | Path,
    corpus: Iterable[str],
    *,
    vocab_size: int = 1024,
    hidden: int = 96,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 256,
    max_positions: int = 2048,
    model_type: str = "qwen3",
    seed: int = 0,
) -> Model:
    """Writes a random model with a tokenizer trained on ``corpus``; returns the model (float32, tied embedding).

    The embedding has ``vocab_size`` rows even when the corpus yields fewer tokens. model_type: "llama", "qwen2",
    "qwen3" or "qwen3_5" (at least two layers; every fourth and the last are full attention).
    """
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(corpus, vocab_size)
    tokenizer.save(str(out / "tokenizer.json"))
    ids = tokenizer.get_vocab()
    end, pad = ids["<|im_end|>"], ids["<|endoftext|>"]
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
    }
    write_json(out / "tokenizer_config.json", tokenizer_config)
    write_json(out / "generation_config.json", {"eos_token_id": [end, pad], "pad_token_id": pad})
    if model_type == "qwen3_5":
        for name, value in _PROCESSORS.items():
            write_json(out / name, value)
    config = _config(
        model_type,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        max_positions=max_positions,
        tie_embeddings=True,
        eos_token_ids=(end,),
        pad_token_id=pad,
    )
    model = family_of(model_type).make(config, "float32")
    save_checkpoint(out, model, model.init(jax.random.key(seed)))
    return model


def _config(model_type: str, **sizes: Any) -> ModelConfig:
    if model_type != "qwen3_5":
        return ModelConfig(model_type, qk_norm=model_type == "qwen3", qkv_bias=model_type == "qwen2", **sizes)
    layers, frequencies = sizes["layers"], sizes["head_dim"] // 4
    return Qwen35Config(
        model_type=model_type,
        layer_types=tuple(FULL if (i + 1) % 4 == 0 or i + 1 == layers else LINEAR for i in range(layers)),
        linear_key_heads=sizes["kv_heads"],
        linear_value_heads=sizes["heads"],
        linear_key_dim=sizes["head_dim"],
        linear_value_dim=sizes["head_dim"],
        conv_kernel=4,
        partial_rotary_factor=0.5,
        mrope_section=(frequencies - 2 * (frequencies // 3), frequencies // 3, frequencies // 3),
        **sizes,
    )
