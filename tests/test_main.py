"""The command line: bad input ends with one message and a documented exit code, never with a stack trace."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdjax.train.rundir import RunDir

ROOT = Path(__file__).parents[1]


def call(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "sdjax.main", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


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
    assert done.returncode == 75 and "is in use by" in done.stderr


def test_a_report_without_runs_says_so(tmp_path):
    done = call("--mode=report", f"--workdir={tmp_path}")
    assert done.returncode == 1 and "no run directory was given" in done.stderr
