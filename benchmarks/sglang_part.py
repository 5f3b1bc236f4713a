"""One part of ``benchmarks.sglang``, in its own process. Writes ``part.json`` after every stage."""

import dataclasses
import faulthandler
import io
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from benchmarks import sglang_models
from benchmarks.sglang import parse_arguments, write
from sdjax import jsonl
from sdjax.config import EnvConfig, RunConfig, defaults, load
from sdjax.rollout import sglang_sync
from sdjax.rollout.engine import SamplingParams
from sdjax.rollout.episodes import Assignment, play_all
from sdjax.rollout.sglang import SglangEngine
from sdjax.rollout.sglang_sync import DiskTransfer, Transfer
from sdjax.train import session
from sdjax.train.rundir import RunDir
from sdjax.train.trainer import Trainer, draw_tasks

PHASES = ("rollout", "score", "update", "sync", "other")
PUSHES = {"disk": 2, "ipc": 5}
NEVER = 10**6
# More than any prompt of these games has. Of memory: what weights, caches and CUDA graphs of a server may take.
PROMPT_TOKENS, MEMORY_SHARE = 1024, 0.3
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128)  # the default has twice as many, and each costs seconds at start


def settings(a: Namespace, model: str, engine: str, checkpoint: Path) -> RunConfig:
    small = model == "tiny"
    config = defaults("grpo")
    config.name, config.model.path = f"sglang-benchmark-{model}", str(checkpoint)
    config.model.compute_dtype = "bfloat16"
    config.env.template, config.env.history = "compact", 2
    config.env.turns = a.turns or (30 if small else 10)

    rollout, episodes = config.rollout, a.tasks * a.group
    rollout.engine, rollout.slots, rollout.cache_dtype = engine, episodes, "bfloat16"
    rollout.prompt_tokens, rollout.response_tokens = PROMPT_TOKENS, a.tokens
    rollout.max_length = PROMPT_TOKENS + a.tokens
    rollout.prefill_rows, rollout.decode_chunk, rollout.transcripts_every = min(64, episodes), 16, NEVER
    rollout.stop_gap = 10.0  # a random model's gap is to be seen, not to stop the run
    servers = rollout.sglang
    servers.sync = a.sync or ("disk" if a.platform == "cpu" or a.engine_url else "ipc")
    servers.sleep = a.platform == "gpu" and not a.no_sleep
    servers.start_timeout_s = servers.request_timeout_s = 180.0 if a.platform == "gpu" else 900.0
    servers.restarts = 0  # a benchmark over a server that died is none
    if a.engine_url:
        servers.urls = (a.engine_url,)
    else:
        servers.command = (a.command,)
        sizes = sorted({min(size, episodes) for size in GRAPH_SIZES} | {episodes})
        gpu = (f"--mem-fraction-static={MEMORY_SHARE}", "--cuda-graph-bs-decode", *map(str, sizes))
        flags = gpu if a.platform == "gpu" else ()
        servers.flags = (*flags, f"--max-running-requests={episodes}", *a.flags.split())

    train = config.train
    train.steps, train.tasks_per_step, train.group_size = a.steps or (5 if small else 3), a.tasks, a.group
    train.pack_length, train.pack_rows, train.loss_slots = (4096, 8, 1024) if a.platform == "gpu" else (2048, 2, 512)
    train.remat = "none" if small else "full"
    config.eval.panel, config.eval.every, config.eval.final_seeds = "valid:1", NEVER, 0
    return load(config)


class Unsaved:
    """In place of checkpoints: gigabytes that nobody wants, in the time that is measured."""

    def steps(self) -> list[int]:
        return []

    def save(self, *_: Any) -> None:
        pass

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass


class Measured(Trainer):
    """Trains, and calls ``after`` while the engine is still there."""

    after: Callable[[], None]

    def final_evaluation(self, progress: Any) -> None:
        self.after()


class Part:
    """Keeps what was measured so far on disk."""

    def __init__(self, arguments: Namespace):
        self.a, self.begin = arguments, time.perf_counter()
        self.record: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        self.model, _, self.engine = arguments.part.partition("-")
        self.run = arguments.work / "run"

    def note(self, **values: Any) -> None:
        self.record |= values
        write(self.a.work / "part.json", self.record)
        print(f"[{time.perf_counter() - self.begin:.1f} s] {values}", flush=True)

    def play(self) -> None:
        checkpoint = sglang_models.make(self.model, self.a.models, EnvConfig(template="compact", history=2))
        self.note(model_s=round(time.perf_counter() - self.begin, 1))
        config = settings(self.a, self.model, self.engine or "sglang", checkpoint)
        if self.engine:
            self.embedded(config)
        else:
            self.train(config)

    def train(self, config: RunConfig) -> None:
        """Training steps through SGLang, then sync and sleep on the same server."""
        begin = time.perf_counter()
        with RunDir(self.run) as directory:
            trainer = Measured(config, directory, Console(file=io.StringIO()))
            opened = time.perf_counter() - begin
            trainer.checkpoints.close()
            trainer.checkpoints = Unsaved()  # pyright: ignore[reportAttributeAccessIssue]
            engine = trainer.session.engine
            assert isinstance(engine, SglangEngine)
            self.note(open_s=round(opened, 1), parameters=trainer.session.model.num_params(), **self.memory("opened"))
            syncs: list[float] = []
            engine.update_weights = timed(engine.update_weights, syncs)  # pyright: ignore[reportAttributeAccessIssue]
            finish_step = trainer._finish_step

            def finish(step: int, record: dict[str, Any], **kwargs: Any) -> None:
                finish_step(step, record, **kwargs)
                if step:
                    self.note(steps=steps(jsonl.read(directory.metrics)), sync_calls_s=syncs)

            trainer._finish_step = finish  # pyright: ignore[reportAttributeAccessIssue]
            trainer.after = lambda: self.after(trainer, engine)
            trainer.run()

    def after(self, trainer: Trainer, engine: SglangEngine) -> None:
        model, params = trainer.session.model, trainer.state["params"]
        servers, dtype = engine.servers, trainer.config.rollout.sglang.dtype
        self.note(**self.memory("trained"))
        found: dict[str, Any] = {}
        sums = {}
        for kind in ("disk", *(("ipc",) if self.a.platform == "gpu" and not self.a.engine_url else ())):
            transfer = make_transfer(kind, model, dtype)
            seconds: list[float] = []
            push = timed(sglang_sync.push, seconds)
            for number in range(PUSHES[kind]):
                push(transfer, params, f"{kind}-{number}", servers)
            transfer.close()
            sums[kind] = sglang_sync.checksums(servers[0])
            found[kind] = {"first_s": seconds[0], "seconds": seconds[1:]}
            self.note(sync=found, same_weights=len({str(value) for value in sums.values()}) == 1, checksums=sums)
        if trainer.config.rollout.sglang.sleep:
            self.sleep_and_wake(engine, params, trainer.config.train.steps)

    def sleep_and_wake(self, engine: SglangEngine, params: Any, version: int) -> None:
        found: dict[str, list[float]] = {"sleep_s": [], "wake_s": []}
        for _ in range(3):
            timed(engine.sleep, found["sleep_s"])()
            asleep = self.memory("asleep")
            timed(engine.update_weights, found["wake_s"])(params, version)
            self.note(**found, **asleep, **self.memory("awake"))

    def memory(self, when: str) -> dict[str, int | None]:
        """MiB of the GPU in use by everybody, and what JAX holds of it."""
        if self.a.platform == "cpu":
            return {}
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        used = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
        ours = (jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use", 0)
        return {f"gpu_{when}_mib": int(used), f"jax_{when}_mib": ours // 2**20}

    def embedded(self, config: RunConfig) -> None:
        """The rollouts of the same steps on the embedded engine; weights stay, which changes no speed."""
        opened = session.open_session(config)
        try:
            self.note(**self.memory("opened"))
            tasks, found = opened.benchmark.task_ids(config.env.train_split), []
            for step in range(1, config.train.steps + 1):
                assignments = [
                    Assignment(task, g, g * config.train.group_size + k, k, "train", step)
                    for g, task in enumerate(draw_tasks(tasks, config.train.tasks_per_step, step, config.seed))
                    for k in range(config.train.group_size)
                ]
                stats, begin = dataclasses.replace(opened.engine.stats), time.perf_counter()
                played = play_all(opened.player, assignments, SamplingParams(1.0, config.rollout.response_tokens))
                seconds = time.perf_counter() - begin
                now = opened.engine.stats
                found.append(
                    rollout_row(
                        seconds,
                        sum(len(t.turns) for t in played),
                        now.prompt_tokens - stats.prompt_tokens,
                        now.prefill_tokens - stats.prefill_tokens,
                        now.decode_tokens - stats.decode_tokens,
                    )
                )
                self.note(steps=found, **self.memory("played"))
        finally:
            opened.close()


def make_transfer(kind: str, model: Any, dtype: str) -> Transfer:
    if kind == "disk":
        return DiskTransfer(model, dtype, "/dev/shm")
    from sdjax.rollout.sglang_ipc import IpcTransfer  # torch is wanted for this way alone

    return IpcTransfer(model, dtype)


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = function(*args, **kwargs)
        seconds.append(round(time.perf_counter() - begin, 4))
        return result

    return call


def rollout_row(seconds: float, turns: float, prompt: float, prefill: float, drawn: float) -> dict[str, float]:
    return {
        "rollout_s": seconds,
        "turns": turns,
        "prompt_tokens": prompt,
        "prefill_tokens": prefill,
        "drawn_tokens": drawn,
        "drawn_tokens_per_s": drawn / seconds,
        "turns_per_s": turns / seconds,
    }


def steps(metrics: list[dict[str, Any]]) -> list[dict[str, float]]:
    """One row a training step, from the run's own metrics."""
    rows = []
    for line in metrics:
        if line["step"] == 0:
            continue
        row = rollout_row(
            line["time/rollout_s"],
            line["rollout/rows"],
            line["engine/prompt_tokens"],
            line["engine/prefill_tokens"],
            line["engine/decode_tokens"],
        )
        row |= {f"{phase}_s": line[f"time/{phase}_s"] for phase in PHASES}
        row |= {
            "step_s": line["time/step_s"],
            "gap_mean": line["engine/logp_gap_abs_mean"],
            "gap_max": line["engine/logp_gap_abs_max"],
            "k3": line["engine/kl_sample_train_k3"],
            "prompt_tokens_mean": line["rollout/prompt_tokens_mean"],
            "response_tokens_mean": line["rollout/response_tokens_mean"],
            "identical_groups": line["rollout/identical_groups"],
        }
        rows.append(row)
    return rows


def main() -> None:
    arguments = parse_arguments()
    logging.getLogger("absl").setLevel(logging.WARNING)
    # A part that is ended at its limit says in its log where it was.
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    part, code = Part(arguments), 0
    try:
        part.play()
        part.note(closed_s=round(time.perf_counter() - part.begin, 1))
    except Exception as error:
        traceback.print_exc()
        part.note(error=f"{type(error).__name__}: {str(error)[-800:]}")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed and written. Threads that a library left behind must not hold an accelerator.
    os._exit(code)


if __name__ == "__main__":
    main()
