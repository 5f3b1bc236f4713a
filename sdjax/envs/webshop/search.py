"""Search engines of the shop: text in, asins out, best first."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from sdjax.envs.bm25 import Bm25, analyze
from sdjax.envs.webshop.catalogue import INDEX_FILE, Product, index_text
from sdjax.errors import ConfigError, DataError

ENGINES = ("bm25", "bm25s")
_K1, _B = 0.9, 0.4  # Anserini's
_CACHED_QUERIES = 1 << 14
_CACHED_CHARACTERS = 500  # longer queries are not worth the memory


class SearchEngine(Protocol):
    """Anything that finds products, e.g. a client of a Lucene server."""

    def search(self, query: str, k: int) -> tuple[str, ...]:
        """Asins of the ``k`` best products; only those that share a word with ``query``."""
        ...


def open_search(engine: str, products: Sequence[Product], folder: Path | None = None) -> SearchEngine:
    """Indexes the products, or reads the index that ``--mode=prepare`` left in ``folder``.

    Raises:
      ConfigError: ``engine`` is bm25s and the package is missing. DataError: the stored index is of other products.
    """
    # Lucene breaks ties by asin.
    products = sorted(products, key=lambda product: product.asin)
    asins = [product.asin for product in products]
    if engine == "bm25s":
        return CachedSearch(Bm25sSearch(asins, [index_text(product) for product in products]))
    if folder is not None and (folder / INDEX_FILE).is_file():
        index = Bm25.load(folder / INDEX_FILE)
        if len(index) != len(asins):
            raise DataError(
                f"{folder / INDEX_FILE} indexes {len(index)} products, the catalogue has {len(asins)}.",
                "run --mode=prepare again.",
            )
    else:
        index = Bm25((index_text(product) for product in products), k1=_K1, b=_B)
    return CachedSearch(LuceneSearch(asins, index))


def save_index(products: Sequence[Product], path: Path) -> None:
    """Builds the default index and writes it where ``open_search`` looks."""
    ordered = sorted(products, key=lambda product: product.asin)
    Bm25((index_text(product) for product in ordered), k1=_K1, b=_B).save(path)


class LuceneSearch:
    """The ranking of the original. asins: sorted, in the order of the index."""

    def __init__(self, asins: list[str], index: Bm25):
        self._asins, self._index = asins, index

    def search(self, query: str, k: int) -> tuple[str, ...]:
        return tuple(self._asins[row] for row in self._index.top(query, k)[0])


class Bm25sSearch:
    """The package bm25s with the same words. It does not quantise lengths, so that near ties come in another order."""

    def __init__(self, asins: list[str], texts: Sequence[str]):
        try:
            import bm25s  # type: ignore[import-not-found]  # optional
        except ImportError as error:
            raise ConfigError("env.webshop.search is bm25s, which is not installed.", "pip install bm25s.") from error
        self._asins = asins
        self._index = bm25s.BM25(method="lucene", k1=_K1, b=_B)
        self._index.index([analyze(text) for text in texts], show_progress=False)

    def search(self, query: str, k: int) -> tuple[str, ...]:
        terms = analyze(query)
        if not any(term in self._index.vocab_dict for term in terms):
            return ()
        scores = self._index.get_scores(terms)
        best = np.argsort(-scores, kind="stable")[:k]
        return tuple(self._asins[row] for row in best if scores[row] > 0)


class CachedSearch:
    """Remembers the results of recent short queries: pages of results are turned, and groups start alike."""

    def __init__(self, engine: SearchEngine):
        self._engine = engine
        self._recent = functools.lru_cache(_CACHED_QUERIES)(engine.search)

    def search(self, query: str, k: int) -> tuple[str, ...]:
        return (self._recent if len(query) <= _CACHED_CHARACTERS else self._engine.search)(query, k)
