"""What a Search-QA data set holds and what its retrieval and its experts reach.

``python -m sdjax.envs.searchqa.check [--data PATH] [--queries N]``
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from sdjax.envs.config import EnvConfig
from sdjax.envs.searchqa.adapter import SearchqaBenchmark
from sdjax.envs.searchqa.backends import Bm25Backend
from sdjax.envs.searchqa.corpus import Corpus
from sdjax.envs.searchqa.expert import EXPERTS
from sdjax.envs.searchqa.questions import SOURCES, Question
from sdjax.errors import DataError, SdjaxError

DEPTHS = (1, 3, 10)
_TURNS = 4


def recall(backend: Bm25Backend, questions: Sequence[Question]) -> dict[str, dict[int, float]]:
    """source -> depth -> share of its questions with at least one gold passage among the first so many, where the
    query is the question. Questions without gold passages do not count."""
    found: dict[str, dict[int, float]] = {}
    for source in SOURCES:
        asked = [question for question in questions if question.source == source and question.gold_ids]
        if not asked:
            continue
        results = backend.search([question.question for question in asked], max(DEPTHS))
        ranks = [
            next((rank for rank, hit in enumerate(hits) if hit.passage.id in question.gold_ids), max(DEPTHS))
            for question, hits in zip(asked, results, strict=True)
        ]
        found[source] = {depth: sum(rank < depth for rank in ranks) / len(ranks) for depth in DEPTHS}
    return found


def queries_per_second(backend: Bm25Backend, questions: Sequence[Question], count: int) -> float:
    """Searches one after the other, top 3, on one core, by CPU time; the first few are not counted."""
    queries = [questions[i % len(questions)].question for i in range(count)]
    backend.search(queries[:100], 3)
    begin = time.process_time()
    for query in queries:
        backend.search([query], 3)
    return count / (time.process_time() - begin)


def expert_wins(benchmark: SearchqaBenchmark, split: str, kind: str) -> dict[str, float]:
    """source -> share of the questions of ``split`` that the expert answers right."""

    async def play() -> dict[str, list[bool]]:
        won: dict[str, list[bool]] = {}
        for task_id in benchmark.task_ids(split):
            turns = await benchmark.expert_episode(task_id, kind, 0, _TURNS)
            won.setdefault(benchmark.family(task_id), []).append(bool(turns))
        return won

    return {source: sum(wins) / len(wins) for source, wins in asyncio.run(play()).items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sdjax.envs.searchqa.check", description=__doc__)
    parser.add_argument("--data", default="generated", help='a folder with questions and a corpus, or "generated"')
    parser.add_argument("--queries", type=int, default=3000, help="searches of the speed measurement")
    parsed = parser.parse_args(arguments)
    try:
        _report(parsed.data, parsed.queries, Console())
    except SdjaxError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _report(data: str, count: int, console: Console) -> None:
    benchmark = SearchqaBenchmark(EnvConfig(name="searchqa", data=data, turns=_TURNS))
    store = benchmark.store
    corpus: Corpus | None = store.corpus
    if corpus is None:
        raise DataError(f"{data} has no corpus.jsonl, so nothing can be searched.", "add the corpus.")
    backend = Bm25Backend(corpus, store.index)
    every = list(store.questions.values())
    main_split = "eval" if "eval" in store.splits else next(iter(store.splits))
    scores: dict[str, dict[str, Any]] = {kind: expert_wins(benchmark, main_split, kind) for kind in EXPERTS}
    recalls = recall(backend, every)
    table = Table(box=box.SIMPLE, title=f"{store.name}: {len(corpus)} passages, {len(every)} questions")
    for name in ("source", *store.splits, *(f"any@{depth}" for depth in DEPTHS), *(f"{kind} EM" for kind in EXPERTS)):
        table.add_column(name, justify="right")
    for source in SOURCES:
        counts = [str(sum(store.questions[i].source == source for i in ids)) for ids in store.splits.values()]
        shares = [recalls.get(source, {}).get(depth) for depth in DEPTHS]
        wins = [scores[kind].get(source) for kind in EXPERTS]
        table.add_row(source, *counts, *("-" if share is None else f"{share:.2f}" for share in [*shares, *wins]))
    console.print(table)
    macro = ", ".join(f"{kind} {sum(won.values()) / len(won):.2f}" for kind, won in scores.items())
    console.print(f"macro EM on {main_split} within {_TURNS} turns: {macro}")
    console.print(f"BM25: {queries_per_second(backend, every, count):,.0f} queries/s on one core (top 3)")
    console.print(f"corpus sha256 {corpus.sha256}")
    benchmark.close()


if __name__ == "__main__":
    sys.exit(main())
