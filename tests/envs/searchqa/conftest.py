"""What the tests of Search-QA share: the generated benchmark, and the larger data where it is at hand."""

import asyncio
from pathlib import Path

import pytest

from sdjax.envs import EnvConfig
from sdjax.envs.searchqa.adapter import SearchqaBenchmark
from sdjax.envs.searchqa.config import SearchqaConfig
from sdjax.envs.searchqa.store import Store, open_store

ROOT = Path(__file__).resolve().parents[3]
SHARED = ROOT.parent / "shared" / "data" / "searchqa"


@pytest.fixture(scope="session")
def world() -> Store:
    return open_store("generated", SearchqaConfig())


@pytest.fixture(scope="session")
def benchmark():
    made = SearchqaBenchmark(EnvConfig(name="searchqa", turns=4, history=4))
    yield made
    made.close()


@pytest.fixture(scope="session")
def closed_corpus() -> Path:
    """The folder with 23,083 real passages; skips the test where it is absent."""
    if not (SHARED / "corpus.jsonl.gz").is_file():
        pytest.skip("the real corpus is not here")
    return SHARED


@pytest.fixture
def run():
    return asyncio.run
