"""A run over two processes: the numbers of one process, one directory, and refusal of what does not fit together."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from sdjax import jsonl
from sdjax.config import TrainConfig
from sdjax.methods.registry import MethodConfig, config_class
from sdjax.models import load_checkpoint
from sdjax.train.checkpoints import Checkpoints
from sdjax.train.update import Updater
from tests.train.sharded import ROOT

# Counters of the engine are those of one process; everything else is common.
OWN = ("time/", "cost/", "engine/")


def start(model, workdir, *, processes, process, port, mesh, rate="3e-3"):
    devices = 8 // processes
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    arguments = [str(model), str(workdir), str(processes), str(process), str(port), mesh, rate]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.train.two_processes", *arguments],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def start_pair(model, workdir, mesh, rates=("3e-3", "3e-3")):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        start(model, workdir, processes=2, process=i, port=port, mesh=mesh, rate=rate) for i, rate in enumerate(rates)
    ]


def finish(processes):
    return [process.communicate(timeout=300)[0] for process in processes]


def comparable(path: Path) -> list[dict]:
    lines = jsonl.read(path / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith(OWN) and k != "attempt"} for line in lines]


def parameters(model: Path, path: Path):
    """The last parameters, restored onto the one device of this process."""
    decoder, params, tokenizer = load_checkpoint(model)
    method = MethodConfig("grpo", config_class("grpo")()).build()
    state = Updater(decoder, method, TrainConfig(), 1.0, tokenizer.sampling_mask_V).init(params)
    checkpoints = Checkpoints(path / "checkpoints", keep=2, asynchronous=False)
    restored = checkpoints.restore(2, state)["params"]
    checkpoints.close()
    return jax.tree.leaves(jax.device_get(restored))


@pytest.mark.slow
def test_two_processes_train_as_one_does_and_go_on_after_a_kill(tiny_model, tmp_path):
    mesh = "1,8,1"
    alone = start(tiny_model, tmp_path / "one", processes=1, process=0, port=0, mesh=mesh)
    output = finish([alone])
    assert alone.returncode == 0, output[0][-3000:]
    pair, metrics = start_pair(tiny_model, tmp_path / "two", mesh), tmp_path / "two" / "metrics.jsonl"
    while len(jsonl.read(metrics)) < 2:
        assert all(process.poll() is None for process in pair), finish(pair)
        time.sleep(0.05)
    for process in pair:  # inside step 2
        process.send_signal(signal.SIGKILL)
    finish(pair)
    pair = start_pair(tiny_model, tmp_path / "two", mesh)
    output = finish(pair)
    assert [process.returncode for process in pair] == [0, 0], output[0][-3000:] + output[1][-3000:]
    one, two = comparable(tmp_path / "one"), comparable(tmp_path / "two")
    assert [line.keys() for line in one] == [line.keys() for line in two] and len(one) == 3
    for a, b in zip(one, two, strict=True):
        for name, value in a.items():
            assert b[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (name, a["step"])
    for x, y in zip(*(parameters(tiny_model, tmp_path / name) for name in ("one", "two")), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)
    names = [sorted(str(p.relative_to(tmp_path / n)) for p in (tmp_path / n).glob("*/*.json*")) for n in ("one", "two")]
    assert names[0] == names[1]
    for seed in range(2):
        scores = [jsonl.read(tmp_path / name / "final_eval" / f"seed_{seed}.jsonl") for name in ("one", "two")]
        assert [line["score"] for line in scores[0]] == [line["score"] for line in scores[1]]


@pytest.mark.slow
def test_processes_with_different_configurations_refuse_to_train(tiny_model, tmp_path):
    pair = start_pair(tiny_model, tmp_path / "run", "1,8,1", rates=("3e-3", "4e-3"))
    output = finish(pair)
    assert all(process.returncode != 0 for process in pair)
    text = "configuration: the processes of the run do not agree (processes 0: "
    assert any(text in out for out in output), output[0][-3000:] + output[1][-3000:]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
