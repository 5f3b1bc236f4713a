"""Methods against settings: aggregates, ranks, wins and losses, and what they refuse."""

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest

from sdjax import jsonl
from sdjax.report import find_runs, load_runs, stats, study, study_figures, summary, tables
from sdjax.report.html import build_report
from sdjax.report.records import NET_PHASES
from tests.report.synthetic import write_run
from tests.report.synthetic_study import write_study

METHODS: tuple[str, ...] = ("grpo", "sdar", "icsd", "pcsd")
ENVS: tuple[str, ...] = ("alfworld", "scienceworld", "webshop", "searchqa")


def build(paths):
    runs = load_runs(paths)
    finals, curves, budgets = summary.final_rows(runs), summary.curve_rows(runs), summary.budget_rows(runs)
    return study.build(finals, curves, budgets), curves, runs


def small(root, **options):
    panels = {"alfworld": 40, "searchqa": 60}
    return write_study(
        root, **({"methods": METHODS, "sizes": ("2B", "4B"), "panels": panels, "steps": 20, "seeds": 3} | options)
    )


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return small(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def built(paths):
    return build(paths)


def test_cells_and_aggregates_by_hand(built):
    data, _, runs = built
    assert data.methods == METHODS and data.is_grid
    assert [study.setting_name(s) for s in data.settings] == [
        "ALFWorld / Qwen3.5-2B",
        "ALFWorld / Qwen3.5-4B",
        "Search-QA / Qwen3.5-2B",
        "Search-QA / Qwen3.5-4B",
    ]
    rows = {row.method: row for row in study.method_rows(data)}
    mine = [run for run in runs if run.method == "sdar"]
    means = [np.mean([e.value for e in run.final]) for run in mine]
    assert rows["sdar"].final == pytest.approx(np.mean(means))
    assert rows["sdar"].auc == pytest.approx(
        np.mean([stats.auc(r.validation_steps, r.validation_values) for r in mine])
    )
    per_seed = [np.mean([e.value for e in run.final if e.rollout_seed == seed]) for run in mine for seed in range(3)]
    assert rows["sdar"].iqm is not None and rows["sdar"].iqm.value == pytest.approx(stats.iqm(np.array(per_seed)))
    assert rows["sdar"].iqm.low < rows["sdar"].iqm.value < rows["sdar"].iqm.high
    assert rows["grpo"].improvement is None and rows["grpo"].ratio == 1.0
    assert 0 <= rows["sdar"].improvement.low <= rows["sdar"].improvement.high <= 1  # pyright: ignore
    ranked = sorted(rows.values(), key=lambda row: row.final, reverse=True)
    assert [row.final_rank for row in ranked] == [1, 2, 3, 4]
    drops = sorted(rows.values(), key=lambda row: row.drop)
    assert [row.drop_rank for row in drops] == stats.ranks([round(row.drop, 2) for row in drops], descending=False)


def test_wins_losses_and_ties_are_differences_of_rounded_means(built):
    data, _, _ = built
    for record in study.records(data):
        for setting, (points, outcome, beyond) in record.outcomes.items():
            cell, base = data.cell(record.method, setting), data.cell("grpo", setting)
            assert points == pytest.approx(cell.mean - base.mean, abs=0.011)
            assert outcome == ("tie" if points == 0 else "win" if points > 0 else "loss")
            assert cell.difference is not None and beyond == cell.difference.conclusive
        assert sum(record.count(kind) for kind in ("win", "loss", "tie")) == 4


def test_equal_means_tie_and_many_small_wins_can_mislead():
    settings = [("alfworld", str(number)) for number in range(4)]
    means = {"grpo": [50.0, 50, 50, 50.001], "icsd": [51.0, 51, 0, 50.004]}
    cells = {(m, s): study.Cell(m, s, (), mean=v[k]) for m, v in means.items() for k, s in enumerate(settings)}
    (record,) = study.records(study.Study(("grpo", "icsd"), tuple(settings), cells, {}))
    assert [record.count(kind) for kind in ("win", "loss", "tie")] == [2, 1, 1]
    assert record.mean == pytest.approx(-12.0) and record.misleading
    assert record.count("win", beyond=True) == 0


def test_costlier_pairs_are_counted(built):
    data, _, _ = built
    found = study.costlier(data)
    assert (found.pairs, found.costlier) == (12, 12)  # every method of the synthetic study costs more than GRPO
    assert found.lower + found.tied + found.higher == 12 and found.unscored == 0
    lower = sum(r.count("loss") for r in study.records(data))
    assert found.lower == lower


def test_missing_cells_take_ranks_away_and_are_listed(paths):
    data, _, _ = build([path for path in paths if path.name != "searchqa-4b-sdar"])
    rows = {row.method: row for row in study.method_rows(data)}
    assert (rows["sdar"].covered, rows["sdar"].of, rows["sdar"].final_rank) == (3, 4, None)
    assert {rows[m].final_rank for m in METHODS if m != "sdar"} == {1, 2, 3}
    assert tables.missing_cells(data) == ["SDAR on Search-QA / Qwen3.5-4B: not run"]
    figure = study_figures.rank_changes(list(rows.values()), dict.fromkeys(METHODS, _LOOK))
    assert figure is not None and "SDAR" not in figure.alt


def test_unequal_panels_leave_the_setting_out_and_say_which(paths, tmp_path):
    copies = [shutil.copytree(path, tmp_path / path.name) for path in paths]
    (odd,) = [path for path in copies if path.name == "alfworld-4b-pcsd"]
    for file in odd.glob("final_eval/*.jsonl"):
        jsonl.rewrite(file, [line | {"panel_sha": "f" * 64} for line in jsonl.read(file)])
    data, _, runs = build(copies)
    (setting,) = data.refused
    assert setting == ("alfworld", "Qwen3.5-4B")
    assert "PCSD: ffffffffffff" in data.refused[setting] and "GRPO: 000000000000" in data.refused[setting]
    rows = study.method_rows(data)
    assert all((row.covered, row.of) == (3, 4) and row.final_rank for row in rows)  # equal sets: ranks stay
    assert all(setting not in record.outcomes for record in study.records(data))
    assert tables.warnings(runs, data, [])[0][1].startswith("ALFWorld / Qwen3.5-4B takes part in no aggregate: final")
    text = build_report(copies, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "takes part in no aggregate" in text and "(panels differ)" in text


def test_a_run_cut_short_is_shown_but_not_aggregated(paths, tmp_path):
    copies = [shutil.copytree(path, tmp_path / path.name) for path in paths]
    (short,) = [path for path in copies if path.name == "alfworld-4b-icsd"]
    jsonl.rewrite(short / "metrics.jsonl", [line for line in jsonl.read(short / "metrics.jsonl") if line["step"] <= 15])
    (short / "val" / "step_000020.jsonl").unlink()
    data, _, _ = build(copies)
    cell = data.cell("icsd", ("alfworld", "Qwen3.5-4B"))
    assert cell.partial == "15 of 20 updates" and not cell.scored and not math.isnan(cell.mean)
    rows = {row.method: row for row in study.method_rows(data)}
    assert (rows["icsd"].covered, rows["icsd"].curves, rows["icsd"].auc_rank) == (3, 3, None)
    assert {rows[m].auc_rank for m in METHODS if m != "icsd"} == {1, 2, 3}
    assert tables.missing_cells(data) == ["ICSD on ALFWorld / Qwen3.5-4B: 15 of 20 updates"]
    assert "(15 of 20 updates)" in build_report(copies, tmp_path / "report.html").read_text(encoding="utf-8")


def test_one_method_only(tmp_path):
    runs = [write_run(tmp_path, "sdar", seed=seed) for seed in range(2)]
    data, _, _ = build(runs)
    (row,) = study.method_rows(data)
    assert (row.covered, row.final_rank, row.improvement) == (1, None, None)
    assert study.records(data) == [] and study.costlier(data).pairs == 0
    text = build_report(runs, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "One method only: there is nothing to rank." in text


def test_training_seeds_share_a_cell(tmp_path):
    """Two runs of a method: the cell is their mean, and the paired difference is taken of their means."""
    seeds = [write_run(tmp_path, "sdar", seed=seed) for seed in range(2)]
    data, _, runs = build([write_run(tmp_path, "grpo"), *seeds])
    cell = data.cell("sdar", data.settings[0])
    means = [np.mean([e.value for e in run.final]) for run in runs if run.method == "sdar"]
    base = np.mean([e.value for e in runs[0].final])
    assert len(cell.runs) == 2 and cell.mean == pytest.approx(np.mean(means)) and math.isnan(cell.sd)
    assert cell.difference is not None and cell.difference.mean == pytest.approx(np.mean(means) - base)


def test_failed_episodes_do_not_break_the_bootstrap(tmp_path):
    paths = [write_run(tmp_path, "grpo"), write_run(tmp_path, "sdar")]
    file = paths[1] / "final_eval" / "seed_0.jsonl"
    lines = jsonl.read(file)
    jsonl.rewrite(file, [line | {"status": "error"} if k % 3 else line for k, line in enumerate(lines)])
    data, _, runs = build(paths)
    row = study.method_rows(data)[1]
    per_seed = [np.mean([e.value for e in runs[1].final if e.rollout_seed == s and not e.failed]) for s in range(3)]
    assert row.iqm is not None and row.iqm.value == pytest.approx(stats.iqm(np.array(per_seed)))
    assert row.iqm.low <= row.iqm.high


def test_a_restarted_run_keeps_its_net_time_and_books_the_loss(tmp_path):
    path = write_run(tmp_path, "sdar")
    before = load_runs([path])[0]
    repeated = [line | {"attempt": 2} for line in jsonl.read(path / "ledger.jsonl") if line["step"] == 20]
    jsonl.append(path / "ledger.jsonl", repeated)
    (run,) = load_runs([path])
    hours, earlier = summary.device_hours([run]), summary.device_hours([before])
    assert hours["lost"] == pytest.approx(
        sum(line["seconds"] for line in repeated if line["phase"] in NET_PHASES) / 3600
    )
    assert hours["training"] == pytest.approx(earlier["training"]) and earlier["lost"] == 0


def test_decoding_check_flags_a_score_that_holds_under_one_decoding(tmp_path):
    path = write_run(tmp_path, "ovcsd", curve=[0.1, 0.4, 0.5, 0.5, 0.6])
    greedy = [line | {"success": k == 0, "sampling": {"temperature": 0.0}} for k, line in enumerate(_last(path))]
    jsonl.append(path / "val_greedy" / "step_000020.jsonl", greedy)
    rows = summary.decoding_rows(load_runs([path]))
    assert {(row.first, row.second) for row in rows} == {
        ("greedy validation", "validation, T 0.4"),
        ("greedy validation", "final evaluation, T 0.4"),
    }
    assert all(row.flagged and row.gap is not None and row.gap.mean > 30 for row in rows)
    same = [line | {"sampling": {"temperature": 0.0}} for line in _last(path)]
    jsonl.rewrite(path / "val_greedy" / "step_000020.jsonl", same)
    by_name = {row.second: row for row in summary.decoding_rows(load_runs([path]))}
    assert not by_name["validation, T 0.4"].flagged and by_name["validation, T 0.4"].gap.mean == 0  # pyright: ignore
    other = [line | {"panel_sha": "b" * 64} for line in same]
    jsonl.rewrite(path / "val_greedy" / "step_000020.jsonl", other)
    assert {row.note for row in summary.decoding_rows(load_runs([path]))} == {"refused: the panels differ"}


def _last(path):
    return jsonl.read(path / "val" / "step_000020.jsonl")


def test_two_horizons_where_the_baseline_goes_beyond_the_study(tmp_path):
    curve = [0.1, 0.3, 0.5, 0.6, 0.7, 0.8]
    grpo = write_run(tmp_path, "grpo", steps=125, every=25, curve=curve, tasks=16)
    sdar = write_run(tmp_path, "sdar", steps=125, every=25, curve=curve, tasks=16, teacher_s=1.6)
    rows = summary.budget_rows(load_runs([grpo, sdar]))
    assert [(row.run.method, row.horizon) for row in rows] == [
        ("grpo", 100),
        ("sdar", 100),
        ("grpo", 125),
        ("sdar", 125),
    ]
    assert rows[1].step == 50 and rows[3].step == 75  # about 1.5 times the time per update
    assert rows[0].budget_s == pytest.approx(rows[0].run.net_seconds(100))
    values = rows[1].run.validation_values
    assert rows[1].at_horizon == values[4] and rows[1].auc == pytest.approx(stats.auc([0, 25, 50, 75, 100], values[:5]))


def test_clocks_that_run_backwards_get_no_budget(tmp_path):
    paths = [write_run(tmp_path, "grpo"), write_run(tmp_path, "sdar")]
    lines = jsonl.read(paths[1] / "metrics.jsonl")
    lines[14]["cost/net_s"] = 1.0  # step 15 is validated
    jsonl.rewrite(paths[1] / "metrics.jsonl", lines)
    row = summary.budget_rows(load_runs(paths))[1]
    assert "runs backwards" in row.note and row.step is None


def test_devices_that_differ_are_said(tmp_path):
    runs = load_runs([write_run(tmp_path, "grpo"), write_run(tmp_path, "sdar")])
    eight = dataclasses.replace(runs[1], ledger=(), devices_stated=8)
    assert any("devices differ (GRPO: 1; SDAR: 8)" in text for text in summary.comparison_warnings([runs[0], eight]))


_LOOK = {"colour": "#0072b2", "dash": "solid", "symbol": "circle"}


def test_figures_of_the_study(built):
    data, curves, _ = built
    looks = dict.fromkeys(METHODS, _LOOK)
    ranks = study_figures.rank_changes(study.method_rows(data), looks)
    histogram = study_figures.drop_histogram(curves)
    costs = study_figures.cost_figures(data, looks)
    assert ranks is not None and histogram is not None and len(costs) == 2
    assert sum(sum(trace["y"]) for trace in histogram.spec["data"]) == len(curves) == len(histogram.rows)
    assert [trace["y"][0] for trace in ranks.spec["data"]] == [1, 2, 3, 4]
    assert sum(len(trace["x"]) for figure in costs for trace in figure.spec["data"]) == len(data.cells)


@pytest.mark.slow
def test_a_full_size_study_stays_small(tmp_path):
    """132 runs with 21 validations each; the panels are small here, which the size of the page does not depend on."""
    panels = dict.fromkeys(ENVS, 12)
    paths = write_study(tmp_path / "runs", panels=panels, seeds=2)
    assert len(paths) == 132 and sum(len(list(path.glob("val/*"))) for path in paths) == 2772
    out = build_report(find_runs([tmp_path / "runs"]), tmp_path / "report.html")
    assert out.stat().st_size <= 8_000_000
    text = out.read_text(encoding="utf-8")
    assert "132 runs, 12 settings" in text and "120 of 120 pairs" in text
    assert json.dumps("not run") not in text and "missing:" not in text
