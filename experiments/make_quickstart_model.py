"""Makes the starting point of the quickstart: a tiny tokenizer and model, warm-started on expert games.

    python -m experiments.make_quickstart_model --workdir=runs/warm_start

Writes experiments/quickstart_model (about 1 MB). The tokenizer is trained on the games' own text, the weights start at
random and are trained on generated games that no run uses for validation: first on a clean expert, then on a careless
one. Minutes on an accelerator, about an hour on two CPU cores; can be stopped and started again.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

from absl import app, flags
from rich.console import Console

from experiments import quickstart
from sdjax.config import RunConfig, load
from sdjax.envs import make_benchmark
from sdjax.envs.demos import Demonstration, chat_turns, play_experts
from sdjax.envs.prompts import PromptTemplate
from sdjax.models.tiny import write_tiny_checkpoint
from sdjax.teacher.skills import SkillBank
from sdjax.train.rundir import RunDir
from sdjax.train.sft import WarmStart

_WORKDIR = flags.DEFINE_string("workdir", "runs/warm_start", "Where the warm start runs.")
_OUT = flags.DEFINE_string("out", str(quickstart.WARM_START), "Where the model is written.")
_CORPUS_GAMES = 400


def corpus(config: RunConfig) -> Iterator[str]:
    """Every text the model reads or writes: prompts and answers of expert games, and the teacher's skills."""
    benchmark = make_benchmark(config.env)
    template = PromptTemplate.load(config.env.name, config.env.template, config.env.history)
    tasks = benchmark.task_ids(config.env.train_split)[:_CORPUS_GAMES]
    wanted = [Demonstration(task, 0, config.sft.noise) for task in tasks]
    for turns in play_experts(benchmark, wanted, config.sft.expert, config.env.turns):
        for turn in chat_turns(turns, template):
            yield turn.prompt
            yield turn.answer
    # Repeated, so that the tokenizer spends merges on words that only the skills use.
    yield from list(SkillBank.load(config.teacher.bank).texts().values()) * 20


def main(_: list[str]) -> None:
    workdir = Path(_WORKDIR.value)
    model = workdir / "random"
    for phase in ("warm_start_clean", "warm_start"):
        values = quickstart.get_config(phase)
        values.model.path = str(model)
        config = load(values)
        if not model.exists():
            write_tiny_checkpoint(model, corpus(config), **quickstart.TINY)
        with RunDir(workdir / phase) as directory:
            if not directory.done.exists():
                WarmStart(config, directory, Console()).run()
        model = workdir / phase / "model"
    shutil.rmtree(_OUT.value, ignore_errors=True)
    shutil.copytree(model, _OUT.value)


if __name__ == "__main__":
    app.run(main)
