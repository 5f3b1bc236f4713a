"""One cell of the smoke study: a model of 0.1 M parameters, two updates on one of the four environments, in seconds.

    python -m sdjax.main --config=experiments/smoke.py:webshop,sdar --workdir=runs/smoke/one

Arguments: environment and method. Shapes are the same everywhere, so that the cells of a study share compiled programs.
"""

from pathlib import Path

from sdjax.config import defaults

MODEL = Path(__file__).parent / "smoke_model"
PANELS = {"alfworld": "valid", "scienceworld": "train_gold:4", "webshop": "test:4", "searchqa": "eval:4"}
BANKS = {"alfworld": "alfworld_brief"}


def get_config(arguments: str = "alfworld,grpo"):
    name, _, method = arguments.partition(",")
    config = defaults(method or "grpo")
    config.name = f"smoke-{name}-{method}"
    config.model.name, config.model.path = "smoke", str(MODEL)

    env = config.env
    env.name, env.template, env.turns, env.history, env.workers = name, "compact", 6, 1, 1
    env.generator.task_types, env.generator.rooms = ("pick_and_place_simple",), ("bathroom",)
    env.generator.receptacles_min, env.generator.receptacles_max, env.generator.closed_share = 3, 3, 0.0
    env.generator.distractors_min, env.generator.distractors_max, env.generator.spare_targets = 0, 1, 0.0
    env.generator.train_games, env.generator.valid_games, env.generator.test_games = 64, 4, 4
    env.webshop.generator_products = 60
    env.searchqa.generator_train, env.searchqa.generator_eval = 3, 1
    # Short gold paths with points on the way.
    env.scienceworld.task_names, env.scienceworld.heap_mb = ("lifespan-longest-lived-then-shortest-lived",), 1400
    env.train_split = "train_gold" if name == "scienceworld" else "train"

    rollout = config.rollout
    rollout.prompt_tokens, rollout.response_tokens, rollout.max_length = 1024, 32, 1056
    rollout.slots, rollout.prefill_rows, rollout.decode_chunk = 8, 8, 8

    train = config.train
    train.steps, train.tasks_per_step, train.group_size, train.minibatch_rows = 2, 2, 4, 64
    train.learning_rate, train.pack_length, train.pack_rows, train.loss_slots, train.remat = 1e-3, 1056, 4, 128, "none"

    teacher = config.teacher
    teacher.bank, teacher.privileged_tokens = BANKS.get(name, name), 2048
    teacher.reflection_tokens, teacher.reflection_observation_chars = 24, 60
    config.eval.every, config.eval.panel, config.eval.final_seeds = 1, PANELS[name], 2
    config.sft.episodes, config.sft.steps, config.sft.batch_rows, config.sft.learning_rate = 64, 30, 16, 2e-2
    config.save.every, config.save.keep = 1, 1
    return config
