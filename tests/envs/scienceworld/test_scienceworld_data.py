"""Ids, splits, panels, gold files, prompts and thoughts of ScienceWorld: what needs no Java."""

import json
import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sdjax.envs.prompts import PromptTemplate, load_protocol, project
from sdjax.envs.scienceworld import store
from sdjax.envs.scienceworld.config import ScienceworldConfig, episodes_in_heap
from sdjax.envs.scienceworld.expert import thought_for
from sdjax.envs.scienceworld.java import find_jar
from sdjax.envs.scienceworld.make_gold import choose
from sdjax.envs.scienceworld.prepare import prepare
from sdjax.envs.scienceworld.session import goal_sentences, status_of
from sdjax.envs.scienceworld.store import Gold, Tasks, read_gold, write_gold
from sdjax.errors import ConfigError, DataError
from sdjax.teacher.routing import route

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "scienceworld"


@pytest.fixture(scope="module")
def tasks() -> Tasks:
    return Tasks()


@pytest.fixture
def simulator_installed():
    try:
        find_jar()
    except ConfigError as error:
        pytest.skip(f"the simulator is not here: {error}")


def test_splits_are_disjoint_and_complete(tasks):
    splits = {split: tasks.task_ids(split) for split in ("train", "dev", "test")}
    assert {split: len(ids) for split, ids in splits.items()} == {"train": 3592, "dev": 1796, "test": 1819}
    assert len(set().union(*splits.values())) == 7207
    assert len(tasks.names) == 30
    assert len(tasks.task_ids("train_gold")) == 588 and set(tasks.task_ids("train_gold")) <= set(splits["train"])
    with pytest.raises(DataError, match="no split 'valid'"):
        tasks.task_ids("valid")


def test_every_task_routes_to_a_skill_family(tasks):
    families = {route("scienceworld", {"task_name": name}) for name in tasks.names}
    assert all(len(family) == 1 for family in families) and len(families) == 10


def test_splits_can_be_restricted_to_some_tasks():
    some = Tasks(task_names=("find-plant", "boil"))
    assert some.task_ids("test")[0] == "find-plant/225" and some.task_ids("test")[-1] == "boil/29"
    assert len(some.task_ids("train")) == 150 + 14
    with pytest.raises(ConfigError, match="'cook'"):
        Tasks(task_names=("cook",))


@pytest.mark.parametrize("name", ["bogus", "easy,bogus", "Easy", "easy "])
def test_unknown_simplifications_are_refused(name):
    with pytest.raises(ConfigError, match="simplification"):
        Tasks(name)


def test_electrical_tasks_need_electrical_actions():
    tasks = Tasks("openDoors,noElectricalAction")
    assert tasks.parse("boil/3") == ("boil", 3)
    with pytest.raises(DataError, match="cannot be solved"):
        tasks.parse("test-conductivity/3")


@pytest.mark.parametrize(
    "task_id", ["boil/30", "boil", "boil/", "boil/-1", "boil/x", "boil/1/2", "cook/1", "", "boil/²"]
)
def test_unknown_ids_are_refused(tasks, task_id):
    with pytest.raises(DataError, match="no ScienceWorld task"):
        tasks.parse(task_id)


@pytest.mark.usefixtures("simulator_installed")
@pytest.mark.parametrize(("name", "count", "types"), [("panel200", 200, 30), ("panel_23types", 201, 23)])
def test_published_panels(tasks, name, count, types):
    panel = tasks.panel(name)  # checks the published hash
    assert len(panel.task_ids) == count and set(panel.task_ids) <= set(tasks.task_ids("test"))
    assert len({task_id.partition("/")[0] for task_id in panel.task_ids}) == types
    assert Tasks("easy").panel(name).sha256 != panel.sha256
    assert Tasks(task_names=("boil",)).panel(name) == panel
    assert set(tasks.panel(f"{name}:20").task_ids) < set(tasks.panel(f"{name}:40").task_ids) < set(panel.task_ids)


@pytest.mark.usefixtures("simulator_installed")
def test_split_panels_and_unknown_ones(tasks):
    assert tasks.panel("dev").task_ids == tasks.task_ids("dev")
    assert len(tasks.panel("test:64").task_ids) == 64
    with pytest.raises(DataError, match=r"no panel 'nonsense'.*panel200"):
        tasks.panel("nonsense")
    with pytest.raises(DataError, match="a panel of 5000 tasks"):
        tasks.panel("test:5000")


@pytest.mark.usefixtures("simulator_installed")
def test_a_panel_of_another_simulator_is_refused(tasks, monkeypatch):
    monkeypatch.setattr(store, "jar_sha256", lambda: "0" * 64)
    with pytest.raises(DataError, match="panel panel200 has hash"):
        tasks.panel("panel200")


@pytest.mark.usefixtures("simulator_installed")
def test_every_task_of_panel200_has_a_gold_path(tasks):
    rows = [tasks.gold(task_id) for task_id in tasks.panel("panel200").task_ids]
    assert all(rows)
    assert sum(row.score == 100 for row in rows) == 199
    # The ceiling at 30 turns that the documentation states.
    assert sum(row.score_at(30) for row in rows) / 200 == pytest.approx(65.1, abs=0.05)
    assert sum(row.score_at(30) == 100 for row in rows) == 102


@pytest.mark.shared
def test_panels_and_gold_are_those_that_were_measured(tasks):
    if not SHARED.is_dir():
        pytest.skip("the measured data are not here")
    for name in ("panel200", "panel_23types"):
        ids = [row["id"] for row in json.loads((SHARED / f"{name}.json").read_text())["tasks"]]
        assert list(tasks.panel(name).task_ids) == ids
    with lzma.open(SHARED / "gold.jsonl.xz", "rt") as file:
        rows = {f"{row['task']}/{row['variation']}": row for row in map(json.loads, file)}
    ours = {row.task_id: row for row in read_gold(None)}
    assert ours.keys() == rows.keys()
    for task_id, row in rows.items():
        assert list(ours[task_id].actions) == row["gold"] and ours[task_id].score == row["score"]


CURVES = st.lists(st.tuples(st.integers(1, 9), st.integers(-100, 100)), max_size=8)


@given(CURVES, st.integers(0, 60))
def test_scores_within_a_budget(steps, limit):
    """Against the scores turn by turn."""
    scores, curve = [0], []
    for wait, score in steps:
        scores += [scores[-1]] * (wait - 1) + [score]
        curve.append((len(scores) - 1, score))
    gold = Gold("boil/1", "", ("wait1",) * (len(scores) - 1), scores[-1], tuple(curve))
    end = min(limit, len(scores) - 1)
    assert gold.score_at(limit) == scores[end]
    rises = [turn for turn in range(1, end + 1) if scores[turn] > scores[turn - 1]]
    assert gold.turns_worth(limit) == max(rises, default=0)


def test_gold_files_round_trip_and_add_up(tmp_path, tasks):
    mine = Gold("boil/13", "", ("wait", "0"), 3, ((1, 0), (2, 3)))
    easy = Gold("boil/2", "easy", ("wait",), 0, ((1, 0),))
    write_gold(tmp_path / "gold.jsonl.xz", [mine, easy])
    assert read_gold(tmp_path) == read_gold(tmp_path / "gold.jsonl.xz") == [easy, mine]
    more = Tasks(data=str(tmp_path))
    assert more.gold("boil/13") == mine and more.gold("boil/21") == tasks.gold("boil/21")
    assert Tasks("easy", data=str(tmp_path)).gold("boil/2") == easy
    assert Tasks("easy").gold("boil/2") is None and tasks.gold("boil/2") != easy


@pytest.mark.parametrize(
    "text",
    [
        b"no archive",
        lzma.compress(b"{}\n"),
        lzma.compress(b'{"id": "boil/1", "simplification": "", "gold": [1], "score": 1, "score_curve": []}\n'),
        lzma.compress(b'{"id": "boil/1", "simplification": "", "gold": [], "score": 1, "score_curve": [1]}\n'),
        lzma.compress(b"[1]\n"),
        lzma.compress(b"\xff\xfe\n"),
        lzma.compress(b"x" * 1000)[:-8],
    ],
)
def test_damaged_gold_files_are_refused(tmp_path, text):
    (tmp_path / "gold.jsonl.xz").write_bytes(text)
    with pytest.raises(DataError, match="line 1, is no gold path"):
        Tasks(data=str(tmp_path))


def test_a_missing_gold_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nothing.jsonl.xz does not exist.*make_gold"):
        Tasks(data=str(tmp_path / "nothing.jsonl.xz"))


@pytest.mark.usefixtures("simulator_installed")
def test_prepare_joins_gold_files(tmp_path, monkeypatch):
    console = Console(quiet=True)
    monkeypatch.setattr("sdjax.envs.scienceworld.prepare.find_java", lambda: "java")
    monkeypatch.setattr("sdjax.envs.scienceworld.prepare.java_version", lambda java: "some version")
    rows = [Gold(f"boil/{i}", "", ("wait",), i, ((1, i),)) for i in range(3)]
    write_gold(tmp_path / "a.jsonl.xz", rows[:2])
    write_gold(tmp_path / "b.jsonl.xz", rows[1:])
    prepare([str(tmp_path / "a.jsonl.xz"), str(tmp_path / "b.jsonl.xz")], tmp_path / "out", console)
    assert read_gold(tmp_path / "out") == rows
    write_gold(tmp_path / "c.jsonl.xz", [Gold("boil/1", "", ("wait1",), 1, ((1, 1),))])
    with pytest.raises(DataError, match="another path of boil/1"):
        prepare([str(tmp_path / "a.jsonl.xz"), str(tmp_path / "c.jsonl.xz")], tmp_path / "other", console)
    with pytest.raises(DataError, match="no sources"):
        prepare([], tmp_path / "other", console)
    with pytest.raises(DataError, match="does not exist"):
        prepare([str(tmp_path / "d.jsonl.xz")], tmp_path / "other", console)
    assert not (tmp_path / "other").exists()


def test_variations_for_new_gold_are_spread(tasks):
    assert choose(tasks, ["boil"], "train", 7) == [f"boil/{i}" for i in range(0, 14, 2)]
    assert choose(tasks, ["boil"], "dev", 100) == list(tasks.task_ids("dev")[:7])
    assert len(choose(tasks, [], "test", 2)) == 60


def test_thoughts_exist_for_every_command_of_the_gold_paths():
    thoughts = {action: thought_for(action) for row in read_gold(None) for action in row.actions}
    other = thought_for("dance with the wolf")
    assert [action for action, thought in thoughts.items() if thought == other] == []
    assert max(len(thought) for thought in thoughts.values()) < 200
    assert thoughts["0"] != other and thoughts["look around"] == "First I see what is here."


def test_status_and_goals_of_an_answer():
    assert status_of({"score": 99, "completed": False}) == "running"
    assert status_of({"score": 100, "completed": True}) == "success"
    assert status_of({"score": 40, "completed": True}) == "failed"
    assert status_of({"score": -100, "completed": False}) == "failed"
    rows = ["Completed keys: ", "---", "0\ttrue\t  GoalFind\tfocus on x", "1\tfalse\t  GoalMove\tmove x", "---", ""]
    table = "\n".join(rows)
    assert goal_sentences(table) == ["done: focus on x", "open: move x"]


@pytest.mark.parametrize(
    "settings",
    [
        {"failed_return": "best"},
        {"failed_penalty": -1.0},
        {"expert_score": 101},
        {"heap_mb": 315},
        {"restarts": -1},
    ],
)
def test_settings_without_meaning_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ScienceworldConfig(**settings).check()
    ScienceworldConfig().check()


def test_the_default_memory_holds_a_training_batch_of_two_workers():
    assert episodes_in_heap(ScienceworldConfig().heap_mb) >= 64


@pytest.mark.parametrize("name", ["standard", "compact"])
def test_templates_show_task_commands_objects_and_history(name):
    template = PromptTemplate.load("scienceworld", name)
    past = [("You see a door.", "open door"), ("The door is now open.", "go to kitchen")]
    seen = ("Your task is to boil lead.", "You move to the kitchen.", ("open OBJ", "look around", "task"))
    for history in ([], past):
        text = template.render(*seen, history, len(history), objects=("stove", "pot {x}"))
        assert all(part in text for part in ("boil lead", "You move to the kitchen.", "open OBJ", "look around"))
        assert "stove" in text and "pot {x}" in text
        assert ("The door is now open." in text) == ("go to kitchen" in text) == bool(history)
    answer = template.answer("It asks which one.", "0")
    assert project(answer, template).action == "0" and project(answer, template).valid


def test_protocol():
    protocol = load_protocol("scienceworld")
    assert (protocol.turn_limit, protocol.history, protocol.prompt_tokens, protocol.response_tokens) == (
        30,
        2,
        4096,
        512,
    )
    assert protocol.graded and protocol.reward_success == 10.0 and protocol.invalid_penalty == 0.1
