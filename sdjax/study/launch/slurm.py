"""A Slurm array: one script for all runs, and ``submit``, which hands it to ``sbatch`` once for each stage."""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from sdjax.errors import INTERRUPTED_EXIT_CODE, LOCKED_EXIT_CODE, ConfigError
from sdjax.study.launch.batch import Batch, machines, render
from sdjax.study.manifest import FILE, Entry

# Runs of numbers as sbatch writes them; what comes into a script's header must be free of surprises.
_PLAIN = re.compile(r"[A-Za-z0-9_.:,/@%+=~-]*")


@dataclass(frozen=True)
class Options:
    """parallel: runs at the same time, 0 for no limit. gpus: accelerators of one machine, 0 to ask for none. cpus: of
    one machine. time: limit of one start (a run that reaches it is put into the queue again). partition, account, qos:
    as sbatch has them. python: interpreter on the machines. setup: file to source first. max_array: the cluster's
    MaxArraySize (``scontrol show config``; Slurm's own default)."""

    parallel: int = 16
    gpus: int = 8
    cpus: int = 64
    time: str = "24:00:00"
    partition: str = ""
    account: str = ""
    qos: str = ""
    python: str = sys.executable
    setup: str = ""
    max_array: int = 1001


def files(batch: Batch, options: Options) -> dict[str, str]:
    """File names and texts.

    Raises:
      ConfigError: the array is larger than the cluster allows, or an option holds characters that sbatch misreads.
    """
    folder = batch.workdir.resolve() / "launch" / "slurm"
    for name, value in {**vars(options), "root of the manifest": batch.manifest.root, "--workdir": folder}.items():
        if not _PLAIN.fullmatch(str(value)):
            raise ConfigError(f"{name} = {str(value)!r} holds a character that sbatch may misread.", "leave it out.")
    highest = max(entry.index for entry in batch.entries)
    if highest >= options.max_array:
        raise ConfigError(
            f"the highest index of the array is {highest}, but Slurm's MaxArraySize, {options.max_array}, allows "
            "indices below it (1001 unless slurm.conf says otherwise).",
            "split the study, choose --cells, or raise MaxArraySize and say so with max_array=N in --options.",
        )
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", batch.manifest.study)
    script = render(
        "slurm_array.sbatch.j2",
        study=name,
        array=_array([entry.index for entry in batch.entries], options.parallel),
        options=options,
        notice_s=batch.notice_s,
        root=batch.manifest.root,
        logs=folder / "logs",
        run=shlex.join([options.python, "-m", "sdjax.study.element", str(batch.workdir.resolve() / FILE)]),
        setup=shlex.quote(options.setup) if options.setup else "",
        interrupted=INTERRUPTED_EXIT_CODE,
        locked=LOCKED_EXIT_CODE,
    )
    stages = [_parts(stage, options) for stage in batch.stages()]
    submit = render("slurm_submit.j2", study=name, stages=stages)
    return {"array.sbatch": script, "submit": submit, "logs/.keep": ""}


def _parts(stage: Sequence[Entry], options: Options) -> list[str]:
    """Arguments of sbatch for a stage, one text for each kind of machines that its runs want."""

    def shape(entry: Entry) -> tuple[int, int]:
        return machines(entry, options.gpus) if options.gpus else (1, 0)

    parts = []
    for (nodes, gpus), group in groupby(sorted(stage, key=lambda e: (shape(e), e.index)), key=shape):
        arguments = [f"--array={_array([entry.index for entry in group], options.parallel)}", f"--nodes={nodes}"]
        parts.append(" ".join(arguments + ([f"--gpus-per-node={gpus}"] if gpus else [])))
    return parts


def _array(indices: Sequence[int], parallel: int) -> str:
    """``0-3,7%2`` for these indices."""
    spans: list[list[int]] = []
    for index in sorted(indices):
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"{text}%{parallel}" if parallel else text
