"""Makes ``batch.npz``, the batch that the notebook of the losses looks at.

    python -m experiments.notebooks.make_batch --workdir=runs/notebook

Runs one step of the quickstart (fewer tasks) with each method whose teacher's views are wanted. The same seed and the
same starting weights draw the same episodes, token for token, so that their views fit on one batch.
"""

import dataclasses
from pathlib import Path
from typing import Any

from absl import app, flags
from rich.console import Console

from experiments import quickstart
from sdjax.config import RunConfig, load
from sdjax.errors import DataError
from sdjax.methods import registry
from sdjax.train.batch_file import SavedBatch, load_batch, save_batch
from sdjax.train.rundir import RunDir
from sdjax.train.trainer import Trainer

_WORKDIR = flags.DEFINE_string("workdir", "runs/notebook", "Where the runs go.")
_MODEL = flags.DEFINE_string("model", str(quickstart.WARM_START), "Checkpoint to start from.")
_OUT = flags.DEFINE_string("out", str(Path(__file__).with_name("batch.npz")), "File to write.")
METHODS = ("sdar", "ocsd")  # skills; the next observation, shown and hidden


def one_step(method: str, model: str) -> RunConfig:
    config: Any = quickstart.get_config(method)
    config.model.path = model
    config.train.steps, config.train.tasks_per_step = 1, 6
    config.env.generator.valid_games = 2
    config.eval.final_seeds = 0
    return load(config)


def with_views_of(one: SavedBatch, other: SavedBatch) -> SavedBatch:
    if one.tokens != other.tokens:
        raise DataError("two runs of one seed drew other tokens.", "start both in empty directories, with one version.")
    views = {**one.batch.views, **other.batch.views}
    context = {**one.batch.context, **other.batch.context}
    return dataclasses.replace(one, batch=dataclasses.replace(one.batch, views=views, context=context))


def main(_: list[str]) -> None:
    saved = None
    for method in METHODS:
        if method not in registry.names():
            continue
        with RunDir(Path(_WORKDIR.value) / method) as directory:
            if not directory.done.exists():
                Trainer(one_step(method, _MODEL.value), directory, Console()).run()
            step = load_batch(directory.batch(1))
        saved = step if saved is None else with_views_of(saved, step)
    assert saved is not None
    # Padding rows have no tokens and come last.
    tokens = [row for row in saved.tokens if row]
    save_batch(Path(_OUT.value), saved.batch, saved.adv_NL, tokens, step=saved.step, method=saved.method)


if __name__ == "__main__":
    app.run(main)
