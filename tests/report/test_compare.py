"""Two runs in the terminal: the verdict never says more than the interval, the panels and the clock allow."""

import json
import shutil

import pytest
from rich.console import Console

from sdjax import jsonl
from sdjax.errors import DataError, RunDirError
from sdjax.report.compare import compare
from tests.report.synthetic import write_run

RISING = [0.1, 0.4, 0.5, 0.6, 0.7]


def run(a, b):
    console = Console(record=True, width=120, force_terminal=False)
    found = compare(a, b, console)
    return found, console.export_text()


def test_a_clear_difference(tmp_path):
    low = write_run(tmp_path, "grpo", curve=[0.1] * 5)
    high = write_run(tmp_path, "sdar", curve=[0.9] * 5, teacher_s=3.2)
    found, text = run(low, high)
    assert found.difference is not None and found.difference.low > 0
    assert found.basis == "final evaluation, paired over 64 tasks and 3 rollout seeds, bootstrap over tasks"
    assert found.verdict.startswith("B scored higher than A, by ") and "for these two training runs" in found.verdict
    assert 1.8 < found.ratio < 2.2 and f"at {found.ratio:.2f} times A's net time over 20 updates" in found.verdict
    assert "GRPO" in text and "SDAR" in text and found.verdict.split(",")[0] in text
    back, _ = run(high, low)
    assert back.verdict.startswith("B scored lower than A, by ")
    assert back.difference is not None and back.difference.mean == pytest.approx(-found.difference.mean)
    assert "−" not in back.verdict  # "lower by 60 points", not "lower by -60"


def test_an_interval_over_zero_shows_no_difference(tmp_path):
    paths = [write_run(tmp_path, "grpo", curve=RISING), write_run(tmp_path, "sdar", curve=RISING, seed=1)]
    found, _ = run(*paths)
    assert found.verdict.startswith("No difference is shown: B minus A is between −")


def test_few_tasks_show_no_difference(tmp_path):
    paths = [write_run(tmp_path, m, curve=[c] * 5, tasks=4) for m, c in (("grpo", 0.0), ("sdar", 1.0))]
    found, _ = run(*paths)
    assert found.verdict.startswith("No difference is shown: ") and "over 4 tasks only" in found.verdict


def test_panels_that_differ_give_no_verdict(tmp_path):
    paths = [write_run(tmp_path, "grpo", panel="a" * 64), write_run(tmp_path, "sdar", panel="b" * 64)]
    found, _ = run(*paths)
    assert found.difference is None
    assert found.verdict.startswith("No verdict: the final panels differ (A aaaaaaaaaaaa, B bbbbbbbbbbbb)")


def test_without_final_evaluation_the_last_common_validation_counts(tmp_path):
    paths = [write_run(tmp_path, "grpo", curve=[0.1] * 5), write_run(tmp_path, "sdar", curve=[0.9] * 5)]
    for path in paths:
        shutil.rmtree(path / "final_eval")
    found, _ = run(*paths)
    assert found.basis == "one validation at step 20, paired over 64 tasks, bootstrap over tasks"
    assert found.difference is not None and found.difference.mean > 60
    shorter = write_run(tmp_path, "rlsd", steps=15, curve=[0.5] * 4)
    shutil.rmtree(shorter / "final_eval")
    found, _ = run(paths[0], shorter)
    assert found.basis.startswith("one validation at step 15, not paired")
    assert "of unequal length (20 and 15 updates)" in found.verdict and found.ratio_step == 15


def test_logs_are_compared_without_pairing(tmp_path):
    def log(name, top, gen):
        values = [{"step": 0, "val/success_rate": 0.125}]
        for step in range(1, 11):
            row = {"step": step, "timing_s/step": gen, "timing_s/gen": gen, "episode/pick_and_place_success_rate": 0.5}
            values.append(row | {"val/success_rate": round(round(128 * top * step / 10) / 128, 6)})
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(value) + "\n" for value in values))
        return path

    found, text = run(log("grpo", 0.8, 10.0), log("sdar", 0.3, 12.0))
    assert found.ratio == pytest.approx(1.2) and "normal interval from 128 tasks" in found.basis
    assert found.verdict.startswith("B scored lower than A")
    assert text.count("the model is not declared") == 1 and "warning, A and B" in text


def test_copies_and_missing_clocks(tmp_path):
    path = write_run(tmp_path, "grpo")
    found, _ = run(path, shutil.copytree(path, tmp_path / "copy"))
    assert found.verdict == "A and B are copies of one run: there is nothing to compare."
    other = write_run(tmp_path, "sdar")
    lines = jsonl.read(other / "metrics.jsonl")
    jsonl.rewrite(
        other / "metrics.jsonl", [{k: v for k, v in line.items() if k[:5] not in ("cost/", "time/")} for line in lines]
    )
    found, _ = run(path, other)
    assert found.ratio != found.ratio and "net time" not in found.verdict


def test_what_cannot_be_compared_is_an_error(tmp_path):
    alfworld, webshop = write_run(tmp_path, "grpo"), write_run(tmp_path, "grpo", env="webshop")
    with pytest.raises(DataError, match="A is a run on alfworld, B on webshop"):
        run(alfworld, webshop)
    with pytest.raises(RunDirError, match="not a run directory"):
        run(alfworld, tmp_path / "absent")
    table = tmp_path / "two.csv"
    table.write_text("Step,a - val/success,b - val/success\n0,1,2\n5,2,3\n")
    with pytest.raises(DataError, match="holds 2 runs"):
        run(alfworld, table)


def test_markup_in_names_is_text(tmp_path):
    path = write_run(tmp_path, "grpo", hostile="[bold red]x[/]")
    config = json.loads((path / "config.json").read_text())
    config["model"]["path"] = "[link=x]m[/link]"
    (path / "config.json").write_text(json.dumps(config))
    _, text = run(path, write_run(tmp_path, "sdar"))
    assert "[link=x]m[" in text or "link]" in text
