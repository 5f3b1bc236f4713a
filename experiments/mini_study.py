"""The study on one accelerator with SmolLM2-135M: 11 methods x 4 environments = 44 runs from 4 shared warm starts.

    python -m sdjax.main --mode=study --study=plan --config=experiments/mini_study.py --workdir=runs/mini
    python -m sdjax.main --mode=study --study=run --workdir=runs/mini [--parallel=8]

Arguments: ``all11`` (default) or ``all13``, then optionally ``official``: ``all11,official`` takes the official data
and panels from where ``experiments/study.py`` has them (``--config.data.alfworld=PATH`` names another place); without
it the data are generated, and their scores compare with no published ones.

The study's settings with 16 tasks x 8 episodes a step everywhere, validation every 5 updates, and a final evaluation
with 8 rollout seeds at T 0.4; 20 updates (more: ``--config.overrides="train.steps=100"``). A model of this size never
wins untrained, so that each environment has one warm start from expert episodes, which all its cells share. On one H200
an ALFWorld update of GRPO takes 26 s (benchmarks/NOTES.md).
"""

from experiments.study import DATA, METHODS
from sdjax.study import Grid, axis, prod, rule, settings

MODEL = "smollm2-135m"
GENERATED_PANELS = {"alfworld": "valid", "searchqa": "eval"}  # the other two have one name for both


def get_config(arguments: str = "all11"):
    methods, _, data = arguments.partition(",")
    if data not in ("", "official"):
        raise ValueError(f"{data!r} is no kind of data; write all11 or all11,official")
    rules = [
        rule({"train.steps": 20, "train.tasks_per_step": 16, "eval.every": 5}, kind="train"),
        # The study's 1e-6 is for models 15 to 70 times as large.
        rule({"train.learning_rate": 1e-5, "train.warmup_share": 0.0}, kind="train"),
    ]
    if not data:
        rules += [rule({"eval.panel": panel}, env=env) for env, panel in GENERATED_PANELS.items()]
    grid = Grid(
        prod(axis("env", *DATA), axis("model", MODEL), axis("method", *METHODS[methods])),
        config="experiments/{env}.py:{method},{model}",
        rules=tuple(rules),
        warm_start="experiments/{env}.py:grpo,{model}",
    )
    return settings("mini", grid, data=DATA if data else None)
