"""One process of a tiny run over several; run by tests: MODEL WORKDIR PROCESSES PROCESS PORT MESH [LEARNING_RATE]."""

import dataclasses
import sys
from pathlib import Path

from rich.console import Console

from sdjax.config import MeshConfig
from sdjax.train import distributed
from sdjax.train.rundir import open_run
from sdjax.train.trainer import Trainer
from tests.train.tiny_run import tiny_config


def main(model: str, workdir: str, processes: str, process: str, port: str, mesh: str, rate: str = "3e-3") -> None:
    if int(processes) > 1:
        distributed.initialize(f"127.0.0.1:{port}", int(processes), int(process), timeout_s=120)
    config = tiny_config(Path(model), "sdar", steps=2, pack_rows=8, learning_rate=float(rate))
    config = dataclasses.replace(config, mesh=MeshConfig(*map(int, mesh.split(","))))
    with open_run(Path(workdir)) as directory:
        Trainer(config, directory, Console(file=sys.stderr, quiet=process != "0")).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
