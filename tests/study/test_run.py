"""Real cells of a tiny model in processes of their own: failures, locks, signals, resuming, evaluation, report."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from sdjax import jsonl
from sdjax.errors import ConfigError
from sdjax.study import Grid, needs, rule, status
from sdjax.study import manifest as manifests
from sdjax.study.command import Options, execute
from sdjax.study.run import Runner, _slots
from sdjax.train.rundir import RunDir
from tests.study.studies import CELL, path_of, plan, small, write_progress
from tests.train.tiny_run import tiny_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model"))


def _study(tiny_model, *methods, **keys):
    return small(*methods, models={"tiny": tiny_model}, **keys)


def _run(manifest, wanted=(), parallel=1):
    console = Console(file=io.StringIO(), width=200)
    code = Runner(manifest, manifests.select(manifest, wanted), console, parallel=parallel).run()
    return code, console.file.getvalue()  # type: ignore[attr-defined]


def _call(*arguments: str, **options):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-m", "sdjax.main", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def mixed(tiny_model, tmp_path_factory):
    """Three cells: one is done, one fails (its panel does not exist), one is locked by this process."""
    workdir = tmp_path_factory.mktemp("mixed")
    broken = rule({"eval.panel": "nowhere"}, method="sdar")
    manifest = plan(_study(tiny_model, rules=[broken]), workdir)
    with RunDir(path_of(manifest, manifest.entries[2])):
        code, text = _run(manifest, parallel=2)
    return manifest, workdir, code, text


def test_a_failure_stops_nothing_else_and_a_locked_cell_is_skipped(mixed):
    manifest, workdir, code, text = mixed
    assert code == 1
    assert "alfworld-tiny-grpo: done after" in text and "alfworld-tiny-rlsd: locked" in text
    assert "alfworld-tiny-sdar: failed" in text and "[data]" in text and "nowhere" in text
    assert all(part in text.splitlines()[-1] for part in ("3 runs: ", "1 done", "1 failed", "1 locked"))
    assert [one.state for one in status.states(manifest, workdir)] == ["done", "failed", "queued"]
    log = (path_of(manifest, manifest.entries[0]) / "logs" / "study.log").read_text()
    assert "--mode=train" in log and "validation after 2 updates" in log


def test_what_is_done_is_not_started_again(mixed):
    manifest = mixed[0]
    path = path_of(manifest, manifest.entries[0])
    code, text = _run(manifest, ["0"])
    assert code == 0 and "alfworld-tiny-grpo: was done" in text
    assert [attempt.name for attempt in path.glob("logs/attempt_*")] == ["attempt_001"]


def test_the_report_covers_what_ran_and_names_what_did_not(mixed):
    workdir = mixed[1]
    done = _call("--mode=study", "--study=report", f"--workdir={workdir}")
    assert done.returncode == 0, done.stderr
    page = (workdir / "report.html").read_text()
    assert "GRPO" in page and "RLSD" in page and "not run" in page


def test_evaluation_plays_missing_and_torn_files_only_and_never_trains(mixed):
    manifest = mixed[0]
    entry = manifest.entries[0]
    path = path_of(manifest, entry)
    files = [path / "final_eval" / f"seed_{seed}.jsonl" for seed in (0, 1)]
    before, metrics = [file.read_bytes() for file in files], (path / "metrics.jsonl").read_bytes()
    kept = files[0].stat().st_mtime_ns
    files[1].write_bytes(before[1][:-20])
    assert entry.eval is not None
    done = _call(*entry.eval[3:])
    assert done.returncode == 0 and "is not whole and is played again" in done.stdout, done.stderr
    assert [file.read_bytes() for file in files] == before and files[0].stat().st_mtime_ns == kept
    assert (path / "metrics.jsonl").read_bytes() == metrics
    attempts = len(list(path.glob("logs/attempt_*")))
    done = _call(*entry.eval[3:])
    assert done.returncode == 0 and "nothing to do" in done.stdout
    assert len(list(path.glob("logs/attempt_*"))) == attempts


def test_evaluation_of_a_run_that_failed_leaves_its_failure(mixed):
    entry = mixed[0].entries[1]
    assert entry.eval is not None
    done = _call(*entry.eval[3:])
    assert done.returncode == 1 and "has no checkpoint of step 2" in done.stderr
    assert (path_of(mixed[0], entry) / "FAILED.json").exists()


def test_sigterm_stops_the_children_and_the_same_command_goes_on(tiny_model, tmp_path):
    """The cell is long; it is stopped after its first update, and then finished with the same bytes of episodes."""
    manifest = plan(_study(tiny_model, "grpo", overrides="train.steps=12 eval.every=6"), tmp_path)
    path = path_of(manifest, manifest.entries[0])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "sdjax.main", "--mode=study", "--study=run", f"--workdir={tmp_path}"]
    runner = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    end = time.time() + 120
    while not status.tail(path / "metrics.jsonl") or status.tail(path / "metrics.jsonl")[-1]["step"] < 1:
        assert runner.poll() is None and time.time() < end
        time.sleep(0.05)
    runner.send_signal(signal.SIGTERM)
    text, _ = runner.communicate(timeout=120)
    assert runner.returncode == 128 + signal.SIGTERM and "1 interrupted" in text and "goes on" in text
    (one,) = status.states(manifest, tmp_path)
    assert one.state == "stopped" and 1 <= one.step < 12
    code, text = _run(manifest)
    assert code == 0 and "alfworld-tiny-grpo: done" in text
    assert [line["step"] for line in jsonl.read(path / "metrics.jsonl")] == list(range(13))


def test_what_is_needed_runs_first_and_its_failure_holds_cells_back(tiny_model, tmp_path):
    manifest = plan(_study(tiny_model, "grpo", warm_start=CELL), tmp_path / "good")
    code, text = _run(manifest, ["alfworld-tiny-grpo"])
    assert code == 0 and text.index("warm_start: done") < text.index("alfworld-tiny-grpo: done")
    config = json.loads((path_of(manifest, manifest.entries[1]) / "config.json").read_text())
    assert config["model"]["path"] == f"{manifest.entries[0].workdir}/model"

    rules = [rule({"eval.panel": "nowhere"}, kind="sft")]
    manifest = plan(_study(tiny_model, "grpo", warm_start=CELL, rules=rules), tmp_path / "bad")
    code, text = _run(manifest)
    assert code == 1 and "alfworld-tiny-grpo: held back (needs alfworld-tiny-warm_start, which is failed)" in text


# --- without a child --------------------------------------------------------------------------------------------------


def test_a_missing_model_or_data_path_is_named_before_anything_starts(tmp_path):
    manifest = plan(small("grpo", data={"alfworld": "no/such/games"}), tmp_path)
    code, text = _run(manifest)
    assert code == 1 and "not runnable" in text and not path_of(manifest, manifest.entries[0]).exists()
    assert "model.path = no/such/model does not exist (--config.models.tiny=PATH" in text
    assert "env.data = no/such/games does not exist" in text and "--config.data.alfworld=PATH" in text


def test_without_java_scienceworld_is_not_runnable(monkeypatch, tmp_path):
    config = {"model": {"name": "m", "path": str(tmp_path)}, "env": {"name": "scienceworld", "data": "generated"}}
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert "has no bin/java" in needs.missing(config, tmp_path, model_is_made=False)


def test_a_config_that_changed_since_the_plan_is_not_run(tiny_model, tmp_path):
    cell = tmp_path / "cell.py"
    cell.write_text(Path(CELL).read_text())
    values = _study(tiny_model, "grpo")
    values.grid = Grid(values.grid.points, f"{cell}:{{method}}")
    manifest = plan(values, tmp_path / "study")
    cell.write_text(
        cell.read_text()
        .replace("train.steps", "train.kl_coef, train.steps")
        .replace("= 2, 2, 2, 8", "= 0.5, 2, 2, 2, 8")
    )
    code, text = _run(manifest)
    assert code == 1 and "has changed since the plan" in text
    cell.write_text("def get_config(_):\n    return None\n")
    code, text = _run(manifest)
    assert code == 1 and "cell alfworld-tiny-grpo" in text


def test_a_run_directory_with_another_config_is_not_touched(tiny_model, tmp_path):
    manifest = plan(_study(tiny_model, "grpo"), tmp_path)
    path = write_progress(manifest, tmp_path, manifest.entries[0], 1)
    (path / "config.json").write_text("{}")
    code, text = _run(manifest)
    assert code == 1 and "config.json has hash" in text and not (path / "logs").exists()


def test_accelerators_are_divided_among_cells(monkeypatch, tmp_path):
    entries = plan(small(), tmp_path).entries
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert _slots(1, entries) == [""] and _slots(2, entries) == ["4,5", "6,7"] and _slots(4, entries)[3] == "7"
    with pytest.raises(ConfigError, match="leaves 0 of 4 accelerators"):
        _slots(5, entries)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert _slots(3, entries) == [""] * 3
    with pytest.raises(ConfigError, match="use 1 or more"):
        _slots(0, entries)


@pytest.mark.parametrize(
    ("verb", "settings", "message"),
    [
        ("plans", None, "did you mean 'plan'?"),
        ("", None, "is not one of plan"),
        ("run", None, "manifest.json does not exist"),
        ("status", small(), "manifest.json does not exist"),
        ("plan", None, "--config is missing"),
        ("plan", {"name": "x"}, "--config names no study file"),
    ],
)
def test_bad_input_says_what_to_do(verb, settings, message, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(message)):
        execute(verb, settings, tmp_path, Options(), Console(quiet=True))


def test_the_command_line_shows_one_message(tmp_path):
    done = _call("--mode=study", f"--workdir={tmp_path}", "--study=plan", "--config=experiments/quickstart.py:grpo")
    assert done.returncode == 2 and "--config names no study file" in done.stderr and "Traceback" not in done.stderr


def test_a_warm_start_alone_is_nothing_to_report(tmp_path):
    plan(small("grpo", warm_start=CELL), tmp_path)
    with pytest.raises(ConfigError, match="no training run"):
        execute("report", None, tmp_path, Options(cells=["0"]), Console(quiet=True))
