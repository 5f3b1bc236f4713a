"""GRPO through a server of its own, which is killed while it plays."""

import math
import os
import signal
import threading
import time

import psutil

from sdjax import jsonl
from sdjax.rollout.sglang import SglangEngine
from tests.sglang.conftest import COMMAND
from tests.sglang.scoring import sglang_config
from tests.train.tiny_run import run


def test_three_steps_and_a_killed_server(installed, checkpoints, tmp_path, monkeypatch):
    """The server dies in the rollout of step 2; its episodes are played again with the weights of step 1."""
    engines, original = [], SglangEngine.generate

    async def remember(engine, request):
        if engine not in engines:
            engines.append(engine)
        if request.session.startswith("train/2/"):
            killed.set()
        return await original(engine, request)

    def kill():
        killed.wait()
        time.sleep(0.2)
        (server,) = psutil.Process(engines[0]._members[0].process.pid).children()
        os.kill(server.pid, signal.SIGKILL)

    killed = threading.Event()
    monkeypatch.setattr(SglangEngine, "generate", remember)
    threading.Thread(target=kill, daemon=True).start()
    config = sglang_config(checkpoints["qwen3"], command=COMMAND, start_timeout_s=600.0)
    run(config, tmp_path / "run")
    records = {record["step"]: record for record in jsonl.read(tmp_path / "run" / "metrics.jsonl")}
    assert sorted(records) == [0, 1, 2, 3]
    for step in (1, 2, 3):
        record = records[step]
        assert record["engine/weight_version"] == step - 1
        assert record["engine/logp_gap_abs_mean"] < 0.02 and math.isfinite(record["engine/kl_sample_train_k3"])
        assert record["rollout/failed_episodes"] == 0 and record["rollout/cloned_groups"] == 0
    assert [records[step]["engine/restarts"] for step in (1, 2, 3)] == [0, 1, 0]
    assert records[2]["rollout/retried_episodes"] > 0
    log = next((tmp_path / "run" / "logs").glob("attempt_*/sglang_0.log")).read_text()
    assert log.count("$ ") == 2
