"""The certification command: what it finds, what it keeps, and the second half of the games that CI compares."""

import importlib.metadata
import importlib.util
import io
import sys

import pytest
from rich.console import Console

from sdjax import jsonl
from sdjax.envs.alfworld import certify
from sdjax.envs.alfworld.store import open_store
from sdjax.envs.config import GeneratorConfig
from sdjax.errors import ConfigError, DataError

SMALL = GeneratorConfig(valid_games=12, receptacles_max=8, distractors_max=6)
needs_textworld = pytest.mark.skipif(
    importlib.util.find_spec("textworld") is None or importlib.util.find_spec("alfworld") is None,
    reason="the packages alfworld and textworld are not installed",
)

# Plays the native engine, so that it agrees; {fault} changes some answers or breaks.
TWIN = """
import json, sys
from sdjax.envs.alfworld.engine import Episode, Game
episode, steps = None, 0
for line in sys.stdin:
    request = json.loads(line)
    result = {}
    if request["method"] == "reset":
        game = request["params"]["game"]
        episode, steps = Episode(Game(game["pddl_problem"], game["goal"])), 0
    elif request["method"] == "step":
        episode.step(request["params"]["action"])
        steps += 1
    if request["method"] != "close":
        result = {"text": episode.text, "admissible": list(episode.admissible), "won": episode.won()}
    FAULT
    print(json.dumps({"id": request["id"], "result": result}), flush=True)
"""


def twin(fault: str = "") -> list[str]:
    return [sys.executable, "-c", TWIN.replace("FAULT", fault or "pass")]


@pytest.fixture
def store(fixture_path):
    return open_store(str(fixture_path))


@pytest.fixture
def ids(store):
    return store.task_ids("alfworld_fixture")


@pytest.fixture
def versions(monkeypatch):
    """Package versions, so that the command also runs where the real engine is not installed."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{name} 1")


@pytest.fixture
def stand_in(monkeypatch, versions):
    """Calls the command with another worker process; returns (exit status, what it printed)."""
    compare_games = certify.compare_games

    def call(store, ids, out, command, steps=6) -> tuple[int, str]:
        monkeypatch.setattr(certify, "compare_games", lambda *a, **k: compare_games(*a, **k, command=command))
        console = Console(file=io.StringIO(), width=250)
        status = certify.certify(store, {"some": ids}, steps=steps, workers=1, out=out, console=console)
        return status, console.file.getvalue()

    return call


@pytest.mark.slow
@pytest.mark.textworld
@needs_textworld
def test_engines_agree_on_fixture_and_more_generated_games(store, ids, tmp_path):
    generated = open_store("generated", SMALL)
    for made, name in ((store, "alfworld_fixture"), (generated, "valid")):
        console = Console(file=io.StringIO(), width=250)
        out = tmp_path / f"{name}.jsonl"
        split = {name: made.task_ids(name)}
        assert certify.certify(made, split, steps=7, workers=1, out=out, console=console) == 0
        lines = jsonl.read(out)
        assert sorted(line["game"] for line in lines) == sorted(made.task_ids(name)) and len(lines) == 12
        assert any(line["won"] for line in lines) and all(line["mismatch"] is None for line in lines)


def test_a_twin_agrees_and_games_are_won(store, ids):
    outcomes = certify.compare_games(store, ids, steps=40, command=twin())
    assert [o.game for o in outcomes] == list(ids) and all(o.mismatch is None and not o.error for o in outcomes)
    assert sum(o.won for o in outcomes) >= 9
    again = certify.compare_games(store, ids[::-1], steps=40, command=twin(), workers=2)
    assert again[::-1] == outcomes  # play depends on the game alone


def test_a_difference_names_game_step_and_both_texts(store, ids, tmp_path, stand_in):
    fault = 'result.update(text="[bold]Boo[/bold]") if steps == 3 else None'
    status, said = stand_in(store, ids[:2], tmp_path / "out.jsonl", twin(fault))
    assert status == 1
    for task_id in ids[:2]:
        assert f"{task_id}: text differs at step 3, after '" in said
    assert "real   text: '[bold]Boo[/bold]'" in said and "native text: '" in said
    status, said = stand_in(store, ids[:2], tmp_path / "out.jsonl", ["false"])  # known; nothing is played
    assert status == 1 and "2 games were compared before, 0 are left" in said and "differs at step 3" in said


@pytest.mark.parametrize(("key", "wrong"), [("admissible", "result['admissible'][:-1]"), ("won", "True")])
def test_every_part_of_the_answer_is_compared(store, ids, key, wrong):
    fault = f"result.update({key}={wrong}) if steps else None"
    outcome = certify.compare_games(store, ids[:1], steps=5, command=twin(fault))[0]
    found = outcome.mismatch
    assert found is not None and found.step == 1 and found.differing == [key]
    assert list(found.native) == list(found.real) == ["text", key] and found.native["text"] == found.real["text"]


def test_only_missing_games_are_played(store, ids, tmp_path, stand_in):
    out = tmp_path / "out.jsonl"
    assert stand_in(store, ids[:3], out, twin())[0] == 0
    with out.open("a") as file:
        file.write('{"game": "torn')
    status, said = stand_in(store, ids[:5], out, twin())
    assert status == 0 and "3 games were compared before, 2 are left" in said
    assert [line["game"] for line in jsonl.read(out)] == list(ids[:5])
    assert stand_in(store, ids[:5], out, ["false"])[0] == 0
    _, said = stand_in(store, ids[:5], out, twin(), steps=7)  # another play
    assert "compared before" not in said and len(jsonl.read(out)) == 10


def test_a_game_that_cannot_be_played_is_owed(store, ids, tmp_path, stand_in):
    out = tmp_path / "out.jsonl"
    status, said = stand_in(store, ids[:2], out, twin("sys.exit(1) if steps == 2 else None"))
    assert status == 1 and said.count("could not be played on after 1 steps") == 2 and not out.exists()
    status, said = stand_in(store, ids[:2], out, twin())
    assert status == 0 and "compared before" not in said and len(jsonl.read(out)) == 2


def test_a_file_of_something_else_is_an_error(store, ids, tmp_path, stand_in):
    out = tmp_path / "out.jsonl"
    jsonl.append(out, [{"step": 1}])
    with pytest.raises(DataError, match="another kind"):
        stand_in(store, ids[:1], out, twin())


def test_command_line(tmp_path, fixture_path, capsys, monkeypatch, versions):
    compare_games = certify.compare_games
    monkeypatch.setattr(certify, "compare_games", lambda *a, **k: compare_games(*a, **k, command=twin()))
    arguments = [f"--data={fixture_path}", "--splits=alfworld_fixture", "--steps=4", f"--out={tmp_path / 'a.jsonl'}"]
    assert certify.main([*arguments, "--games=2"]) == 0
    assert len(jsonl.read(tmp_path / "a.jsonl")) == 2
    assert certify.main([*arguments, "--games=99"]) == 0
    assert len(jsonl.read(tmp_path / "a.jsonl")) == 12
    for nothing in ("--splits=,", "--steps=0", "--games=-1"):
        with pytest.raises(SystemExit):
            certify.main([*arguments, nothing])
    capsys.readouterr()
    assert certify.main([f"--data={tmp_path / 'nowhere'}"]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_without_the_packages_the_error_says_what_to_install(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ConfigError, match=r"sdjax\[alfworld\]"):
        certify.settings(5)
