"""The official ALFWorld tree, as a folder or an archive, to the compact store."""

import importlib
import io
import json
import lzma
import zipfile

import pytest
from rich.console import Console

from sdjax.envs import BENCHMARKS
from sdjax.envs.alfworld.adapter import AlfworldBenchmark
from sdjax.envs.alfworld.prepare import prepare
from sdjax.envs.alfworld.store import CompactStore, TreeStore, open_store
from sdjax.errors import DataError

COMMON = {"pddl_domain": "(define (domain alfred))", "grammar": '"rhs": "Your task is to: UNKNOWN GOAL."\n'}


def game_bytes(row: dict, common: dict = COMMON) -> bytes:
    """A game file as it is released."""
    grammar = common["grammar"].replace("Your task is to: UNKNOWN GOAL.", "Your task is to: " + row["goal"])
    game = {
        "pddl_domain": common["pddl_domain"],
        "grammar": grammar,
        "pddl_problem": row["pddl_problem"],
        "solvable": True,
        "walkthrough": row["walkthrough"],
    }
    return json.dumps(game).encode()


def write_tree(root, rows, common: dict = COMMON):
    for row in rows:
        folder = root / row["id"]
        folder.mkdir(parents=True)
        (folder / "game.tw-pddl").write_bytes(game_bytes(row, common))
    return root


@pytest.fixture
def tree(tmp_path, fixture_rows):
    return write_tree(tmp_path / "data" / "json_2.1.1", fixture_rows).parent


@pytest.fixture
def archive(tmp_path, fixture_rows):
    path = tmp_path / "json_2.1.2_tw-pddl.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("json_2.1.1/", "")
        for row in fixture_rows:
            file.writestr(f"json_2.1.1/{row['id']}/game.tw-pddl", game_bytes(row))
            file.writestr(f"json_2.1.1/{row['id']}/initial_state.pddl", "not read")
    return path


def run(*sources, out) -> str:
    console = Console(file=io.StringIO(), width=200)
    prepare([str(source) for source in sources], out, console)
    return console.file.getvalue()


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_tree_and_archive_give_the_same_store(tree, archive, tmp_path):
    said = run(tree, out=tmp_path / "one")
    run(tree / "json_2.1.1", out=tmp_path / "two")
    run(archive, out=tmp_path / "three")
    assert contents(tmp_path / "one") == contents(tmp_path / "two") == contents(tmp_path / "three")
    assert set(contents(tmp_path / "one")) == {"gen.jsonl.xz", "game_common.json"}
    assert "gen: 12 games, not a released split" in said
    assert "valid_seen: missing, no valid_seen/<task>/<trial>/game.tw-pddl" in said and "alfworld-download" in said


def test_the_store_holds_the_same_games(tree, tmp_path):
    run(tree, out=tmp_path / "out")
    source, made = open_store(str(tree)), open_store(str(tmp_path / "out"))
    assert isinstance(source, TreeStore) and isinstance(made, CompactStore)
    ids = source.task_ids("gen")
    assert made.task_ids("gen") == ids
    for task_id in ids:
        assert made.row(task_id) == source.row(task_id)
        assert made.game_file(task_id) == source.game_file(task_id)
    panels = [AlfworldBenchmark(str(path)).panel("gen").sha256 for path in (tree, tmp_path / "out")]
    assert panels[0] == panels[1]


def test_several_sources_are_joined_and_a_split_comes_from_one(tree, tmp_path, fixture_rows):
    rows = [{**row, "id": row["id"].replace("gen/", "own/", 1)} for row in fixture_rows[:3]]
    other = write_tree(tmp_path / "other", rows)
    run(tree, other, out=tmp_path / "out")
    assert open_store(str(tmp_path / "out")).splits == ("gen", "own")
    with pytest.raises(DataError, match="gen a second time"):
        run(tree, tree / "json_2.1.1", out=tmp_path / "twice")


def test_short_or_changed_released_splits_are_refused(tree, tmp_path, fixture_rows):
    (tree / "json_2.1.1" / "gen").rename(tree / "json_2.1.1" / "valid_seen")
    with pytest.raises(DataError, match="12 games of split valid_seen, the released data has 140"):
        run(tree, out=tmp_path / "short")
    rows = [{**fixture_rows[i % 12], "id": f"valid_unseen/look_at_obj_in_light-x-{i}/trial_{i}"} for i in range(134)]
    forged = write_tree(tmp_path / "forged", rows)
    with pytest.raises(DataError, match="panel valid_unseen has hash"):
        run(forged, out=tmp_path / "out")
    assert not contents(tmp_path / "out")  # nothing is left of what was not verified


def test_an_older_store_stays_when_the_new_one_is_refused(tree, tmp_path, fixture_rows):
    run(tree, out=tmp_path / "out")
    before = contents(tmp_path / "out")
    game = tree / "json_2.1.1" / fixture_rows[5]["id"] / "game.tw-pddl"
    game.write_bytes(game_bytes(fixture_rows[5], {**COMMON, "pddl_domain": "(define (domain other))"}))
    with pytest.raises(DataError, match="rebuilds to another file than released"):
        run(tree, out=tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_damaged_games_are_named(tree, tmp_path, fixture_rows):
    game = tree / "json_2.1.1" / fixture_rows[0]["id"] / "game.tw-pddl"
    game.write_bytes(game.read_bytes()[:300])
    with pytest.raises(DataError, match=rf"{fixture_rows[0]['id'].split('/')[1]}.*is not a complete game file"):
        run(tree, out=tmp_path / "out")


def test_sources_that_are_none(tree, tmp_path, archive):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.zip").write_text("no archive")
    with zipfile.ZipFile(tmp_path / "json_2.1.1_json.zip", "w") as file:
        file.writestr("json_2.1.1/train/a/b/traj_data.json", "{}")
    whole = archive.read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "rotten.zip").write_bytes(whole[:5000] + bytes(2000) + whole[7000:])
    for name, message in {
        "nowhere": "does not exist",
        "empty": "holds no <split>",
        "notes.zip": "cannot be read as a zip",
        "cut.zip": "cannot be read as a zip",
        "rotten.zip": "cannot be read as a zip",
        "json_2.1.1_json.zip": "holds no <split>",
    }.items():
        with pytest.raises(DataError, match=f"{message}.*alfworld-download"):
            run(tmp_path / name, out=tmp_path / "out")
    run(tree, out=tmp_path / "compact")
    with pytest.raises(DataError, match="in the compact form already"):
        run(tmp_path / "compact", out=tmp_path / "out")


def test_an_archive_writes_nowhere_else(tmp_path, fixture_rows):
    """Names that would leave the folder are not read as games, and large members are refused."""
    path = tmp_path / "bad.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name in (
            "../../x/game.tw-pddl",
            "/a/../../game.tw-pddl",
            "gen/../../game.tw-pddl",
            "gen/.x/t/game.tw-pddl",
        ):
            file.writestr(name, game_bytes(fixture_rows[0]))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DataError, match="holds no <split>"):
        run(path, out=tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("gen/a/b/game.tw-pddl", bytes(50_000_000))
    with pytest.raises(DataError, match="50000000 bytes"):
        run(path, out=tmp_path / "out")
    with zipfile.ZipFile(path, "w") as file:
        for folder in ("one", "two"):
            file.writestr(f"{folder}/gen/a/b/game.tw-pddl", game_bytes(fixture_rows[0]))
    with pytest.raises(DataError, match=r"gen/a/b/game\.tw-pddl twice"):
        run(path, out=tmp_path / "out")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_without_a_source_each_benchmark_says_what_is_needed(name, tmp_path):
    if name == "scienceworld":
        pytest.importorskip("scienceworld")
    module = importlib.import_module(f"sdjax.envs.{name}.prepare")
    files = {"alfworld": "json_2.1.2_tw-pddl.zip", "scienceworld": "make_gold", "webshop": "items_shuffle"}
    with pytest.raises(DataError, match=files.get(name, "NQ-open.dev.jsonl")):
        module.prepare([], tmp_path, Console(file=io.StringIO()))


@pytest.mark.shared
def test_released_games_equal_the_released_panel(released, tmp_path):
    """The official tree of one split, rebuilt from the compact form, gives that form again."""
    common = json.loads((released / "game_common.json").read_text())
    with lzma.open(released / "valid_seen.jsonl.xz", "rt") as file:
        rows = [json.loads(line) for line in file]
    said = run(write_tree(tmp_path / "json_2.1.1", rows, common), out=tmp_path / "out")
    assert "valid_seen: 140 games, equal to the released games" in said
    with lzma.open(tmp_path / "out" / "valid_seen.jsonl.xz", "rt") as file:
        assert [json.loads(line) for line in file] == rows
    assert json.loads((tmp_path / "out" / "game_common.json").read_text()) == common
