"""Expert episodes for warm starts: played at the same time, as chat turns, and as a file for other trainers."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sdjax.envs.base import Benchmark, ExpertTurn
from sdjax.envs.prompts import PromptTemplate
from sdjax.errors import ConfigError

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
    kind = kind or benchmark.experts[0]
    if kind not in benchmark.experts:
        raise ConfigError(
            f"{benchmark.name} has no expert {kind!r}.", f"set sft.expert to one of {', '.join(benchmark.experts)}."
        )

    async def everything() -> list[list[ExpertTurn]]:
        places = asyncio.Semaphore(_AT_ONCE)

        async def one(index: int, wanted: Demonstration) -> list[ExpertTurn]:
            async with places:
                turns = await benchmark.expert_episode(wanted.task, kind, wanted.seed, max_turns, wanted.noise)
            if on_done is not None:
                on_done(index)
            return turns

        return await asyncio.gather(*(one(i, wanted) for i, wanted in enumerate(demonstrations)))

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
