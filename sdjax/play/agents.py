"""Who plays: a person at the keyboard, an expert of the benchmark, or chance."""

import random
import re
from collections import deque
from dataclasses import dataclass
from typing import Protocol, TextIO

from sdjax.envs.base import Benchmark, Environment, ExpertTurn, Observation
from sdjax.errors import ConfigError
from sdjax.play.screen import Screen

HELP = (
    "Type what you want to do and press Enter; any text is sent as it is. OBJ in a command is the name of an object.",
    "Search-QA reads <search>words</search> and <answer>words</answer>, WebShop search[words] and click[button].",
    "/plan  commands that win from here, as far as the benchmark knows them",
    "/help  this text",
    "/quit  end the game (so does the end of the input)",
)
# Experts report only episodes that they win, unless some turns may be random. This chance is as good as none.
_ALSO_LOST_EPISODES = 1e-300
_PLACEHOLDER = re.compile(r"<[^<>]*>")
_ANSWERS = 0.25  # share of random turns that answer, where the benchmark names no commands


@dataclass(frozen=True)
class Move:
    """action: what is sent to the environment. said: a thought or a model's whole answer. problem: what was wrong with
    the format of that answer, "" if nothing was."""

    action: str
    said: str = ""
    problem: str = ""


class Agent(Protocol):
    async def begin(self, environment: Environment, task: str, seed: int) -> None:
        """A new episode; ``environment`` was reset just now."""
        ...

    async def act(self, observation: Observation, past: list[tuple[str, str]]) -> Move | None:
        """The next move, or None to stop. past: (observation, action) pairs, oldest first."""
        ...


class Human:
    """Reads moves from ``lines``, one a line, and answers /plan, /help and /quit itself."""

    def __init__(self, lines: TextIO, screen: Screen):
        self._lines, self._screen = lines, screen
        self._environment: Environment | None = None

    async def begin(self, environment: Environment, task: str, seed: int) -> None:
        self._environment = environment
        self._screen.notes(HELP[-1:])

    async def act(self, observation: Observation, past: list[tuple[str, str]]) -> Move | None:
        assert self._environment is not None, "begin comes first"
        while True:
            self._screen.ask()
            line = self._lines.readline()
            text = line.strip()
            if not line or text == "/quit":
                return None
            if text == "/plan":
                self._screen.plan(self._environment.privileged("plan"))
            elif text == "/help":
                self._screen.notes(HELP)
            elif text.startswith("/"):
                self._screen.notes([f"{text}: no such command; /help lists them."])
            elif text:
                return Move(text)


class Expert:
    """An expert of the benchmark, also where it loses. It plays its episode first, and it is then shown turn by turn.

    Raises:
      ConfigError: the benchmark has no expert ``kind``.
    """

    def __init__(self, benchmark: Benchmark, kind: str, max_turns: int):
        if kind not in benchmark.experts:
            raise ConfigError(
                f"{benchmark.name} has no expert {kind!r}; it has {', '.join(benchmark.experts)}.",
                f"use --agent=expert, which is {benchmark.experts[0]!r}.",
            )
        self._benchmark, self._kind, self._max_turns = benchmark, kind, max_turns
        self._turns: deque[ExpertTurn] = deque()

    async def begin(self, environment: Environment, task: str, seed: int) -> None:
        self._turns = deque(
            await self._benchmark.expert_episode(task, self._kind, seed, self._max_turns, _ALSO_LOST_EPISODES)
        )

    async def act(self, observation: Observation, past: list[tuple[str, str]]) -> Move | None:
        if not self._turns:
            return None
        turn = self._turns.popleft()
        return Move(turn.action, turn.thought)


class Random:
    """Plays any command that the benchmark shows, and else searches and answers with words of the task."""

    def __init__(self) -> None:
        self._rng = random.Random()

    async def begin(self, environment: Environment, task: str, seed: int) -> None:
        self._rng = random.Random(f"random play {task} {seed}")

    async def act(self, observation: Observation, past: list[tuple[str, str]]) -> Move | None:
        return Move(random_action(observation, self._rng))


def random_action(observation: Observation, rng: random.Random) -> str:
    """One of the admissible commands, its placeholders filled. Search-QA, which shows none, gets a search or answer."""
    words = observation.task.split() or ["look"]
    some = " ".join(rng.sample(words, min(3, len(words))))
    if not observation.admissible:
        return f"<answer>{some}</answer>" if rng.random() < _ANSWERS else f"<search>{some}</search>"
    command = _PLACEHOLDER.sub(lambda _: some, rng.choice(observation.admissible))
    names = observation.objects or ("agent",)
    return re.sub(r"\bOBJ\b", lambda _: rng.choice(names), command)
