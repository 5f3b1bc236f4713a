"""The files in which the seven data sets are published, read into rows of one form.

A file is told by its contents, not by its name; only the split comes from the name ("train" in it, or not).
"""

import csv
import importlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdjax.envs.searchqa import rows
from sdjax.envs.searchqa.questions import canonical_source
from sdjax.errors import DataError

# Questions of the published files, by split. Training questions of nq: those of the hub's data set, or all of them.
COUNTS = {
    "eval": {
        "nq": (3610,),
        "triviaqa": (11313,),
        "popqa": (14267,),
        "hotpotqa": (7405,),
        "2wiki": (12576,),
        "musique": (2417,),
        "bamboogle": (125,),
    },
    "train": {"nq": (79168, 87925), "hotpotqa": (90447,)},
}
WHERE = {
    "nq": "NQ-open.dev.jsonl (google-research-datasets/natural-questions, folder nq_open)",
    "triviaqa": "unfiltered-web-dev.json (TriviaQA unfiltered, nlp.cs.washington.edu/triviaqa)",
    "popqa": "popQA.tsv (AlexTMallen/adaptive-retrieval)",
    "hotpotqa": "hotpot_dev_distractor_v1.json or hotpot_dev_fullwiki_v1.json (hotpotqa.github.io)",
    "2wiki": "dev.json (Alab-NII/2wikimultihop)",
    "musique": "musique_ans_v1.0_dev.jsonl (StonyBrookNLP/musique)",
    "bamboogle": "Bamboogle Prerelease as CSV or JSON (ofirpress/self-ask)",
}
ALL_IN_ONE = "the dataset PeterJinGo/nq_hotpotqa_train of the Hugging Face hub has all of them (test.parquet)"
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".tsv", ".csv", ".parquet")

Row = dict[str, Any]


@dataclass(frozen=True)
class Official:
    """kind: ``"questions"`` of one or more data sets, ``"corpus"``, or ``"ours"`` (this package's own form: copied)."""

    kind: str
    split: str
    rows: list[Row]


class UnknownFormError(DataError):
    """The file is none of those that this module knows; a known one that is damaged is a plain DataError."""


def read_official(path: Path) -> Official:
    """Raises UnknownFormError for a file of no known form, DataError for a damaged one."""
    name, split = path.name.lower(), "train" if "train" in path.name.lower() else "eval"
    try:
        if name.endswith((".jsonl", ".jsonl.gz")):
            return _read_lines(path, split)
        if name.endswith(".json"):
            found = _read_json(path)
        elif name.endswith(".parquet"):
            found = [_hub(row, f"{path}, row {n}", split, n) for n, row in enumerate(_parquet(path))]
        else:
            found = _read_table(path)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({error!r}).", "download it again.") from error
    return Official("questions", split, found)


def _unknown(path: Path) -> UnknownFormError:
    known = "; ".join(WHERE.values())
    return UnknownFormError(
        f"{path} is not a file of a known data set.",
        f"give one of: {known}; or a file in the form of questions.jsonl or corpus.jsonl.",
    )


def _read_lines(path: Path, split: str) -> Official:
    lines = rows.read(path)
    first = next(lines, None)
    if first is None:
        raise _unknown(path)
    keys = set(first[1])
    if "contents" in keys or {"title", "text"} <= keys:
        return Official("corpus", split, [])  # read by read_corpus
    every = itertools.chain([first], lines)
    if {"data_source", "golden_answers"} <= keys and path.name.startswith(("questions.", "eval_")):
        return Official("ours", split, [row for _, row in every])
    make: Callable[[Row, str, str, int], Row | None]
    if {"data_source", "question"} <= keys:
        make = _hub
    elif "question_decomposition" in keys:
        make = _musique
    elif {"question", "answer"} <= keys:
        make = _nq
    else:
        raise _unknown(path)
    made = [make(row, where, split, number) for number, (where, row) in enumerate(every)]
    return Official("questions", split, [row for row in made if row is not None])


def _read_json(path: Path) -> list[Row]:
    content = json.loads(path.read_bytes())
    if isinstance(content, dict) and "Data" in content:
        return [
            _row("triviaqa", item["QuestionId"], item["Question"], _trivia(item["Answer"])) for item in content["Data"]
        ]
    keys = set(content[0]) if isinstance(content, list) and content and isinstance(content[0], dict) else set()
    if {"Question", "Answer"} <= keys:
        return [_bamboogle(item, number) for number, item in enumerate(content)]
    if not {"_id", "question", "answer"} <= keys:
        raise _unknown(path)
    source = "2wiki" if "evidences" in keys else "hotpotqa"
    return [
        _row(source, item["_id"], item["question"], [item["answer"]], evidences=item.get("evidences") or [])
        for item in content
    ]


def _read_table(path: Path) -> list[Row]:
    delimiter = "\t" if path.suffix == ".tsv" else ","
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file, delimiter=delimiter)
        keys, table = set(reader.fieldnames or ()), list(reader)
    if {"id", "question", "possible_answers"} <= keys:
        return [_row("popqa", row["id"], row["question"], json.loads(row["possible_answers"])) for row in table]
    if {"Question", "Answer"} <= keys:
        return [_bamboogle(row, number) for number, row in enumerate(table)]
    raise _unknown(path)


def _parquet(path: Path) -> Iterator[Row]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")  # optional, so type checkers must not look for it
    except ImportError as error:
        raise DataError(f"{path} needs pyarrow, which is not installed.", "pip install pyarrow.") from error
    try:
        yield from parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors are of these kinds
        raise DataError(f"{path} cannot be read ({error}).", "download it again.") from error


def _hub(row: Row, where: str, split: str, number: int) -> Row:
    """A row of nq_hotpotqa_train (FlashRAG's form); its ids count anew for each data set."""
    source = canonical_source(row["data_source"], where)
    golds = row.get("golden_answers")
    if golds is None:
        golds = row["reward_model"]["ground_truth"]["target"]
    return _row(source, row.get("id") or f"{split}_{number}", row["question"], list(golds))


def _nq(row: Row, where: str, split: str, number: int) -> Row:
    return _row("nq", f"{split}_{number}", row["question"], row["answer"])


def _musique(row: Row, where: str, split: str, number: int) -> Row | None:
    """None for a question that cannot be answered (the full version has those too)."""
    if not row.get("answerable", True):
        return None
    steps = [{"question": step["question"], "answer": step["answer"]} for step in row["question_decomposition"]]
    golds = [row["answer"], *row.get("answer_aliases", [])]
    return _row("musique", row["id"], row["question"], golds, decomposition=steps)


def _bamboogle(row: Row, number: int) -> Row:
    return _row("bamboogle", f"test_{number}", row["Question"], [row["Answer"]])


def _trivia(answer: Row) -> list[str]:
    return list(dict.fromkeys([answer["Value"], *answer.get("Aliases", [])]))


def _row(source: str, row_id: Any, question: str, golds: list[str], **more: Any) -> Row:
    if not isinstance(question, str) or not isinstance(golds, list) or not all(isinstance(gold, str) for gold in golds):
        raise TypeError(f"question {question!r:.60} with answers {golds!r:.60}")
    row = {"id": f"{source}_{row_id}", "data_source": source, "question": question, "golden_answers": golds}
    return {**row, **{key: value for key, value in more.items() if value}}
