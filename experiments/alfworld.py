"""ALFWorld with the settings of the study, on the real games (16 tasks x 8 episodes a step, 50 turns).

    python -m sdjax.main --config=experiments/alfworld.py:sdar,qwen3-1.7b --workdir=runs/alfworld-sdar \\
        --config.env.data=/data/alfworld/json_2.1.1 --config.model.path=/models/Qwen3-1.7B

Arguments: method and, optionally, a model preset. Hardware: one node of 8 accelerators of 80 GB for the large models;
the small one (smollm2-135m) runs on one. No score is promised here: results of runs are in experiments/results.
"""

from sdjax.config import defaults

MODELS = {
    # name: (path, devices, packed rows of one micro-batch, train.remat)
    "smollm2-135m": ("smollm2-135m", 1, 16, "none"),
    "qwen3-1.7b": ("", 8, 8, "full"),
    "qwen3.5-2b": ("models/Qwen3.5-2B", 8, 8, "full"),
    "qwen3.5-4b": ("models/Qwen3.5-4B", 8, 8, "full"),
    "qwen3.5-9b": ("models/Qwen3.5-9B", 8, 8, "full"),
}


def get_config(arguments: str = "grpo"):
    method, _, model = arguments.partition(",")
    model = model or "smollm2-135m"
    config = defaults(method)
    path, devices, pack_rows, remat = MODELS[model]
    config.name = f"alfworld-{model}-{method}"
    config.model.name, config.model.path, config.model.compute_dtype = model, path, "bfloat16"
    config.mesh.fsdp = devices

    config.env.name = "alfworld"
    config.env.template = "verl_agent"
    config.env.turns, config.env.history = 50, 2
    config.env.train_split, config.eval.panel = "train", "valid_seen"

    rollout = config.rollout
    rollout.prompt_tokens, rollout.response_tokens, rollout.max_length = 2048, 512, 2560
    rollout.slots, rollout.prefill_rows, rollout.decode_chunk, rollout.cache_dtype = 128, 64, 16, "bfloat16"

    train = config.train
    train.steps, train.tasks_per_step, train.group_size, train.minibatch_rows = 100, 16, 8, 256
    train.learning_rate, train.kl_coef, train.entropy_coef = 1e-6, 0.01, 0.001
    train.pack_length, train.pack_rows, train.loss_slots, train.remat = 2560, pack_rows, 512, remat

    # A model of this size never wins untrained games: see --mode=sft for a warm start from expert episodes.
    sft = config.sft
    sft.episodes, sft.steps, sft.batch_rows, sft.learning_rate = 1000, 150, 32, 2e-4

    config.teacher.bank = "alfworld"
    config.eval.every, config.eval.temperature = 5, 0.4
    config.eval.final_seeds, config.eval.final_temperature = 8, 0.4
    return config
