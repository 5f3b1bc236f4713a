"""Speed and memory of the environments, beside the original packages where these are installed.

    python -m benchmarks.envs                             # all four; some minutes on one core
    python -m benchmarks.envs --envs alfworld webshop --steps 500

For each benchmark one list of episodes (its first expert, every third turn random) is drawn and then played by each
implementation, in a process of its own, one episode after the other: through the environment protocol ("adapter"), and
by the original package ("original": TextWorld's engine in our worker process, ScienceWorld's own Python wrapper).
WebShop's and Search-QA's originals are no packages.

Times are CPU time of the process and everything it started, after a warm-up of a quarter of the steps, so that they are
per core and other work on the machine changes little. Compare the ratios of one run.

Memory is what 128 open episodes add to the resident memory of the same processes. An original that starts a process or
loads a library for each episode is opened a few times only, and the number is scaled. Needs Linux.
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from sdjax.envs import BENCHMARKS, EnvConfig, make_benchmark
from sdjax.envs.alfworld.store import open_store
from sdjax.envs.prompts import load_protocol
from sdjax.envs.scienceworld.java import find_java
from sdjax.envs.scienceworld.store import Tasks
from sdjax.envs.workers import WorkerPool
from sdjax.errors import SdjaxError

OPEN = 128
_NOISE, _MEMORY_STEPS, _RESETS_AGAIN = 0.33, 3, 32
_ORIGINALS = {"alfworld": ("alfworld", "textworld"), "scienceworld": ("scienceworld", "py4j")}
_ORIGINAL_SHARE = 10  # originals are slow: they play a tenth of the steps
_TIMES = {"first_reset_ms": 2, "reset_ms": 2, "steps_per_cpu_s": 0}  # columns of the table -> digits
_HEAP_MB = 3000  # of ScienceWorld's Java: room for 128 episodes in one process


@dataclass(frozen=True)
class Episode:
    task: str
    actions: tuple[str, ...]


class Player(Protocol):
    """One implementation of a benchmark; ``open`` gives an episode's reset and step."""

    most_open: int

    def open(self) -> tuple[Callable[[str], Awaitable[Any]], Callable[[str], Awaitable[Any]]]: ...

    def close(self) -> None: ...


def env_config(name: str) -> EnvConfig:
    protocol = load_protocol(name)
    config = EnvConfig(name=name, turns=protocol.turn_limit, history=protocol.history, workers=1)
    return replace(
        config,
        scienceworld=replace(config.scienceworld, heap_mb=_HEAP_MB),
        searchqa=replace(config.searchqa, cache=0),  # the search is what is measured
    )


def draw_episodes(name: str) -> list[Episode]:
    """Episodes of the first expert, spread over the train split: the first half to be timed, and the beginnings of as
    many others, whose memory is measured."""
    config = env_config(name)
    benchmark = make_benchmark(config)
    try:
        ids = benchmark.task_ids("train_gold" if name == "scienceworld" else "train")

        async def play() -> list[Episode]:
            episodes = []
            for number in [*range(0, 2 * OPEN, 2), *range(1, 2 * OPEN, 2)]:
                task = ids[number * len(ids) // (2 * OPEN)]
                turns = config.turns if number % 2 == 0 else _MEMORY_STEPS
                turns = await benchmark.expert_episode(task, benchmark.experts[0], number, turns, _NOISE)
                episodes.append(Episode(task, tuple(turn.action for turn in turns)))
            return episodes

        return asyncio.run(play())
    finally:
        benchmark.close()


class Adapter:
    most_open = OPEN

    def __init__(self, name: str):
        self._benchmark = make_benchmark(env_config(name))

    def open(self):
        environment = self._benchmark.make()
        return lambda task: environment.reset(task, 0), environment.step

    def close(self) -> None:
        self._benchmark.close()


class Textworld:
    """TextWorld's engine with ALFWorld's wrapper, behind a pipe that takes less than a hundredth of its time."""

    most_open = 16

    def __init__(self) -> None:
        self._store = open_store("generated")
        self._pool = WorkerPool("sdjax.envs.alfworld.textworld_worker", 1, 300.0)

    def open(self):
        session = self._pool.session()
        return (
            lambda task: session.call("reset", game=self._store.game_file(task)),
            lambda action: session.call("step", action=action),
        )

    def close(self) -> None:
        self._pool.close()


class Scienceworld:
    """The wrapper of the package, which starts a Java process for each environment."""

    most_open = 2

    def __init__(self) -> None:
        os.environ["PATH"] = os.pathsep.join([str(Path(find_java()).parent), os.environ["PATH"]])
        self._tasks = Tasks("", (), "generated")
        self._environments: list[Any] = []

    def open(self):
        from scienceworld import ScienceWorldEnv  # pyright: ignore[reportMissingImports]

        environment = ScienceWorldEnv("")
        self._environments.append(environment)

        async def reset(task: str) -> None:
            name, variation = self._tasks.parse(task)
            environment.load(name, variation, "")
            environment.reset()

        async def step(action: str) -> None:
            environment.step(action)

        return reset, step

    def close(self) -> None:
        for environment in self._environments:
            environment.close()


def make_player(name: str, kind: str) -> Player:
    if kind == "adapter":
        return Adapter(name)
    return {"alfworld": Textworld, "scienceworld": Scienceworld}[name]()


async def measure(player: Player, episodes: list[Episode], steps: int) -> dict[str, float]:
    """Times of one implementation: first_reset_ms of tasks not seen before and reset_ms of those seen, steps_per_cpu_s
    over ``steps`` steps, steps_per_wall_s (with resets), and memory_128_mb from ``open_episodes``."""
    timed, others = episodes[: len(episodes) // 2], episodes[len(episodes) // 2 :]
    reset, step = player.open()
    await reset(timed[-1].task)  # starts processes and fills what all episodes share
    before, count = memory_mb(), min(player.most_open, len(others))
    for (open_reset, open_step), episode in zip([player.open() for _ in range(count)], others):
        await open_reset(episode.task)
        for action in episode.actions[:_MEMORY_STEPS]:
            await open_step(action)
    memory = memory_mb() - before
    warmed = 0
    for episode in itertools.cycle(others):
        await reset(episode.task)
        for action in episode.actions:
            await step(action)
        warmed += len(episode.actions)
        if warmed >= steps // 4:
            break
    clock = CpuClock()
    first: list[float] = []
    done, seconds, began = 0, 0.0, time.perf_counter()
    for number in itertools.count():
        if done >= steps:
            break
        episode = timed[number % len(timed)]
        begin = clock.now()
        await reset(episode.task)
        middle = clock.now()
        for action in episode.actions:
            await step(action)
        seconds += clock.now() - middle
        done += len(episode.actions)
        if number < len(timed):
            first.append(middle - begin)
    wall = time.perf_counter() - began
    seen = timed[: min(len(first), _RESETS_AGAIN)]
    begin = clock.now()
    for episode in seen:
        await reset(episode.task)
    again = clock.now() - begin
    return {
        "first_reset_ms": 1e3 * sum(first) / len(first),
        "reset_ms": 1e3 * again / len(seen),
        "steps_per_cpu_s": done / seconds,
        "steps_per_wall_s": done / wall,
        "steps": done,
        "open_episodes": count,
        "memory_128_mb": memory * OPEN / count,
    }


class CpuClock:
    """CPU seconds of this process and of those that it has started by now, which the kernel counts in steps of 10 ms;
    over many episodes these average out."""

    def __init__(self) -> None:
        self._children = [pid for pid in processes() if pid != os.getpid()]

    def now(self) -> float:
        ticks = 0
        for pid in self._children:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def memory_mb() -> float:
    """Resident memory of this process and everything it started."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in processes())
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def processes() -> list[int]:
    """This process and everything it started."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue  # ended meanwhile
    found = [os.getpid()]
    for pid in found:  # grows while it is read
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def in_child(name: str, kind: str, episodes: Path, steps: int) -> dict[str, float]:
    """Measures in a fresh process. Raises CalledProcessError with what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.envs", "--envs", name, "--steps", str(steps)]
        command += ["--measure", kind, "--episodes", str(episodes), "--out", str(out)]
        subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1])
        return json.loads(out.read_text())


def measure_all(names: list[str], steps: int, console: Console) -> tuple[dict[str, Any], dict[str, str]]:
    """Results by benchmark and implementation, and what could not be measured, with the reason."""
    results: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path = Path(folder) / f"{name}.json"
            try:
                with console.status(f"{name}: drawing episodes"):
                    path.write_text(json.dumps([vars(episode) for episode in draw_episodes(name)]))
            except SdjaxError as error:
                skipped[name] = error.found
                continue
            results[name] = {}
            for kind in ("adapter", "original"):
                if kind == "original" and not all(map(find_spec, _ORIGINALS.get(name, ("",)))):
                    skipped[f"{name} original"] = "not installed" if name in _ORIGINALS else "no package"
                    continue
                count = steps if kind == "adapter" else max(1, steps // _ORIGINAL_SHARE)
                try:
                    with console.status(f"{name}: {kind}"):
                        results[name][kind] = in_child(name, kind, path, count)
                except subprocess.CalledProcessError as error:
                    skipped[f"{name} {kind}"] = error.stderr.strip().splitlines()[-1] if error.stderr else str(error)
            results[name] |= _ratios(results[name])
    return results, skipped


def _ratios(found: dict[str, Any]) -> dict[str, Any]:
    """How many times the adapter is better than the original."""
    if "adapter" not in found or "original" not in found:
        return {}
    ours, theirs = found["adapter"], found["original"]
    return {
        "ratio_steps": ours["steps_per_cpu_s"] / theirs["steps_per_cpu_s"],
        "ratio_reset": theirs["first_reset_ms"] / ours["first_reset_ms"],
        "ratio_memory": theirs["memory_128_mb"] / max(ours["memory_128_mb"], 1.0),
    }


def show(results: dict[str, Any], skipped: dict[str, str], console: Console) -> None:
    table = Table(title="environments, one episode after the other, CPU time on one core")
    table.add_column("benchmark")
    for column in ("first reset ms", "reset ms", "steps/s", "MB for 128"):
        table.add_column(column, justify="right")
    for name, found in results.items():
        for kind in ("adapter", "original"):
            if kind in found:
                r = found[kind]
                scaled = "" if r["open_episodes"] == OPEN else f" (from {r['open_episodes']})"
                memory = f"{r['memory_128_mb']:,.0f}{scaled}"
                numbers = (
                    f"{r['first_reset_ms']:,.2f}",
                    f"{r['reset_ms']:,.2f}",
                    f"{r['steps_per_cpu_s']:,.0f}",
                    memory,
                )
                table.add_row(f"{name} {kind}", *numbers)
        if "ratio_steps" in found:
            ratios = [f"{found[f'ratio_{key}']:,.1f} x" for key in ("reset", "steps", "memory")]
            table.add_row("  better by", ratios[0], "", *ratios[1:], style="dim")
    console.print(table)
    for name, reason in skipped.items():
        console.print(f"{name}: not measured ({reason})", markup=False, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="*", default=list(BENCHMARKS), choices=BENCHMARKS)
    parser.add_argument("--steps", type=int, default=2000, help="steps of each; originals play a tenth of them")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "envs.json")
    parser.add_argument("--measure", choices=("adapter", "original"), help=argparse.SUPPRESS)
    parser.add_argument("--episodes", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be positive.")
    if options.measure:  # this is the child process
        episodes = [Episode(row["task"], tuple(row["actions"])) for row in json.loads(options.episodes.read_text())]
        player = make_player(options.envs[0], options.measure)
        try:
            options.out.write_text(json.dumps(asyncio.run(measure(player, episodes, options.steps))))
        finally:
            player.close()
        return
    console = Console()
    results, skipped = measure_all(options.envs, options.steps, console)
    show(results, skipped, console)
    record = {"machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()}
    record |= {"settings": {"steps": options.steps, "noise": _NOISE, "open": OPEN}}
    record |= {"not_measured": skipped, "results": results}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
