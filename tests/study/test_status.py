"""Every state a run directory can be in, from files alone."""

import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from sdjax.study import status
from tests.study.studies import path_of, plan, small, write_json, write_progress

ROOT = Path(__file__).parents[2]


@pytest.fixture
def planned(tmp_path):
    return plan(small(), tmp_path), tmp_path


def _state(planned, index=0):
    manifest, workdir = planned
    return status.states(manifest, workdir)[index]


def _lock(path, **holder):
    write_json(path / "LOCK", {"host": socket.gethostname(), "pid": os.getpid(), "start": time.time()} | holder)


def _started(planned, steps=1):
    manifest, workdir = planned
    return write_progress(manifest, workdir, manifest.entries[0], steps)


def test_nothing_yet_is_queued(planned):
    assert [one.state for one in status.states(*planned)] == ["queued"] * 3
    path = path_of(planned[0], planned[0].entries[0])
    path.mkdir()
    (path / "LOCK").touch()
    assert _state(planned).state == "queued"


def test_a_locked_directory_is_running_with_its_speed(planned):
    _lock(_started(planned))
    one = _state(planned)
    assert (one.state, one.step, one.eta_s) == ("running", 1, 10.0)
    assert one.device_hours == pytest.approx(0.5 + 10 / 3600)


def test_a_run_in_its_final_evaluation_says_so(planned):
    path = _started(planned, 2)
    _lock(path)
    (path / "final_eval").mkdir()
    (path / "final_eval" / "seed_0.jsonl").touch()
    assert _state(planned).note.endswith("final evaluation, 1 seeds played")


def test_done_wins_over_everything(planned):
    path = _started(planned, 2)
    write_json(path / "DONE.json", {"step": 2})
    write_json(path / "FAILED.json", {})
    assert _state(planned).state == "done"


def test_a_failure_shows_its_boundary_and_hint(planned):
    path = _started(planned)
    write_json(path / "FAILED.json", {"boundary": "engine", "message": "no answer", "fix": "start it."})
    one = _state(planned)
    assert one.state == "failed" and one.note == "[engine] no answer To fix: start it."
    _lock(path)
    assert _state(planned).state == "running"  # it was started again


def test_a_lock_whose_process_is_gone_is_stale(planned):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    _lock(_started(planned), pid=gone.pid)
    assert _state(planned).state == "stale lock"


def test_a_number_that_another_process_has_since_is_stale(planned):
    _lock(_started(planned), start=time.time() - 10_000_000)
    assert _state(planned).state == "stale lock"


def test_a_lock_of_another_host_is_never_called_dead(planned):
    _lock(_started(planned), host="elsewhere", pid=1, start=time.time() - 7200)
    one = _state(planned)
    assert one.state == "on another host" and "pid 1 on elsewhere, for 2:00:0" in one.note
    (path_of(planned[0], one.entry) / "LOCK").write_text('{"host": "els')
    assert _state(planned).state == "on another host"


def test_a_run_that_nobody_works_on_is_stopped(planned):
    (_started(planned) / "LOCK").touch()
    assert _state(planned).state == "stopped" and "goes on" in _state(planned).note


def test_another_config_in_the_directory_is_seen(planned):
    path = _started(planned)
    config = json.loads((path / "config.json").read_text())
    write_json(path / "config.json", config | {"seed": 9})
    assert _state(planned).state == "other config" and planned[0].entries[0].config_sha256[:8] in _state(planned).note
    (path / "config.json").write_text("{torn")
    assert _state(planned).state == "other config"


def test_a_cell_waits_for_its_warm_start(tmp_path):
    values = small("grpo", "sdar", warm_start=str(Path(__file__).with_name("cell.py")))
    manifest = plan(values, tmp_path)
    states = [one.state for one in status.states(manifest, tmp_path)]
    assert states == ["queued", "waiting", "waiting"]
    warm = write_progress(manifest, tmp_path, manifest.entries[0], 1)
    write_json(warm / "DONE.json", {})
    assert [one.state for one in status.states(manifest, tmp_path)] == ["done", "queued", "queued"]


def test_only_whole_lines_of_long_and_torn_files_count(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        for step in range(3000):
            file.write(json.dumps({"step": step, "x": "y" * 200}) + "\n")
        file.write('{"step": 3000, "x"')
    assert [line["step"] for line in status.tail(path)] == list(range(2989, 3000))
    assert status.tail(tmp_path / "none") == [] and status.tail(tmp_path) == []
    path.write_text('{"step": 0}\n"text"\n{"step": "x"}\n\n')
    assert status.tail(path) == [{"step": 0}]


def test_the_table_has_every_run_and_the_totals(planned):
    path = _started(planned)
    write_json(path / "FAILED.json", {"boundary": "data", "message": "[bold]no file"})
    console = Console(file=io.StringIO(), width=100)
    status.show(planned[0], status.states(*planned), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(entry.cell in text for entry in planned[0].entries)
    assert "#0 alfworld-tiny-grpo: [data] [bold]no file" in text and "3 runs: 2 queued, 1 failed; 0.50 device-h" in text


def test_the_command_reads_files_and_changes_none(planned):
    workdir = planned[1]
    _lock(_started(planned))
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
    command = [sys.executable, "-X", "importtime", "-m", "sdjax.main", "--mode=study", f"--workdir={workdir}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=workdir, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "1 running" in done.stdout, done.stderr[-2000:]
    assert "| jax\n" not in done.stderr  # seconds
    assert before == {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
    shutil.rmtree(workdir)
