"""The comparison of arXiv 2610.19789: 11 methods x 3 models x 4 environments = 132 runs of 100 updates.

    python -m sdjax.main --mode=study --study=plan --config=experiments/study.py --workdir=runs/study \\
        --config.models.qwen3_5_2b=/models/Qwen3.5-2B --config.data.alfworld=/data/json_2.1.1

Then ``--study=run`` (here, one run after another), or a launcher over the manifest that the plan writes;
``--study=status`` and ``--study=report`` at any time. Arguments: ``all11`` (default), or ``all13``, which adds two
methods that are not in the study. ``--config.seeds=3`` trains every cell with three seeds.

Settings of a cell are those of the environment's own file. Hardware: 8 accelerators of 80 GB for each run; the study
reports 12,124 GPU-hours in all. Validation after 0, 5, ..., 100 updates, final evaluation with 8 rollout seeds at
T 0.4.
"""

from sdjax.study import Grid, axis, prod, settings

STUDY = ("grpo", "grpo_opsd", "sdar", "skill_sd", "rlsd", "ocsd", "ovcsd", "agent_opsd", "adrs", "icsd", "pcsd")
METHODS = {"all11": STUDY, "all13": (*STUDY, "grsd", "fa_sd")}
MODELS = {
    "qwen3.5-2b": "models/Qwen3.5-2B",
    "qwen3.5-4b": "models/Qwen3.5-4B",
    "qwen3.5-9b": "models/Qwen3.5-9B",
}
# What --mode=prepare makes of the official files; ScienceWorld's tasks come with its package.
DATA = {
    "alfworld": "data/alfworld",
    "scienceworld": "generated",
    "webshop": "data/webshop",
    "searchqa": "data/searchqa",
}


def get_config(arguments: str = "all11"):
    points = prod(axis("env", *DATA), axis("model", *MODELS), axis("method", *METHODS[arguments]))
    grid = Grid(points, config="experiments/{env}.py:{method},{model}")
    return settings("study", grid, models=MODELS, data=DATA)
