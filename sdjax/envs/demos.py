"""Expert episodes for warm starts: played at the same time, as chat turns, and as a file for other trainers."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.text import Text

from sdjax import jsonl
from sdjax.envs.base import Benchmark, ExpertTurn, Status
from sdjax.envs.prompts import PromptTemplate
from sdjax.errors import ConfigError, DataError, EnvError
from sdjax.seeds import derive_seed

_T = TypeVar("_T")
_AT_ONCE = 32  # as many environments as may wait for their worker processes


@dataclass(frozen=True)
class Demonstration:
    """One expert episode to play. noise: probability that a turn is a random one."""

    task: str
    seed: int
    noise: float = 0.0


@dataclass(frozen=True)
class ChatTurn:
    """One turn as a supervised example: the user message of the agent's prompt, and the expert's answer."""

    prompt: str
    answer: str


def draw(task_ids: Sequence[str], episodes: int, run_seed: int, noise: float) -> list[Demonstration]:
    """The episodes that a warm start imitates: the tasks in turn, each time with another seed."""
    wanted = []
    for number in range(episodes):
        task = task_ids[number % len(task_ids)]
        wanted.append(Demonstration(task, derive_seed(run_seed, "sft/expert", task=task, step=number), noise))
    return wanted


def play_experts(
    benchmark: Benchmark,
    demonstrations: Sequence[Demonstration],
    kind: str,
    max_turns: int,
    on_done: Callable[[int], None] | None = None,
) -> list[list[ExpertTurn]]:
    """Episodes of the expert ``kind`` ("": the benchmark's first), in order; an empty list where it did not win.

    Raises:
      ConfigError: the benchmark has no such expert.
    """
    kind = expert_name(benchmark, kind)

    async def one(index: int, wanted: Demonstration) -> list[ExpertTurn]:
        turns = await benchmark.expert_episode(wanted.task, kind, wanted.seed, max_turns, wanted.noise)
        if on_done is not None:
            on_done(index)
        return turns

    return _run_all([functools.partial(one, index, wanted) for index, wanted in enumerate(demonstrations)])


def expert_name(benchmark: Benchmark, kind: str) -> str:
    """``kind``, or the benchmark's first expert for "". Raises ConfigError if it has no such expert."""
    kind = kind or benchmark.experts[0]
    if kind not in benchmark.experts:
        raise ConfigError(
            f"{benchmark.name} has no expert {kind!r}.", f"set sft.expert to one of {', '.join(benchmark.experts)}."
        )
    return kind


def _run_all(jobs: Sequence[Callable[[], Coroutine[Any, Any, _T]]]) -> list[_T]:
    """Results of all jobs, in order; so many at a time as may wait for their workers."""

    async def everything() -> list[_T]:
        places = asyncio.Semaphore(_AT_ONCE)

        async def one(job: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
            async with places:
                return await job()

        return await asyncio.gather(*map(one, jobs))

    return asyncio.run(everything())


def chat_turns(turns: Sequence[ExpertTurn], template: PromptTemplate) -> list[ChatTurn]:
    """An episode as the prompts that an agent would have seen and the answers in the template's format."""
    past: list[tuple[str, str]] = []
    found = []
    for turn in turns:
        seen = turn.observation
        prompt = template.render(seen.task, seen.text, seen.admissible, past, len(past), seen.objects)
        found.append(ChatTurn(prompt, template.answer(turn.thought, turn.action)))
        past.append((seen.text, turn.action))
    return found


def write_demos(
    benchmark: Benchmark,
    template: PromptTemplate,
    demonstrations: Sequence[Demonstration],
    kind: str,
    max_turns: int,
    path: Path,
    console: Console,
) -> None:
    """Plays ``demonstrations`` and writes one line for each to ``path``, in order; lines that are there are kept.

    A line is {task, family, expert, seed, won, messages}; ``messages`` has an item for each turn, a chat of one user
    and one assistant message. An expert without noise that did not win leaves no messages.

    Raises:
      ConfigError: no such expert. DataError: ``path`` holds other episodes.
    """
    kind = expert_name(benchmark, kind)
    jsonl.repair(path)
    done = jsonl.read(path)
    heads = [{"task": wanted.task, "expert": kind, "seed": wanted.seed} for wanted in demonstrations]
    for number, line in enumerate(done):
        if number >= len(heads) or {key: line.get(key) for key in heads[number]} != heads[number]:
            raise DataError(
                f"{path}: line {number + 1} is not the episode that these settings play.", "use another --workdir."
            )
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task(f"{benchmark.name} episodes", total=len(heads), completed=len(done))
        # A few at a time, so that little is played again after an interruption.
        for start in range(len(done), len(heads), _AT_ONCE):
            part = demonstrations[start : start + _AT_ONCE]
            episodes = play_experts(benchmark, part, kind, max_turns, lambda _: bars.advance(bar))
            won = _run_all([functools.partial(_replay, benchmark, *pair) for pair in zip(part, episodes)])
            lines = [
                {
                    "task": wanted.task,
                    "family": benchmark.family(wanted.task),
                    "expert": kind,
                    "seed": wanted.seed,
                    "won": won[i],
                    "messages": [_messages(chat) for chat in chat_turns(episodes[i], template)],
                }
                for i, wanted in enumerate(part)
            ]
            jsonl.append(path, lines, sync=True)
            done += lines
    wins, turns = sum(line["won"] for line in done), sum(len(line["messages"]) for line in done)
    console.print(Text(f"{path}: {len(done)} episodes, {wins} won, {turns} turns"), soft_wrap=True)


def _messages(chat: ChatTurn) -> list[dict[str, str]]:
    return [{"role": "user", "content": chat.prompt}, {"role": "assistant", "content": chat.answer}]


async def _replay(benchmark: Benchmark, demonstration: Demonstration, turns: Sequence[ExpertTurn]) -> bool:
    """Whether the episode is won: an expert with noise gives its turns either way, so they are played once more."""
    if not turns:
        return False
    environment = benchmark.make()
    try:
        observation, status = await environment.reset(demonstration.task, demonstration.seed), Status.RUNNING
        for number, turn in enumerate(turns, 1):
            if observation.text != turn.observation.text:
                raise EnvError(
                    f"{demonstration.task}: replayed turn {number} of the expert shows another observation.",
                    "report the task and the seed; an episode must depend on them alone.",
                )
            result = await environment.step(turn.action)
            observation, status = result.observation, result.status
        return status is Status.SUCCESS
    finally:
        await environment.close()
