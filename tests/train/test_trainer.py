"""Whole runs of a tiny model: what they write, that a killed run goes on line by line, and what bad input does."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from sdjax import jsonl
from sdjax.errors import CheckpointError, ConfigError, DataError, EngineError, EnvError, ModelError, RunDirError
from sdjax.rollout import episodes
from sdjax.rollout.embedded import EmbeddedEngine
from sdjax.train.batch_file import load_batch
from sdjax.train.checkpoints import Checkpoints
from sdjax.train.rundir import RunDir
from sdjax.train.trainer import evaluate_only
from tests.train.test_update import make_model
from tests.train.tiny_run import run, tiny_config

ROOT = Path(__file__).parents[2]


def comparable(path: Path) -> list[dict]:
    """Metrics without what may differ between two runs of the same config: clocks and attempts."""
    return [
        {k: v for k, v in line.items() if not k.startswith(("time/", "cost/")) and k != "attempt"}
        for line in jsonl.read(path / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def finished(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "run"
    run(tiny_config(tiny_model, "sdar"), path)
    return path


def test_a_run_leaves_what_the_report_reads(finished):
    lines = jsonl.read(finished / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert sorted(p.name for p in (finished / "val").iterdir()) == [f"step_{s:06d}.jsonl" for s in (0, 2, 3)]
    assert sorted(p.name for p in (finished / "final_eval").iterdir()) == ["seed_0.jsonl", "seed_1.jsonl"]
    for name in ("config.json", "provenance.json", "DONE.json", "teacher_prompt_skills.txt"):
        assert (finished / name).exists()
    validation = jsonl.read(finished / "val" / "step_000002.jsonl")
    assert len({line["task"] for line in validation}) == len(validation) == 4
    assert {line["panel_sha"] for line in validation} == {
        json.loads((finished / "provenance.json").read_text())["panel"]["sha256"]
    }
    assert all(line["sampling"]["temperature"] == 0.4 and line["weight_version"] == 2 for line in validation)


def test_saved_batches_agree_with_the_transcripts(finished):
    names = sorted(p.name for p in (finished / "rollouts").iterdir())
    assert names == ["batch_000001.npz", "batch_000002.npz", "step_000001.json", "step_000002.json"]
    saved = load_batch(finished / "rollouts" / "batch_000002.npz")
    assert (saved.step, saved.method) == (2, "sdar")
    turn = json.loads((finished / "rollouts" / "step_000002.json").read_text())["episodes"][0]["turns"][-1]
    row = saved.tokens.index(turn["tokens"])
    n = len(turn["tokens"])
    assert saved.batch.mask_NL[row].sum() == n
    np.testing.assert_allclose(saved.batch.old_NL[row, :n], turn["logp_old"], atol=1e-4)
    np.testing.assert_allclose(saved.batch.views["skills"][row, :n], turn["logp_teacher"], atol=1e-4)
    np.testing.assert_allclose(saved.adv_NL[row, :n], turn["advantage"], atol=1e-4)


def test_time_adds_up_and_teacher_reads_its_context(finished):
    for line in jsonl.read(finished / "metrics.jsonl"):
        parts = sum(v for k, v in line.items() if k.startswith("time/") and k != "time/step_s")
        assert parts == pytest.approx(line["time/step_s"], rel=0.01)
        if line["step"]:
            assert line["teacher/context_frac"] == 1.0 and line["teacher/truncated_frac"] == 0.0
            assert line["engine/logp_gap_abs_max"] < 1e-4
            assert line["engine/weight_version"] == line["step"] - 1
    total = sum(r["seconds"] for r in jsonl.read(finished / "ledger.jsonl"))
    assert total == pytest.approx(sum(r["time/step_s"] for r in jsonl.read(finished / "metrics.jsonl")), rel=0.01)


def test_transcripts_carry_the_numbers_of_every_token(finished):
    record = json.loads((finished / "rollouts" / "step_000002.json").read_text())
    assert record["weight_name"] == "gate" and record["episodes"]
    for turn in record["episodes"][0]["turns"]:
        n = len(turn["tokens"])
        assert n == len(turn["logp_old"]) == len(turn["logp_teacher"]) == len(turn["weight"]) == len(turn["advantage"])
        gap = np.array(turn["logp_teacher"]) - np.array(turn["logp_old"])
        np.testing.assert_allclose(turn["weight"], 1 / (1 + np.exp(-5 * gap)), atol=1e-3)
        assert turn["privileged"] and turn["privileged"] not in turn["prompt"]


def test_two_runs_of_one_config_agree(finished, tiny_model, tmp_path):
    run(tiny_config(tiny_model, "sdar"), tmp_path / "again")
    assert comparable(tmp_path / "again") == comparable(finished)


def test_evaluation_alone_plays_only_what_is_missing(finished, tiny_model, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(finished, path, symlinks=True)
    (path / "final_eval" / "seed_1.jsonl").unlink()
    kept = (path / "final_eval" / "seed_0.jsonl").stat().st_mtime_ns
    with RunDir(path) as directory:
        evaluate_only(tiny_config(tiny_model, "sdar"), directory, Console(file=sys.stderr))
    assert (path / "final_eval" / "seed_0.jsonl").stat().st_mtime_ns == kept
    assert jsonl.read(path / "final_eval" / "seed_1.jsonl") == jsonl.read(finished / "final_eval" / "seed_1.jsonl")


def test_evaluation_of_an_untrained_run_is_refused(tiny_model, tmp_path):
    with RunDir(tmp_path / "new") as directory, pytest.raises(CheckpointError, match=r"no checkpoint of step 3"):
        evaluate_only(tiny_config(tiny_model, "sdar"), directory, Console(file=sys.stderr))
    assert not (tmp_path / "new" / "final_eval").exists()


def wait_for(condition, process, seconds=300):
    end = time.time() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.time() < end, "the run did not get that far"
        time.sleep(0.02)


def test_a_killed_run_goes_on_line_by_line(finished, tiny_model, tmp_path):
    path = tmp_path / "killed"
    command = [sys.executable, "-m", "tests.train.tiny_run", str(tiny_model), str(path), "sdar"]
    for steps in (1, 2):  # killed inside step 1, then inside step 2
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
        wait_for(lambda n=steps: len(jsonl.read(path / "metrics.jsonl")) >= n, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "torn')
    run(tiny_config(tiny_model, "sdar"), path)
    assert comparable(path) == comparable(finished)
    for name in ("val/step_000002.jsonl", "final_eval/seed_1.jsonl"):
        assert jsonl.read(path / name) == jsonl.read(finished / name)
    assert jsonl.read(path / "metrics.jsonl")[-1]["attempt"] == 3
    nets = [line["cost/net_s"] for line in jsonl.read(path / "metrics.jsonl")]
    assert nets == sorted(nets)


def test_a_finished_run_is_left_alone_and_another_config_refused(finished, tiny_model):
    before = (finished / "metrics.jsonl").read_bytes()
    with pytest.raises(RunDirError, match=r"train\.learning_rate"):
        run(tiny_config(tiny_model, "sdar", learning_rate=1.0), finished)
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_a_checkpoint_of_another_model_is_named(finished, tiny_model, tmp_path):
    """The directory's checkpoints come from a model of other shapes."""
    shutil.copytree(finished / "checkpoints", tmp_path / "checkpoints")
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2, asynchronous=False)
    other = {"params": make_model().init(jax.random.key(0))}
    with pytest.raises(CheckpointError, match=r"(?s)checkpoints/3 cannot be read.*another --workdir"):
        checkpoints.restore(3, other)


def test_missing_model_and_missing_games_are_named(tiny_model, tmp_path):
    config = tiny_config(tiny_model)
    broken = dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(tmp_path / "nothing")))
    with pytest.raises(ModelError, match="nothing"):
        run(broken, tmp_path / "a")
    broken = dataclasses.replace(config, env=dataclasses.replace(config.env, data=str(tmp_path / "no_games")))
    with pytest.raises((DataError, ConfigError), match="no_games"):
        run(broken, tmp_path / "b")


def test_an_overlong_prompt_ends_the_run_with_its_task(tiny_model, tmp_path):
    config = tiny_config(tiny_model)
    small = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, prompt_tokens=20))
    with pytest.raises(DataError, match=r"the prompt of generated/.*turn 0.*the limit is 20"):
        run(small, tmp_path / "run")
    failed = json.loads((tmp_path / "run" / "FAILED.json").read_text())
    assert failed["boundary"] == "data" and "prompt_tokens" in failed["fix"]


def test_an_engine_that_disagrees_stops_the_run(tiny_model, tmp_path, monkeypatch):
    from sdjax.train import trainer

    original = trainer.session.open_session

    def other_weights(config, logs):
        opened = original(config, logs)
        opened.engine.update_weights(jax.tree.map(lambda x: x * 1.5, opened.params), 0)
        return opened

    monkeypatch.setattr(trainer.session, "open_session", other_weights)
    with pytest.raises(EngineError, match="log-probabilities differ by"):
        run(tiny_config(tiny_model), tmp_path / "run")


class FlakyEnvironment:
    """Fails on the episodes whose number is in ``bad``; counts environments made."""

    def __init__(self, inner, owner):
        self.inner, self.owner = inner, owner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    async def step(self, action):
        self.owner.steps += 1
        if self.owner.steps in self.owner.bad:
            raise EnvError("the worker died.", "it is restarted.")
        return await self.inner.step(action)


@pytest.mark.parametrize(("bad", "failed", "retried"), [({1}, 0, 1), (range(1, 10_000), 6, 6)])
def test_failed_environments_are_retried_then_counted(tiny_model, tmp_path, monkeypatch, bad, failed, retried):
    """With one fault the episode is played again; when every step fails, no episode is left and the run says so."""
    from sdjax.envs.alfworld.adapter import AlfworldBenchmark

    class Owner:
        steps = -1_000

    owner = Owner()
    owner.bad = bad
    make = AlfworldBenchmark.make
    monkeypatch.setattr(AlfworldBenchmark, "make", lambda self: FlakyEnvironment(make(self), owner))
    validate = episodes.play_all

    def armed(player, assignments, sampling, on_done=None):
        owner.steps = 0 if assignments[0].purpose == "train" and assignments[0].step == 1 else -1_000
        return validate(player, assignments, sampling, on_done)

    from sdjax.evaluate import evaluation
    from sdjax.train import trainer

    monkeypatch.setattr(trainer, "play_all", armed)
    monkeypatch.setattr(evaluation, "play_all", armed)
    if failed == 6:
        with pytest.raises(EngineError, match=r"none of 6 episodes could be played; first error: .*the worker died"):
            run(tiny_config(tiny_model, steps=1), tmp_path / "run")
        return
    run(tiny_config(tiny_model, steps=1), tmp_path / "run")
    line = jsonl.read(tmp_path / "run" / "metrics.jsonl")[1]
    assert line["rollout/failed_episodes"] == failed and line["rollout/retried_episodes"] == retried
    assert line["rollout/rows"] == 6 * 3


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="needs root to mount a small disk")
def test_a_full_disk_loses_nothing(tiny_model, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        config = tiny_config(tiny_model)
        (disk / "ballast").write_bytes(b"x" * (1_048_576 - 300_000))
        with pytest.raises((CheckpointError, RunDirError)) as caught:
            run(config, disk / "run")
        assert "disk" in str(caught.value) or "space" in str(caught.value)
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        run(config, disk / "run")
        assert [line["step"] for line in jsonl.read(disk / "run" / "metrics.jsonl")] == [0, 1, 2, 3]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_further_validation_leaves_the_run_as_it_is(tiny_model, tmp_path, monkeypatch):
    """The teacher plays in the student's engine; afterwards the student's weights are back."""
    given, original = [], EmbeddedEngine.update_weights

    def update_weights(engine, params, version):
        given.append((version, sum(float(abs(leaf).sum()) for leaf in jax.tree.leaves(params))))
        original(engine, params, version)

    plain = tiny_config(tiny_model)
    teacher = dataclasses.replace(plain.teacher, weights="init")  # far from the student after two updates
    plain = dataclasses.replace(plain, teacher=teacher)
    wanted = ("greedy", "teacher_weights")
    extra = dataclasses.replace(plain, eval=dataclasses.replace(plain.eval, extra_validations=wanted, extra_every=2))
    run(plain, tmp_path / "plain")
    monkeypatch.setattr(EmbeddedEngine, "update_weights", update_weights)
    run(extra, tmp_path / "extra")
    own = [{k: v for k, v in line.items() if not k.startswith("val_")} for line in comparable(tmp_path / "extra")]
    assert own == comparable(tmp_path / "plain")
    for kind in wanted:
        files = sorted(path.name for path in (tmp_path / "extra" / f"val_{kind}").iterdir())
        assert files == ["step_000002.jsonl", "step_000003.jsonl"]
    for seed in range(2):
        scores = [jsonl.read(tmp_path / name / "final_eval" / f"seed_{seed}.jsonl") for name in ("plain", "extra")]
        assert scores[0] == scores[1]
    (student, teacher, again), *rest = [[total for v, total in given if v == step] for step in (2, 3)]
    assert student == again != teacher
    assert rest[0][0] == rest[0][2] != student and rest[0][1] == teacher  # the initial weights teach at every step
