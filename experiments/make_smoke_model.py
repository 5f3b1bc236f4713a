"""Makes the starting point of the smoke study: random weights, and a tokenizer that knows all four environments.

    python -m experiments.make_smoke_model [--out=experiments/smoke_model]

The tokenizer is trained on expert episodes and skills. Of ScienceWorld it reads the gold commands and the skills only,
so that no Java is needed. Seconds on two CPU cores; the same bytes every time.
"""

import shutil
from collections.abc import Iterator
from typing import Any

from absl import app, flags

from experiments import smoke
from sdjax.config import load
from sdjax.envs import make_benchmark
from sdjax.envs.base import ExpertTurn, Observation
from sdjax.envs.demos import Demonstration, chat_turns, play_experts
from sdjax.envs.prompts import PromptTemplate
from sdjax.envs.scienceworld.store import Tasks
from sdjax.models import tiny
from sdjax.teacher.skills import SkillBank

_OUT = flags.DEFINE_string("out", str(smoke.MODEL), "Where the model is written.")
_EPISODES = 48
_SIZES: dict[str, Any] = {"vocab_size": 2048, "hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 64}


def corpus() -> Iterator[str]:
    """What the model reads and writes in each environment, and what the teacher adds."""
    for name in smoke.PANELS:
        config = load(smoke.get_config(f"{name},grpo"))
        template = PromptTemplate.load(name, config.env.template, config.env.history)
        if name == "scienceworld":
            tasks, room = Tasks(task_names=config.env.scienceworld.task_names), Observation("a room", "do it", (), ())
            stored = [tasks.gold(task) for task in tasks.task_ids("train_gold")[:_EPISODES]]
            episodes = [[ExpertTurn(room, action, "ok") for action in gold.actions] for gold in stored if gold]
        else:
            benchmark = make_benchmark(config.env)
            wanted = [Demonstration(task, 0) for task in benchmark.task_ids("train")[:_EPISODES]]
            episodes = list(play_experts(benchmark, wanted, "", config.env.turns))
            benchmark.close()
        for chat in (chat for turns in episodes for chat in chat_turns(turns, template)):
            yield from (chat.prompt, chat.answer)
        # Repeated, so that the tokenizer spends merges on words that only the skills use.
        yield from list(SkillBank.load(config.teacher.bank).texts().values()) * 8


def main(_: list[str]) -> None:
    shutil.rmtree(_OUT.value, ignore_errors=True)
    tiny.write_tiny_checkpoint(_OUT.value, corpus(), max_positions=8192, **_SIZES)


if __name__ == "__main__":
    app.run(main)
