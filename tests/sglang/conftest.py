"""Real SGLang servers on the CPU, with tiny models; all are started at once and live as long as the tests."""

import asyncio
import contextlib
import os
import subprocess
from pathlib import Path

import pytest

from sdjax.config import SglangConfig
from sdjax.envs import make_benchmark
from sdjax.envs.prompts import PromptTemplate
from sdjax.models.tiny import write_tiny_checkpoint
from sdjax.rollout import engines
from tests.train.tiny_run import tiny_config

ROOT = Path(__file__).parents[2]
COMMAND = (str(ROOT / "launch" / "sglang_cpu"),)
LAYERS = {"qwen3": 2, "qwen3_5": 4, "llama": 2}
_INSTALL_S = 1800


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.sglang)


@pytest.fixture(scope="session")
def installed():
    """The environment of the servers; made here if it is not there yet."""
    try:
        done = subprocess.run([*COMMAND, "--install"], capture_output=True, text=True, timeout=_INSTALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"the environment of the SGLang servers cannot be made: {error}")
    if done.returncode:
        pytest.skip(f"the environment of the SGLang servers cannot be made: {done.stderr.strip()[-300:]}")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Random models by name, with a tokenizer of generated games."""
    folder = tmp_path_factory.mktemp("checkpoints")
    benchmark = make_benchmark(tiny_config(folder).env)
    template = PromptTemplate.load("alfworld", "compact", 1)
    corpus = []
    for task in benchmark.task_ids("train"):
        for turn in asyncio.run(benchmark.expert_episode(task, "search", 0, 10)):
            seen = turn.observation
            corpus += [
                template.render(seen.task, seen.text, seen.admissible, [], 0),
                template.answer("ok", turn.action),
            ]
    for name, layers in LAYERS.items():
        write_tiny_checkpoint(
            folder / name, corpus, vocab_size=512, hidden=64, layers=layers, heads=2, kv_heads=1, intermediate=96,
            max_positions=1024, model_type=name,
        )  # fmt: skip
    return {name: folder / name for name in LAYERS}


@pytest.fixture(scope="session")
def urls(installed, checkpoints, tmp_path_factory):
    """A function from a model's name to the address of its server."""
    logs = tmp_path_factory.mktemp("logs")
    with contextlib.ExitStack() as stack:
        members = {}
        for name, checkpoint in checkpoints.items():
            settings = SglangConfig(command=COMMAND, start_timeout_s=600.0)
            (members[name],) = engines.own_members(settings, checkpoint, logs / name, key="", seed=0)
            stack.callback(members[name].process.stop)
            members[name].process.start()

        def url(name):
            members[name].process.wait_ready()
            return members[name].server.url

        os.environ.pop("SDJAX_SGLANG_KEY", None)
        yield url
