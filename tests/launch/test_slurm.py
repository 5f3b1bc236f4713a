"""A whole study on a real Slurm: an array with a warm start before it, and an element that is interrupted and requeued."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from sdjax import jsonl
from sdjax.study import manifest as manifests
from tests.study import studies
from tests.test_main import ROOT, call

pytestmark = pytest.mark.slurm

STEPS = 40
METHODS = ("grpo", "sdar", "rlsd", "icsd")
OPTIONS = "gpus=0,cpus=1,parallel=2,time=10:00"


def wait_until(condition, seconds=170.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not within the time"
        time.sleep(0.05)


def submit(slurm, workdir, script="submit"):
    """Runs the script that --study=launch wrote; returns the arrays' job ids."""
    folder = workdir / "launch" / "slurm"
    done = subprocess.run([folder / script], env=slurm.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.split()[1].rstrip(":") for line in done.stdout.splitlines()]


def logs(workdir):
    return {path.stem: path.read_text() for path in (workdir / "launch" / "slurm" / "logs").glob("*.log")}


def test_a_study_on_slurm_survives_an_interruption(slurm, tiny_model, tmp_path):
    values = studies.small(*METHODS, models={"tiny": str(tiny_model)})
    values.overrides = f"train.steps={STEPS} save.every=100 eval.every=20 eval.final_seeds=1"
    workdir = tmp_path / "study"
    manifest = studies.plan(values, workdir)
    done = call("--mode=study", "--study=launch", "--launcher=slurm", f"--options={OPTIONS}", f"--workdir={workdir}")
    assert done.returncode == 0, done.stderr
    (array,) = submit(slurm, workdir)
    paths = [Path(manifest.root) / entry.workdir for entry in manifest.entries]
    chosen = 0
    wait_until(lambda: len(jsonl.read(paths[chosen] / "metrics.jsonl")) > 3)
    slurm.call("scancel", "--batch", "--signal=TERM", f"{array}_{chosen}")
    wait_until(lambda: "back into the queue" in logs(workdir).get(f"{array}_{chosen}", ""))
    reached = jsonl.read(paths[chosen] / "metrics.jsonl")[-1]["step"]
    assert reached < STEPS and not (paths[chosen] / "DONE.json").exists()
    wait_until(lambda: all((path / "DONE.json").exists() for path in paths))
    for path in paths:
        lines = jsonl.read(path / "metrics.jsonl")
        assert [line["step"] for line in lines] == list(range(STEPS + 1))
        assert (path / "final_eval" / "seed_0.jsonl").exists()
    attempts = [line["attempt"] for line in jsonl.read(paths[chosen] / "metrics.jsonl")]
    assert attempts[: reached + 1] == [1] * (reached + 1) and attempts[-1] == 2
    text = logs(workdir)[f"{array}_{chosen}"]
    assert f"start 1, on" in text and f"going on after update {reached}" in text
    wait_until(lambda: set(slurm.states().values()) == {"COMPLETED"})
