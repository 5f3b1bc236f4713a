"""The commands of the package against the real simulator."""

import io
from dataclasses import replace

import pytest
from rich.console import Console
from scienceworld_play import TASKS, run

from sdjax.envs.scienceworld import make_gold
from sdjax.envs.scienceworld.check import differing_splits, replay_all, table_of
from sdjax.envs.scienceworld.store import Tasks, read_gold

pytestmark = pytest.mark.scienceworld


def test_check_finds_a_curve_that_differs(benchmark):
    gold = [benchmark.tasks.gold(task_id) for task_id in (TASKS[0], TASKS[1])]
    wrong = replace(gold[1], score_curve=((1, 7), (2, 57), (6, 100)))
    finished = []
    checked, speed = run(replay_all(benchmark, [gold[0], wrong], at_once=2, done=lambda: finished.append(1)))
    assert [row.equal for row in checked] == [True, False] and len(finished) == 2
    assert speed.steps == sum(len(row.actions) for row in gold) and speed.episodes == 2
    assert speed.cpu_s > 0 and speed.rss_mb > 0 and "steps/s per core" in str(speed)
    console = Console(record=True, file=io.StringIO(), width=160)
    console.print(table_of(checked, turns=10))
    text = console.export_text()
    assert "find-animal" in text and "power-component" in text and "success, 10 turns" in text


@pytest.mark.slow
def test_the_stored_splits_are_the_simulators_own(benchmark):
    assert differing_splits(Tasks(), 512) == []


@pytest.mark.slow
def test_new_gold_paths_are_replayed_and_equal_those_that_ship(benchmark, tmp_path):
    out = tmp_path / "gold.jsonl.xz"
    assert make_gold.main([f"--out={out}", "--ids=find-plant/0"]) == 0
    assert read_gold(out) == [Tasks().gold("find-plant/0")] and read_gold(out)[0].wins
    written = out.read_bytes()
    assert make_gold.main([f"--out={out}", "--tasks=find-plant", "--count=1"]) == 0  # it is there already
    assert out.read_bytes() == written
