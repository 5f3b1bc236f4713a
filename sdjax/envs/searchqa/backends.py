"""Search backends: what finds passages for a query. All of them answer many queries in one call.

A backend that cannot answer raises EnvError; the environment shows that to the agent as text and counts it.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sdjax.envs.bm25 import Bm25
from sdjax.envs.searchqa.config import SearchqaConfig
from sdjax.envs.searchqa.corpus import Corpus, Passage
from sdjax.errors import ConfigError, DataError

TOKEN_VARIABLE = "SDJAX_SEARCH_TOKEN"


@dataclass(frozen=True, slots=True)
class Hit:
    passage: Passage
    score: float


class SearchBackend(Protocol):
    """on_threads: ``search`` waits for something else than this process and belongs on a thread. Thread-safe."""

    on_threads: bool

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """At most ``k`` passages for each query, best first; none for a blank query.

        Raises:
          EnvError: the search failed.
        """
        ...

    def provenance(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class Bm25Backend:
    """Lucene's BM25 over a corpus in memory.

    Args:
      index: a saved index of this corpus; built where it is None.
    """

    on_threads = False

    def __init__(self, corpus: Corpus, index: Path | None = None):
        self._corpus = corpus
        self._index = Bm25(p.contents for p in corpus) if index is None else Bm25.load(index)
        if len(self._index) != len(corpus):
            raise DataError(
                f"{index} has {len(self._index)} documents, the corpus {len(corpus)} passages.",
                "remove the index file or build it again with --mode=prepare.",
            )

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        found = []
        for query in queries:
            rows, scores = self._index.top(query, k)
            passages = self._corpus.passages
            found.append([Hit(passages[row], score) for row, score in zip(rows.tolist(), scores.tolist())])
        return found

    def save_index(self, path: Path) -> None:
        self._index.save(path)

    def provenance(self) -> dict[str, Any]:
        return {"retriever": "bm25", "bm25_k1": self._index.k1, "bm25_b": self._index.b}

    def close(self) -> None:
        pass


class CachedBackend:
    """Keeps the results of the ``size`` queries that were asked last. Failures are not kept."""

    def __init__(self, backend: SearchBackend, size: int):
        if size < 1:
            raise ConfigError(f"a cache of {size} queries.", "use a positive size, or no cache.")
        self._backend, self._size = backend, size
        self._kept: OrderedDict[tuple[str, int], list[Hit]] = OrderedDict()
        self._lock = threading.Lock()
        self.on_threads = backend.on_threads
        self.hits = self.misses = 0

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        with self._lock:
            known = {query: self._kept[query, k] for query in queries if (query, k) in self._kept}
            self.hits += sum(query in known for query in queries)
            self.misses += sum(query not in known for query in queries)
        missing = list(dict.fromkeys(query for query in queries if query not in known))
        if missing:
            known.update(zip(missing, self._backend.search(missing, k), strict=True))
        with self._lock:
            for query in queries:
                self._kept[query, k] = known[query]
                self._kept.move_to_end((query, k))
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)
        return [known[query] for query in queries]

    def provenance(self) -> dict[str, Any]:
        return self._backend.provenance()

    def close(self) -> None:
        self._backend.close()


def make_backend(config: SearchqaConfig, corpus: Corpus | None, index: Path | None = None) -> SearchBackend:
    """The backend that ``config`` names, behind a cache if one is wanted.

    Raises:
      ConfigError: an unknown retriever, or one that needs a corpus where there is none.
    """
    if config.retriever not in ("bm25", "dense", "http"):
        raise ConfigError(f"env.searchqa.retriever = {config.retriever!r}.", "use bm25, dense or http.")
    backend: SearchBackend
    if config.retriever == "http":
        from sdjax.envs.searchqa.client import HttpBackend

        backend = HttpBackend(
            config.url,
            config.payload,
            timeout_s=config.timeout_s,
            retries=config.retries,
            connections=config.connections,
            token=os.environ.get(TOKEN_VARIABLE, ""),
        )
    elif corpus is None:
        raise ConfigError(
            f"env.searchqa.retriever is {config.retriever}, but env.data has no corpus.jsonl.",
            "put the corpus there, or set retriever to http and url to a running server.",
        )
    elif config.retriever == "dense":
        from sdjax.envs.searchqa.dense import DenseBackend
        from sdjax.envs.searchqa.encoder import load_encoder

        backend = DenseBackend(corpus, Path(config.embeddings), load_encoder(config.encoder))
    else:
        backend = Bm25Backend(corpus, index)
    return CachedBackend(backend, config.cache) if config.cache else backend
