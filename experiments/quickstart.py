"""A tiny model learns generated ALFWorld games on two CPU cores, in minutes.

    python -m sdjax.main --config=experiments/quickstart.py:grpo --workdir=runs/quickstart/grpo

Arguments: a method (``grpo``, ``sdar``, ...), or ``warm_start_clean`` and ``warm_start`` for the two runs that made the
shipped starting point (``python -m experiments.make_quickstart_model``).
"""

from pathlib import Path
from typing import Any

from sdjax.config import defaults

WARM_START = Path(__file__).parent / "quickstart_model"
TINY: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden": 64,
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "intermediate": 192,
    "max_positions": 512,
}


def get_config(arguments: str = "grpo"):
    method = "grpo" if arguments.startswith("warm_start") else arguments
    config = defaults(method)
    config.name = f"quickstart-{arguments}"
    config.model.path = str(WARM_START)

    env = config.env
    env.name, env.data, env.template = "alfworld", "generated", "compact"
    env.turns, env.history = 8, 1
    games = env.generator
    games.task_types = ("pick_and_place_simple",)
    games.receptacles_min, games.receptacles_max, games.closed_share = 3, 4, 0.3
    games.distractors_min, games.distractors_max, games.spare_targets, games.shared_places = 0, 1, 0.0, 0.0
    games.train_games, games.valid_games = 4000, 64

    rollout = config.rollout
    rollout.prompt_tokens, rollout.response_tokens, rollout.max_length = 160, 24, 192
    rollout.slots, rollout.prefill_rows, rollout.decode_chunk = 64, 32, 8
    rollout.transcripts_every = 4

    train = config.train
    train.steps, train.tasks_per_step, train.group_size, train.minibatch_rows = 12, 8, 8, 640
    train.learning_rate, train.kl_coef = 3e-4, 0.02
    train.pack_length, train.pack_rows, train.loss_slots, train.remat = 192, 16, 64, "none"

    config.teacher.bank, config.teacher.privileged_tokens = "alfworld_brief", 192
    config.eval.every, config.eval.panel, config.eval.final_seeds = 4, "valid", 3
    # First the game from a clean expert, then a careless one: what is left to learn is to stop trying things at random,
    # which the teacher's text (always in front of careful play) already tells.
    sft = config.sft
    sft.episodes, sft.privileged_share = 4000, 0.25
    if arguments == "warm_start_clean":
        sft.steps, sft.batch_rows, sft.learning_rate = 1000, 32, 3e-3
    else:
        sft.steps, sft.batch_rows, sft.learning_rate, sft.noise = 160, 40, 1e-3, 0.5
    config.save.every, config.save.keep = 4, 1
    return config
