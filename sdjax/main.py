"""Command line: ``python -m sdjax.main --config=FILE[:arguments] --workdir=DIR --mode={train,sft,eval,report}``.

Every key of the config can be overridden: ``--config.train.steps=20``. Starting the same command again goes on where
the last one stopped; a finished run returns at once.
"""

import os
import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags
from rich.console import Console

from sdjax.errors import ConfigError, SdjaxError

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Python file with get_config(), e.g. experiments/alfworld.py:sdar"
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run (train, sft, eval) or of the report.")
_MODE = flags.DEFINE_enum("mode", "train", ["train", "sft", "eval", "report"], "What to do.")
_RUNS = flags.DEFINE_list("runs", [], "Run directories of a report, or folders that contain some.")

_CONFIG_EXIT_CODE, _FAILED_EXIT_CODE = 2, 1


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    # JAX and Orbax report every start and checkpoint at INFO; the run's own lines say more.
    logging.set_verbosity(logging.WARNING)
    console = Console()
    try:
        return _run(console)
    except SdjaxError as error:
        return _show(error)


def _show(error: SdjaxError) -> int:
    """Prints an error without a stack trace and returns the exit code."""
    from sdjax.train.rundir import LOCKED_EXIT_CODE, Locked

    Console(stderr=True).print(f"[bold red]{type(error).__name__}[/]", end=" ")
    print(error, file=sys.stderr)
    if isinstance(error, Locked):
        return LOCKED_EXIT_CODE
    return _CONFIG_EXIT_CODE if isinstance(error, ConfigError) else _FAILED_EXIT_CODE


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
    if not _WORKDIR.value:
        raise ConfigError("--workdir is missing.", "add --workdir=runs/NAME.")
    workdir = Path(_WORKDIR.value)
    if _MODE.value == "report":
        from sdjax.report import build_report, find_runs

        out = build_report(find_runs(_RUNS.value or [workdir]), workdir / "report.html")
        console.print(f"report: {out}")
        return 0
    if _CONFIG.value is None:
        raise ConfigError("--config is missing.", "add --config=experiments/quickstart.py, for example.")

    from sdjax.config import load, resolved
    from sdjax.train.rundir import RunDir

    config = load(_CONFIG.value)
    _keep_compiled_programs()
    with RunDir(workdir) as directory:
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


def _keep_compiled_programs() -> None:
    """Compiled programs are kept on disk, so that a resumed run or the next method starts in seconds."""
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(root / "sdjax" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


if __name__ == "__main__":
    app.run(main, flags_parser=_parse_flags)
