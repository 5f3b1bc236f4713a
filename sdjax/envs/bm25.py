"""BM25 as Lucene and Anserini compute it, in numpy: same words, same ranking, no Java.

Analysis is Anserini's default for English: words by Unicode segmentation (Lucene's StandardTokenizer), possessive
``'s`` removed, lower case, 33 stop words dropped, Porter's stemmer with Martin Porter's later changes. Scores follow
Lucene's BM25Similarity: document lengths quantised to one byte, single precision, idf = log(1 + (N - n + 0.5) / (n +
0.5)), a repeated query word counts as often as it stands there. The postings are flat arrays, so that millions of them
fit.
"""

import functools
import io
import math
import re
import zipfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import regex

from sdjax.errors import DataError

FORMAT = 1
_STOP_WORDS = """a an and are as at be but by for if in into is it no not of on or such that the their then there these
they this to was will with"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
_LONGEST_WORD = 255  # longer ones are cut into pieces of this length
_KNOWN_STEMS = 1 << 18
_BLOCKS = 64
_SMALLEST = np.finfo(np.float32).smallest_subnormal

# A word is a run of letters, digits and underscores; some punctuation may stand between two letters or two digits.
# Han and Hiragana characters and emoji are words of their own. The emoji are those of the Unicode version that Lucene's
# tokenizer was made with (Extended_Pictographic with stars, hands and notes); newer versions have fewer.
_PICTURES = (
    r"\u00A9\u00AE\u203C\u2049\u2122\u2139\u2194-\u2199\u21A9-\u21AA\u231A-\u231B\u2328\u2388\u23CF\u23E9-\u23F3"
    r"\u23F8-\u23FA\u24C2\u25AA-\u25AB\u25B6\u25C0\u25FB-\u25FE\u2600-\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2705"
    r"\u2708-\u2712\u2714\u2716\u271D\u2721\u2728\u2733-\u2734\u2744\u2747\u274C\u274E\u2753-\u2755\u2757\u2763-\u2764"
    r"\u2795-\u2797\u27A1\u27B0\u27BF\u2934-\u2935\u2B05-\u2B07\u2B1B-\u2B1C\u2B50\u2B55\u3030\u303D\u3297\u3299"
    r"\U0001F000-\U0001F0FF\U0001F10D-\U0001F10F\U0001F12F\U0001F16C-\U0001F171\U0001F17E-\U0001F17F\U0001F18E"
    r"\U0001F191-\U0001F19A\U0001F1AD-\U0001F1E5\U0001F201-\U0001F20F\U0001F21A\U0001F22F\U0001F232-\U0001F23A"
    r"\U0001F23C-\U0001F23F\U0001F249-\U0001F3FA\U0001F400-\U0001F53D\U0001F546-\U0001F64F\U0001F680-\U0001F6FF"
    r"\U0001F774-\U0001F77F\U0001F7D5-\U0001F7FF\U0001F80C-\U0001F80F\U0001F848-\U0001F84F\U0001F85A-\U0001F85F"
    r"\U0001F888-\U0001F88F\U0001F8AE-\U0001F8FF\U0001F90C-\U0001F93A\U0001F93C-\U0001F945\U0001F947-\U0001FFFD"
)
_PICTURE = rf"[{_PICTURES}][\uFE0F\U0001F3FB-\U0001F3FF]?"
_EMOJI = rf"{_PICTURE}(?:\u200D{_PICTURE})*|[\U0001F1E6-\U0001F1FF]{{2}}"
_SINGLE = r"[\p{Han}\p{Hiragana}]\p{M}*"
_RUN = (
    r"(?![\p{Han}\p{Hiragana}])[\p{Alphabetic}\p{Nd}_]"
    r"(?:(?![\p{Han}\p{Hiragana}])[\p{Alphabetic}\p{Nd}\p{M}_\u200D\uFE0F])*"
)
# Word_Break classes MidNumLet with the apostrophe, MidLetter and MidNum of Unicode.
_BETWEEN_BOTH = r".'\u2018\u2019\u2024\uFE52\uFF07\uFF0E"
_BETWEEN_LETTERS = r":\u00B7\u0387\u05F4\u2027\uFE13\uFE55\uFF1A"
_BETWEEN_DIGITS = r",;\u037E\u0589\u060C\u060D\u066C\u07F8\u2044\uFE10\uFE14\uFE50\uFE54\uFF0C\uFF1B"
_JOINT = (
    rf"(?:(?<=[\p{{Alphabetic}}][\p{{M}}]*)[{_BETWEEN_BOTH}{_BETWEEN_LETTERS}](?=\p{{Alphabetic}})"
    rf"|(?<=\p{{Nd}}[\p{{M}}]*)[{_BETWEEN_BOTH}{_BETWEEN_DIGITS}](?=\p{{Nd}}))"
)
_WORD = regex.compile(f"{_EMOJI}|{_SINGLE}|{_RUN}(?:{_JOINT}{_RUN})*", regex.V1)
# The same for ASCII text, where it is several times faster.
_ASCII_WORD = re.compile(r"\w+(?:(?:(?<=[A-Za-z])['.:](?=[A-Za-z])|(?<=[0-9])[.,;'](?=[0-9]))\w+)*", re.ASCII)
_POSSESSIVE = ("'s", "’s", "＇s")


def analyze(text: str) -> list[str]:
    """The index terms of ``text``, in order, repeats kept."""
    if text.isascii():
        words = _ASCII_WORD.findall(text.lower())
    else:
        # One character at a time: lower-casing a whole string depends on neighbours (Greek sigma) and can add marks.
        words = _WORD.findall("".join(character.lower()[:1] for character in text))
    terms = []
    for word in words:
        pieces = (word,) if len(word) <= _LONGEST_WORD else _cut(word)
        for piece in pieces:
            if piece.endswith(_POSSESSIVE):
                piece = piece[:-2]
            if piece and piece not in STOP_WORDS and piece.strip("_"):
                terms.append(_stem(piece))
    return terms


def _cut(word: str) -> list[str]:
    return [word[start : start + _LONGEST_WORD] for start in range(0, len(word), _LONGEST_WORD)]


@functools.lru_cache(_KNOWN_STEMS)
def _stem(word: str) -> str:
    return word if len(word) <= 2 else _porter()(word, to_lowercase=False)


@functools.cache
def _porter() -> Callable[..., str]:
    # Imported on first use: nltk takes a second.
    from nltk.stem.porter import PorterStemmer

    return PorterStemmer(mode=PorterStemmer.MARTIN_EXTENSIONS).stem


class Bm25:
    """An index over documents that are numbered from 0 in the given order. Immutable; may be shared by threads.

    Raises:
      DataError: there are no documents, or none has a word.
    """

    def __init__(self, documents: Iterable[str], *, k1: float = 0.9, b: float = 0.4):
        vocabulary: dict[str, int] = {}
        lengths, terms, rows, counts = array("q"), array("i"), array("i"), array("i")
        for row, text in enumerate(documents):
            found = Counter(analyze(text))
            lengths.append(found.total())
            terms.extend([vocabulary.setdefault(term, len(vocabulary)) for term in found])
            rows.extend([row] * len(found))
            counts.extend(found.values())
        if not vocabulary:
            raise DataError(f"{len(lengths)} documents without a word.", "give the index documents with text.")
        # Stable: the documents of a term stay in ascending order.
        order = np.argsort(np.frombuffer(terms, np.int32), kind="stable")
        document_counts = np.bincount(np.frombuffer(terms, np.int32), minlength=len(vocabulary))
        frequencies = np.frombuffer(counts, np.int32)[order]
        self._set(
            vocabulary,
            np.concatenate([[0], np.cumsum(document_counts)]),
            np.frombuffer(rows, np.int32)[order],
            frequencies.astype(np.min_scalar_type(int(frequencies.max()))),
            np.frombuffer(lengths, np.int64),
            k1,
            b,
        )

    def _set(self, vocabulary, starts, rows, frequencies, lengths, k1: float, b: float) -> None:
        """starts: [terms + 1] int64, where the postings of a term begin. rows, frequencies: [postings]. lengths:
        [documents], in words."""
        self.k1, self.b = k1, b
        self._vocabulary: dict[str, int] = vocabulary
        self._starts, self._rows, self._frequencies, self._lengths = starts, rows, frequencies, lengths
        self._norms = _norms(lengths, k1, b)
        documents = int(np.count_nonzero(lengths))
        df = np.diff(starts)
        self._idf = np.log(1 + (documents - df + 0.5) / (df + 0.5)).astype(np.float32)
        # What a posting adds for a word that the query has once, the usual case.
        self._impacts = _impact(np.repeat(self._idf, df), frequencies, self._norms[rows])

    def __len__(self) -> int:
        return len(self._lengths)

    def top(self, query: str, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The ``k`` best documents for ``query``; fewer if fewer share a word with it.

        Returns:
          Row numbers [n] int64 and scores [n] float32, best first, equal scores by row number.
        """
        if k < 1:
            raise DataError(f"the top {k} of a search.", "ask for at least one document.")
        totals = np.zeros(-(-len(self) // _BLOCKS) * _BLOCKS, np.float64)  # padded, see _threshold
        for term, count in Counter(analyze(query)).items():
            number = self._vocabulary.get(term)
            if number is None:
                continue
            part = slice(self._starts[number], self._starts[number + 1])
            rows = self._rows[part]
            if count == 1:
                impacts = self._impacts[part]
            else:
                weight = np.float32(count) * self._idf[number]
                impacts = _impact(weight, self._frequencies[part], self._norms[rows])
            totals[rows] += impacts
        scores = totals.astype(np.float32)
        hits = np.flatnonzero(scores >= _threshold(scores, k))
        best = hits[np.argsort(-scores[hits], kind="stable")[:k]]
        return best, scores[best]

    def save(self, path: str | Path) -> None:
        """Writes the index to one .npz file (arrays only)."""
        terms = "\n".join(self._vocabulary).encode()  # no word holds a line break
        held = io.BytesIO()
        np.savez(
            held,
            format=np.int64(FORMAT),
            parameters=np.asarray([self.k1, self.b]),
            terms=np.frombuffer(terms, np.uint8),
            starts=self._starts,
            rows=self._rows,
            frequencies=self._frequencies,
            lengths=self._lengths,
        )
        Path(path).write_bytes(held.getbuffer())

    @classmethod
    def load(cls, path: str | Path) -> "Bm25":
        """Reads what ``save`` wrote.

        Raises:
          DataError: the file is missing, damaged or of another format.
        """
        fix = "build the index again."
        try:
            with np.load(path, allow_pickle=False) as file:
                parts: dict[str, Any] = {name: file[name] for name in file.files}
            if int(parts.pop("format")) != FORMAT:
                raise DataError(f"{path} has another format than this version reads.", fix)
            k1, b = parts.pop("parameters").tolist()
            terms = parts.pop("terms").tobytes().decode().split("\n")
            index = cls.__new__(cls)
            index._set({term: number for number, term in enumerate(terms)}, **parts, k1=k1, b=b)
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"{path} is not a saved BM25 index ({error!r}).", fix) from error
        return index


def _threshold(scores: np.ndarray, k: int) -> np.float32:
    """A positive score that at least ``k`` of the ``scores`` reach, if so many are positive, and few more than that."""
    # The k-th best of the maxima of blocks is a bound, and much cheaper to find than the k-th best of all.
    maxima = scores.reshape(_BLOCKS, -1).max(axis=0)
    candidates = maxima if len(maxima) >= 4 * k else scores
    bound = np.partition(candidates, len(candidates) - k)[len(candidates) - k] if len(candidates) > k else np.float32(0)
    return max(bound, _SMALLEST)


def _impact(weights, frequencies, norms) -> np.ndarray:
    """weight * tf / (tf + length factor), in the form and the single precision of Lucene."""
    one = np.float32(1)
    return weights - weights / (one + frequencies.astype(np.float32) * norms)


def _norms(lengths: np.ndarray, k1: float, b: float) -> np.ndarray:
    """1 / (k1 * (1 - b + b * length / mean length)) for each document, float32, of one-byte lengths."""
    f = np.float32
    distinct, position = np.unique(lengths, return_inverse=True)
    quantised = np.asarray([_quantise(int(length)) for length in distinct], f)
    mean = f(int(lengths.sum()) / max(1, int(np.count_nonzero(lengths))))
    return (f(1) / (f(k1) * ((f(1) - f(b)) + f(b) * quantised / mean)))[position]


def _quantise(length: int) -> int:
    """The largest length not above ``length`` that Lucene's one-byte code has: exact up to 39, then four bits."""
    exact = 24
    if length < exact:
        return length
    rest = length - exact
    shift = max(0, math.frexp(rest)[1] - 4)
    return exact + (rest >> shift << shift)
