"""Search-QA with the settings of the study (64 questions x 8 episodes a step, 4 turns, validation greedy).

    python -m sdjax.main --config=experiments/searchqa.py:sdar,qwen3-1.7b --workdir=runs/searchqa-sdar \\
        --config.env.data=/data/searchqa --config.model.path=/models/Qwen3-1.7B

Arguments: method and, optionally, a model preset. ``env.data`` is a folder that ``--mode=prepare --env=searchqa``
wrote, with training questions, the evaluation list of 3,125 and a corpus. Without it, ``--config.eval.panel=eval`` runs
on the small generated world, whose scores compare with no published ones. All of Wikipedia is searched through a
server: ``--config.env.searchqa.retriever=http --config.env.searchqa.url=...``. Beside the greedy validations there is a
sampled one at every twentieth step. Hardware: one node of 8 accelerators of 80 GB for the large model; the small one
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
    config.name = f"searchqa-{model}-{method}"
    config.model.name, config.model.path, config.model.compute_dtype = model, path, "bfloat16"
    config.mesh.fsdp = devices

    config.env.name = "searchqa"
    config.env.template = "verl_agent"
    config.env.turns, config.env.history = 4, 4
    config.env.searchqa.rule, config.env.searchqa.topk = "verl_agent", 3
    config.env.train_split, config.eval.panel = "train", "eval_3125"

    rollout = config.rollout
    rollout.prompt_tokens, rollout.response_tokens, rollout.max_length = 4096, 512, 4608
    rollout.slots, rollout.prefill_rows, rollout.decode_chunk, rollout.cache_dtype = 256, 16, 16, "bfloat16"

    train = config.train
    train.steps, train.tasks_per_step, train.group_size, train.minibatch_rows = 100, 64, 8, 256
    train.learning_rate, train.kl_coef, train.entropy_coef, train.warmup_share = 1e-6, 0.001, 0.001, 0.1
    train.pack_length, train.pack_rows, train.loss_slots, train.remat = 4608, pack_rows, 1024, remat

    # A model of this size rarely wins untrained: see --mode=sft for a warm start from expert episodes.
    sft = config.sft
    sft.expert, sft.episodes, sft.steps, sft.batch_rows, sft.learning_rate = "gold", 1000, 150, 32, 2e-4

    config.teacher.bank, config.teacher.reflection_turns = "searchqa", 4
    config.eval.every, config.eval.temperature = 5, 0.0
    config.eval.extra_validations, config.eval.extra_every = ("sampled",), 20
    config.eval.final_seeds, config.eval.final_temperature = 8, 0.4
    return config
