"""Dense retrieval: inner products of a query with stored embeddings, best first by ``lax.top_k``."""

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from sdjax.envs.searchqa.backends import Hit
from sdjax.envs.searchqa.corpus import Corpus
from sdjax.errors import ConfigError, DataError

_FIX = "write it again with python -m sdjax.envs.searchqa.embed."


class Encoder(Protocol):
    """Turns texts into vectors whose inner product says how well they match."""

    name: str

    def encode(self, texts: Sequence[str], kind: str) -> np.ndarray:
        """[N, D] float32. kind: ``"query"`` or ``"passage"``; some models mark them differently."""
        ...


class DenseBackend:
    """Args:
      embeddings: the .npy file that ``write_embeddings`` made for this corpus with this encoder.

    Raises:
      ConfigError: no file is named. DataError: the file is missing, damaged or belongs to something else.
    """

    on_threads = True

    def __init__(self, corpus: Corpus, embeddings: Path, encoder: Encoder):
        if embeddings == Path(""):
            raise ConfigError("env.searchqa.embeddings is empty.", "name the .npy file; " + _FIX)
        self._corpus, self._encoder = corpus, encoder
        vectors_ND = _read_embeddings(embeddings, corpus, encoder)
        self.sha256 = hashlib.sha256(vectors_ND.tobytes()).hexdigest()
        self._vectors_ND = jnp.asarray(vectors_ND)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        asked = [query for query in queries if query.strip()]
        if not asked:
            return [[] for _ in queries]
        k = min(k, len(self._corpus))
        # Padded to a power of two, so that few shapes are compiled.
        padded = asked + [""] * ((1 << (len(asked) - 1).bit_length()) - len(asked))
        query_BD = jnp.asarray(self._encoder.encode(padded, "query"), self._vectors_ND.dtype)
        scores_BK, rows_BK = jax.device_get(_top(self._vectors_ND, query_BD, k))
        passages = self._corpus.passages
        found = iter(
            [Hit(passages[row], float(score)) for row, score in zip(rows, scores)]
            for rows, scores in zip(rows_BK.tolist(), scores_BK.tolist())
        )
        return [next(found) if query.strip() else [] for query in queries]

    def provenance(self) -> dict[str, Any]:
        return {"retriever": "dense", "encoder": self._encoder.name, "embeddings_sha256": self.sha256}

    def close(self) -> None:
        pass


@functools.partial(jax.jit, static_argnums=2)
def _top(vectors_ND: jax.Array, query_BD: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Scores [B, K] float32 and rows [B, K]."""
    scores_BN = jnp.einsum("bd,nd->bn", query_BD, vectors_ND, preferred_element_type=jnp.float32)
    return jax.lax.top_k(scores_BN, k)


def write_embeddings(path: Path, corpus: Corpus, encoder: Encoder, batch: int = 64) -> Iterable[int]:
    """Encodes the corpus to ``path`` (.npy, float32) and notes beside it what it belongs to. Yields the number of
    passages done so far."""
    order = sorted(range(len(corpus)), key=lambda row: len(corpus.passages[row].contents))
    vectors_ND: np.ndarray | None = None
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        part = encoder.encode([corpus.passages[row].contents for row in rows], "passage")
        if vectors_ND is None:
            vectors_ND = np.zeros((len(corpus), part.shape[1]), np.float32)
        vectors_ND[rows] = part
        yield start + len(rows)
    assert vectors_ND is not None  # a corpus has passages
    np.save(path, vectors_ND)
    facts = {"corpus_sha256": corpus.sha256, "encoder": encoder.name, "passages": len(corpus)}
    _facts_path(path).write_text(json.dumps(facts) + "\n", encoding="utf-8")


def _facts_path(path: Path) -> Path:
    return path.with_suffix(".json")


def _read_embeddings(path: Path, corpus: Corpus, encoder: Encoder) -> np.ndarray:
    try:
        facts = json.loads(_facts_path(path).read_text(encoding="utf-8"))
        vectors_ND = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"the embeddings {path} cannot be read ({error}).", _FIX) from error
    wanted = {"corpus_sha256": corpus.sha256, "encoder": encoder.name, "passages": len(corpus)}
    differing = [key for key, value in wanted.items() if not isinstance(facts, dict) or facts.get(key) != value]
    if differing:
        raise DataError(f"the embeddings {path} were made for another {', '.join(differing)}.", _FIX)
    if vectors_ND.ndim != 2 or len(vectors_ND) != len(corpus) or vectors_ND.dtype.kind != "f":
        raise DataError(f"the embeddings {path} have shape {vectors_ND.shape}, type {vectors_ND.dtype}.", _FIX)
    return vectors_ND
