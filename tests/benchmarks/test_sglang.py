"""The SGLang benchmark without servers: parts that fail or hang, what is kept of them, its tables and its models."""

import gzip
import io
import sys
import textwrap
from argparse import Namespace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import sglang, sglang_models, sglang_part
from sdjax.config import EnvConfig
from sdjax.models.tiny import write_tiny_checkpoint
from sdjax.models.tokenizer import Tokenizer

ARGUMENTS = {
    "steps": 0, "turns": 0, "tokens": 64, "tasks": 16, "group": 8, "sync": "", "no_sleep": False, "command": "serve",
    "flags": "--a=1 --b", "engine_url": "", "platform": "gpu",
}  # fmt: skip


@pytest.fixture
def part_program(tmp_path, monkeypatch):
    """Puts another program in the place of a part; returns a function that runs it."""

    def run(program: str, limit_s: float):
        file = tmp_path / "program.py"
        file.write_text(textwrap.dedent(program))
        launcher = tmp_path / "python"
        launcher.write_text(f'#!/bin/sh\nfor last; do :; done\nexec {sys.executable} {file} "$last"\n')
        launcher.chmod(0o755)
        monkeypatch.setattr(sglang.sys, "executable", str(launcher))
        monkeypatch.setattr(sglang, "LEAVING_S", 0.0)
        (tmp_path / "out").mkdir()
        return sglang.run_part("tiny", limit_s, tmp_path / "work", tmp_path / "out")

    return run


def test_a_part_that_hangs_is_ended_and_keeps_what_it_wrote(part_program, tmp_path):
    record = part_program(
        """
        import json, pathlib, sys, time
        work = pathlib.Path(sys.argv[1].removeprefix("--work="))
        (work / "run" / "logs" / "attempt_000").mkdir(parents=True)
        (work / "run" / "logs" / "attempt_000" / "sglang_0.log").write_text("from the server")
        (work / "part.json").write_text(json.dumps({"steps": [{"rollout_s": 1.0}]}))
        print("started", flush=True)
        time.sleep(600)
        """,
        2.0,
    )
    assert record["steps"] == [{"rollout_s": 1.0}] and "over its limit" in record["exit"]
    assert record["wall_s"] < 60
    kept = {path.name: gzip.decompress(path.read_bytes()).decode() for path in (tmp_path / "out").iterdir()}
    assert kept == {"tiny-output.log.gz": "started\n", "tiny-sglang_0.log.gz": "from the server"}


def test_a_part_that_fails_at_once_says_so(part_program):
    record = part_program("raise SystemExit(3)", 60.0)
    assert record["exit"] == 3 and "steps" not in record


def test_of_a_long_log_beginning_and_end_are_kept(tmp_path):
    log = tmp_path / "x.log"
    log.write_bytes(b"first" + b"." * (sglang.LOG_BYTES + 10) + b"last")
    sglang.keep_log(log, tmp_path / "x.gz")
    text = gzip.decompress((tmp_path / "x.gz").read_bytes())
    assert text.startswith(b"first") and text.endswith(b"last") and len(text) < sglang.LOG_BYTES + 100


def test_the_first_step_is_left_out_and_engines_are_compared():
    row = sglang_part.rollout_row(2.0, 10, 100, 50, 40)
    slow = sglang_part.rollout_row(9.0, 10, 100, 50, 10)
    parts = {
        "tiny": {"steps": [slow, row, row], "exit": 0},
        "tiny-embedded": {"steps": [slow, {**row, "drawn_tokens_per_s": 10.0}], "exit": 0},
        "2b": {"exit": 1, "error": "EngineError: no", "log_tail": "the [red]end"},
    }
    columns = {name: sglang.medians(part.get("steps", [])) for name, part in parts.items()}
    assert columns["tiny"]["rollout_s"] == 2.0 and columns["2b"] == {}
    assert sglang.ratios(columns) == {"tiny": 2.0}
    console = Console(file=io.StringIO(), width=150)
    sglang.show({"device": "a GPU", "parts": parts}, console)
    shown = console.file.getvalue()
    assert "2.00 times" in shown and "the [red]end" in shown and "EngineError: no" in shown


@pytest.mark.parametrize("model", ["tiny", "2b"])
@pytest.mark.parametrize("engine", ["sglang", "embedded"])
def test_settings_are_a_valid_run(model, engine):
    config = sglang_part.settings(Namespace(**ARGUMENTS), model, engine, Path("checkpoint"))
    assert config.train.tasks_per_step * config.train.group_size == config.rollout.slots == 128
    servers = config.rollout.sglang
    assert servers.sync == "ipc" and servers.sleep and servers.flags[-2:] == ("--a=1", "--b")
    remote = Namespace(**ARGUMENTS | {"engine_url": "http://127.0.0.1:1", "platform": "cpu"})
    servers = sglang_part.settings(remote, model, engine, Path("checkpoint")).rollout.sglang
    assert servers.urls == ("http://127.0.0.1:1",) and servers.sync == "disk" and not servers.sleep


def test_every_id_of_a_large_vocabulary_has_a_text(tmp_path):
    corpus = ["go to shelf 1", "take apple 1 from shelf 1"] * 20
    write_tiny_checkpoint(tmp_path, corpus, vocab_size=300, hidden=32, layers=2)
    before = Tokenizer.load(tmp_path, model_vocab_size=500)
    sglang_models.fill_vocabulary(tmp_path / "tokenizer.json", 500)
    after = Tokenizer.load(tmp_path, model_vocab_size=500)
    assert before.sampling_mask_V.sum() < 500 and after.sampling_mask_V.all()
    assert after.encode(corpus[1]) == before.encode(corpus[1]) and after.stop_ids == before.stop_ids
    assert after.decode([499]) and after.decode(after.encode(after.decode([499]))) == after.decode([499])


def test_prompts_fit_the_limit(tmp_path):
    env = EnvConfig(template="compact", history=2)
    texts = list(sglang_models.corpus(env))
    write_tiny_checkpoint(tmp_path, texts, vocab_size=1024, hidden=32, layers=2)
    tokenizer = Tokenizer.load(tmp_path)
    assert max(len(tokenizer.encode(text)) for text in texts) < sglang_part.PROMPT_TOKENS


def test_the_kit_names_every_package_once():
    folder = Path(sglang.__file__).parent / "sglang_kit"
    for file in ("requirements.txt", "requirements-trainer.txt"):
        lines = [line for line in (folder / file).read_text().splitlines() if not line.startswith("#")]
        assert all("==" in line and line.count("#") == 1 for line in lines)
        names = [line.split("==")[0] for line in lines]
        assert sorted(set(names)) == sorted(names)
