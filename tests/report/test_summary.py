"""Rows of the report's tables, and the comparisons that must be refused."""

import math

import pytest

from sdjax import jsonl
from sdjax.report import load, summary
from tests.report.synthetic import write_run

RISING = [0.1, 0.4, 0.5, 0.6, 0.7]


def rows(folder, seed, values, panel="p"):
    lines = [{"task": f"t{k}", "status": "done", "success": v, "panel_sha": panel} for k, v in enumerate(values)]
    jsonl.append(folder / "final_eval" / f"seed_{seed}.jsonl", lines)


def config(folder, method):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(f'{{"method": {{"name": "{method}"}}, "env": {{"name": "alfworld"}}}}')
    return folder


def test_final_row_by_hand(tmp_path):
    """Seeds score 50, 75, 25 %: mean 50, sample SD 25. Task sums of deviations in [2, 0, 0, -2] x 0.5 ..."""
    grpo, sdar = config(tmp_path / "g", "grpo"), config(tmp_path / "s", "sdar")
    for seed, values in enumerate(([1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0])):
        rows(sdar, seed, [bool(v) for v in values])
        rows(grpo, seed, [False] * 4)
    first, second = summary.final_rows(load.load_runs([sdar, grpo]))
    assert (first.run.method, first.mean, first.rank) == ("grpo", 0.0, 2)
    assert (second.mean, second.sd, second.rank) == pytest.approx((50.0, 25.0, 1))
    # Deviations in points per task: 150, 50, -50, -150.
    assert second.se == pytest.approx(math.sqrt(4 / 3 * (2 * 150**2 + 2 * 50**2)) / 12)
    assert second.difference is not None and second.difference.mean == pytest.approx(50.0)
    assert first.difference is None


def test_failed_episodes_are_counted_and_left_out(tmp_path):
    path = config(tmp_path / "g", "grpo")
    lines = [{"task": "a", "status": "done", "success": True}, {"task": "b", "status": "error", "success": False}]
    jsonl.append(path / "final_eval" / "seed_0.jsonl", lines)
    (row,) = summary.final_rows(load.load_runs([path]))
    assert (row.mean, row.episodes, row.failed, row.seeds) == (100.0, 2, 1, 1)
    assert math.isnan(row.sd) and row.rank is None


def test_unequal_panels_are_not_compared(tmp_path):
    grpo = write_run(tmp_path, "grpo", panel="a" * 64)
    sdar = write_run(tmp_path, "sdar", panel="b" * 64)
    runs = load.load_runs([grpo, sdar])
    final = summary.final_rows(runs)[1]
    assert final.difference is None and final.rank is None and "aaaaaaaaaaaa" in final.note
    assert not math.isnan(final.mean)  # the run itself is still shown
    assert "refused" in summary.budget_rows(runs)[1].note
    assert all(row.rank is None for row in summary.curve_rows(runs))
    assert any("panels differ" in text and "SDAR: bbbbbbbbbbbb" in text for text in summary.comparison_warnings(runs))


def test_a_panel_that_changes_inside_a_run_gives_no_statistic(tmp_path):
    path = write_run(tmp_path)
    records = jsonl.read(path / "final_eval" / "seed_1.jsonl")
    jsonl.rewrite(path / "final_eval" / "seed_1.jsonl", [record | {"panel_sha": "c" * 64} for record in records])
    (row,) = summary.final_rows(load.load_runs([path]))
    assert math.isnan(row.mean) and row.note.startswith("refused: mixes panels aaaaaaaaaaaa, cccccccccccc")


def test_unequal_steps_give_no_ranks(tmp_path):
    runs = load.load_runs([write_run(tmp_path, "grpo"), write_run(tmp_path, "sdar", steps=15)])
    assert all(row.rank is None for row in [*summary.curve_rows(runs), *summary.final_rows(runs)])
    assert any("validation steps differ" in text for text in summary.comparison_warnings(runs))
    assert summary.budget_rows(runs)[1].ratio_step == 15


def test_equal_runs_get_ranks(tmp_path):
    low = [0.0, 0.1, 0.1, 0.1, 0.1]
    runs = load.load_runs([write_run(tmp_path, "sdar", curve=low), write_run(tmp_path, "grpo", curve=RISING)])
    assert [(row.run.method, row.rank) for row in summary.curve_rows(runs)] == [("grpo", 1), ("sdar", 2)]
    assert summary.comparison_warnings(runs) == []


def test_collapse_is_read_out(tmp_path):
    curve = [0.1, 0.8, 0.9, 0.0, 0.0, 0.0, 0.0, 0.9, 0.9]
    path = write_run(tmp_path, "sdar", steps=40, curve=curve, tasks=128)
    (row,) = summary.curve_rows(load.load_runs([path]))
    assert row.verdict.startswith("collapsed, steps 15–30, recovered")
    path = write_run(tmp_path, "pcsd", steps=40, curve=[*curve[:3], *[0.0] * 6], tasks=128)
    (row,) = summary.curve_rows(load.load_runs([path]))
    assert "not recovered" in row.verdict and "fell" in row.verdict and "99.9 %" in row.verdict


def test_budget_uses_measured_time(tmp_path):
    grpo = write_run(tmp_path, "grpo", curve=RISING)
    sdar = write_run(tmp_path, "sdar", curve=RISING, teacher_s=3.2)  # about twice the time per step
    base, row = summary.budget_rows(load.load_runs([grpo, sdar]))
    assert (base.ratio, base.step) == (1.0, 20)
    assert 1.8 < row.ratio < 2.2 and row.step in (5, 10)
    assert row.budget_s == pytest.approx(base.run.net_seconds(20))
    assert summary.budget_rows(load.load_runs([sdar])) == []


def test_verdicts_claim_no_difference_when_the_interval_includes_zero(tmp_path):
    runs = load.load_runs([write_run(tmp_path, "grpo", curve=RISING), write_run(tmp_path, "sdar", curve=RISING)])
    (sentence,) = summary.verdicts(summary.final_rows(runs), summary.budget_rows(runs))
    assert "no difference shown" in sentence
    better = write_run(tmp_path, "skill_sd", curve=[0.99] * 5)
    runs = load.load_runs([runs[0].path, better])
    (sentence,) = summary.verdicts(summary.final_rows(runs), summary.budget_rows(runs))
    assert "higher for these two training runs" in sentence and "Skill-SD minus GRPO" in sentence


def test_ledger_totals(tmp_path):
    (run,) = load.load_runs([write_run(tmp_path, "sdar", teacher_s=0.5)])
    seconds = summary.ledger_seconds(run)
    assert summary.net_of(seconds) == pytest.approx(run.net_seconds(20), rel=1e-6)
    assert (seconds["validation"], seconds["startup"]) == pytest.approx((7.5, 4.0))
    (run.path / "ledger.jsonl").unlink()
    (again,) = load.load_runs([run.path])
    assert summary.net_of(summary.ledger_seconds(again)) == pytest.approx(run.net_seconds(20), rel=1e-6)


def test_facts_are_split_into_equal_and_different():
    same, different = summary.split_facts([{"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}])
    assert same == {"a": "1"}
    assert different == {"b": ["2", "3"], "c": ["–", "4"]}
    assert summary.flatten({"a": {"b": 1, "c": None}, "d": [1], "e": {}}) == {
        "a.b": "1",
        "a.c": "null",
        "d": "[1]",
        "e": "{}",
    }
