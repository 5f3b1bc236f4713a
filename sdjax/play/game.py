"""The loop of one game: observation, move, result, until the game ends or the player stops."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console

from sdjax.envs import make_benchmark
from sdjax.envs.base import Benchmark, Status
from sdjax.errors import ConfigError
from sdjax.play.agents import Agent, Expert, Human, Random
from sdjax.play.record import Record
from sdjax.play.screen import Screen, TeacherView
from sdjax.play.settings import Settings
from sdjax.seeds import derive_seed
from sdjax.teacher.skills import SkillBank


@dataclass(frozen=True)
class Options:
    """task: id, "" for the first of the panel. agent: human, expert (the benchmark's first), random, checkpoint, or the
    name of an expert. teacher: show what a teacher would read. episodes: of the task, or of so
    many tasks of the panel; more than one are not shown turn by turn."""

    task: str = ""
    agent: str = "human"
    teacher: bool = False
    episodes: int = 1


def play(
    settings: Settings, options: Options, console: Console, lines: TextIO, workdir: Path | None = None
) -> list[Record]:
    """Plays and shows; ``lines`` are a person's moves. ``workdir``: run directory with the model of --agent=checkpoint.

    Returns:
      One record for each episode that was begun.
    Raises:
      ConfigError: options that do not fit. DataError: no such task. And what loading a model raises.
    """
    if options.episodes < 1 or (options.episodes > 1 and options.agent == "human"):
        raise ConfigError(
            f"--episodes={options.episodes} with --agent={options.agent}.",
            "use a positive number, and more than one only with another agent.",
        )
    screen = Screen(console, quiet=options.episodes > 1, typed=options.agent == "human")
    if options.agent == "checkpoint":
        from sdjax.play.checkpoint import Checkpoint, open_newest

        if settings.run is None:
            raise ConfigError("--env names no model.", "use --config or the --workdir of a run instead of --env.")
        session, origin = open_newest(settings.run, workdir)
        try:
            screen.notes([f"model: {origin}"])
            return _play_all(session.benchmark, settings, options, Checkpoint(session), screen)
        finally:
            session.close()
    benchmark = make_benchmark(settings.env)
    try:
        return _play_all(benchmark, settings, options, _agent(benchmark, settings, options, screen, lines), screen)
    finally:
        benchmark.close()


def _agent(benchmark: Benchmark, settings: Settings, options: Options, screen: Screen, lines: TextIO) -> Agent:
    if options.agent == "human":
        return Human(lines, screen)
    if options.agent == "random":
        return Random()
    kind = benchmark.experts[0] if options.agent == "expert" else options.agent
    return Expert(benchmark, kind, settings.env.turns)


def _play_all(benchmark: Benchmark, settings: Settings, options: Options, agent: Agent, screen: Screen) -> list[Record]:
    if options.task:
        tasks = [options.task] * options.episodes
    else:
        tasks = list(benchmark.panel(settings.panel).task_ids[: options.episodes])
    bank = SkillBank.load(settings.bank) if options.teacher else None
    records: list[Record] = []

    async def everything() -> None:
        for number, task in enumerate(tasks):
            seed = derive_seed(settings.seed, "play", task=task, sample=number)
            records.append(await _play_one(benchmark, agent, task, seed, settings.env.turns, bank, screen))
            screen.episode(records[-1])

    try:
        with _interruptible():
            asyncio.run(everything())
    except KeyboardInterrupt:
        screen.notes(["", "interrupted"])
    screen.summary(records, options.agent)
    return records


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the game at once; asyncio's own handler would wait for the line that is being read."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


async def _play_one(
    benchmark: Benchmark,
    agent: Agent,
    task: str,
    seed: int,
    max_turns: int,
    bank: SkillBank | None,
    screen: Screen,
) -> Record:
    environment = benchmark.make()
    try:
        observation = await environment.reset(task, seed)
        family = benchmark.family(task)
        teacher = None
        if bank is not None:
            teacher = TeacherView(*bank.text(bank.route(benchmark.fields(task))), bank.name)
        screen.start(task, family, observation, teacher)
        await agent.begin(environment, task, seed)
        past: list[tuple[str, str]] = []
        status, score, total = Status.RUNNING.value, 0.0, 0.0
        while status == Status.RUNNING.value:
            plan = environment.privileged("plan") if bank is not None else None
            screen.turn(len(past) + 1, observation, plan, teacher=bank is not None)
            move = await agent.act(observation, past)
            if move is None:
                status = "stopped"
                break
            screen.move(move.action, move.said, move.problem)
            result = await environment.step(move.action)
            past.append((observation.text, move.action))
            observation, score, total = result.observation, result.score, total + result.reward
            status = result.status.value
            if status == Status.RUNNING.value and len(past) >= max_turns:
                status = Status.TRUNCATED.value
            screen.result(result, status)
        else:
            screen.last(observation)
        return Record(task, family, status, score, total, len(past))
    finally:
        await environment.close()
