"""``--mode=study``: plan, status, run, report and launch of a whole study."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from sdjax.errors import ConfigError
from sdjax.study import grid, manifest

VERBS = ("plan", "status", "run", "report", "launch")


@dataclass(frozen=True)
class Options:
    """What the command line says beside verb and directory. cells: as in `manifest.select`; runs: further folders with
    runs, for what runs cost; launcher and its options: as in `launch.write`."""

    cells: Sequence[str] = ()
    parallel: int = 1
    runs: Sequence[str] = ()
    launcher: str = ""
    launch_options: Sequence[str] = ()


def execute(verb: str, settings: Any, workdir: Path, options: Options, console: Console) -> int:
    """Carries out one verb; returns the exit code. settings: the study file's ConfigDict, which only ``plan`` needs.

    Raises:
      ConfigError, DataError, RunDirError: with what does not fit.
    """
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        raise ConfigError(
            f"--study={verb!r} is not one of {', '.join(VERBS)}.", f"did you mean {near[0]!r}?" if near else "use one."
        )
    study = None if settings is None else grid.load(settings)
    if verb == "plan":
        if study is None:
            raise ConfigError("--config is missing.", "add --config=experiments/study.py, for example.")
        from sdjax.study.plan import write_plan

        write_plan(study, workdir, options.runs, console)
        return 0
    planned = manifest.read(workdir, study.name if study else None)
    chosen = manifest.select(planned, options.cells)
    if verb == "status":
        from sdjax.study import status

        names = {entry.name for entry in chosen}
        found = status.states(planned, workdir)
        status.show(planned, [state for state in found if state.entry.name in names], console)
        return 0
    if verb == "run":
        from sdjax.study.run import Runner

        return Runner(planned, chosen, console, parallel=options.parallel).run()
    if verb == "launch":
        from sdjax.study import launch

        launch.write(planned, chosen, workdir, options.launcher, options.launch_options, console)
        return 0
    return _report(planned, chosen, workdir, console)


def _report(planned: manifest.Manifest, chosen: Sequence[manifest.Entry], workdir: Path, console: Console) -> int:
    from sdjax.report import build_report
    from sdjax.study.status import run_path

    runs = []
    for entry in chosen:
        if entry.kind == "train":
            path = run_path(Path(planned.root), entry)
            # What was not started is shown as such, from its planned config.
            runs.append(path if (path / "config.json").exists() else workdir / entry.config_file)
    if not runs:
        raise ConfigError("--cells chooses no training run.", "choose one; warm starts have no score to report.")
    console.print(f"report: {build_report(runs, workdir / manifest.REPORT)}", highlight=False)
    return 0
