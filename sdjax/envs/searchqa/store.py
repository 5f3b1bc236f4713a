"""Questions and corpus of one run: generated, or a folder.

A folder holds ``questions.jsonl`` (with splits), evaluation lists ``eval_N.jsonl`` (each a split of that name, whose
task ids begin with it: a list may score a question by other answers than ``questions.jsonl``) and ``corpus.jsonl``,
each plain or with ``.gz``. The corpus may be missing where a retrieval server is used. ``manifest.json`` and
``bm25.npz``, which ``--mode=prepare`` writes, are optional.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sdjax.envs.searchqa import rows
from sdjax.envs.searchqa.config import SearchqaConfig
from sdjax.envs.searchqa.corpus import Corpus, read_corpus
from sdjax.envs.searchqa.generator import generate
from sdjax.envs.searchqa.questions import Question, content_hash, read_questions
from sdjax.envs.searchqa.scoring import normalize
from sdjax.errors import DataError

CORPUS, MANIFEST, INDEX = "corpus.jsonl", "manifest.json", "bm25.npz"
_LIST_NAME = re.compile(r"(eval_\d+)\.jsonl(?:\.gz)?")


@dataclass(frozen=True)
class Store:
    """Immutable. name: "generated" or the folder's name. splits: name -> question ids in order. index: a saved BM25
    index of the corpus."""

    name: str
    questions: dict[str, Question]
    splits: dict[str, tuple[str, ...]]
    corpus: Corpus | None = None
    index: Path | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def question(self, task_id: str) -> Question:
        """DataError for an unknown id."""
        if task_id not in self.questions:
            raise DataError(f"no question {task_id!r:.100} in {self.name}.", "take an id from task_ids(split).")
        return self.questions[task_id]

    def task_ids(self, split: str) -> tuple[str, ...]:
        """DataError for an unknown split."""
        if split not in self.splits:
            raise DataError(f"no split {split!r} in {self.name}.", f"use one of {', '.join(sorted(self.splits))}.")
        return self.splits[split]

    def content_hash(self, ids: Sequence[str]) -> str:
        return content_hash(self.question(task_id) for task_id in ids)

    def provenance(self) -> dict[str, Any]:
        every = content_hash(self.questions.values())
        found: dict[str, Any] = {"store": self.name, "questions": len(self.questions), "questions_sha256": every}
        if self.corpus is not None:
            found.update(corpus_passages=len(self.corpus), corpus_sha256=self.corpus.sha256)
        return {**found, **self.facts}


def open_store(data: str, config: SearchqaConfig) -> Store:
    """The store that ``env.data`` names.

    Raises:
      DataError: no such folder, no questions in it, or contents that contradict each other.
    """
    if data == "generated":
        corpus, drawn = generate(config.generator_seed, config.generator_train, config.generator_eval)
        return make_store("generated", drawn, corpus, facts={"generator_seed": config.generator_seed})
    folder = Path(data)
    if not folder.is_dir():
        raise DataError(
            f"env.data = {data!r} is not a folder.",
            'use "generated", or a folder with questions.jsonl and corpus.jsonl.',
        )
    drawn = []
    for path, split in _question_files(folder):
        for named, question in read_questions(path):
            drawn.append((split, replace(question, id=f"{split}/{question.id}")) if split else (named, question))
    if not drawn:
        raise DataError(
            f"{folder} has no questions.jsonl and no eval_N.jsonl (plain or .gz).", "build them with --mode=prepare."
        )
    corpus_path = rows.find(folder, CORPUS)
    corpus = read_corpus(corpus_path) if corpus_path else None
    store = make_store(folder.resolve().name, drawn, corpus)
    return _with_manifest(store, folder)


def open_corpus(data: str, config: SearchqaConfig) -> Corpus:
    """The corpus alone, for servers and embeddings; questions are neither needed nor read.

    Raises:
      DataError: there is none.
    """
    if data == "generated":
        return generate(config.generator_seed, 0, 0)[0]
    path = rows.find(Path(data), CORPUS)
    if path is None:
        raise DataError(f"{data} has no {CORPUS} (plain or .gz).", "name the folder that has it.")
    return read_corpus(path)


def make_store(
    name: str,
    drawn: Iterable[tuple[str, Question]],
    corpus: Corpus | None,
    facts: dict[str, Any] | None = None,
) -> Store:
    """Checks that (split, question) pairs and corpus fit together.

    Raises:
      DataError: a repeated question id, a gold passage that the corpus lacks, or a question of a training split that
      is also in another one.
    """
    questions: dict[str, Question] = {}
    splits: dict[str, list[str]] = {}
    for split, question in drawn:
        if questions.setdefault(question.id, question) is not question:
            raise DataError(f"two questions have the id {question.id!r}.", "give them ids of their own.")
        splits.setdefault(split, []).append(question.id)
    for question in questions.values():
        lost = [gold for gold in question.gold_ids if corpus is not None and gold not in corpus]
        if lost:
            raise DataError(
                f"the corpus has no passage {lost[0]!r}, a gold one of {question.id!r}.", "add the passage."
            )
    held_out = {normalize(questions[i].question) for split, ids in splits.items() if split != "train" for i in ids}
    leaked = [i for i in splits.get("train", ()) if normalize(questions[i].question) in held_out]
    if leaked:
        raise DataError(
            f"{len(leaked)} training questions are also evaluation questions, first {leaked[0]!r}.",
            "remove them from the split train.",
        )
    ordered = {split: tuple(ids) for split, ids in splits.items()}
    return Store(name, questions, ordered, corpus, facts=facts or {})


def write_manifest(folder: Path) -> Store:
    """Notes the hashes of a folder's splits, corpus and index, so that a later change is noticed. Returns the store."""
    (folder / MANIFEST).unlink(missing_ok=True)
    store = open_store(str(folder), SearchqaConfig())
    text = json.dumps({"format": 1, **_fingerprint(store, folder)}, indent=1) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    return open_store(str(folder), SearchqaConfig())


def _question_files(folder: Path) -> list[tuple[Path, str]]:
    """(file, split of all its questions or "" where each line says its own)."""
    main = rows.find(folder, "questions.jsonl")
    lists = sorted({found.group(1) for path in folder.iterdir() if (found := _LIST_NAME.fullmatch(path.name))})
    files = [(main, "")] if main else []
    return files + [(path, name) for name in lists if (path := rows.find(folder, f"{name}.jsonl"))]


def _fingerprint(store: Store, folder: Path) -> dict[str, Any]:
    splits = {split: {"questions": len(ids), "sha256": store.content_hash(ids)} for split, ids in store.splits.items()}
    corpus = None if store.corpus is None else {"passages": len(store.corpus), "sha256": store.corpus.sha256}
    index = folder / INDEX
    digest = hashlib.sha256(index.read_bytes()).hexdigest() if index.is_file() else None
    return {"splits": splits, "corpus": corpus, "index": digest}


def _with_manifest(store: Store, folder: Path) -> Store:
    """Compares the folder with its manifest, if it has one; only then a saved index is used."""
    path = folder / MANIFEST
    if not path.is_file():
        return store
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        if noted.pop("format") != 1:
            raise ValueError("another format")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} cannot be read ({error!r}).", "remove it, or run --mode=prepare again.") from error
    found = _fingerprint(store, folder)
    differing = [key for key in found if noted.get(key) != found[key]]
    if differing:
        raise DataError(
            f"the {' and the '.join(differing)} of {folder} are not what {MANIFEST} says.",
            "restore the files, or run --mode=prepare again; results on changed data are not comparable.",
        )
    return replace(store, index=folder / INDEX if found["index"] else None)
