"""Training steps with SGLang servers beside the trainer on one GPU, and the embedded engine on the same games.

    . benchmarks/sglang_kit/env.sh                       # on a machine that carries the kit, see benchmarks/sglang_kit
    python3 -m benchmarks.sglang --out=DIRECTORY         # all parts, under ten minutes on one H200
    python3 -m benchmarks.sglang --out=DIRECTORY --parts=2b --limits=400
    python3 -m benchmarks.sglang --platform=cpu --command=launch/sglang_cpu --parts=tiny,tiny-embedded --steps=2 \\
        --turns=3 --tasks=2 --group=2 --out=DIRECTORY    # the same on two CPU cores

Random Qwen3.5 weights play generated ALFWorld games: they never win, so every episode has all its turns. Parts:
``tiny`` and ``2b`` train with GRPO through SGLang (seconds by phase, tokens/s, gap of the log-probabilities) and then
measure the ways of sync, whether they leave the same weights, and sleep and wake; ``tiny-embedded`` and ``2b-embedded``
play the same tasks on the embedded engine. Each part is a process of its own with a time limit and writes what it has
after every step, so that one that fails or is late takes nothing from the others.
"""

import argparse
import gzip
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PARTS = ("tiny", "tiny-embedded", "2b", "2b-embedded")
LIMITS = {"tiny": 170, "tiny-embedded": 70, "2b": 230, "2b-embedded": 80}  # seconds
LOG_BYTES = 4 * 2**20
LEAVING_S = 10.0  # until the server of a part that was ended has given its memory back
SERVE = str(Path(__file__).parent / "sglang_kit" / "serve")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json and logs")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--limits", default="", help="seconds of each part, in the order of --parts")
    parser.add_argument("--steps", type=int, default=0, help="training steps; default 5 (tiny) and 3 (2b)")
    parser.add_argument("--turns", type=int, default=0, help="turns of an episode; default 30 (tiny) and 10 (2b)")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--tasks", type=int, default=16, help="tasks of a step")
    parser.add_argument("--group", type=int, default=8, help="episodes of a task")
    parser.add_argument("--sync", default="", help="way of the training steps; default ipc on a GPU, else disk")
    parser.add_argument("--no-sleep", action="store_true", help="servers without memory saver")
    parser.add_argument("--command", default=SERVE, help="starts a server")
    parser.add_argument("--flags", default="", help="further flags of the server, separated by spaces")
    parser.add_argument("--engine-url", default="", help="a running server instead of one that is started")
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/sdjax-sglang-benchmark"), help="for weights")
    # Of the process that runs one part.
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = set(arguments.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}.")
    return arguments


def write(path: Path, value: Any) -> None:
    """So that the file is always whole, whenever the process is ended."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(temporary, path)


def run_part(name: str, limit_s: float, work: Path, out: Path) -> dict[str, Any]:
    """Runs one part in its own process group; returns what it wrote."""
    work.mkdir(parents=True)
    begin = time.perf_counter()
    with (work / "output.log").open("wb") as log:
        command = [sys.executable, "-m", "benchmarks.sglang_part", *sys.argv[1:], f"--part={name}", f"--work={work}"]
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | str = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = f"over its limit of {limit_s:g} s"
            end_group(child)
            time.sleep(LEAVING_S)
        finally:
            end_group(child)
    record = json.loads((work / "part.json").read_text()) if (work / "part.json").exists() else {}
    record |= {"exit": code, "wall_s": round(time.perf_counter() - begin, 1)}
    for log in [work / "output.log", *sorted(work.glob("run/logs/**/*.log"))]:
        keep_log(log, out / f"{name}-{log.name}.gz")
    return record


def end_group(child: subprocess.Popen[bytes]) -> None:
    """The part ends its server itself; what has not gone after a while is killed."""
    for number, patience_s in ((signal.SIGTERM, 8), (signal.SIGKILL, 5)):
        if child.poll() is not None:
            return
        os.killpg(child.pid, number)
        try:
            child.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue


def keep_log(log: Path, path: Path) -> None:
    """The beginning of a log says with what something started, its end why it failed."""
    text = log.read_bytes()
    if len(text) > LOG_BYTES:
        text = text[: LOG_BYTES // 2] + b"\n[...]\n" + text[-LOG_BYTES // 2 :]
    path.write_bytes(gzip.compress(text))


def medians(steps: list[dict[str, float]]) -> dict[str, float]:
    """Over the steps after the first, which compiles."""
    rest = steps[1:] or steps
    return {key: statistics.median(step[key] for step in rest if key in step) for key in rest[0]} if rest else {}


def show(results: dict[str, Any], console: Console) -> None:
    table = Table(title=f"SGLang beside the trainer, {results['device']}; medians after the first step")
    table.add_column("")
    columns = {name: medians(part.get("steps", [])) for name, part in results["parts"].items()}
    for name in columns:
        table.add_column(name, justify="right")
    for key in dict.fromkeys(key for column in columns.values() for key in column):
        table.add_row(key, *(f"{column[key]:,.4g}" if key in column else "-" for column in columns.values()))
    console.print(table)
    for name, part in results["parts"].items():
        rest = {key: value for key, value in part.items() if key not in ("steps", "log_tail")}
        console.print(f"[bold]{name}[/] {json.dumps(rest)}", highlight=False, soft_wrap=True)
        if part["exit"] != 0:
            console.print(f"the end of {name}'s output:\n{part['log_tail']}", markup=False, highlight=False)
    for name, ratio in ratios(columns).items():
        console.print(f"{name}: SGLang draws {ratio:.2f} times the tokens per second of the embedded engine.")


def ratios(columns: dict[str, dict[str, float]]) -> dict[str, float]:
    key = "drawn_tokens_per_s"
    pairs = {name: (columns[name], columns.get(f"{name}-embedded", {})) for name in columns}
    return {name: ours[key] / other[key] for name, (ours, other) in pairs.items() if key in ours and key in other}


def main() -> None:
    arguments = parse_arguments()
    parts = arguments.parts.split(",")
    limits = [float(x) for x in arguments.limits.split(",") if x] or [LIMITS[part] for part in parts]
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"device": "", "settings": vars(arguments) | {"out": "", "models": ""}, "parts": {}}
    console = Console(width=150)
    with tempfile.TemporaryDirectory(prefix="sdjax-sglang-") as folder:
        try:
            for name, limit_s in zip(parts, limits, strict=True):
                work = Path(folder) / name
                part = run_part(name, limit_s, work, arguments.out)
                if part["exit"] != 0:
                    part["log_tail"] = (work / "output.log").read_text(errors="replace")[-2000:]
                results["device"] = part.pop("device", results["device"])
                results["parts"][name] = part
                write(arguments.out / "results.json", results)
                console.print(f"{name}: exit {part['exit']} after {part['wall_s']} s")
        finally:
            shutil.rmtree(arguments.models, ignore_errors=True)
    show(results, console)


if __name__ == "__main__":
    main()
