"""What --study=launch writes: complete, the same every time, and as its scheduler wants it."""

import re
import shlex
import subprocess
import sys

import pytest
import yaml
from rich.console import Console

from sdjax.errors import INTERRUPTED_EXIT_CODE, LOCKED_EXIT_CODE, ConfigError
from sdjax.study import launch
from tests.launch import manifests
from tests.test_main import call

OPTIONS = {
    "slurm": ["partition=h100"],
    "sky": ["volume=runs"],
    "jobset": ["image=registry/sdjax:1", "claim=runs", "queue=lab"],
}
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


def command(name, *more):
    return [
        "python",
        "-m",
        "sdjax.main",
        f"--workdir=runs/study/{name}",
        "--config=experiments/alfworld.py:sdar",
        *more,
    ]


def study(tmp_path, count=3, devices=8, grace_s=100.0, needs=None, prefix="alfworld-qwen3.5-2b-m"):
    names = [f"{prefix}{i}-{i:08x}" for i in range(count)]
    commands = {name: command(name, "--config.name=it's $HOME") for name in names}
    wanted = {names[late]: [names[early]] for late, early in (needs or {}).items()}
    return manifests.write(tmp_path, tmp_path, commands, devices=devices, grace_s=grace_s, needs=wanted)


def write(manifest, tmp_path, launcher, *options, entries=None):
    entries = manifest.entries if entries is None else entries
    return launch.write(manifest, entries, tmp_path, launcher, [*OPTIONS[launcher], *options], Console(quiet=True))


def texts(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("launcher", ["slurm", "sky", "jobset"])
def test_the_same_study_gives_the_same_bytes_and_leaves_nothing_of_an_older_one(tmp_path, launcher):
    first = texts(write(study(tmp_path, 5), tmp_path, launcher))
    folder = write(study(tmp_path, 3), tmp_path, launcher)
    again = texts(folder)
    assert texts(write(study(tmp_path, 3), tmp_path, launcher)) == again != first
    assert len(list(folder.glob("*.yaml"))) == (0 if launcher == "slurm" else 3)
    for path in (folder / "submit", *folder.glob("*.sbatch")):
        assert subprocess.run(["bash", "-n", path]).returncode == 0


@pytest.mark.parametrize("launcher", ["slurm", "sky", "jobset"])
def test_runs_are_submitted_after_what_they_need(tmp_path, launcher):
    folder = write(study(tmp_path, 4, needs={0: 3, 2: 3}), tmp_path, launcher)
    submit = (folder / "submit").read_text()
    if launcher == "slurm":
        first, second = (line for line in submit.splitlines() if line.startswith("id="))
        assert "--array=1,3%16" in first and "--array=0,2%16" in second
        assert '--dependency="afterany$needed"' in second and "--dependency" not in first
        return
    parts = re.split("# Later runs need", submit)
    early, late = ({int(n) for n in re.findall(r"-m(\d)-", part)} for part in (parts[0], parts[1].split("done", 1)[1]))
    if launcher == "sky":
        early = {int(n) for n in re.findall(r"-m(\d)-.* &", submit)}
    assert (early, late) == ({1, 3}, {0, 2})


def headers(folder):
    lines = (folder / "array.sbatch").read_text().splitlines()
    return dict(re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(.*))?", one).groups() for one in lines if "#SBATCH" in one)


def test_the_array_asks_for_whole_machines_and_for_a_signal_in_time(tmp_path):
    folder = write(study(tmp_path, grace_s=300.0), tmp_path, "slurm", "parallel=7", "cpus=32", "account=lab")
    found = headers(folder)
    wanted = {"array": "0-2%7", "signal": "B:TERM@320", "gpus-per-node": "8", "cpus-per-task": "32", "requeue": None}
    assert found | wanted == found and found["partition"] == "h100" and found["account"] == "lab"
    assert "qos" not in found and "--nodes=1 --gpus-per-node=8" in (folder / "submit").read_text()


@pytest.mark.parametrize(
    ("devices", "shape"), [(1, "--nodes=1 --gpus-per-node=1"), (32, "--nodes=4 --gpus-per-node=8")]
)
def test_the_mesh_of_a_run_decides_its_machines(tmp_path, devices, shape):
    manifest = study(tmp_path, devices=devices)
    assert shape in (write(manifest, tmp_path, "slurm") / "submit").read_text()
    nodes, gpus = map(int, re.findall(r"\d+", shape))
    jobs = [yaml.safe_load(path.read_text()) for path in sorted(write(manifest, tmp_path, "jobset").glob("*.yaml"))]
    for job in jobs:
        spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]
        container = spec["template"]["spec"]["containers"][0]
        assert spec["parallelism"] == spec["completions"] == nodes
        assert container["resources"]["limits"]["nvidia.com/gpu"] == str(gpus)
        variables = {one["name"]: one["value"] for one in container.get("env", [])}
        host = f"{job['metadata']['name']}-run-0-0.{job['metadata']['name']}:8476"
        assert variables == ({"SDJAX_COORDINATOR": host, "SDJAX_PROCESSES": str(nodes)} if nodes > 1 else {})
    for path in write(manifest, tmp_path, "sky").glob("*.yaml"):
        task = yaml.safe_load(path.read_text())
        assert task["num_nodes"] == nodes and task["resources"]["accelerators"] == f"H100:{gpus}"
        assert ("--process=" in task["run"]) == (nodes > 1)


def test_a_jobset_is_as_the_api_wants_it(tmp_path):
    """Rules of jobset.x-k8s.io/v1alpha2 and batch/v1: required fields, names, enumerations."""
    long = "alfworld-qwen3.5-2b-a-method-with-quite-a-long-name-and-more-of-it-"
    manifest = study(tmp_path, 3, prefix=long)
    names = set()
    for path in write(manifest, tmp_path, "jobset").glob("*.yaml"):
        job = yaml.safe_load(path.read_text())
        assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
        name = job["metadata"]["name"]
        names.add(name)
        assert _LABEL.fullmatch(f"{name}-run-0-0-abcde") and path.name == f"{name}.yaml"
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "lab"
        policy = job["spec"]["failurePolicy"]
        assert policy["maxRestarts"] == 100
        assert [rule["action"] for rule in policy["rules"]] == ["RestartJobSet", "FailJobSet"]
        assert policy["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
        (replicated,) = job["spec"]["replicatedJobs"]
        spec = replicated["template"]["spec"]
        assert spec["completionMode"] == "Indexed" and spec["backoffLimit"] == 0
        rule = spec["podFailurePolicy"]["rules"][0]
        pod = spec["template"]["spec"]
        assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] == 120
        container = pod["containers"][0]
        assert rule["action"] == "FailJob" and rule["onExitCodes"]["containerName"] == container["name"]
        codes = rule["onExitCodes"]["values"]
        assert codes == sorted({*codes, INTERRUPTED_EXIT_CODE, LOCKED_EXIT_CODE}) and {0, 1, 2}.isdisjoint(codes)
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert {mount["name"] for mount in mounts.values()} == volumes
        assert mounts["/sdjax/runs/study"]["subPath"] == "runs/study" and "/sdjax/models" in mounts
        assert tuple(container["command"]) in {entry.command for entry in manifest.entries}
    assert len(names) == 3


def test_a_managed_job_runs_the_command_and_recovers_from_interruptions(tmp_path):
    manifest = study(tmp_path)
    for path, entry in zip(sorted(write(manifest, tmp_path, "sky").glob("*.yaml")), manifest.entries, strict=True):
        task = yaml.safe_load(path.read_text())
        assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [INTERRUPTED_EXIT_CODE]
        assert task["volumes"] == {"/mnt/sdjax": "runs"} and "file_mounts" not in task
        assert tuple(shlex.split(task["run"].splitlines()[-1])) == ("exec", *entry.command)
        assert "ln -sfnT /mnt/sdjax/runs/study runs/study" in task["setup"]
        assert subprocess.run(["bash", "-n"], input=task["setup"] + task["run"], text=True).returncode == 0


def test_skypilot_itself_accepts_the_jobs(tmp_path):
    sky = pytest.importorskip("sky", reason="skypilot is not installed")
    manifest = study(tmp_path)
    for option in ("spot=no", "infra=aws", "image=ami-0abc"):
        for path in write(manifest, tmp_path, "sky", option).glob("*.yaml"):
            task = sky.Task.from_yaml_config(yaml.safe_load(path.read_text()))
            assert [resource.accelerators for resource in task.resources] == [{"H100": 8}]


@pytest.mark.parametrize(
    ("launcher", "options", "message"),
    [
        ("slurm", ["partiton=x"], r"did you mean partition=\.\.\.\?"),
        ("slurm", ["nonsense"], "is no option of slurm"),
        ("slurm", ["gpus=many"], "is no number"),
        ("slurm", ["partition=a b"], "sbatch may misread"),
        ("slurm", ["max_array=3"], r"highest index of the array is 3.*MaxArraySize, 3.*1001"),
        ("slurm", ["gpus=3"], "wants 8 devices, which do not fill machines with 3"),
        ("sky", ["volume="], "one place that outlives"),
        ("sky", ["bucket=s3://x"], "one place that outlives"),
        ("sky", ["spot=maybe"], "spot=yes or spot=no"),
        ("sky", ["shared=models:../x"], "not all are folders below another"),
        ("jobset", ["image="], "needs an image"),
        ("jobset", ["namespace=My_Space"], "namespace='My_Space'"),
    ],
)
def test_bad_options_are_named(tmp_path, launcher, options, message):
    with pytest.raises(ConfigError, match=message):
        write(study(tmp_path, 4), tmp_path, launcher, *options)
    assert not (tmp_path / "launch").exists()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["9lives-0000aaaa"], "cannot be the name of a Kubernetes object"),
        (["white space-0000aaaa"], "cannot be the name of a Kubernetes object"),
        (["a_b-0000aaaa", "a.b-0000aaaa"], "would both be a-b-0000aaaa"),
    ],
)
@pytest.mark.parametrize("launcher", ["sky", "jobset"])
def test_names_that_kubernetes_refuses_are_refused_here(tmp_path, launcher, names, message):
    manifest = manifests.write(tmp_path, tmp_path, {name: command(name) for name in names})
    with pytest.raises(ConfigError, match=message):
        write(manifest, tmp_path, launcher)


def test_an_empty_study_an_unknown_launcher_and_a_circle_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there are no runs to launch"):
        write(study(tmp_path, 1), tmp_path, "slurm", entries=())
    with pytest.raises(ConfigError, match="use one of slurm, sky, jobset"):
        launch.write(study(tmp_path), study(tmp_path).entries, tmp_path, "pbs", [], Console(quiet=True))
    with pytest.raises(ConfigError, match="waits for itself"):
        write(study(tmp_path, 2, needs={0: 1, 1: 0}), tmp_path, "slurm")


def test_the_command_line_reports_an_unknown_launcher(tmp_path):
    study(tmp_path)
    done = call("--mode=study", "--study=launch", "--launcher=pbs", f"--workdir={tmp_path}")
    assert done.returncode == 2 and "use one of slurm, sky, jobset" in done.stderr


@pytest.mark.parametrize(
    ("index", "code", "message"),
    [("7", 2, "has no entry '7'"), ("-1", 2, "has no entry '-1'"), ("x", 2, "has no entry 'x'")],
)
def test_an_element_without_an_entry_says_so(tmp_path, index, code, message):
    study(tmp_path)
    done = run_element(tmp_path, "manifest.json", index)
    assert done.returncode == code and message in done.stderr and "Traceback" not in done.stderr


def test_an_element_waits_for_no_one(tmp_path):
    study(tmp_path, 2, needs={1: 0})
    done = run_element(tmp_path, "manifest.json", "1")
    assert done.returncode == 1 and "which is not done" in done.stderr and "(entry 0)" in done.stderr
    assert run_element(tmp_path, "nothing.json", "1").returncode == 2


def run_element(tmp_path, file, index):
    arguments = [sys.executable, "-m", "sdjax.study.element", str(tmp_path / file), index]
    return subprocess.run(arguments, capture_output=True, text=True)
