"""A run small enough for tests: a one-layer model with random weights on generated games."""

import asyncio
import sys
from pathlib import Path

from rich.console import Console

from sdjax import interrupt
from sdjax.config import RunConfig, defaults, load
from sdjax.envs import make_benchmark
from sdjax.envs.prompts import PromptTemplate
from sdjax.models.tiny import write_tiny_checkpoint
from sdjax.teacher.skills import SkillBank
from sdjax.train.rundir import RunDir
from sdjax.train.trainer import Trainer


def tiny_config(model: Path, method: str = "grpo", **train) -> RunConfig:
    values = defaults(method)
    values.name = f"tiny-{method}"
    values.model.path = str(model)
    values.env.template, values.env.turns, values.env.history = "compact", 3, 1
    games = values.env.generator
    games.task_types, games.rooms = ("pick_and_place_simple",), ("bathroom",)
    games.receptacles_min, games.receptacles_max, games.distractors_min, games.distractors_max = 3, 3, 0, 1
    games.train_games, games.valid_games, games.test_games = 8, 4, 2
    rollout = values.rollout
    rollout.prompt_tokens, rollout.response_tokens, rollout.max_length = 220, 12, 232
    rollout.slots, rollout.prefill_rows, rollout.decode_chunk, rollout.transcripts_every = 8, 8, 6, 2
    rollout.stop_gap = 0.01
    values.train.update(
        {
            "steps": 3,
            "tasks_per_step": 2,
            "group_size": 3,
            "minibatch_rows": 8,
            "learning_rate": 3e-3,
            "pack_length": 512,
            "pack_rows": 2,
            "loss_slots": 64,
            "remat": "none",
        }
    )
    values.train.update(train)
    values.teacher.bank, values.teacher.privileged_tokens = "alfworld_brief", 256
    values.eval.every, values.eval.panel, values.eval.final_seeds = 2, "valid", 2
    values.save.every, values.save.keep = 1, 2
    return load(values)


def tiny_checkpoint(out: Path) -> Path:
    """Writes the model; texts of a few games and of the skill bank train its tokenizer."""
    benchmark = make_benchmark(tiny_config(out).env)
    template = PromptTemplate.load("alfworld", "compact", 1)
    corpus = list(SkillBank.load("alfworld_brief").texts().values())
    for task in benchmark.task_ids("train"):
        for turn in asyncio.run(benchmark.expert_episode(task, "search", 0, 10)):
            seen = turn.observation
            corpus += [
                template.render(seen.task, seen.text, seen.admissible, [], 0),
                template.answer("ok", turn.action),
            ]
    write_tiny_checkpoint(out, corpus, vocab_size=400, hidden=16, layers=1, heads=2, kv_heads=1, intermediate=32)
    return out


def run(config: RunConfig, path: Path) -> None:
    with interrupt.listen(config.save.grace_s), RunDir(path) as directory:
        Trainer(config, directory, Console(file=sys.stderr)).run()


if __name__ == "__main__":  # used by tests that kill the process: MODEL WORKDIR METHOD
    run(tiny_config(Path(sys.argv[1]), sys.argv[3]), Path(sys.argv[2]))
