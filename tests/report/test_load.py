"""Loading of run directories: complete, partial, damaged, restarted."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sdjax import jsonl
from sdjax.errors import RunDirError
from sdjax.report import load, records
from tests.report.synthetic import write_run

ROOT = Path(__file__).parents[2]


def edit_line(path, number, **changes):
    records = jsonl.read(path)
    records[number] |= changes
    jsonl.rewrite(path, records)


def episode(task, **changes):
    base = {"task": task, "status": "failed", "success": False, "score": 0.0, "panel_sha": "p", "sampling": {}}
    return base | changes


def test_a_complete_run(tmp_path):
    run = load.load_run(write_run(tmp_path, "sdar", seed=3, teacher_s=0.5))
    assert (run.method, run.env, run.model, run.seed, run.state) == ("sdar", "alfworld", "tiny-0.2M", 3, "done")
    assert run.steps == tuple(range(1, 21))
    assert run.validation_steps == [0, 5, 10, 15, 20]
    assert len(run.final) == 3 * 64 and run.final_seeds == [0, 1, 2]
    assert run.sampling["final"] == {"temperature": 0.4, "max_new_tokens": 64}
    assert run.net_seconds(0) == 0.0
    assert run.net_seconds(20) == pytest.approx(run.metrics["cost/net_s"][20])
    assert run.warnings == ()


def test_scores_are_percent_and_failed_episodes_are_no_zeros(tmp_path):
    jsonl.append(
        tmp_path / "val" / "step_000005.jsonl",
        [episode("a", success=True, score=0.2), episode("b", score=0.4), episode("c", status="error", error="x")],
    )
    (row,) = load.load_run(tmp_path).validations
    assert (row.value, row.episodes, row.failed) == (50.0, 3, 1)
    (tmp_path / "config.json").write_text('{"env": {"name": "scienceworld"}}')
    assert load.load_run(tmp_path).validations[0].value == pytest.approx(30.0)


def test_a_failed_final_episode_has_no_value(tmp_path):
    jsonl.append(tmp_path / "final_eval" / "seed_2.jsonl", [episode("a", status="error"), episode("b", success="yes")])
    run = load.load_run(tmp_path)
    assert [(one.rollout_seed, one.failed, math.isnan(one.value)) for one in run.final] == [(2, True, True)] * 2
    assert any("without a numeric 'success'" in text for text in run.warnings)


def test_a_run_that_has_only_a_config(tmp_path):
    (tmp_path / "config.json").write_text('{"method": {"name": "grpo"}}')
    run = load.load_run(tmp_path)
    assert run.state == "not run"
    assert (run.validations, run.final, run.ledger, run.steps_done) == ((), (), (), 0)


def test_what_is_no_run_directory_is_an_error(tmp_path):
    with pytest.raises(RunDirError, match="not a run directory"):
        load.load_run(tmp_path)
    with pytest.raises(RunDirError, match="not a run directory"):
        load.load_run(tmp_path / "absent")
    with pytest.raises(RunDirError, match="no run directory was given"):
        load.load_runs([])


def test_torn_and_damaged_files_become_warnings(tmp_path):
    path = write_run(tmp_path)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "tra')
    (path / "val" / "step_000010.jsonl").write_text("")
    (path / "ledger.jsonl").write_text('{"phase": "rollout"}\nnot json\n{"phase": "save", "seconds": 1}\n')
    (path / "provenance.json").write_text("{")
    run = load.load_run(path)
    assert run.steps_done == 20
    assert run.validation_steps == [0, 5, 15, 20]
    assert run.ledger == () and run.provenance == {}
    text = "\n".join(run.warnings)
    assert "metrics.jsonl: the last line is torn" in text
    assert "step_000010.jsonl: no scored episode" in text
    assert "ledger.jsonl is left out: line 2 is not a JSON object" in text
    assert "provenance.json is not valid JSON" in text


def test_a_last_line_without_newline_is_not_torn(tmp_path):
    path = write_run(tmp_path)
    data = (path / "metrics.jsonl").read_bytes()
    (path / "metrics.jsonl").write_bytes(data.rstrip(b"\n"))
    assert load.load_run(path).warnings == ()


def test_nan_metrics_and_backward_clocks_are_flagged(tmp_path):
    path = write_run(tmp_path)
    edit_line(path / "metrics.jsonl", 3, **{"optim/grad_norm": math.nan})
    edit_line(path / "metrics.jsonl", 8, **{"cost/net_s": 1.0, "optim/clip_frac": 2.5, "time/rollout_s": -1.0})
    edit_line(path / "ledger.jsonl", 2, end=-5.0)
    text = "\n".join(load.load_run(path).warnings)
    assert "optim/grad_norm is not finite at step 4." in text
    assert "cost/net_s runs backwards at step 9" in text
    assert "optim/clip_frac is outside 0..1 at step 9." in text
    assert "time/rollout_s is negative at step 9." in text
    assert "does not sum to time/step_s within 1 % at step 9." in text
    assert "1 phases end before they start" in text


def test_costs_of_one_step_may_fall(tmp_path):
    path = write_run(tmp_path)
    lines = jsonl.read(path / "metrics.jsonl")
    costs = [line | {"cost/engine_s": 10.0 / line["step"], "cost/net_gpu_h": line["step"]} for line in lines]
    jsonl.rewrite(path / "metrics.jsonl", costs)
    assert load.load_run(path).warnings == ()
    edit_line(path / "metrics.jsonl", 10, **{"cost/net_gpu_h": 0.5})
    assert any("cost/net_gpu_h runs backwards at step 11" in text for text in load.load_run(path).warnings)


def test_a_ledger_that_disagrees_with_the_metrics_is_flagged(tmp_path):
    path = write_run(tmp_path)
    edit_line(path / "ledger.jsonl", 2, seconds=500.0)
    assert any("net time is" in text and "in ledger.jsonl" in text for text in load.load_run(path).warnings)


def test_restarts_book_repeated_work_as_lost(tmp_path):
    path = write_run(tmp_path)
    last_metrics = jsonl.read(path / "metrics.jsonl")[-1]
    jsonl.append(path / "metrics.jsonl", [last_metrics | {"attempt": 2, "train/reward_mean": -7.0}])
    phase = {"attempt": 2, "step": 20, "phase": "rollout", "seconds": 2.0, "start": 900.0, "end": 902.0, "devices": 1}
    jsonl.append(path / "ledger.jsonl", [phase])
    run = load.load_run(path)
    assert run.attempts == 2
    assert run.metrics["train/reward_mean"][20] == -7.0 and len(run.steps) == 20
    lost = [phase for phase in run.ledger if phase.booked == records.LOST]
    assert {(phase.step, phase.attempt) for phase in lost} == {(20, 1)}
    assert [phase.phase for phase in lost] == list(records.NET_PHASES)
    assert any("1 steps were run again" in text for text in run.warnings)


def test_what_the_trainer_cut_at_a_restart_is_lost(tmp_path):
    path = write_run(tmp_path)
    cut = {"attempt": 1, "step": 21, "phase": "lost", "lost_phase": "rollout", "seconds": 2.5, "devices": 1}
    jsonl.append(path / "ledger.jsonl", [cut])
    run = load.load_run(path)
    assert [phase.seconds for phase in run.ledger if phase.booked == records.LOST] == [2.5]
    assert run.warnings == ()


def test_odd_types_in_a_ledger_are_no_crash(tmp_path):
    path = write_run(tmp_path)
    odd = {"attempt": "2", "step": [1], "phase": "rollout", "seconds": 1.0, "start": "x", "devices": None}
    jsonl.append(path / "ledger.jsonl", [odd, {"phase": 3, "seconds": 1.0}])
    run = load.load_run(path)
    assert (run.ledger[-1].step, run.ledger[-1].attempt, run.ledger[-1].devices) == (None, 1, 1)
    assert any("1 lines without phase or seconds" in text for text in run.warnings)


def test_panels_are_checked(tmp_path):
    path = write_run(tmp_path)
    edit_line(path / "val" / "step_000005.jsonl", 0, panel_sha="b" * 64, task="game-1")
    edit_line(path / "val" / "step_000010.jsonl", 0, panel_sha=None, score=3.0, success=3.0)
    text = "\n".join(load.load_run(path).warnings)
    assert "mix the panels" in text and "no statistic over them" in text
    assert "validations without a panel hash" in text
    assert "1 tasks appear more than once" in text
    assert "1 episodes have a score outside 0..1" in text


def test_failed_runs_keep_boundary_and_fix(tmp_path):
    path = write_run(tmp_path, done=False)
    assert load.load_run(path).state == "unfinished"
    (path / "FAILED.json").write_text(json.dumps({"boundary": "engine", "message": "m", "fix": "f"}))
    run = load.load_run(path)
    assert run.state == "failed" and run.failure["boundary"] == "engine"


def test_labels_are_unique_and_duplicates_load_once(tmp_path):
    a = write_run(tmp_path / "x", "sdar", seed=0)
    b = write_run(tmp_path / "x", "sdar", seed=1)
    grpo = write_run(tmp_path / "x", "grpo")
    runs = load.load_runs([a, b, a, grpo, a / ".." / a.name])
    assert [run.label for run in runs] == ["GRPO", "SDAR seed 0", "SDAR seed 1"]
    same_seed = write_run(tmp_path / "y", "sdar", seed=0, tasks=32)
    assert len({run.label for run in load.load_runs([a, same_seed, grpo])}) == 3


def test_a_copy_of_a_run_is_left_out_with_a_warning(tmp_path):
    original, grpo = write_run(tmp_path / "x", "sdar"), write_run(tmp_path / "x", "grpo")
    copy = shutil.copytree(original, tmp_path / "y")
    runs = load.load_runs([original, copy, grpo])
    assert [run.label for run in runs] == ["GRPO", "SDAR"]
    (warning,) = runs[1].warnings
    assert str(copy) in warning and "is a copy of" in warning and str(original) in warning


def test_planned_runs_are_found_and_model_directories_are_not(tmp_path):
    done = write_run(tmp_path, "grpo")
    planned = tmp_path / "study" / "planned"
    planned.mkdir(parents=True)
    (planned / "config.json").write_text('{"method": {"name": "sdar"}, "env": {"name": "alfworld"}}')
    (done / "model").mkdir()
    (done / "model" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert set(load.find_runs([tmp_path])) == {done, planned}
    states = {run.method: run.state for run in load.load_runs(load.find_runs([tmp_path]))}
    assert states == {"grpo": "done", "sdar": "not run"}


def test_nan_scores_are_failed_episodes(tmp_path):
    jsonl.append(tmp_path / "val" / "step_000000.jsonl", [episode("a", success=math.nan), episode("b", success=True)])
    run = load.load_run(tmp_path)
    assert (run.validations[0].value, run.validations[0].failed) == (100.0, 1)
    assert any("without a numeric 'success'" in text for text in run.warnings)


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl", "config.json", "val/step_000005.jsonl"])
def test_empty_files(tmp_path, name):
    path = write_run(tmp_path)
    (path / name).write_text("")
    run = load.load_run(path)
    assert run.final and run.validations
    if name == "val/step_000005.jsonl":
        assert run.validation_steps == [0, 10, 15, 20]
    if name == "config.json":
        assert run.method == "unknown" and any("not valid JSON" in text for text in run.warnings)


def test_many_runs_are_read_in_several_processes_alike(tmp_path):
    """In a fresh interpreter: where JAX is loaded, as in other tests, the runs are read one after another."""
    for seed in range(34):
        write_run(tmp_path, "sdar", seed=seed, steps=5, tasks=4)
    code = """
import sys
from sdjax.report import load
paths = load.find_runs([sys.argv[1]])
together = load.load_runs(paths)
alone = [run for path in paths for run in load.load_path(path)]
key = lambda run: (run.name, run.validations, run.final, run.ledger, run.metrics, run.warnings)
assert len(together) == 34 and sorted(map(key, together), key=str) == sorted(map(key, alone), key=str)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True)
