"""Loading games: three forms of data, and clear errors for what is missing or damaged."""

import dataclasses
import hashlib
import json
import lzma
import random

import pytest

from sdjax.envs.alfworld.adapter import AlfworldBenchmark
from sdjax.envs.alfworld.engine import Episode
from sdjax.envs.alfworld.store import OFFICIAL_COUNTS, CompactStore, GeneratedStore, TreeStore, open_store, task_type_of
from sdjax.envs.config import GeneratorConfig
from sdjax.errors import ConfigError, DataError, SdjaxError

SMALL = GeneratorConfig(train_games=12, valid_games=8, test_games=4, receptacles_max=10)
COMMON = {"pddl_domain": "(define (domain alfred))", "grammar": '"rhs": "Your task is to: UNKNOWN GOAL."\n'}


def game_file(row: dict) -> dict:
    grammar = COMMON["grammar"].replace("Your task is to: UNKNOWN GOAL.", "Your task is to: " + row["goal"])
    return {
        "pddl_domain": COMMON["pddl_domain"],
        "grammar": grammar,
        "pddl_problem": row["pddl_problem"],
        "solvable": True,
        "walkthrough": row["walkthrough"],
    }


@pytest.fixture
def tree(tmp_path, fixture_rows):
    """A tree in the official layout, of the fixture games, with a split of its own name."""
    for row in fixture_rows:
        folder = tmp_path / "json_2.1.1" / row["id"]
        folder.mkdir(parents=True)
        (folder / "game.tw-pddl").write_text(json.dumps(game_file(row)))
    return tmp_path


@pytest.fixture
def compact(tmp_path, fixture_rows):
    """The same games in the compact form, with hashes."""
    folder = tmp_path / "compact"
    folder.mkdir()
    (folder / "game_common.json").write_text(json.dumps(COMMON))
    with lzma.open(folder / "gen.jsonl.xz", "wt") as file:
        for row in fixture_rows:
            sha256 = hashlib.sha256(json.dumps(game_file(row)).encode()).hexdigest()
            file.write(json.dumps({**row, "sha256": sha256}) + "\n")
    return folder


def test_fixture_file_is_a_store(fixture_path, fixture_rows):
    store = open_store(str(fixture_path))
    assert isinstance(store, CompactStore)
    ids = store.task_ids("alfworld_fixture")
    assert ids == tuple(sorted(row["id"] for row in fixture_rows)) and len(ids) == 12
    row = store.row(ids[0])
    assert row.sha256 is None and store.game(ids[0]).goal_text == row.goal
    assert store.game(ids[0]) is store.game(ids[0])  # parsed once
    assert store.game_file(ids[0])["goal"] == row.goal


def test_tree_and_compact_form_are_the_same_games(tree, compact):
    one, two = open_store(str(tree)), open_store(str(compact))
    assert isinstance(one, TreeStore) and isinstance(two, CompactStore)
    ids = one.task_ids("gen")
    assert ids == two.task_ids("gen")
    assert one.content_hash(ids) == two.content_hash(ids)
    assert [one.row(task_id) for task_id in ids] == [two.row(task_id) for task_id in ids]
    assert one.game_file(ids[3]) == two.game_file(ids[3])
    panels = [AlfworldBenchmark(str(path)).panel("gen").sha256 for path in (tree, compact)]
    assert panels[0] == panels[1]


def test_changed_game_is_found_by_its_hash(compact, fixture_rows):
    path = compact / "gen.jsonl.xz"
    lines = lzma.decompress(path.read_bytes()).decode().splitlines()
    row = json.loads(lines[2])
    row["pddl_problem"] = row["pddl_problem"].replace("KeyChain", "Keychain")
    row["goal"] += " "
    lines[2] = json.dumps(row)
    with lzma.open(path, "wt") as file:
        file.write("\n".join(lines) + "\n")
    store = open_store(str(compact))
    with pytest.raises(DataError, match="another file"):
        store.game(row["id"])
    store.game(json.loads(lines[0])["id"])  # the others still play


@pytest.mark.parametrize("damage", [b"", b"\x00\x01garbage", None])
def test_damaged_compact_file_names_the_file(compact, damage):
    path = compact / "gen.jsonl.xz"
    path.write_bytes(path.read_bytes()[:2000] if damage is None else damage)
    with pytest.raises(DataError, match=r"gen\.jsonl\.xz"):
        open_store(str(compact)).task_ids("gen")


@pytest.mark.parametrize("line", ['{"id": "x"}', "[1]", "not json"])
def test_lines_that_are_no_games(compact, line):
    with lzma.open(compact / "gen.jsonl.xz", "wt") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=r"gen\.jsonl\.xz"):
        open_store(str(compact)).task_ids("gen")


def test_repeated_game_is_an_error(compact):
    path = compact / "gen.jsonl.xz"
    text = lzma.decompress(path.read_bytes()).decode()
    with lzma.open(path, "wt") as file:
        file.write(text + text.splitlines()[0] + "\n")
    with pytest.raises(DataError, match="twice"):
        open_store(str(compact)).task_ids("gen")


def test_missing_common_file(compact):
    (compact / "game_common.json").unlink()
    store = open_store(str(compact))
    with pytest.raises(DataError, match=r"game_common\.json"):
        store.game(store.task_ids("gen")[0])


@pytest.mark.parametrize("content", ["", "{}", '{"grammar": 3, "pddl_problem": "x", "walkthrough": []}', "{"])
def test_damaged_game_file_names_the_file(tree, fixture_rows, content):
    path = tree / "json_2.1.1" / fixture_rows[0]["id"] / "game.tw-pddl"
    path.write_text(content)
    with pytest.raises(DataError, match=r"game\.tw-pddl"):
        open_store(str(tree)).game(fixture_rows[0]["id"])


def test_game_with_a_damaged_problem_names_the_game(tree, fixture_rows):
    path = tree / "json_2.1.1" / fixture_rows[0]["id"] / "game.tw-pddl"
    game = json.loads(path.read_text())
    path.write_text(json.dumps({**game, "pddl_problem": game["pddl_problem"][:500]}))
    with pytest.raises(DataError, match="trial_gen"):
        open_store(str(tree)).game(fixture_rows[0]["id"])


def test_short_official_split_is_an_error(tree, compact, fixture_rows):
    (tree / "json_2.1.1" / "gen").rename(tree / "json_2.1.1" / "valid_seen")
    with pytest.raises(DataError, match="140"):
        open_store(str(tree)).task_ids("valid_seen")
    (compact / "gen.jsonl.xz").rename(compact / "valid_unseen.jsonl.xz")
    with pytest.raises(DataError, match="134"):
        open_store(str(compact)).task_ids("valid_unseen")


def test_missing_paths_splits_and_ids(tmp_path, tree, compact):
    for data in (str(tmp_path / "nowhere"), str(tmp_path / "compact" / "nothing"), str(__file__)):
        with pytest.raises(ConfigError, match=r"env\.data"):
            open_store(data)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r"env\.data"):
        open_store(str(empty))
    for store in (open_store(str(tree)), open_store(str(compact)), open_store("generated", SMALL)):
        with pytest.raises(DataError, match="nowhere"):
            store.task_ids("nowhere")
        for task_id in ("", "gen/none/none", "nowhere/../x", "generated/look-x-None-y-1/trial_gen_5", "trial_gen_9x"):
            with pytest.raises(SdjaxError):
                store.row(task_id)


def test_generated_store_is_a_function_of_its_settings():
    one, two = GeneratedStore(SMALL), GeneratedStore(SMALL)
    assert [len(one.task_ids(split)) for split in one.splits] == [12, 8, 4]
    ids = one.task_ids("valid")
    two.game(ids[5])  # order of use does not matter
    assert one.content_hash(ids) == two.content_hash(ids)
    assert not set(ids) & set(one.task_ids("train"))
    other = GeneratedStore(dataclasses.replace(SMALL, seed=1))
    assert not set(other.task_ids("valid")) & set(ids)
    harder = GeneratedStore(dataclasses.replace(SMALL, distractors_min=12))
    assert harder.content_hash(harder.task_ids("valid")) != one.content_hash(ids)
    assert {task_type_of(task_id) for task_id in one.task_ids("train")} == set(SMALL.task_types)
    assert one.provenance()["seed"] == 0 and "generator_version" in one.provenance()


def test_task_type_of_strange_ids():
    for task_id in ("", "x", "a/b/c", "train/pick_nothing-Mug-None-Desk-1/trial"):
        with pytest.raises(DataError):
            task_type_of(task_id)


@pytest.mark.shared
def test_released_games_load_count_and_hash(released):
    store = open_store(str(released))
    assert set(store.splits) == set(OFFICIAL_COUNTS)
    for split in ("valid_seen", "valid_unseen", "valid_train"):
        ids = store.task_ids(split)
        assert len(ids) == OFFICIAL_COUNTS[split]
        for task_id in random.Random(0).sample(ids, 30):
            assert Episode(store.game(task_id)).admissible  # the row's sha256 is checked on the way
    assert len(AlfworldBenchmark(str(released)).panel("valid_seen").task_ids) == 140  # hash pinned in panels.toml
