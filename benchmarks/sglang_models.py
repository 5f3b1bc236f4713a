"""Random Qwen3.5 checkpoints of the SGLang benchmark, with a tokenizer of the games' own text."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.qwen3_5 import config as published_config
from sdjax.config import EnvConfig
from sdjax.envs import make_benchmark
from sdjax.envs.demos import Demonstration, chat_turns, play_experts
from sdjax.envs.prompts import PromptTemplate
from sdjax.models.hf import load_model, save_checkpoint, write_json
from sdjax.models.qwen3_5 import Qwen35Model
from sdjax.models.tiny import write_tiny_checkpoint

# Kernels of engines want heads of at least 64; the rest is as small as it may be.
TINY: dict[str, Any] = {
    "vocab_size": 1024, "hidden": 512, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 1024,
    "max_positions": 4096, "model_type": "qwen3_5",
}  # fmt: skip
GAMES = 64
# Wider than where training starts: logits then spread by about 2, like those of a model that knows something, and the
# last token of a prompt does not simply come again (its embedding is the head's row).
SPREAD = {"tiny": 0.08, "2b": 0.04}


def make(name: str, folder: Path, env: EnvConfig) -> Path:
    """Writes the checkpoint ``tiny`` or ``2b`` below ``folder`` unless it is there; returns its directory."""
    directory = folder / name
    if (directory / "config.json").exists():
        return directory
    if name == "tiny":
        write_tiny_checkpoint(directory, corpus(env), **TINY)
        config = dataclasses.replace(load_model(directory).config, initializer_range=SPREAD[name])
        _save(directory, config, jnp.float32, directory)
        return directory
    tiny = make("tiny", folder, env)
    text = load_model(tiny).config
    config = dataclasses.replace(
        published_config(name), model_type="qwen3_5", max_positions=8192, mrope_section=(11, 11, 10),
        eos_token_ids=text.eos_token_ids, pad_token_id=text.pad_token_id, initializer_range=SPREAD[name],
    )  # fmt: skip
    _save(directory, config, jnp.bfloat16, tiny)
    fill_vocabulary(directory / "tokenizer.json", config.vocab_size)
    return directory


def _save(directory: Path, config: Any, dtype: Any, tokenizer_from: Path) -> None:
    model = Qwen35Model(config, dtype)
    save_checkpoint(directory, model, model.init(jax.random.key(0), dtype), tokenizer_from=tokenizer_from)


def corpus(env: EnvConfig) -> Iterator[str]:
    """Prompts and answers of expert games."""
    benchmark = make_benchmark(env)
    template = PromptTemplate.load(env.name, env.template, env.history)
    tasks = benchmark.task_ids(env.train_split)[:GAMES]
    for turns in play_experts(benchmark, [Demonstration(task, 0) for task in tasks], "", env.turns):
        for turn in chat_turns(turns, template):
            yield turn.prompt
            yield turn.answer
    benchmark.close()


def fill_vocabulary(path: Path, size: int) -> None:
    """Gives every id up to ``size`` a text of its own, so that whatever a random model draws can be read.

    No merge leads to these, so texts are encoded as before.
    """
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    known = tokenizer["model"]["vocab"]
    # Added tokens that the model's vocabulary lacks would get new ids behind it.
    known.update({token["content"]: token["id"] for token in tokenizer["added_tokens"]})
    taken = set(known.values())
    known.update({f"~{number:x}": number for number in range(size) if number not in taken})
    write_json(path, tokenizer)
