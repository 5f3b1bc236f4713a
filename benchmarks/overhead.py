"""What each method adds to a step of GRPO, on the same episodes.

    python -m benchmarks.overhead --model=experiments/quickstart_model
    python -m benchmarks.overhead --config=experiments/alfworld.py --arguments={method},smollm2-135m --model=CHECKPOINT

Every method runs ``--steps`` steps of the real trainer with learning rate 0: the weights stay, so the same seeds draw
the same episodes in every run, and the ledger of the run says where the time went. Step 1 compiles and is left out. The
rollout of GRPO is counted once for all methods, because its noise would hide the difference.

Added time = teacher + score + update + what a method's own rollouts cost, minus the same of GRPO; the share is relative
to GRPO's whole step. Published: teacher pass 8 to 11 %, PCSD 17 %, AgentOPSD 19 %, GRSD 17 % over GRPO.
"""

import argparse
import importlib.util
import io
import json
import logging
import statistics
import tempfile
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from sdjax import jsonl
from sdjax.config import RunConfig, load
from sdjax.errors import DataError, SdjaxError
from sdjax.methods import registry
from sdjax.train.batch_file import load_batch
from sdjax.train.rundir import RunDir
from sdjax.train.trainer import Trainer

BASELINE = "grpo"
PHASES = ("rollout", "teacher", "score", "update", "sync", "other")
ADDED = ("teacher", "score", "update")


def make_config(path: Path, arguments: str, method: str, options: argparse.Namespace) -> RunConfig:
    """The config file's settings for one method, cut down to a measurement."""
    spec = importlib.util.spec_from_file_location("overhead_config", path)
    if spec is None or spec.loader is None or not path.exists():
        raise DataError(f"{path} is no Python file.", "give a config file with get_config().")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(arguments.format(method=method))
    config.method.name = method
    if options.model:
        config.model.path = options.model
    if options.data:
        config.env.data = options.data
    if options.tasks:
        config.train.tasks_per_step = options.tasks
    if options.turns:
        config.env.turns = options.turns
    config.train.steps, config.train.learning_rate = options.steps, 0.0
    config.eval.panel, config.eval.every, config.eval.final_seeds = f"{config.eval.panel.split(':')[0]}:1", 10**6, 0
    config.save.every, config.save.keep = 10**6, 1
    config.rollout.transcripts_every = options.steps
    return load(config)


def run_method(config: RunConfig, workdir: Path) -> list[dict[str, float]]:
    """Metrics of the steps after the first."""
    with RunDir(workdir) as directory:
        if not directory.done.exists():
            Trainer(config, directory, Console(file=io.StringIO())).run()
        return [line for line in jsonl.read(directory.metrics) if line["step"] > 1]


def episodes(workdir: Path, step: int) -> list[list[str]]:
    """All answers of one step's own episodes, to prove that two runs drew the same ones."""
    return load_batch(RunDir(workdir).batch(step)).tokens


def compare(records: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Median seconds by phase of each method, and what it adds to the baseline's step.

    Added is the median over steps of the paired difference: both runs played the same episodes in that step.
    """
    base = records[BASELINE]
    base_step = statistics.median(sum(line[f"time/{phase}_s"] for phase in PHASES) for line in base)
    cost = lambda line: sum(line[f"time/{phase}_s"] for phase in ADDED)  # noqa: E731
    results = {}
    for name, lines in records.items():
        added = statistics.median(cost(line) - cost(other) for line, other in zip(lines, base, strict=True))
        results[name] = {f"{phase}_s": statistics.median(line[f"time/{phase}_s"] for line in lines) for phase in PHASES}
        results[name] |= {"added_s": added, "added_share": added / base_step}
    return results


def measure(options: argparse.Namespace, workdir: Path, console: Console) -> dict[str, Any]:
    names = [BASELINE, *(n for n in options.methods or registry.names() if n != BASELINE)]
    records, failed, wanted = {}, {}, None
    for name in names:
        config = make_config(options.config, options.arguments, name, options)
        with console.status(name):
            try:
                records[name] = run_method(config, workdir / name)
            except SdjaxError as error:  # one method that cannot run here must not cost the others' results
                if name == BASELINE:
                    raise
                failed[name] = str(error)
                console.print(f"[red]{name}[/] failed: {error}")
                continue
        played = episodes(workdir / name, options.steps)
        wanted = wanted or [row for row in played if row]
        if played[: len(wanted)] != wanted:
            raise DataError(f"{name} drew other episodes than {BASELINE}.", "do not compare their times.")
    rows = statistics.median(line["rollout/rows"] for line in records[BASELINE])
    return {"rows": rows, "methods": compare(records), "failed": failed}


def show(results: dict[str, Any], console: Console) -> None:
    table = Table(title=f"added time per step, {results['rows']:.0f} rows, {jax.devices()[0].device_kind}")
    table.add_column("method")
    for column in ("rollout s", "teacher s", "score s", "update s", "added s", "added"):
        table.add_column(column, justify="right")
    for name, r in results["methods"].items():
        seconds = [f"{r[f'{key}_s']:.3f}" for key in ("rollout", "teacher", "score", "update", "added")]
        table.add_row(name, *seconds, "" if name == BASELINE else f"{r['added_share']:+.1%}")
    console.print(table)


def main() -> None:
    root = Path(__file__).parents[1]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=root / "experiments" / "quickstart.py")
    parser.add_argument("--arguments", default="{method}", help="of get_config; {method} is replaced")
    parser.add_argument("--model", default="", help="checkpoint, instead of the config's")
    parser.add_argument("--data", default="", help="env.data, instead of the config's")
    parser.add_argument("--tasks", type=int, default=0, help="tasks per step, instead of the config's")
    parser.add_argument("--turns", type=int, default=0, help="turns per episode, instead of the config's")
    parser.add_argument("--steps", type=int, default=6, help="steps per method; the first is left out")
    parser.add_argument("--methods", nargs="*", help="default: all")
    parser.add_argument("--workdir", type=Path, help="keeps the runs and goes on with them; default: a temporary one")
    results_dir = Path(__file__).parent / "results"
    parser.add_argument("--out", type=Path, default=results_dir / f"overhead_{jax.default_backend()}.json")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2: the first one compiles and is left out.")

    logging.getLogger("absl").setLevel(logging.WARNING)
    console = Console()
    with tempfile.TemporaryDirectory() as temporary:
        results = measure(options, options.workdir or Path(temporary), console)
    show(results, console)
    settings = {"config": options.config.stem, "arguments": options.arguments, "steps": options.steps}
    settings |= {key: getattr(options, key) or "as in the config" for key in ("tasks", "turns")}
    settings |= {"model": Path(options.model).name or "as in the config"}
    record = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "settings": settings, **results}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
