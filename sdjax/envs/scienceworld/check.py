"""Replays gold paths against their stored score curves and measures speed; prints one row for each task type.

Exit status 1 if a curve differs or the simulator's splits are not the stored ones.
"""

import argparse
import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sdjax.envs.config import EnvConfig
from sdjax.envs.scienceworld.adapter import ScienceworldBenchmark
from sdjax.envs.scienceworld.config import ScienceworldConfig
from sdjax.envs.scienceworld.replay import Replay, replay
from sdjax.envs.scienceworld.simulator import Jvm
from sdjax.envs.scienceworld.store import SPLITS, Gold, Tasks


@dataclass(frozen=True)
class Checked:
    """One gold path, and what its replay gave."""

    gold: Gold
    found: Replay

    @property
    def equal(self) -> bool:
        return self.found.score_curve == self.gold.score_curve and self.found.score == self.gold.score


@dataclass(frozen=True)
class Speed:
    """Of one worker with its Java. cpu_s: of both processes. Resets are in the times and not in the steps."""

    steps: int
    episodes: int
    wall_s: float
    cpu_s: float
    rss_mb: float

    def __str__(self) -> str:
        return (
            f"{self.steps} steps and {self.episodes} resets in {self.wall_s:.1f} s, "
            f"{self.steps / self.wall_s:.0f} steps/s; "
            f"{self.cpu_s:.1f} s of CPU, {self.steps / self.cpu_s:.0f} steps/s per core; {self.rss_mb:.0f} MB"
        )


async def replay_all(
    benchmark: ScienceworldBenchmark, rows: list[Gold], at_once: int, done: Callable[[], None]
) -> tuple[list[Checked], Speed]:
    """Replays ``rows``, ``at_once`` at a time, interleaved step by step; ``done`` is called after each."""
    places = asyncio.Semaphore(at_once)

    async def one(gold: Gold) -> Checked:
        async with places:
            environment = benchmark.make()
            try:
                return Checked(gold, await replay(environment, gold))
            finally:
                await environment.close()
                done()

    probe = benchmark.pool.session()
    before = await probe.call("status")
    started = time.perf_counter()
    checked = await asyncio.gather(*(one(gold) for gold in rows))
    wall_s = time.perf_counter() - started
    after = await probe.call("status")
    steps = sum(row.found.turns for row in checked)
    return checked, Speed(steps, len(rows), wall_s, after["cpu_s"] - before["cpu_s"], after["rss_mb"])


def differing_splits(tasks: Tasks, heap_mb: int) -> list[str]:
    """Names of tasks whose stored ranges are not the simulator's own."""
    jvm = Jvm(heap_mb)
    try:
        stored: dict[str, dict[str, list[int]]] = {name: {split: [] for split in SPLITS} for name in tasks.names}
        for split in SPLITS:
            for task_id in tasks.task_ids(split):
                name, variation = tasks.parse(task_id)
                stored[name][split].append(variation)
        return [name for name in tasks.names if jvm.ranges(name) != stored[name]]
    finally:
        jvm.close()


def table_of(checked: list[Checked], turns: int) -> Table:
    by_name: dict[str, list[Checked]] = defaultdict(list)
    for row in checked:
        by_name[row.gold.task_id.partition("/")[0]].append(row)
    table = Table(title=f"Gold paths; the score of the gold path after {turns} turns is a yardstick, not a bound")
    table.add_column("task")
    for column in ("paths", "equal", "turns", "score", "success", f"score, {turns} turns", f"success, {turns} turns"):
        table.add_column(column, justify="right")
    for name, rows in [*by_name.items(), ("all", checked)]:
        cut = [max(row.gold.score_at(turns), 0) for row in rows]
        table.add_row(
            name,
            str(len(rows)),
            str(sum(row.equal for row in rows)),
            f"{_mean([row.found.turns for row in rows]):.0f}",
            f"{_mean([max(row.found.score, 0) for row in rows]):.1f}",
            f"{_mean([row.found.score == 100 for row in rows]):.3f}",
            f"{_mean(cut):.1f}",
            f"{_mean([score == 100 for score in cut]):.3f}",
        )
    return table


def _mean(values: list[Any]) -> float:
    return sum(values) / max(len(values), 1)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sdjax.envs.scienceworld.check", description=__doc__)
    parser.add_argument("--panel", default="panel200", help="panel or split, e.g. panel_23types, train_gold")
    parser.add_argument("--data", default="generated", help="further gold paths: a file made by make_gold")
    parser.add_argument("--simplification", default="", help="of the simulator")
    parser.add_argument("--at_once", type=int, default=8, help="episodes played at the same time in one Java process")
    parser.add_argument("--turns", type=int, default=30, help="turn budget of the yardstick")
    options = parser.parse_args(arguments)
    console = Console()
    config = replace(
        EnvConfig(),
        name="scienceworld",
        data=options.data,
        workers=1,
        scienceworld=ScienceworldConfig(simplification=options.simplification),
    )
    benchmark = ScienceworldBenchmark(config)
    try:
        panel = benchmark.panel(options.panel)
        found = {task_id: benchmark.tasks.gold(task_id) for task_id in panel.task_ids}
        rows = [gold for gold in found.values() if gold is not None]
        console.print(
            f"{panel.name}: {len(rows)} of {len(panel.task_ids)} tasks have a gold path; sha256 {panel.sha256}"
        )
        for key, value in benchmark.provenance().items():
            console.print(f"{key}: {value}", highlight=False)
        checked, speed = _replay_with_bar(benchmark, rows, options.at_once, console)
        short = [replace(gold, actions=gold.actions[: options.turns]) for gold in rows]
        _, warm = _replay_with_bar(benchmark, short, options.at_once, console)
    finally:
        benchmark.close()
    console.print(table_of(checked, options.turns))
    console.print(f"whole paths, Java just started, {options.at_once} at once: {speed}")
    console.print(f"first {options.turns} turns, Java warmed up, {options.at_once} at once: {warm}")
    wrong = [row for row in checked if not row.equal]
    for row in wrong:
        console.print(f"differs: {row.gold.task_id}: stored {row.gold.score_curve}, found {row.found.score_curve}")
    splits = differing_splits(benchmark.tasks, config.scienceworld.heap_mb)
    console.print(f"splits: {'; '.join(splits) + ' differ' if splits else 'equal to the simulator'}")
    return 1 if wrong or splits else 0


def _replay_with_bar(
    benchmark: ScienceworldBenchmark, rows: list[Gold], at_once: int, console: Console
) -> tuple[list[Checked], Speed]:
    with Progress(console=console, transient=True) as bars:
        bar = bars.add_task("replaying", total=len(rows))
        return asyncio.run(replay_all(benchmark, rows, at_once, lambda: bars.advance(bar)))


if __name__ == "__main__":
    sys.exit(main())
