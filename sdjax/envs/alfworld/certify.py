"""Differential test over whole splits: the native engine against the real one (packages alfworld and textworld).

    python -m sdjax.envs.alfworld.certify --data=/data/alfworld/json_2.1.1 --splits=valid_seen,valid_unseen

Every game is played in both engines side by side, and text, admissible commands and victory are compared after every
command. Half of the commands follow the oracle, so that games are won; the others change something at random or are
nonsense. They depend on the game alone. Outcomes are appended to ``--out``, and a later start plays only what is
missing there. Exit status 1 if a game differs or cannot be played.
"""

import argparse
import asyncio
import hashlib
import importlib.metadata
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from sdjax import jsonl
from sdjax.envs.alfworld.engine import Episode
from sdjax.envs.alfworld.planner import plan
from sdjax.envs.alfworld.store import GameStore, open_store
from sdjax.envs.panels import subset
from sdjax.envs.workers import WorkerPool
from sdjax.errors import ConfigError, DataError, EnvError, SdjaxError

WORKER_MODULE = "sdjax.envs.alfworld.textworld_worker"
_PLAYED = ("engine", "planner", "certify")  # modules that an outcome depends on
NONSENSE = ("", "fly to the moon", "look\nlook", "\x00", "Ω {brace} %s", "x" * 20_000, "  look  ")


@dataclass(frozen=True)
class Mismatch:
    """step: commands played before the engines differed. command: the last of them ("" for the start of the game).
    differing: names of the parts that differ (text, admissible, won). native, real: these parts, and the text."""

    step: int
    command: str
    differing: list[str]
    native: dict[str, Any]
    real: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """One game. steps: commands that were compared. error: why the real engine could not play on, "" if it could."""

    game: str
    steps: int
    won: bool
    mismatch: Mismatch | None = None
    error: str = ""


def next_command(rng: random.Random, episode: Episode) -> str:
    """Random play that gets somewhere: oracle moves, nonsense, object commands, anything admissible."""
    draw = rng.random()
    commands = plan(episode) if draw < 0.5 else None
    if commands:
        return commands[0]
    if draw < 0.6:
        return rng.choice(NONSENSE)
    changes = [command for command in episode.admissible if command.split()[0] not in ("go", "examine", "look")]
    return rng.choice(changes if draw < 0.85 and changes else list(episode.admissible))


async def compare_game(store: GameStore, task_id: str, pool: WorkerPool, steps: int) -> Outcome:
    """Plays one game in both engines until it is won, the engines differ or ``steps`` commands are played."""
    rng, episode, session = random.Random(task_id), Episode(store.game(task_id)), pool.session()
    command, played = "", 0
    try:
        real = await session.call("reset", game=store.game_file(task_id))
        while True:
            native = {"text": episode.text, "admissible": list(episode.admissible), "won": episode.won()}
            differing = [key for key, value in native.items() if real.get(key) != value]
            if differing:
                shown = dict.fromkeys(["text", *differing])
                parts = ({key: answer.get(key) for key in shown} for answer in (native, real))
                return Outcome(task_id, played, False, Mismatch(played, command, differing, *parts))
            if episode.won() or played >= steps:
                return Outcome(task_id, played, episode.won())
            command = next_command(rng, episode)
            real = await session.call("step", action=command)
            episode.step(command)
            played += 1
    except EnvError as error:
        return Outcome(task_id, played, False, error=str(error))
    finally:
        await session.close()


def compare_games(
    store: GameStore,
    task_ids: Sequence[str],
    *,
    steps: int,
    workers: int = 1,
    timeout_s: float = 120.0,
    command: str | Sequence[str] = WORKER_MODULE,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Plays all games, ``workers`` at a time; ``on_done`` is called after each. ``command``: the worker process."""
    pool = WorkerPool(command, workers, timeout_s)
    places = asyncio.Semaphore(workers)

    async def one(task_id: str) -> Outcome:
        async with places:
            outcome = await compare_game(store, task_id, pool, steps)
            on_done(outcome)
            return outcome

    async def everything() -> list[Outcome]:
        return await asyncio.gather(*(one(task_id) for task_id in task_ids))

    try:
        return asyncio.run(everything())
    finally:
        pool.close()


def settings(steps: int) -> dict[str, Any]:
    """What an outcome depends on beside the game: after a change of any of these the games are played again.

    Raises:
      ConfigError: the real engine is not installed.
    """
    try:
        versions = {name: importlib.metadata.version(name) for name in ("alfworld", "textworld")}
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"{error}: the real engine is missing.", "pip install 'sdjax[alfworld]'.") from error
    sources = [resources.files("sdjax.envs.alfworld").joinpath(f"{name}.py").read_bytes() for name in _PLAYED]
    return {"steps": steps, "native_sha256": hashlib.sha256(b"\0".join(sources)).hexdigest(), **versions}


def read_outcomes(path: Path, wanted: dict[str, dict[str, Any]]) -> dict[str, Outcome]:
    """Outcomes in ``path`` by game. ``wanted``: game -> settings that its outcome must have been found with.

    Raises:
      DataError: the file was changed by something else.
    """
    jsonl.repair(path)
    found = {}
    for line in jsonl.read(path):
        try:
            if line["settings"] == wanted.get(line["game"]):
                mismatch = Mismatch(**line["mismatch"]) if line["mismatch"] else None
                found[line["game"]] = Outcome(line["game"], line["steps"], line["won"], mismatch)
        except (KeyError, TypeError) as error:
            raise DataError(f"{path} holds a line of another kind ({error!r}).", "choose another --out.") from error
    return found


def certify(
    store: GameStore, splits: dict[str, Sequence[str]], *, steps: int, workers: int, out: Path, console: Console
) -> int:
    """Compares the games of ``splits`` (name -> ids), prints what differs and a table. Returns the exit status."""
    everything = [task_id for ids in splits.values() for task_id in ids]
    common = settings(steps)
    # The same id can be another game in another store.
    wanted = {task_id: {**common, "game_sha256": store.content_hash([task_id])} for task_id in everything}
    known = read_outcomes(out, wanted)
    outcomes = {task_id: known[task_id] for task_id in everything if task_id in known}
    missing = [task_id for task_id in everything if task_id not in known]
    if outcomes:
        console.print(f"{len(outcomes)} games were compared before, {len(missing)} are left")

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("comparing games", total=len(everything), completed=len(outcomes))

        def done(outcome: Outcome) -> None:
            outcomes[outcome.game] = outcome
            if not outcome.error:  # a game that could not be played is still owed
                line = asdict(outcome) | {"settings": wanted[outcome.game]}
                line.pop("error")
                jsonl.append(out, [line])
            bars.advance(bar)

        if missing:
            compare_games(store, missing, steps=steps, workers=workers, on_done=done)
    console.print(table_of({name: [outcomes[task_id] for task_id in ids] for name, ids in splits.items()}))
    return report(outcomes.values(), console)


def report(outcomes: Iterable[Outcome], console: Console) -> int:
    """Prints every game that differs or could not be played. Returns 1 if there is one, else 0."""
    status = 0
    for outcome in outcomes:
        found = outcome.mismatch
        if found is None and not outcome.error:
            continue
        status = 1
        if found is None:
            lines = [f"{outcome.game}: could not be played on after {outcome.steps} steps: {outcome.error}"]
        else:
            where = f"at step {found.step}, after {found.command[:200]!r}"
            lines = [f"{outcome.game}: {', '.join(found.differing)} differs {where}"]
            for key, native in found.native.items():
                lines += [f"  native {key}: {native!r}", f"  real   {key}: {found.real[key]!r}"]
        for line in lines:
            console.print(Text(line))
    return status


def table_of(splits: dict[str, Sequence[Outcome]]) -> Table:
    table = Table(title="native engine against the real one")
    table.add_column("split")
    for column in ("games", "steps", "won", "differ", "not played"):
        table.add_column(column, justify="right")
    rows = dict(splits)
    if len(rows) > 1:
        rows["all"] = [outcome for outcomes in splits.values() for outcome in outcomes]
    for name, outcomes in rows.items():
        numbers = (
            len(outcomes),
            sum(outcome.steps for outcome in outcomes),
            sum(outcome.won for outcome in outcomes),
            sum(outcome.mismatch is not None for outcome in outcomes),
            sum(bool(outcome.error) for outcome in outcomes),
        )
        table.add_row(Text(name), *map(str, numbers))
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sdjax.envs.alfworld.certify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", required=True, help='official tree, compact folder, *.jsonl.xz file, or "generated"')
    parser.add_argument("--splits", default="valid_seen,valid_unseen", help="names joined by commas")
    parser.add_argument("--games", type=int, default=0, help="a fixed subset of so many games of each split; 0: all")
    parser.add_argument("--steps", type=int, default=30, help="most commands of one game")
    parser.add_argument("--workers", type=int, default=2, help="processes with the real engine")
    parser.add_argument("--out", type=Path, default=Path("runs/certify_alfworld.jsonl"), help="outcomes, one a line")
    options = parser.parse_args(arguments)
    names = list(filter(None, options.splits.split(",")))
    if not names or options.games < 0 or options.steps < 1:
        parser.error("--splits must name a split, --steps must be positive and --games not negative.")
    try:
        store = open_store(options.data)
        splits: dict[str, Sequence[str]] = {}
        for name in names:
            ids = store.task_ids(name)
            splits[name] = subset(ids, min(options.games, len(ids))) if options.games else ids
        return certify(store, splits, steps=options.steps, workers=options.workers, out=options.out, console=Console())
    except SdjaxError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
