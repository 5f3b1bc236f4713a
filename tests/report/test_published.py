"""The published numbers: consistent among themselves, and set beside ours."""

import json
import math

import pytest

from sdjax.report import load_runs, published, study, summary
from tests.report.synthetic_study import write_study

TABLE = json.loads(published.REFERENCE.read_text(encoding="utf-8"))
FACTS = {fact["id"]: fact["value"] for fact in TABLE["facts"]}


def test_every_fact_has_a_source_and_a_measure():
    assert len(FACTS) == len(TABLE["facts"])
    for fact in TABLE["facts"]:
        assert fact["source"] == "arXiv 2610.19789" and fact["measure"] in published._MEASURES
    assert {fact["measure"] for fact in TABLE["facts"]} == set(published._MEASURES)


def test_what_can_be_derived_is_derived():
    design = TABLE["design"]
    settings = len(design["sizes"]) * len(design["environments"])
    assert FACTS["runs"] == design["methods"] * settings == 132
    assert FACTS["validations"] == FACTS["runs"] * FACTS["validations_per_run"] == 2772
    assert FACTS["validations_per_run"] == design["steps"] // 5 + 1
    assert FACTS["pairs"] == (design["methods"] - 1) * settings == 120
    hours = [FACTS[f"hours_{kind}"] for kind in ("training", "validation", "saving")]
    assert sum(hours) == pytest.approx(FACTS["hours_total"], abs=0.05) and FACTS["hours_total"] == 12124.4
    assert sum(FACTS[f"{kind}_pcsd"] for kind in ("wins", "losses", "ties")) == settings
    assert FACTS["costlier_lower"] + FACTS["costlier_tied"] <= FACTS["costlier"] <= FACTS["pairs"]


def test_seconds_follow_from_hours():
    devices, steps = TABLE["design"]["devices"], TABLE["design"]["steps"]
    per_run = 3600 / devices / FACTS["runs"]
    assert FACTS["hours_training"] * per_run / steps == pytest.approx(FACTS["net_step_s"], abs=0.05)
    assert FACTS["hours_validation"] * 3600 / devices / FACTS["validations"] == pytest.approx(
        FACTS["validation_s"], abs=0.5
    )
    assert FACTS["hours_saving"] * per_run == pytest.approx(FACTS["save_s"], abs=0.5)


def test_ranks_agree_with_means():
    """Two methods are above GRPO, so GRPO is third and the best of the other eight fourth."""
    means = {method: FACTS[f"final_{method}"] for method in ("grpo", "pcsd", "agent_opsd", "icsd")}
    above = [method for method, mean in means.items() if mean > means["grpo"]]
    assert len(above) == FACTS["methods_above_grpo"] == 2
    assert FACTS["final_rank_ocsd"] == len(above) + 2
    differences = {method: round(mean - means["grpo"], 2) for method, mean in means.items()}
    assert differences == {"grpo": 0.0, "pcsd": 4.58, "agent_opsd": 1.66, "icsd": -4.93}
    assert FACTS["wins_icsd"] > 12 - FACTS["wins_icsd"] and differences["icsd"] < 0  # wins alone mislead
    within, at_100 = FACTS["alfworld_budget_agent_opsd"], FACTS["alfworld_last_agent_opsd"]
    assert within < FACTS["alfworld_last_grpo"] < at_100  # better per step, worse per second


def test_the_published_collapse_is_one_by_the_rule():
    assert FACTS["agent_opsd_45_70"] <= 0.25 * FACTS["agent_opsd_35"]
    assert FACTS["agent_opsd_100"] >= 0.75 * FACTS["agent_opsd_35"]
    assert FACTS["ovcsd_70"] - FACTS["ovcsd_100"] >= 20 and FACTS["ovcsd_final"] - FACTS["ovcsd_100"] > 30


def compare(paths):
    runs = load_runs(paths)
    finals, curves, budgets = summary.final_rows(runs), summary.curve_rows(runs), summary.budget_rows(runs)
    cells = study.build(finals, curves, budgets)
    rows, source = published.compare(cells, study.method_rows(cells), study.records(cells), curves, budgets)
    assert "More Methods, Better Agents?" in source
    ids = [fact["id"] for fact in TABLE["facts"]]
    return dict(zip(ids, rows, strict=True)), cells, runs


def test_ours_stands_beside_the_published(tmp_path):
    panels = {"alfworld": 40, "webshop": 40}
    paths = write_study(tmp_path, methods=("grpo", "agent_opsd", "icsd"), panels=panels, sizes=("2B", "4B"), seeds=2)
    rows, cells, runs = compare(paths)
    assert (rows["runs"].published, rows["runs"].ours) == (132, 12)
    assert rows["validations"].ours == 12 * 21 and rows["pairs"].ours == 8
    means = {row.method: row.final for row in study.method_rows(cells)}
    assert rows["final_grpo"].ours == pytest.approx(means["grpo"]) and rows["final_grpo"].note == "4 settings"
    assert rows["agent_opsd_45_70"].ours < 12 and rows["agent_opsd_100"].ours > 40
    assert rows["icsd_webshop_4b"].ours < 3 and rows["icsd_webshop_4b"].note == "1 setting"
    (cell,) = [c for (m, s), c in cells.cells.items() if m == "agent_opsd" and s == ("alfworld", "Qwen3.5-4B")]
    assert rows["agent_opsd_100"].ours == pytest.approx(cell.runs[0].validations[-1].value)
    training = sum(run.net_seconds(100) * 8 / 3600 for run in runs)
    assert rows["hours_training"].ours == pytest.approx(training, rel=1e-4)
    assert rows["validation_s"].ours == pytest.approx(246.0) and rows["save_s"].ours == pytest.approx(97.0)
    assert math.isnan(rows["final_pcsd"].ours) and rows["final_pcsd"].note == "not run"
    assert math.isnan(rows["ovcsd_100"].ours)
    budget = [r for r in summary.budget_rows(runs) if r.run.method == "agent_opsd" and r.run.env == "alfworld"]
    assert rows["alfworld_budget_agent_opsd"].ours == pytest.approx(sum(r.score for r in budget) / 2)


def test_sizes_are_matched_whole():
    assert published._is_size("Qwen3.5-4B", "4B") and published._is_size("qwen3.5-4b-base", "4B")
    assert not published._is_size("Qwen3-14B", "4B") and not published._is_size("x-2.4B", "4B")
