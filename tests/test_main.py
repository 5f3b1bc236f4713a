"""The command line: bad input ends with one message and a documented exit code, never with a stack trace."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdjax.train.rundir import RunDir

ROOT = Path(__file__).parents[1]


def call(*arguments: str, typed: str | bytes = "") -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    typed = typed.encode() if isinstance(typed, str) else typed
    command = [sys.executable, "-m", "sdjax.main", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, input=typed)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=experiments/quickstart.py:grpo", "--config.train.lerning_rate=1"], 'Did you mean "learning_rate"'),
        (["--config=experiments/quickstart.py:sdra"], "did you mean 'sdar'?"),
        (["--config=experiments/quickstart.py:grpo", "--config.train.pack_length=9"], "shorter than the longest row"),
        ([], "--config is missing"),
    ],
)
def test_a_bad_config_is_one_message_and_exit_code_2(arguments, message, tmp_path):
    done = call(*arguments, f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_a_locked_directory_has_its_own_exit_code(tmp_path):
    with RunDir(tmp_path):
        done = call("--config=experiments/quickstart.py:grpo", f"--workdir={tmp_path}")
    assert done.returncode == 73 and "is in use by" in done.stderr


def test_a_report_without_runs_says_so(tmp_path):
    done = call("--mode=report", f"--workdir={tmp_path}")
    assert done.returncode == 1 and "no run directory was given" in done.stderr


def test_play_reads_moves_from_a_pipe():
    done = call("--mode=play", "--env=alfworld", "--teacher", typed="look\n/plan\n[bold]\n/quit\n")
    assert done.returncode == 0 and "teacher: plan" in done.stdout and "[bold]" in done.stdout
    assert "human: 1 episode" in done.stdout and done.stderr == ""


def test_play_survives_bytes_that_are_no_text():
    done = call("--mode=play", "--env=alfworld", typed=b"look \xff\xfe\n")
    assert done.returncode == 0 and "human: 1 episode" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--mode=play"], "nothing says what to play", 2),
        (["--mode=play", "--env=alfworld", "--agent=rule"], "it has search, plan", 2),
        (["--mode=play", "--env=alfworld", "--task=x"], "no game 'x'", 1),
        (["--mode=prepare"], "use one of alfworld, scienceworld, webshop, searchqa", 2),
        (["--mode=prepare", "--env=alfworld"], "alfworld-download", 1),
        (["--mode=prepare", "--env=webshop"], "items_shuffle", 1),
        (["--mode=prepare", "--env=searchqa", "--source=nowhere.jsonl"], "--workdir is missing", 2),
        (["--mode=demos"], "--workdir is missing", 2),
    ],
)
def test_bad_input_of_the_other_modes_is_one_message(arguments, message, code):
    done = call(*arguments)
    assert done.returncode == code and message in done.stderr and "Traceback" not in done.stderr


def test_prepare_without_a_source_says_what_is_wanted():
    done = call("--mode=prepare", "--env=alfworld")
    assert "<split>/<task>/<trial>/game.tw-pddl of the splits train" in " ".join(done.stdout.split())


def test_demos_are_written_once_and_kept(tmp_path):
    arguments = ["--mode=demos", "--config=experiments/quickstart.py:grpo", "--config.sft.episodes=40"]
    done = call(*arguments, f"--workdir={tmp_path}")
    assert done.returncode == 0 and "demos.jsonl: 40 episodes" in done.stdout
    first = (tmp_path / "demos.jsonl").read_bytes()
    facts = json.loads((tmp_path / "provenance.json").read_text())
    assert first.count(b"\n") == 40 and facts["episodes"] == 40 and facts["benchmark"]["store"] == "generated"
    assert facts["demos_sha256"] == hashlib.sha256(first).hexdigest()
    (tmp_path / "demos.jsonl").write_bytes(first[:-100])
    assert call(*arguments, f"--workdir={tmp_path}").returncode == 0
    assert (tmp_path / "demos.jsonl").read_bytes() == first
    other = call(*arguments, "--config.sft.noise=0.0", f"--workdir={tmp_path}")
    assert other.returncode == 1 and "started with another config" in other.stderr


def test_a_tuple_is_overridden_on_the_command_line(tmp_path):
    override = '--config.rollout.sglang.command=("launch/sglang_cpu", "--fast")'
    done = call("--config=experiments/quickstart.py:grpo", f"--workdir={tmp_path}", override, "--config.train.steps=-1")
    assert "train.steps" in done.stderr and "command" not in done.stderr, done.stderr
