"""The config file of a cell small enough for tests: two updates of a one-layer model. Argument: the method."""

from sdjax.config import defaults


def get_config(method: str = "grpo"):
    config = defaults(method)
    config.name = f"cell-{method}"
    config.model.name, config.model.path = "tiny", "no/such/model"
    config.env.template, config.env.turns, config.env.history = "compact", 4, 1
    games = config.env.generator
    games.task_types, games.rooms = ("pick_and_place_simple",), ("bathroom",)
    games.receptacles_min, games.receptacles_max, games.distractors_min, games.distractors_max = 3, 3, 0, 1
    games.train_games, games.valid_games, games.test_games = 8, 3, 2
    rollout = config.rollout
    rollout.prompt_tokens, rollout.response_tokens, rollout.max_length = 220, 12, 232
    rollout.slots, rollout.prefill_rows, rollout.decode_chunk = 8, 8, 6
    train = config.train
    train.steps, train.tasks_per_step, train.group_size, train.minibatch_rows = 2, 2, 2, 8
    train.pack_length, train.pack_rows, train.loss_slots, train.remat = 256, 2, 64, "none"
    config.teacher.bank, config.teacher.privileged_tokens = "alfworld_brief", 256
    config.eval.every, config.eval.panel, config.eval.final_seeds = 2, "valid", 2
    config.save.every, config.save.keep = 1, 2
    config.sft.episodes, config.sft.steps, config.sft.batch_rows = 8, 2, 4
    return config
