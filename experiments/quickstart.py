"""A tiny model learns generated ALFWorld games on two CPU cores, in minutes.

    python -m sdjax.main --config=experiments/quickstart.py:grpo --workdir=runs/quickstart/grpo

Arguments: a method (``grpo``, ``sdar``, ...), or ``warm_start`` for the configuration that made the shipped starting
point (``launch/make_warm_start``).
"""

from pathlib import Path

from sdjax.config import defaults

WARM_START = Path(__file__).parent / "quickstart_model"
TINY = {"vocab_size": 1024, "hidden": 64, "layers": 3, "heads": 4, "kv_heads": 2, "intermediate": 192, "max_positions": 512}


def get_config(arguments: str = "grpo"):
    method = "grpo" if arguments == "warm_start" else arguments
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
    rollout.transcripts_every = 5

    train = config.train
    train.steps, train.tasks_per_step, train.group_size, train.minibatch_rows = 20, 8, 8, 96
    train.learning_rate = 3e-4
    train.pack_length, train.pack_rows, train.loss_slots, train.remat = 192, 16, 64, False

    config.teacher.bank, config.teacher.privileged_tokens = "alfworld_brief", 160
    config.eval.every, config.eval.panel, config.eval.final_seeds = 5, "valid", 3
    sft = config.sft
    sft.episodes, sft.steps, sft.batch_rows, sft.learning_rate = 4000, 1600, 32, 4e-3
    sft.noise, sft.privileged_share = 0.6, 0.25
    config.save.every, config.save.keep = 5, 1
    return config
