"""Logs of other trainers: verl-style JSON lines and W&B CSV, sound and damaged; the published logs of ADRS."""

import csv
import gzip
import json
import lzma
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdjax.errors import DataError
from sdjax.report import build_report, find_runs, load_runs, logs, stats, summary

SHARED = Path(__file__).parents[3] / "shared" / "data" / "verl_logs"


def rows(steps=20, every=5, gen=60.0, teacher=0.0, top=0.6, more=None):
    """A verl log: one row per step; validation and saving are inside the step's time."""
    found = [{"step": 0, "val/success_rate": 0.125}]
    for step in range(1, steps + 1):
        parts = {"timing_s/gen": gen, "timing_s/ref": 4.0, "timing_s/old_log_prob": 5.0, "timing_s/update_actor": 20.0}
        row = {"step": step, **parts, "timing_s/adv": 1.0, "episode/success_rate": 0.5, "actor/grad_norm": 1.0}
        if teacher:
            row["timing_s/teacher_forward"] = teacher
        if step % every == 0:
            row |= {"timing_s/testing": 50.0, "val/success_rate": round(round(128 * top * step / steps) / 128, 6)}
        if step == steps:
            row["timing_s/save_checkpoint"] = 7.0
        row["timing_s/step"] = sum(value for key, value in row.items() if key.startswith("timing_s/"))
        row |= {"perf/total_num_tokens": 4e6, "perf/time_per_step": row["timing_s/step"]}
        row["perf/throughput"] = 4e6 / row["timing_s/step"] / 4
        found.append(row | (more or {}))
    return found


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def load_one(path):
    (run,) = load_runs([path])
    return run


def test_a_log_becomes_a_run(tmp_path):
    run = load_one(write(tmp_path / "my_sdar_alfworld.jsonl", rows()))
    assert (run.method, run.env, run.state, run.source) == ("sdar", "alfworld", "log", "metrics log")
    assert run.steps == tuple(range(1, 21)) and run.devices == 4
    assert run.validation_steps == [0, 5, 10, 15, 20]
    assert run.validation_values[0] == 12.5
    # Net time is the step without validation and saving.
    assert run.net_seconds(20) == pytest.approx(20 * 90.0)
    assert run.validation_net == pytest.approx([0, 450, 900, 1350, 1800])
    seconds = summary.ledger_seconds(run)
    assert (seconds["rollout"], seconds["score"], seconds["update"]) == pytest.approx((1200, 180, 420))
    assert (seconds["validation"], seconds["save"]) == pytest.approx((200, 7))
    assert run.metrics["train/win_rate"][3] == 0.5
    assert run.validations[0].episodes == 128  # all scores are multiples of 1/128
    text = " ".join(run.warnings)
    assert (
        "read as sdar on alfworld" in text
        and "128 tasks explain all scores" in text
        and "model is not declared" in text
    )


def test_all_containers_read_alike(tmp_path):
    records = rows()
    plain = write(tmp_path / "a" / "grpo_alfworld.jsonl", records)
    text = plain.read_bytes()
    (tmp_path / "b").mkdir()
    packed = tmp_path / "b" / "grpo_alfworld.jsonl.xz"
    packed.write_bytes(lzma.compress(text))
    zipped = tmp_path / "b" / "grpo_alfworld.jsonl.gz"
    zipped.write_bytes(gzip.compress(text))
    nested = write(tmp_path / "c" / "grpo_alfworld.jsonl", [{"step": r["step"], "data": r} for r in records])
    keys = sorted({key for record in records for key in record} - {"step"})
    table = tmp_path / "c" / "grpo_alfworld.csv"
    with table.open("w") as file:
        writer = csv.DictWriter(file, ["_step", *keys])
        writer.writeheader()
        writer.writerows({"_step": r["step"], **{k: v for k, v in r.items() if k != "step"}} for r in records)
    runs = [load_one(path) for path in (plain, packed, zipped, nested, table)]
    assert len({(run.validations, run.net_seconds(20), run.fingerprint) for run in runs}) == 1
    assert runs[4].source == "W&B CSV"


def test_a_csv_with_several_runs(tmp_path):
    path = tmp_path / "export.csv"
    lines = [
        '"Step","grpo_alfworld - val/success_rate","grpo_alfworld - val/success_rate__MIN","sdar - val/success_rate"'
    ]
    lines += ['0,0.125,0.1,""', "5,0.25,0.2,0.5", "10,0.5,0.4,0.75", "half,1,1,1"]
    path.write_text("\n".join(lines))
    runs = {run.method: run for run in logs.load_logs(path)}
    assert runs["grpo"].validation_values == [12.5, 25.0, 50.0]
    assert runs["sdar"].validation_steps == [5, 10]
    assert "1 rows without a whole step" in " ".join(runs["grpo"].warnings)
    assert math.isnan(runs["grpo"].validations[1].net_s)  # no clock in the file, so none is invented


def test_labels_declare_what_a_log_does_not_say(tmp_path):
    path = write(tmp_path / "x.jsonl", rows())
    entry = {"method": "rlsd", "env": "webshop", "model": "Qwen2.5-3B", "seed": 3, "tasks": 128, "devices": 2}
    (tmp_path / "labels.json").write_text(json.dumps({"x": entry}))
    run = load_one(path)
    assert (run.method, run.env, run.model, run.seed, run.devices) == ("rlsd", "webshop", "Qwen2.5-3B", 3, 2)
    assert "declared" not in " ".join(run.warnings)
    for bad in ('{"x": {"metod": "grpo"}}', '{"x": 3}', "{", "[]"):
        (tmp_path / "labels.json").write_text(bad)
        with pytest.raises(DataError, match=r"labels\.json"):
            logs.load_logs(path)


def test_models_that_are_not_declared_are_told_apart_by_their_start(tmp_path):
    other = rows()
    other[0]["val/success_rate"] = 0.5
    paths = [write(tmp_path / "grpo_alfworld.jsonl", rows()), write(tmp_path / "sdar_alfworld.jsonl", other)]
    assert len({run.setting for run in load_runs(paths)}) == 2


def test_impossible_values_are_flagged(tmp_path):
    bad = rows(more={"perf/mfu/actor": 2.1, "episode/valid_action_ratio": 0.0, "response_length/clip_ratio": 1.5})
    bad[7]["timing_s/gen"] = -5.0
    bad[10]["val/success_rate"] = 1.25
    run = load_one(write(tmp_path / "grpo_alfworld.jsonl", bad))
    text = " ".join(run.warnings)
    assert "perf/mfu/actor is impossible at 20 of 20 steps (2.1 to 2.1)" in text
    assert "episode/valid_action_ratio is 0 throughout (20 steps) although up to 50 % of the episodes succeed" in text
    assert "response_length/clip_ratio is impossible" in text
    assert "timing_s/gen is impossible at 1 of 20 steps (-5)" in text
    assert "val/success_rate is impossible at step 10; these are left out" in text
    assert run.validation_steps == [0, 5, 15, 20]


def test_a_sound_log_raises_no_range_warning(tmp_path):
    run = load_one(write(tmp_path / "grpo_alfworld.jsonl", rows(more={"perf/mfu/actor": 0.4})))
    assert not any("impossible" in text or "backwards" in text for text in run.warnings)


def test_torn_damaged_and_restarted_logs(tmp_path):
    path = write(tmp_path / "grpo_alfworld.jsonl", [*rows()[:11], *rows(gen=70.0)[9:], {"no": "step"}])
    with path.open("a") as file:
        file.write('{"step": 21, "timing')
    run = load_one(path)
    text = " ".join(run.warnings)
    assert "the last line is torn; left out" in text
    assert "1 lines without a step were left out" in text
    assert "the steps go back 1 times: a restart" in text
    assert run.net_seconds(20) == pytest.approx(8 * 90 + 12 * 100)  # steps 9 to 20 of the second attempt count
    damaged = tmp_path / "sdar_alfworld.jsonl.xz"
    damaged.write_bytes(lzma.compress(path.read_bytes())[:40])
    with pytest.raises(DataError, match="no line with a step"):
        logs.load_logs(damaged)


def test_a_cut_archive_gives_what_stands_before_the_cut(tmp_path):
    noise = [row | {"note": str(number * 7919 % 10007) * 40} for number, row in enumerate(rows(steps=400))]
    path = write(tmp_path / "all.jsonl", noise)
    cut = tmp_path / "grpo_alfworld.jsonl.gz"
    cut.write_bytes(gzip.compress(path.read_bytes(), 1)[:-3000])
    run = load_one(cut)
    assert 0 < run.steps_done < 400
    assert any("the archive is damaged" in text for text in run.warnings)


def test_a_step_without_its_time_ends_the_clock(tmp_path):
    records = rows()
    del records[8]["timing_s/step"]
    records[4]["actor/grad_norm"] = math.nan
    run = load_one(write(tmp_path / "grpo_alfworld.jsonl", records))
    assert run.net_seconds(7) == pytest.approx(630)
    assert math.isnan(run.net_seconds(9))
    text = " ".join(run.warnings)
    assert (
        "no timing_s/step at step 8: net time is unknown" in text and "actor/grad_norm is not finite at step 4." in text
    )
    baseline = load_one(write(tmp_path / "b" / "grpo_alfworld.jsonl", rows()))
    assert "without net time" in [row.note for row in summary.budget_rows([baseline, run])][1]


def test_no_known_score_is_said(tmp_path):
    records = [{"step": step, "timing_s/step": 1.0, "val/text/test_score": 3.0} for step in (1, 2)]
    run = load_one(write(tmp_path / "grpo.jsonl", records))
    assert run.validations == () and run.env == "unknown"
    assert any("no single validation score is known (found val/text/test_score)" in text for text in run.warnings)


def test_what_is_no_log_is_no_log(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "notes.jsonl").write_text('{"text": "hello"}\n')
    (tmp_path / "table.csv").write_text("name,size\na,1\n")
    (tmp_path / "bad.jsonl.xz").write_bytes(b"not xz")
    good = write(tmp_path / "sub" / "grpo.jsonl", rows())
    assert find_runs([tmp_path]) == [good]
    for name in ("empty.jsonl", "notes.jsonl", "bad.jsonl.xz"):
        with pytest.raises(DataError, match="no line with a step"):
            logs.load_logs(tmp_path / name)
    with pytest.raises(DataError, match="no step column"):
        logs.load_logs(tmp_path / "table.csv")


@given(st.integers(3, 400), st.lists(st.floats(0.02, 0.98), min_size=6, max_size=20, unique=True))
def test_the_panel_size_explains_every_score(tasks, rates):
    values = [100 * round(round(rate * tasks) / tasks, 6) for rate in rates]
    found = logs.panel_size(values)
    if len({value for value in values if 0 < value < 100}) < 3:
        assert found == 0
    else:
        assert 0 < found <= tasks  # never more than the truth, so that the floor is an upper bound
        assert all(abs(value / 100 * found - round(value / 100 * found)) < 1e-3 for value in values)


def test_the_panel_size_is_unknown_where_anything_fits():
    assert logs.panel_size([12.5, 25.0]) == 0
    assert logs.panel_size([31.2232, 38.6929, 40.3933, 45.0119]) == 0


TABLE = {  # run -> net-time ratio after 300 steps, then (score, AUC, step within GRPO's time, its score) at 100 and 300
    "curves_300step_grpo_alfworld": (1.0, (0.672, 0.438, 100, 0.672), (0.867, None, 300, 0.867)),
    "curves_300step_sdar_alfworld": (1.160, (0.656, 0.444, 85, 0.555), (0.844, None, 255, 0.828)),
    "curves_300step_adrs_alfworld": (1.298, (0.625, 0.366, 75, 0.461), (0.875, None, 220, 0.898)),
    "table2_3b_alfworld": (1.260, (0.688, 0.399, 75, 0.453), (0.898, None, 230, 0.906)),
    "curves_300step_gigpo_alfworld": (1.012, (0.742, 0.526, 100, 0.742), (0.914, None, 295, 0.938)),
}


@pytest.fixture(scope="module")
def public_runs():
    return load_runs(find_runs([SHARED]))


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.shared
@pytest.mark.skipif(not SHARED.exists(), reason="the public logs are not here")
def test_the_public_logs_give_the_known_table(public_runs, name):
    ratio, *reached = TABLE[name]
    found = {row.horizon: row for row in summary.budget_rows(public_runs) if row.run.name == name}
    assert set(found) == {100, 300}
    assert found[300].ratio == pytest.approx(ratio, abs=5e-4)
    for horizon, (score, auc, step, within) in zip((100, 300), reached, strict=True):
        row = found[horizon]
        assert row.at_horizon / 100 == pytest.approx(score, abs=5e-4)
        assert (row.step, row.score / 100) == (step, pytest.approx(within, abs=5e-4))
        if auc is not None:
            assert row.auc / 100 == pytest.approx(auc, abs=5e-4)


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.exists(), reason="the public logs are not here")
def test_the_public_logs_are_told_apart_and_flagged(public_runs):
    by_name = {run.name: run for run in public_runs}
    assert len(by_name) == 9
    settings = {run.setting for run in public_runs}
    assert len(settings) == 4 and by_name["table2_q3_alfworld"].setting != by_name["table2_3b_alfworld"].setting
    assert [run.method for run in by_name.values()].count("adrs") == 5
    assert all(any("perf/mfu/actor is impossible" in text for text in run.warnings) for run in public_runs)
    flagged = {run.name for run in public_runs if any("valid_action_ratio is 0 throughout" in t for t in run.warnings)}
    assert flagged == {"table2_q3_alfworld"}
    assert {run.devices for run in public_runs} == {2, 4}
    drops = {run.name: stats.peak_to_final(run.validation_values) for run in public_runs}
    assert drops["curves_300step_grpo_alfworld"] == pytest.approx(5.4687, abs=1e-3)
    assert drops["table2_q3_alfworld"] == pytest.approx(1.5625, abs=1e-3)


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.exists(), reason="the public logs are not here")
def test_the_report_over_the_public_logs(tmp_path):
    out = build_report(find_runs([SHARED]), tmp_path / "report.html")
    text = out.read_text(encoding="utf-8")
    assert out.stat().st_size < 4_000_000
    assert "Net time 1.30 × GRPO&#39;s at step 300; within GRPO&#39;s net time it had 89.8 % (step 220)" in text
