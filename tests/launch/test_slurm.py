"""Studies on a real Slurm: what becomes of every exit code, and a run that is interrupted half way."""

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from sdjax import jsonl
from sdjax.study import Grid, axis, launch, prod, settings
from tests.launch import manifests
from tests.launch.slurm_cluster import wait_until
from tests.study import studies
from tests.test_main import call

pytestmark = pytest.mark.slurm

STEPS = 24
OPTIONS = "gpus=0,cpus=1,parallel=2,time=10:00"


def submit(slurm, workdir):
    """Runs the script that --study=launch wrote; returns the job ids of the arrays."""
    command = [workdir / "launch" / "slurm" / "submit"]
    done = subprocess.run(command, env=slurm.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.split()[1].rstrip(":") for line in done.stdout.splitlines()]


def log(workdir, element):
    path = workdir / "launch" / "slurm" / "logs" / f"{element}.log"
    return path.read_text() if path.exists() else ""


def finished(slurm, count):
    states = slurm.states()
    return len(states) == count and all(state in ("COMPLETED", "FAILED") for state in states.values())


def test_every_exit_code_has_its_consequence(slurm, tmp_path):
    """The commands stand for runs; ``starts`` counts them."""
    root, workdir = tmp_path / "root", tmp_path / "study"
    for name in ("warm", "late"):
        (root / "runs" / "study" / name).mkdir(parents=True)

    def shell(name, script):
        return ["/bin/bash", "-c", f"echo {name} >> starts; {script}"]

    commands = {
        "warm": shell("warm", "touch runs/study/warm/DONE.json"),
        "broken": shell("broken", "exit 1"),
        "locked": shell("locked", "exit 73"),
        "interrupted": shell("interrupted", "if mkdir once; then exit 75; fi"),
        "killed": shell("killed", "kill -KILL $$"),
        "late": shell("late", "test -e runs/study/warm/DONE.json"),
        "orphan": shell("orphan", "true"),
        "program": ["python", "-c", "import sys; open('which', 'w').write(sys.executable)"],
    }
    needs = {"late": ["warm"], "orphan": ["broken"]}
    manifest = manifests.write(workdir, root, commands, needs=needs)
    launch.write(manifest, manifest.entries, workdir, "slurm", OPTIONS.split(","), Console(quiet=True))
    first, second = submit(slurm, workdir)
    wait_until(lambda: finished(slurm, len(commands)))
    place = {name: f"{second if name in needs else first}_{i}" for i, name in enumerate(commands)}
    states = slurm.states()
    found = {name: states[element] for name, element in place.items()}
    failed = {"broken", "killed", "orphan"}
    assert found == {name: "FAILED" if name in failed else "COMPLETED" for name in commands}
    starts = (root / "starts").read_text().split()
    assert sorted(starts) == sorted(["warm", "broken", "locked", "interrupted", "interrupted", "killed", "late"])
    assert starts.index("late") > starts.index("interrupted")
    assert "another process works on this run" in log(workdir, place["locked"])
    assert "back into the queue" in log(workdir, place["interrupted"])
    assert "start 1, on" in log(workdir, place["interrupted"])
    assert "orphan needs broken, which is not done" in log(workdir, place["orphan"])
    assert (root / "which").read_text() == sys.executable


def test_a_cancelled_run_stays_cancelled(slurm, tmp_path):
    root, workdir = tmp_path, tmp_path / "study"
    script = "trap 'exit 75' TERM; touch started; while true; do sleep 0.1; done"
    manifest = manifests.write(workdir, root, {"endless": ["/bin/bash", "-c", script]})
    launch.write(manifest, manifest.entries, workdir, "slurm", OPTIONS.split(","), Console(quiet=True))
    (array,) = submit(slurm, workdir)
    wait_until((root / "started").exists)
    slurm.call("scancel", array)
    wait_until(lambda: slurm.states()[f"{array}_0"] == "CANCELLED")
    assert "back into the queue" not in log(workdir, f"{array}_0")


def test_a_run_that_is_interrupted_goes_on_and_all_of_a_study_finish(slurm, tiny_model, tmp_path):
    points = prod(axis("env", "alfworld"), axis("model", "tiny"), axis("method", "grpo"))
    values = settings("real", Grid(points, f"{studies.CELL}:{{method}}"))
    values.models, values.seeds = {"tiny": str(tiny_model)}, 4
    values.overrides = f"train.steps={STEPS} save.every=100 eval.every=100 eval.final_seeds=1"
    workdir = tmp_path / "study"
    manifest = studies.plan(values, workdir)
    done = call("--mode=study", "--study=launch", "--launcher=slurm", f"--options={OPTIONS}", f"--workdir={workdir}")
    assert done.returncode == 0, done.stderr
    (array,) = submit(slurm, workdir)
    paths = [Path(manifest.root) / entry.workdir for entry in manifest.entries]
    element, chosen = f"{array}_0", paths[0]
    wait_until(lambda: len(jsonl.read(chosen / "metrics.jsonl")) > 2)
    slurm.signal(element, lambda: "back into the queue" in log(workdir, element))
    reached = jsonl.read(chosen / "metrics.jsonl")[-1]["step"]
    assert reached < STEPS and not (chosen / "DONE.json").exists()
    wait_until(lambda: all((path / "DONE.json").exists() for path in paths), seconds=600)
    for path in paths:
        assert [line["step"] for line in jsonl.read(path / "metrics.jsonl")] == list(range(STEPS + 1))
        assert (path / "final_eval" / "seed_0.jsonl").exists() and not (path / "FAILED.json").exists()
    attempts = [line["attempt"] for line in jsonl.read(chosen / "metrics.jsonl")]
    assert attempts == [1] * (reached + 1) + [2] * (STEPS - reached)
    assert f"going on after update {reached}" in log(workdir, element)


def test_tasks_of_a_step_find_each_other(slurm, tmp_path):
    """JAX reads the variables of srun; nothing but the step says who is who."""
    code = (
        "from sdjax.train import distributed; several = distributed.initialize(timeout_s=60); import jax; "
        "distributed.barrier('start', timeout_s=60); print(several, jax.process_index(), jax.process_count())"
    )
    found = slurm.call("srun", "--ntasks=2", sys.executable, "-c", code)
    assert sorted(found.splitlines()) == ["True 0 2", "True 1 2"]
    alone = slurm.call("srun", "--ntasks=1", sys.executable, "-c", code)
    assert alone == "False 0 1"
