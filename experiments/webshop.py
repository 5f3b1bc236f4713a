"""WebShop with the settings of the study (16 goals x 8 episodes a step, 15 turns, mini-batches of 64 rows).

    python -m sdjax.main --config=experiments/webshop.py:sdar,qwen3-1.7b --workdir=runs/webshop-sdar \\
        --config.env.data=/data/webshop/items_shuffle_1000.json --config.model.path=/models/Qwen3-1.7B

Arguments: method and, optionally, a model preset. Without ``env.data`` it is the generated catalogue, whose scores
compare with no published ones. ``--config.env.webshop.split=verl_agent`` takes the released split, in which training
and evaluation share products. Hardware: one node of 8 accelerators of 80 GB for the large model; the small one
(smollm2-135m) runs on one. No score is promised here: results of runs are in experiments/results.
"""

from sdjax.config import defaults

MODELS = {
    # name: (path, devices, packed rows of one micro-batch, train.remat)
    "smollm2-135m": ("smollm2-135m", 1, 8, "none"),
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
    config.name = f"webshop-{model}-{method}"
    config.model.name, config.model.path, config.model.compute_dtype = model, path, "bfloat16"
    config.mesh.fsdp = devices

    config.env.name = "webshop"
    config.env.template = "verl_agent"
    config.env.turns, config.env.history = 15, 2
    config.env.webshop.observation = "quoted"
    config.env.train_split, config.eval.panel = "train", "eval"

    rollout = config.rollout
    rollout.prompt_tokens, rollout.response_tokens, rollout.max_length = 4096, 512, 4608
    rollout.slots, rollout.prefill_rows, rollout.decode_chunk, rollout.cache_dtype = 128, 16, 16, "bfloat16"

    train = config.train
    train.steps, train.tasks_per_step, train.group_size, train.minibatch_rows = 100, 16, 8, 64
    train.learning_rate, train.kl_coef, train.entropy_coef, train.warmup_share = 1e-6, 0.01, 0.001, 0.0
    train.pack_length, train.pack_rows, train.loss_slots, train.remat = 4608, pack_rows, 1024, remat

    # A model of this size never wins untrained: see --mode=sft for a warm start from expert episodes.
    sft = config.sft
    sft.expert, sft.episodes, sft.steps, sft.batch_rows, sft.learning_rate = "oracle", 1000, 150, 32, 2e-4

    teacher = config.teacher
    teacher.bank, teacher.observation_tokens, teacher.reflection_turns = "webshop", 1024, 15
    config.eval.every, config.eval.temperature = 5, 0.4
    config.eval.final_seeds, config.eval.final_temperature = 8, 0.4
    return config
