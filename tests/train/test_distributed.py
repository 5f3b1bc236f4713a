"""Processes of one run: how they find each other, and what happens when one of them stays away."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sdjax.errors import ConfigError
from sdjax.train import distributed

ROOT = Path(__file__).parents[2]

MEMBER = """
import sys
from sdjax.train import distributed
process, address, absent = int(sys.argv[1]), sys.argv[2], sys.argv[3:] == ["absent"]
assert distributed.initialize(address, 2, process, timeout_s=60)
import jax
print("devices", jax.device_count(), jax.local_device_count(), flush=True)
for _ in range(2):
    distributed.barrier("start", timeout_s=60)
print("any", [distributed.any_process("stop", process == at, timeout_s=60) for at in (1, 9, 0)], flush=True)
if not (absent and process == 1):
    try:
        distributed.barrier("checkpoint 7", timeout_s=3 if absent else 60)
        print("met", flush=True)
    except distributed.ProcessesError as error:
        print(error, flush=True)
if absent:
    sys.stdin.read()  # stays alive and does not come
"""


def start(process, address, *more):
    return subprocess.Popen(
        [sys.executable, "-c", MEMBER, str(process), address, *more],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_address():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_two_processes_meet_and_agree():
    address = free_address()
    members = [start(process, address) for process in range(2)]
    for member in members:
        output, errors = member.communicate(timeout=120)
        assert member.returncode == 0, errors
        assert output.splitlines() == ["devices 2 1", "any [True, False, True]", "met"]
        assert "waiting up to 60 s for the other processes" in errors


def test_a_process_that_stays_away_is_an_error_with_the_name_of_the_barrier():
    address = free_address()
    members = [start(process, address, "absent") for process in range(2)]
    try:
        lines = [members[0].stdout.readline() for _ in range(3)]
        assert lines[:2] == ["devices 2 1\n", "any [True, False, True]\n"]
        assert "barrier 'checkpoint 7': not every process of the run was there within 3 s" in lines[2]
        assert "process 0 of 2" in lines[2]
        assert all(member.poll() is None for member in members)
    finally:
        for member in members:
            member.kill()
            member.communicate()


def test_one_process_needs_no_one(monkeypatch):
    for name in ("SDJAX_COORDINATOR", "SDJAX_PROCESSES", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert not distributed.initialize()
    assert not distributed.initialize("localhost:1", 1, 0)
    distributed.barrier("alone", timeout_s=0.01)
    assert distributed.any_process("alone", True, timeout_s=0.01)
    assert not distributed.any_process("alone", False, timeout_s=0.01)


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (("", 2, 0), {}),
        (("host", 2, 0), {}),
        (("host:12x", 2, 0), {}),
        ((":1234", 2, 0), {}),
        (("host:1234", 2, 2), {}),
        (("host:1234", 2, -1), {}),
        (("host:1234", 0, 0), {}),
        (("", 0, -1), {"SDJAX_COORDINATOR": "host:1234"}),
        (("", 0, -1), {"SDJAX_PROCESSES": "2", "JOB_COMPLETION_INDEX": "0"}),
        (("", 0, -1), {"SDJAX_COORDINATOR": "host:1234", "SDJAX_PROCESSES": "two", "JOB_COMPLETION_INDEX": "0"}),
        (("", 0, -1), {"SDJAX_COORDINATOR": "host:1234", "SDJAX_PROCESSES": "2", "JOB_COMPLETION_INDEX": "2"}),
    ],
)
def test_parts_that_do_not_fit_are_refused(arguments, variables, monkeypatch):
    for name in ("SDJAX_COORDINATOR", "SDJAX_PROCESSES", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="do not fit together"):
        distributed.initialize(*arguments)


STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "1", "SLURM_GPUS_ON_NODE": "8"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # a batch script: its tasks are not started yet
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, None),
        (STEP, {"cluster_detection_method": "slurm", "local_device_ids": list(range(8))}),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "16"}, {"cluster_detection_method": "slurm", "local_device_ids": None}),
    ],
)
def test_a_slurm_step_is_seen(variables, expected, monkeypatch):
    """Two tasks on two machines take all accelerators there; eight tasks a machine take one each, which JAX decides."""
    called = []
    for name in {*STEP, "SLURM_NTASKS", "SDJAX_COORDINATOR", "SDJAX_PROCESSES"}:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed.jax.distributed, "initialize", lambda **given: called.append(given))
    monkeypatch.setattr(distributed.jax.config, "update", lambda *_: None)
    distributed.initialize(timeout_s=5)
    assert called == ([] if expected is None else [{**expected, "initialization_timeout": 5}])
