"""The real simulator in one worker process for all tests; they are skipped where it or Java is missing."""

from collections.abc import Iterator

import pytest
from scienceworld_play import config, make_or_skip

from sdjax.envs.scienceworld.adapter import ScienceworldBenchmark


@pytest.fixture(scope="session")
def benchmark() -> Iterator[ScienceworldBenchmark]:
    made = make_or_skip(config())
    yield made
    made.close()


@pytest.fixture
def make_benchmark():
    """Benchmarks with other settings, each with a Java process of its own."""
    made: list[ScienceworldBenchmark] = []

    def make(**settings) -> ScienceworldBenchmark:
        made.append(make_or_skip(config(**settings)))
        return made[-1]

    yield make
    for benchmark in made:
        benchmark.close()
