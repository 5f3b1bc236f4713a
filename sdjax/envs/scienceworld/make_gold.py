"""Makes gold paths for further variations, offline: asks the simulator for its solution, replays it as an episode is
played, and stores what the replay scored. Paths that exist in the file already are kept.

    python -m sdjax.envs.scienceworld.make_gold --out=gold.jsonl.xz --tasks=boil,melt --split=train --count=24
    python -m sdjax.envs.scienceworld.make_gold --out=gold.jsonl.xz --ids=boil/3,melt/5 --simplification=easy

env.data=gold.jsonl.xz adds the file to the paths that ship. A path takes about two seconds, in genetics half a minute.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from sdjax.envs.config import EnvConfig
from sdjax.envs.scienceworld.adapter import ScienceworldBenchmark
from sdjax.envs.scienceworld.config import ScienceworldConfig
from sdjax.envs.scienceworld.replay import replay
from sdjax.envs.scienceworld.simulator import Jvm
from sdjax.envs.scienceworld.store import SPLITS, Gold, Tasks, read_gold, write_gold
from sdjax.errors import EnvError

_GOLD_HEAP_MB = 1024
_SAVE_EVERY = 10


def choose(tasks: Tasks, names: Sequence[str], split: str, count: int) -> list[str]:
    """Ids of ``count`` variations of each task, spread evenly over its split; all of them where there are fewer."""
    chosen = []
    for name in names or tasks.names:
        ids = [task_id for task_id in tasks.task_ids(split) if tasks.parse(task_id)[0] == name]
        number = min(count, len(ids)) if count else len(ids)
        chosen += [ids[i * len(ids) // number] for i in range(number)]
    return chosen


def make_gold(jvm: Jvm, benchmark: ScienceworldBenchmark, task_id: str) -> Gold:
    """One gold path with the score of its replay; it ends where the episode ends.

    Raises:
      DataError, EnvError: no such task, or the simulator has no solution.
    """
    simplification = benchmark.tasks.simplification
    actions = jvm.gold(*benchmark.tasks.parse(task_id), simplification)
    if not actions:
        raise EnvError(f"the simulator gave no gold path for {task_id}.", "leave this task out.")
    gold = Gold(task_id, simplification, tuple(actions), 0, ())

    async def play():
        environment = benchmark.make()
        try:
            return await replay(environment, gold)
        finally:
            await environment.close()

    found = asyncio.run(play())
    return replace(gold, actions=gold.actions[: found.turns], score=found.score, score_curve=found.score_curve)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sdjax.envs.scienceworld.make_gold",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="file of gold paths (.jsonl.xz), may exist")
    parser.add_argument("--ids", default="", help="task ids, joined by commas; else --tasks, --split and --count")
    parser.add_argument("--tasks", default="", help="task names, joined by commas; empty: all 30")
    parser.add_argument("--split", default="train", choices=SPLITS)
    parser.add_argument("--count", type=int, default=0, help="variations of each task; 0: all")
    parser.add_argument("--simplification", default="", help="of the simulator")
    options = parser.parse_args(arguments)
    console = Console()
    names = tuple(filter(None, options.tasks.split(",")))
    settings = ScienceworldConfig(simplification=options.simplification, task_names=names)
    benchmark = ScienceworldBenchmark(replace(EnvConfig(), name="scienceworld", workers=1, scienceworld=settings))
    try:
        ids = list(filter(None, options.ids.split(","))) or choose(benchmark.tasks, names, options.split, options.count)
        known = read_gold(options.out) if options.out.exists() else []
        rows = {(row.task_id, row.simplification): row for row in known}
        wanted = [task_id for task_id in ids if (task_id, options.simplification) not in rows]
        console.print(f"{len(wanted)} gold paths to make, {len(ids) - len(wanted)} exist in {options.out}")
        if wanted:
            _make_all(benchmark, wanted, rows, options.out, console)
    finally:
        benchmark.close()
    return 0


def _make_all(
    benchmark: ScienceworldBenchmark,
    wanted: Sequence[str],
    rows: dict[tuple[str, str], Gold],
    out: Path,
    console: Console,
) -> None:
    """Makes the ``wanted`` paths, adds them to ``rows`` and writes all of them to ``out`` now and then."""
    jvm = Jvm(_GOLD_HEAP_MB)
    try:
        for number, task_id in enumerate(wanted, 1):
            row = make_gold(jvm, benchmark, task_id)
            rows[task_id, row.simplification] = row
            console.print(f"{number}/{len(wanted)} {task_id}: score {row.score} in {len(row.actions)} turns")
            if number % _SAVE_EVERY == 0 or number == len(wanted):
                write_gold(out, rows.values())
    finally:
        jvm.close()


if __name__ == "__main__":
    sys.exit(main())
