"""Command line: ``python -m sdjax.main --config=FILE[:arguments] --workdir=DIR --mode=MODE``.

Modes of a run: train, sft (warm start), eval (final evaluation), report, demos (expert episodes as a file). Modes of a
benchmark: prepare (downloads into the form that env.data names) and play (in the terminal). ``--mode=export`` writes a
checkpoint of a run as a Hugging Face directory. ``--mode=compare A B`` sets two runs side by side.
``--mode=study --study=plan|status|run|report|launch`` works on a whole grid of runs.

Every key of the config can be overridden: ``--config.train.steps=20``. Starting the same command again goes on where
the last one stopped; a finished run returns at once.
"""

import hashlib
import importlib
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from absl import app, flags, logging
from ml_collections import config_flags
from rich.console import Console

from sdjax import interrupt
from sdjax.errors import CONFIG_EXIT_CODE, FAILED_EXIT_CODE, LOCKED_EXIT_CODE, ConfigError, SdjaxError

if TYPE_CHECKING:
    from sdjax.config import RunConfig
    from sdjax.train.rundir import RunDir

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Python file with get_config(), e.g. experiments/alfworld.py:sdar"
)
_MODES = ["train", "sft", "eval", "report", "compare", "demos", "prepare", "play", "study", "export"]
_AGENTS = ["human", "expert", "random", "rule", "checkpoint"]
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run, of the report, or of what is written.")
_MODE = flags.DEFINE_enum("mode", "train", _MODES, "What to do.")
_RUNS = flags.DEFINE_list("runs", [], "Run directories of a report, or folders that contain some.")
_STUDY = flags.DEFINE_string("study", "status", "What to do with a study: plan, status, run, report, launch.")
_CELLS = flags.DEFINE_list("cells", [], "Cells of a study: 3,5-9, names, or patterns such as 'alfworld-*' (study).")
_PARALLEL = flags.DEFINE_integer("parallel", 1, "Cells at the same time, on as many groups of accelerators (study).")
_LAUNCHER = flags.DEFINE_string("launcher", "", "For whom --study=launch writes files: slurm, sky, jobset.")
_OPTIONS = flags.DEFINE_list("options", [], "Settings of the launcher: key=value,key=value (study).")
_COORDINATOR = flags.DEFINE_string("coordinator", "", "HOST:PORT of process 0, of a run over several processes.")
_PROCESSES = flags.DEFINE_integer("processes", 0, "Processes of the run; 0: as Slurm or JobSet say, else one.")
_PROCESS = flags.DEFINE_integer("process", -1, "Number of this process, from 0.")
_ENV = flags.DEFINE_string("env", None, "Benchmark (prepare, play).")
_SOURCE = flags.DEFINE_list("source", [], "What was downloaded: files, folders, dataset ids (prepare).")
_AGENT = flags.DEFINE_enum("agent", "human", _AGENTS, "Who plays (play).")
_TASK = flags.DEFINE_string("task", "", "Task id (play); default: the first of the panel.")
_TEACHER = flags.DEFINE_bool("teacher", False, "Show what a teacher would read (play).")
_EPISODES = flags.DEFINE_integer("episodes", 1, "Episodes, of an agent that is not human (play).")
_STEP = flags.DEFINE_integer("step", None, "Checkpoint (export); default: the newest.", lower_bound=0)
_OUT = flags.DEFINE_string("out", "", "Where the checkpoint goes (export); default: WORKDIR/export/step_NNNNNN.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of the written weights (export).")


def main(argv: list[str]) -> int:
    comparing = _MODE.value == "compare"
    if len(argv) > 1 and not comparing:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    # JAX and Orbax report every start and checkpoint at INFO; the run's own lines say more.
    logging.set_verbosity(logging.WARNING)
    console = Console()
    try:
        return _compare(argv[1:], console) if comparing else _run(console)
    except SdjaxError as error:
        return _show(error)


def _show(error: SdjaxError) -> int:
    """Prints an error without a stack trace and returns the exit code."""
    from sdjax.train.rundir import Locked

    Console(stderr=True).print(f"[bold red]{type(error).__name__}[/]", end=" ")
    print(error, file=sys.stderr)
    if isinstance(error, Locked):
        return LOCKED_EXIT_CODE
    if isinstance(error, interrupt.Interrupted):
        return error.exit_code
    return CONFIG_EXIT_CODE if isinstance(error, ConfigError) else FAILED_EXIT_CODE


def _parse_flags(argv: list[str]) -> list[str]:
    """Reads the config file and its overrides; what does not fit is a ConfigError like any other."""
    try:
        return app.parse_flags_with_usage(argv)
    except ConfigError as error:
        sys.exit(_show(error))
    except (AttributeError, TypeError) as error:  # what config_flags raises for an unknown key or another type
        overrides = ", ".join(a for a in argv if a.startswith("--config."))
        found = f"the config file or one of its overrides does not fit ({overrides}): {error}"
        sys.exit(_show(ConfigError(found, "correct the key or the value; every key is in config.json of a run.")))


def _run(console: Console) -> int:
    if _MODE.value == "play":
        return _play(console)
    if _MODE.value == "prepare":
        return _prepare(console)
    workdir = _workdir()
    if _MODE.value == "study":
        return _study(workdir, console)
    if _MODE.value == "report":
        from sdjax.report import build_report, find_runs

        out = build_report(find_runs(_RUNS.value or [workdir]), workdir / "report.html")
        console.print(f"report: {out}")
        return 0
    if _MODE.value == "export":
        return _export(workdir, console)
    if _CONFIG.value is None:
        raise ConfigError("--config is missing.", "add --config=experiments/quickstart.py, for example.")

    from sdjax.config import load, resolved
    from sdjax.train import distributed
    from sdjax.train.rundir import RunDir, open_run

    config = load(_CONFIG.value)
    _keep_compiled_programs()
    if _MODE.value == "demos":
        with RunDir(workdir) as directory:
            _demos(config, directory, console)
        return 0
    several = distributed.initialize(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value)
    if several and _MODE.value == "sft":
        raise ConfigError("--mode=sft over several processes.", "start it as one process.")
    if several and not distributed.is_first():
        console = Console(quiet=True)
    with interrupt.listen(config.save.grace_s, alone=not several), open_run(workdir) as directory:
        if _MODE.value == "sft":
            from sdjax.train.sft import WarmStart

            WarmStart(config, directory, console).run()
            return 0
        from sdjax.train.trainer import Trainer, evaluate_only

        if _MODE.value == "eval":
            evaluate_only(config, directory, console)
            return 0
        if directory.done.exists():
            directory.write_config(resolved(config))
            console.print(f"{workdir}: finished ({directory.done.name} exists); nothing to do.")
            return 0
        Trainer(config, directory, console).run()
    return 0


def _study(workdir: Path, console: Console) -> int:
    from sdjax.study.command import Options, execute

    options = Options(_CELLS.value, _PARALLEL.value, _RUNS.value, _LAUNCHER.value, _OPTIONS.value)
    return execute(_STUDY.value, _CONFIG.value, workdir, options, console)


def _export(workdir: Path, console: Console) -> int:
    import jax

    jax.config.update("jax_platforms", "cpu")  # the run may be using all of the accelerators' memory
    from sdjax.train.export import export

    out = export(workdir, step=_STEP.value, out=Path(_OUT.value) if _OUT.value else None, dtype=_DTYPE.value)
    console.print(f"export: {out}")
    return 0


def _compare(paths: list[str], console: Console) -> int:
    from sdjax.report.compare import compare

    if len(paths) != 2:
        raise ConfigError(f"--mode=compare with {len(paths)} paths.", "add two run directories or metrics logs.")
    compare(paths[0], paths[1], console)
    return 0


def _workdir() -> Path:
    if not _WORKDIR.value:
        raise ConfigError("--workdir is missing.", "add --workdir=runs/NAME.")
    return Path(_WORKDIR.value)


def _prepare(console: Console) -> int:
    from sdjax.envs import BENCHMARKS

    if _ENV.value not in BENCHMARKS:
        raise ConfigError(f"--env={_ENV.value or ''}.", f"use one of {', '.join(BENCHMARKS)}.")
    module = importlib.import_module(f"sdjax.envs.{_ENV.value}.prepare")
    if not _SOURCE.value:  # the docstring says what is wanted, the error where it comes from
        for paragraph in str(module.__doc__).replace("``", "").split("\n\n"):
            console.print(" ".join(paragraph.split()) + "\n", markup=False, highlight=False)
        module.prepare([], Path(_WORKDIR.value or "."), console)
        return 0
    module.prepare(_SOURCE.value, _workdir(), console)
    return 0


def _play(console: Console) -> int:
    from sdjax import play

    config = None
    if _CONFIG.value is not None:
        from sdjax.config import load

        config = load(_CONFIG.value)
    workdir = Path(_WORKDIR.value) if _WORKDIR.value else None
    settings = play.find_settings(config, _ENV.value, workdir)
    options = play.Options(_TASK.value, _AGENT.value, _TEACHER.value, _EPISODES.value)
    if options.agent == "checkpoint":
        _keep_compiled_programs()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a stray byte must not end the game
    play.play(settings, options, console, sys.stdin, workdir)
    return 0


def _demos(config: "RunConfig", directory: "RunDir", console: Console) -> None:
    from sdjax.config import resolved
    from sdjax.envs import make_benchmark
    from sdjax.envs.demos import draw, write_demos
    from sdjax.envs.prompts import PromptTemplate
    from sdjax.train import rundir

    env, sft, path = config.env, config.sft, directory.path / "demos.jsonl"
    directory.write_config(resolved(config))
    benchmark = make_benchmark(env)
    try:
        template = PromptTemplate.load(env.name, env.template, env.history)
        wanted = draw(benchmark.task_ids(env.train_split), sft.episodes, config.seed, sft.noise)
        write_demos(benchmark, template, wanted, sft.expert, env.turns, path, console)
        facts = {"benchmark": benchmark.provenance(), "template": template.name, "episodes": len(wanted)}
        facts["demos_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        rundir.write_json(directory.path / "provenance.json", rundir.provenance(resolved(config), facts))
    finally:
        benchmark.close()


def _keep_compiled_programs() -> None:
    """Compiled programs are kept on disk, so that a resumed run or the next method starts in seconds."""
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(root / "sdjax" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


if __name__ == "__main__":
    app.run(main, flags_parser=_parse_flags)
