"""Expected costs from ledgers: the nearest kind of run, by hand."""

import json

import pytest

from sdjax.study.cost import estimate, observe
from tests.study.studies import plan, small, write_progress


def _config(env="alfworld", model="m", method="grpo"):
    return {"env": {"name": env}, "model": {"name": model, "path": "x"}, "method": {"name": method}}


def _write(root, name, per_step, *, steps=4, devices=2, once=30.0, **config):
    path = root / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(_config(**config)))
    lines = [{"step": 0, "phase": "compile", "seconds": once, "devices": devices}]
    lines += [{"step": s, "phase": "rollout", "seconds": per_step, "devices": devices} for s in range(1, steps + 1)]
    lines += [{"step": steps, "phase": "lost", "seconds": 1e9, "devices": devices}]
    (path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def seen(tmp_path):
    runs = [
        _write(tmp_path, "a", 10.0),
        _write(tmp_path, "b", 15.0, method="sdar"),
        _write(tmp_path, "c", 40.0, model="large"),
        _write(tmp_path, "d", 80.0, env="webshop"),
    ]
    (tmp_path / "broken").mkdir()
    return observe([*runs, tmp_path / "broken", tmp_path / "nowhere"])


@pytest.mark.parametrize(
    ("config", "hours", "basis"),
    [
        ({}, (60 + 100 * 20) / 3600, "1 run of the same cell"),
        ({"method": "sdar"}, (60 + 100 * 30) / 3600, "1 run of the same cell"),
        (
            {"model": "large", "method": "sdar"},
            (60 + 100 * 80 * 1.5) / 3600,
            "1 run of the same environment and model, scaled",
        ),
        (
            {"method": "rlsd"},
            (60 + 100 * (20 + 20) / 2) / 3600,
            "2 runs of the same environment and model, other methods",
        ),
        ({"env": "webshop", "model": "large"}, (60 + 100 * 160) / 3600, "1 run of the same environment, other models"),
        ({"env": "searchqa"}, None, "unknown"),
    ],
)
def test_the_nearest_runs_are_taken(seen, config, hours, basis):
    cost = estimate(_config(**config), 100, 8, seen)
    assert cost.basis.startswith(basis)
    if hours is None:
        assert cost.gpu_hours is None and cost.hours is None
    else:
        assert cost.gpu_hours == pytest.approx(hours, abs=1e-4) and cost.hours == pytest.approx(hours / 8, abs=1e-4)


def test_a_warm_start_is_no_run_of_its_method(tmp_path):
    path = _write(tmp_path, "a", 10.0)
    text = (path / "ledger.jsonl").read_text()
    (path / "ledger.jsonl").write_text(text.replace("rollout", "update"))
    assert observe([path]) == ()


def test_a_plan_uses_the_runs_of_the_study_and_of_other_folders(tmp_path):
    first = plan(small(), tmp_path / "a")
    assert all(entry.cost.gpu_hours is None for entry in first.entries)
    write_progress(first, tmp_path / "a", first.entries[0], 2)
    again = plan(small(), tmp_path / "a")
    expected = (30 + 2 * 10) / 3600
    assert again.entries[0].cost.gpu_hours == pytest.approx(expected, abs=1e-4)
    assert again.entries[1].cost.basis.endswith("ratio unknown and taken as 1")
    other = plan(small(overrides="train.steps=5"), tmp_path / "b", seen_in=[str(tmp_path / "a")])
    assert other.entries[0].cost.gpu_hours == pytest.approx((30 + 5 * 10) / 3600, abs=1e-4)
