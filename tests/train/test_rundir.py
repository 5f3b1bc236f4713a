"""One directory, one process, one config; records after the checkpoint are cut, lost time is kept."""

import json
import os
import subprocess
import sys

import pytest

from sdjax import jsonl
from sdjax.errors import DataError, RunDirError
from sdjax.train.rundir import Locked, RunDir

HOLD = (
    "import sys\nfrom sdjax.train.rundir import RunDir\n"
    "with RunDir(sys.argv[1]):\n    print('held', flush=True)\n    sys.stdin.read()\n"
)


def test_a_living_process_locks_and_a_dead_one_does_not(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(Locked, match=f'"pid": {holder.pid}'), RunDir(tmp_path):
        pass
    holder.kill()
    holder.wait()
    with RunDir(tmp_path):
        assert json.loads((tmp_path / "LOCK").read_text())["pid"] == os.getpid()


def test_another_config_is_refused_with_a_diff(tmp_path):
    with RunDir(tmp_path) as directory:
        directory.write_config({"train": {"steps": 5}, "seed": 0})
        directory.write_config({"train": {"steps": 5}, "seed": 0})
        with pytest.raises(RunDirError, match=r"train.steps: 5 -> 6"):
            directory.write_config({"train": {"steps": 6}, "seed": 0})
    assert json.loads((tmp_path / "config.json").read_text())["train"]["steps"] == 5


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match=r"cannot write to .*file"), RunDir(tmp_path / "file"):
        pass


def test_trim_keeps_what_the_checkpoint_covers(tmp_path):
    with RunDir(tmp_path) as directory:
        jsonl.append(directory.metrics, [{"step": s} for s in range(5)])
        jsonl.append(directory.ledger, [{"step": s, "phase": "update", "seconds": 1.0} for s in range(5)])
        with directory.metrics.open("a") as file:
            file.write('{"step": 5, "tor')
        for step in (0, 2, 4):
            jsonl.rewrite(directory.validation(step), [{"step": step}])
        directory.transcripts(4).parent.mkdir()
        directory.transcripts(4).write_text("{}")
        for step in (2, 4):
            directory.batch(step).touch()
        directory.trim(2)
        assert [r["step"] for r in jsonl.read(directory.metrics)] == [0, 1, 2]
        lines = jsonl.read(directory.ledger)
        assert [r["phase"] for r in lines] == ["update"] * 3 + ["lost"] * 2
        assert lines[3]["lost_phase"] == "update" and sum(r["seconds"] for r in lines) == 5.0
        assert directory.validation(2).exists() and not directory.validation(4).exists()
        assert not directory.transcripts(4).exists()
        assert directory.batch(2).exists() and not directory.batch(4).exists()
        directory.trim(2)  # doing it again changes nothing
        assert jsonl.read(directory.ledger) == lines


def test_attempts_are_counted(tmp_path):
    with RunDir(tmp_path) as directory:
        assert [directory.new_attempt()[0] for _ in range(3)] == [1, 2, 3]
        assert (tmp_path / "logs" / "latest").resolve().name == "attempt_003"


def test_a_torn_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(DataError, match=r"x.jsonl: line 2"):
        jsonl.read(path)


def test_repair_cuts_only_the_torn_end(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a"')
    assert jsonl.read(path) == [{"a": 1}]
    assert jsonl.repair(path) == 4 and jsonl.repair(path) == 0
    jsonl.append(path, [{"a": 2}])
    assert jsonl.read(path) == [{"a": 1}, {"a": 2}]
