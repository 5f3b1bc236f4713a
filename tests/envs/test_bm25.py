"""BM25 against its definition, Lucene's rankings, and itself after saving."""

import gzip
import json
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from sdjax.envs import bm25
from sdjax.envs.bm25 import STOP_WORDS, Bm25, analyze
from sdjax.errors import DataError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "webshop"
WORDS = ["red", "dress", "dresses", "shoe", "women's", "size", "large", "6.5", "cotton", "rouge"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=60).map(" ".join)


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("Running shoes for the women's team", ["run", "shoe", "women", "team"]),
        ("us is at technology, assembly; happily", ["us", "technolog", "assembl", "happili"]),
        ("3.5 inch v1.2-beta e.g. a.b.c 1,000", ["3.5", "inch", "v1.2", "beta", "e.g", "a.b.c", "1,000"]),
        ("don't O'Neill’s L'ORÉAL", ["don't", "o'neil", "l'oréal"]),
        ("_ __ snake_case ...", ["snake_cas"]),
        ("valentine‘s 1’000 a’b x:y 1:2", ["valentine‘", "1’000", "a’b", "x:y", "1", "2"]),
        ("你好 world ひら カタカナ", ["你", "好", "world", "ひ", "ら", "カタカナ"]),
        ("★★ gift ❤️ 👍🏽 🇫🇷", ["★", "★", "gift", "❤️", "👍🏽", "🇫🇷"]),
        ("İΟΣ", ["iοσ"]),
        ("", []),
    ],
)
def test_analysis(text, terms):
    assert analyze(text) == terms


def test_a_very_long_word_is_cut():
    assert [len(term) for term in analyze("x" * 600)] == [255, 255, 90]


@settings(max_examples=300)
@given(st.text(st.sampled_from("abZ09_'.:;,- \n")) | st.text(st.characters(max_codepoint=127)))
def test_the_fast_pattern_for_ascii_finds_the_same_words(text):
    assert re.findall(bm25._ASCII_WORD, text) == regex.findall(bm25._WORD, text)


@given(st.text())
def test_any_text_can_be_analyzed(text):
    terms = analyze(text)
    assert terms == analyze(text) and not any("\n" in term or not term for term in terms)
    assert not STOP_WORDS & {term for term in terms if len(term) < 3}


def definition(texts: list[str], query: str, k1: float = 0.9, b: float = 0.4) -> np.ndarray:
    """BM25 written down plainly, lengths not quantised (they are exact below 40 words)."""
    documents = [Counter(analyze(text)) for text in texts]
    used = [document for document in documents if document]
    mean = sum(document.total() for document in used) / len(used)
    scores = np.zeros(len(texts))
    for term, weight in Counter(analyze(query)).items():
        df = sum(term in document for document in documents)
        idf = math.log(1 + (len(used) - df + 0.5) / (df + 0.5))
        for row, document in enumerate(documents):
            tf = document[term]
            scores[row] += weight * idf * tf / (tf + k1 * (1 - b + b * document.total() / mean))
    return scores


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join), min_size=1, max_size=30), TEXTS)
def test_scores_are_the_definition(texts, query):
    texts = [*texts, "red"]
    rows, scores = Bm25(texts).top(query, len(texts))
    expected = definition(texts, query)
    assert set(rows) == set(np.flatnonzero(expected > 0))
    np.testing.assert_allclose(scores, expected[rows], rtol=2e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=400), TEXTS, st.integers(1, 60))
def test_the_top_is_the_head_of_the_whole_ranking(texts, query, k):
    index = Bm25([*texts, "red"])
    rows, scores = index.top(query, len(index))
    assert list(rows) == sorted(rows, key=lambda row: (-scores[list(rows).index(row)], row))
    head_rows, head_scores = index.top(query, k)
    assert list(head_rows) == list(rows[:k]) and list(head_scores) == list(scores[:k])


def test_the_top_of_many_documents():
    rng = np.random.default_rng(0)
    words = np.array([f"w{n}x" for n in range(200)])
    texts = [" ".join(words[np.minimum(rng.geometric(0.05, 20), 199)]) for _ in range(5000)]
    index = Bm25(texts)
    for query in ("w1x w7x", "w150x", "w3x w3x w90x w0x", "absent"):
        rows, scores = index.top(query, len(index))
        assert [list(part) for part in index.top(query, 10)] == [list(rows[:10]), list(scores[:10])]
        assert (np.diff(scores) <= 0).all() and (scores > 0).all()


def test_long_documents_share_a_length_code():
    filler = " ".join(["filler"] * 200)
    rows, scores = Bm25([f"red {filler}", f"red {filler} filler", f"red {filler} {filler}", "blue"]).top("red", 5)
    assert list(rows) == [0, 1, 2] and scores[0] == scores[1] > scores[2]


def test_length_codes():
    assert [bm25._quantise(n) for n in range(41)] == [*range(40), 40]
    assert [bm25._quantise(n) for n in (41, 42, 57, 1000, 2**31 - 1)] == [40, 42, 56, 984, 2013265944]


def test_equal_scores_come_in_row_order():
    rows, _ = Bm25(["a red hat", "", "a red hat", "red hat", "blue"]).top("HATS, red", 3)
    assert list(rows) == [0, 2, 3]


def test_saved_and_loaded(tmp_path):
    index = Bm25(["red dress ❤", "", "blue dress", "dress dress"], k1=1.2, b=0.75)
    index.save(tmp_path / "index.bin")
    again = Bm25.load(tmp_path / "index.bin")
    assert (len(again), again.k1, again.b) == (4, 1.2, 0.75)
    for query in ("dress", "red red dress", "❤", "nothing"):
        assert [list(part) for part in again.top(query, 4)] == [list(part) for part in index.top(query, 4)]


def test_damaged_index_files(tmp_path):
    path = tmp_path / "index.npz"
    with pytest.raises(DataError, match=r"index\.npz"):
        Bm25.load(path)
    Bm25(["red"]).save(path)
    whole = path.read_bytes()
    for content in (b"", b"PK\x03\x04", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(DataError, match="not a saved"):
            Bm25.load(path)
    np.savez(path, format=np.int64(99))
    with pytest.raises(DataError, match="format"):
        Bm25.load(path)
    np.savez(path, format=np.asarray([{}], object), allow_pickle=True)
    with pytest.raises(DataError, match="not a saved"):
        Bm25.load(path)


def test_nothing_to_index_and_nothing_asked():
    for texts in ([], ["", "the"]):
        with pytest.raises(DataError, match="without a word"):
            Bm25(texts)
    with pytest.raises(DataError, match="top 0"):
        Bm25(["red"]).top("red", 0)


def test_a_query_of_a_megabyte():
    index = Bm25(["red dress", "blue"])
    for query in ("a" * 1_000_000, "'.'" * 300_000, "é'" * 400_000, "́" * 500_000):
        assert index.top(query, 5)[0].size == 0
    assert list(index.top("dresses " * 100_000, 5)[0]) == [0]


@pytest.mark.shared
def test_rankings_of_lucene():
    path = SHARED / "golden" / "search_lucene_bm25.jsonl.gz"
    if not path.is_file():
        pytest.skip("the recorded rankings are not here")
    from sdjax.envs.webshop.catalogue import index_text, read_catalogue

    products = sorted(read_catalogue(SHARED).products, key=lambda product: product.asin)
    index = Bm25(index_text(product) for product in products)
    with gzip.open(path, "rt", encoding="utf-8") as file:
        golden = [json.loads(line) for line in file]
    top10 = top50 = differing = 0
    for row in golden:
        rows, scores = index.top(row["query"], 50)
        found, expected = [products[n].asin for n in rows], [asin for asin, _ in row["hits"]]
        top10 += found[:10] == expected[:10]
        top50 += found == expected
        by_asin = dict(row["hits"])
        differing += sum(abs(by_asin.get(asin, score) - score) > 1e-3 for asin, score in zip(found, scores))
    assert len(golden) == 806 and top10 == 806 and top50 >= 804 and differing == 0
