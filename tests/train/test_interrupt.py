"""A signal ends a run at a safe point; the next start goes on line by line."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sdjax import interrupt, jsonl
from sdjax.errors import CTRL_C_EXIT_CODE, INTERRUPTED_EXIT_CODE
from sdjax.interrupt import Interrupted
from sdjax.train.checkpoints import Checkpoints
from sdjax.train.trainer import Trainer
from tests.train.test_trainer import comparable, wait_for
from tests.train.tiny_run import run, tiny_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def config(tiny_model):
    """Only the first and the last step are saved for their own sake."""
    plain = tiny_config(tiny_model, "sdar")
    return dataclasses.replace(plain, save=dataclasses.replace(plain.save, every=100))


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "run"
    run(config, path)
    return path


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def send(number):
    os.kill(os.getpid(), number)
    wait_until(lambda: interrupt.received() == number)


def signal_in(monkeypatch, method, step, number, *, after=False):
    """Sends ``number`` to this very process when ``method`` of the trainer begins (or ends) step ``step``."""
    original = getattr(Trainer, method)

    def patched(self, *arguments):
        matches = step is None or arguments[0] == step
        if matches and not after:
            send(number)
        value = original(self, *arguments)
        if matches and after:
            send(number)
        return value

    monkeypatch.setattr(Trainer, method, patched)


@pytest.mark.parametrize(
    ("method", "step", "after", "saved", "lines"),
    [
        ("_validate", 0, False, [], 0),
        ("_rollout", 2, False, [0, 1], 2),
        ("_score", 3, True, [0, 2], 3),
        ("_validate", 2, False, [0, 2], 2),
        ("final_evaluation", None, False, [0, 3], 4),
    ],
)
def test_an_interrupted_run_keeps_its_steps_and_goes_on(
    config, finished, tmp_path, monkeypatch, method, step, after, saved, lines
):
    path = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="SIGTERM was received"):
        signal_in(patch, method, step, signal.SIGTERM, after=after)
        run(config, path)
    assert Checkpoints(path / "checkpoints", keep=3, asynchronous=False).steps() == saved
    assert len(jsonl.read(path / "metrics.jsonl")) == lines
    assert not (path / "FAILED.json").exists() and not (path / "DONE.json").exists()
    assert jsonl.read(path / "LOCK") == []
    run(config, path)
    assert comparable(path) == comparable(finished)
    for name in ("val/step_000002.jsonl", "final_eval/seed_0.jsonl", "final_eval/seed_1.jsonl"):
        assert jsonl.read(path / name) == jsonl.read(finished / name)
    ledger = jsonl.read(path / "ledger.jsonl")
    if lines and method != "final_evaluation":
        assert any(line["phase"] == "lost" for line in ledger)
    kept = {s: [r["phase"] for r in ledger if r["step"] == s].count("update") for s in (1, 2, 3)}
    assert kept == {1: 2, 2: 2, 3: 2}  # advantages and the updates themselves; nothing twice, nothing missing


def test_a_signal_has_no_effect_on_a_run_that_nobody_interrupts(config, finished, tmp_path):
    interrupt.check()
    assert interrupt.received() is None
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    with interrupt.listen(60):
        interrupt.check()
    assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]


def test_one_process_of_several_does_not_stop_within_a_step():
    with interrupt.listen(60, alone=False):
        send(signal.SIGUSR1)
        interrupt.check()
        assert interrupt.received() == signal.SIGUSR1


STUCK = """
import hashlib, sys
from sdjax import interrupt
with interrupt.listen(float(sys.argv[1])):
    print("listening", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


@pytest.mark.parametrize(
    ("grace_s", "numbers", "code"),
    [
        (0.2, [signal.SIGTERM], INTERRUPTED_EXIT_CODE),
        (0.2, [signal.SIGUSR1], INTERRUPTED_EXIT_CODE),
        (0.2, [signal.SIGINT], CTRL_C_EXIT_CODE),
        (0.2, [signal.SIGTERM, signal.SIGTERM], INTERRUPTED_EXIT_CODE),
        (1.0, [signal.SIGWINCH, signal.SIGTERM], INTERRUPTED_EXIT_CODE),
    ],
)
def test_a_process_that_reaches_no_safe_point_ends_with_its_grace(grace_s, numbers, code):
    """The main thread sits in one call of C code, as in a long compilation, where no handler of Python's runs."""
    command = [sys.executable, "-c", STUCK, str(grace_s)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "listening\n"
        for number in numbers:
            process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == code and "the grace is over" in errors and "Traceback" not in errors


LOOP = """
import time
from sdjax import interrupt
with interrupt.listen(600):
    print("listening", flush=True)
    while True:
        time.sleep(0.01)
"""


def test_a_second_ctrl_c_ends_the_process_at_once():
    command = [sys.executable, "-c", LOOP]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "listening\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None and "SIGINT" in process.stderr.readline()
        time.sleep(0.1)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == -signal.SIGINT


@pytest.mark.parametrize(("mode", "number"), [("train", signal.SIGUSR1), ("sft", signal.SIGTERM)])
def test_the_command_line_exits_with_the_code_of_an_interruption(tmp_path, mode, number):
    path = tmp_path / "run"
    overrides = ["env.generator.valid_games=2", "env.generator.train_games=20", "eval.final_seeds=1"]
    overrides += ["sft.episodes=20", "sft.batch_rows=4", "train.tasks_per_step=2", "train.group_size=2"]
    command = [sys.executable, "-m", "sdjax.main", f"--mode={mode}", "--config=experiments/quickstart.py:grpo"]
    command += [f"--workdir={path}", *(f"--config.{override}" for override in overrides)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(jsonl.read(path / "metrics.jsonl")) >= 2, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED_EXIT_CODE
    assert "Interrupted" in errors and "start the same command again" in errors and "Traceback" not in errors
    lines = jsonl.read(path / "metrics.jsonl")
    steps = Checkpoints(path / "checkpoints", keep=3, asynchronous=False).steps()
    assert steps[-1] in (lines[-1]["step"], lines[-1]["step"] + 1) and not (path / "FAILED.json").exists()
