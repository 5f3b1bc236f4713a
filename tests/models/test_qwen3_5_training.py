"""Two global steps of the trainer with a tiny Qwen3.5: rollouts, scoring, updates, evaluation, checkpoints."""

import json

import jax
import numpy as np
import pytest

from sdjax.models import save_checkpoint
from sdjax.models.config import read_json
from sdjax.models.qwen3_5_config import FULL, LINEAR, Qwen35Config
from sdjax.models.registry import family_of
from tests.train.tiny_run import run, tiny_checkpoint, tiny_config

pytestmark = pytest.mark.slow


def _checkpoint(directory):
    """The tests' tiny tokenizer with a hybrid model."""
    source = tiny_checkpoint(directory / "dense")
    dense = read_json(source / "config.json")
    config = Qwen35Config(
        model_type="qwen3_5", vocab_size=dense["vocab_size"], hidden_size=16, intermediate_size=32, layers=2, heads=2,
        kv_heads=1, head_dim=8, max_positions=dense["max_position_embeddings"], partial_rotary_factor=0.5,
        tie_embeddings=True, layer_types=(LINEAR, FULL), linear_key_heads=1, linear_value_heads=2, linear_key_dim=8,
        linear_value_dim=8, conv_kernel=4, eos_token_ids=(dense["eos_token_id"],), pad_token_id=dense["pad_token_id"],
    )  # fmt: skip
    model = family_of("qwen3_5").make(config, "float32")
    return save_checkpoint(directory / "qwen35", model, model.init(jax.random.key(0)), tokenizer_from=source)


def test_a_tiny_qwen35_trains_two_steps(tmp_path):
    run(tiny_config(_checkpoint(tmp_path), steps=2), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss_total" in line]
    assert [line["step"] for line in steps] == [1, 2] and (tmp_path / "run" / "DONE.json").is_file()
    for line in steps:
        assert np.isfinite(line["train/loss_total"]) and line["optim/grad_norm"] > 0
        assert line["optim/updates"] > 0 and line["optim/skipped_updates"] == 0
        # The engine's decoding and the trainer's packed rows see the same model.
        assert line["engine/logp_gap_abs_max"] < 1e-4
