"""Search engines: order, ties, stored indexes, the cache, the optional package."""

import sys

import pytest
from webshop_shops import tiny_catalogue  # type: ignore[import-not-found]

from sdjax.envs.webshop.catalogue import INDEX_FILE
from sdjax.envs.webshop.generator import generate_catalogue
from sdjax.envs.webshop.search import CachedSearch, open_search, save_index
from sdjax.errors import ConfigError, DataError


def test_equal_products_come_by_asin_whatever_their_place():
    products = tiny_catalogue().products
    assert open_search("bm25", products[::-1]).search("leather lamp hat red", 50) == open_search(
        "bm25", products
    ).search("leather lamp hat red", 50)


def test_a_stored_index_is_used_and_must_fit(tmp_path):
    products = generate_catalogue(50, 0).products
    save_index(products, tmp_path / INDEX_FILE)
    built, stored = open_search("bm25", products), open_search("bm25", products, tmp_path)
    for product in products[:20]:
        assert stored.search(product.title, 10) == built.search(product.title, 10)
    with pytest.raises(DataError, match="indexes 50 products, the catalogue has 49"):
        open_search("bm25", products[1:], tmp_path)


def test_the_cache_answers_like_the_engine_and_leaves_long_queries_alone():
    class Counting:
        calls = 0

        def search(self, query, k):
            self.calls += 1
            return (query[:3], str(k))

    engine = Counting()
    cached = CachedSearch(engine)
    assert [cached.search("red", 5) for _ in range(3)] == [("red", "5")] * 3 and engine.calls == 1
    assert cached.search("red", 6) == ("red", "6") and engine.calls == 2
    for _ in range(2):
        cached.search("x" * 501, 5)
    assert engine.calls == 4


def test_bm25s_finds_nearly_the_same():
    pytest.importorskip("bm25s")
    products = generate_catalogue(200, 0).products
    ours, theirs = open_search("bm25", products), open_search("bm25s", products)
    shared = 0
    for product in products[:40]:
        first, second = ours.search(product.title, 10), theirs.search(product.title, 10)
        assert product.asin in first and product.asin in second
        shared += len(set(first) & set(second))
    assert shared > 0.9 * 400
    assert theirs.search("qqqq", 5) == () == theirs.search("", 5)


def test_a_missing_package_is_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ConfigError, match="pip install bm25s"):
        open_search("bm25s", tiny_catalogue().products)
