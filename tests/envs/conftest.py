"""Games for the tests of environments: the shipped fixture, and the released games where they are at hand."""

import json
import lzma
from pathlib import Path

import pytest

from sdjax.envs.alfworld.engine import Game

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "tests" / "data" / "alfworld_fixture.jsonl.xz"
SHARED = ROOT.parent / "shared" / "data" / "alfworld"


def read_rows(path: Path) -> list[dict]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="session")
def fixture_path() -> Path:
    return FIXTURE


@pytest.fixture(scope="session")
def fixture_rows() -> list[dict]:
    return read_rows(FIXTURE)


@pytest.fixture(scope="session")
def fixture_games(fixture_rows) -> list[Game]:
    return [Game(row["pddl_problem"], row["goal"]) for row in fixture_rows]


@pytest.fixture(scope="session")
def released() -> Path:
    """The compact form of the released games; skips the test where it is absent."""
    if not (SHARED / "game_common.json").is_file():
        pytest.skip("the released games are not here")
    return SHARED
