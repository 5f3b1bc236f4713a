"""From downloads to the folder that ``env.data`` names: corpus, training questions and the evaluation list of 3,125.

The evaluation list has 500 questions of each of six data sets and all 125 of Bamboogle. The draw is this project's
own: for each data set, ``random.Random("233/<data set>")`` samples from its usable questions in the order of their
ids.
"""

import random
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
from rich.console import Console

from sdjax.envs.searchqa import rows, store
from sdjax.envs.searchqa.backends import Bm25Backend
from sdjax.envs.searchqa.corpus import Corpus, read_corpus
from sdjax.envs.searchqa.official import ALL_IN_ONE, COUNTS, SUFFIXES, WHERE, Row, UnknownFormError, read_official
from sdjax.envs.searchqa.questions import SOURCES, canonical_source, question_from
from sdjax.envs.searchqa.scoring import normalize
from sdjax.errors import DataError

SEED, EACH = 233, 500


@dataclass
class Found:
    """What the downloads hold. pools: (split, data set) -> rows. ours: file stem -> rows in this package's form."""

    corpus: Corpus | None = None
    pools: dict[tuple[str, str], list[Row]] = field(default_factory=dict)
    ours: dict[str, list[Row]] = field(default_factory=dict)


def prepare(sources: Sequence[str], out: Path, console: Console) -> None:
    """Reads ``sources`` (files, folders, dataset ids of the Hugging Face hub) and writes the folder ``out``.

    Raises:
      DataError: a source that cannot be had or read, a data set with another number of questions than published, data
      sets that the evaluation list lacks, or nothing to write.
    """
    paths = [path for source in sources for path in _files(source)]
    found = collect(paths, console, named={Path(source) for source in sources})
    lists = {name: made for name, made in found.ours.items() if name.startswith("eval_")}
    if not lists and any(split == "eval" for split, _ in found.pools):
        drawn = draw_eval(found.pools)
        lists[f"eval_{len(drawn)}"] = drawn
    questions = found.ours.get("questions", [])
    trained = [row for (split, _), pool in sorted(found.pools.items()) if split == "train" for row in _usable(pool)]
    held_out = {normalize(row["question"]) for row in [*questions, *(row for made in lists.values() for row in made)]}
    kept = [{**row, "split": "train"} for row in trained if normalize(row["question"]) not in held_out]
    if trained:
        console.print(
            f"{len(kept)} training questions; {len(trained) - len(kept)} left out that are also asked elsewhere"
        )
    questions = [*questions, *kept]
    if not questions and not lists:
        raise DataError(
            f"no questions in {', '.join(sources) or 'nothing'}.", "name files of the data sets: " + _wanted(SOURCES)
        )
    if found.corpus is None:
        console.print("no corpus: use env.searchqa.retriever=http with a running server")
    _write(found.corpus, questions, lists, out, console)


def collect(paths: Sequence[Path], console: Console, named: Container[Path]) -> Found:
    """Reads the files and checks that every published data set is whole. Other files are skipped, and said, unless they
    were ``named``."""
    found = Found()
    for path in paths:
        try:
            official = read_official(path)
        except UnknownFormError:
            if path in named:
                raise
            console.print(f"{path}: skipped, not a file of a known data set")
            continue
        if official.kind == "corpus":
            if found.corpus is not None:
                raise DataError(f"{path} is a second corpus.", "name one corpus only.")
            found.corpus = read_corpus(path)
            console.print(f"{path}: corpus of {len(found.corpus)} passages")
            continue
        if official.kind == "ours":
            name = path.name.partition(".")[0]
            if name in found.ours:
                raise DataError(f"{path} is a second {name}.", "name one of them.")
            for number, row in enumerate(official.rows, 1):
                question_from(row, f"{path}, row {number}")
            found.ours[name] = official.rows
        for row in official.rows if official.kind == "questions" else ():
            found.pools.setdefault((official.split, row["data_source"]), []).append(row)
        console.print(f"{path}: {len(official.rows)} questions")
    for (split, source), pool in found.pools.items():
        wanted = COUNTS[split].get(source)
        if wanted is not None and len(pool) not in wanted:
            raise DataError(
                f"{len(pool)} {source} questions for {split}; the published file has {' or '.join(map(str, wanted))}.",
                f"name the whole file, once: {WHERE[source] if split == 'eval' else 'the training file'}.",
            )
    return found


def draw_eval(pools: dict[tuple[str, str], list[Row]]) -> list[Row]:
    """The evaluation list, in the order of ``SOURCES``. Raises DataError that names every missing data set."""
    missing = [source for source in SOURCES if ("eval", source) not in pools]
    if missing:
        raise DataError(f"the evaluation list lacks {', '.join(missing)}.", f"add {_wanted(missing)}; {ALL_IN_ONE}.")
    drawn: list[Row] = []
    for source in SOURCES:
        pool = sorted(_usable(pools["eval", source]), key=lambda row: row["id"])
        rng = random.Random(f"{SEED}/{source}")
        drawn += pool if len(pool) <= EACH else rng.sample(pool, EACH)
    return drawn


def _usable(pool: Sequence[Row]) -> list[Row]:
    """Rows with a golden answer that has a word."""
    return [row for row in pool if any(normalize(gold) for gold in row["golden_answers"])]


def _wanted(sources: Sequence[str]) -> str:
    return "; ".join(f"{source}: {WHERE[source]}" for source in sources)


def _write(
    corpus: Corpus | None, questions: list[Row], lists: dict[str, list[Row]], out: Path, console: Console
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / store.INDEX).unlink(missing_ok=True)
    tables = {name: made for name, made in {"questions": questions, **lists}.items() if made}
    for name, table in tables.items():
        named = [{**row, "data_source": canonical_source(row["data_source"], str(row.get("id")))} for row in table]
        count, digest = rows.write(out / f"{name}.jsonl.gz", named)
        console.print(f"{name}.jsonl.gz: {count} questions, sha256 of the content {digest}")
    if corpus is not None:
        count, digest = rows.write(
            out / f"{store.CORPUS}.gz", ({"id": passage.id, "contents": passage.contents} for passage in corpus)
        )
        Bm25Backend(corpus).save_index(out / store.INDEX)
        console.print(f"{store.CORPUS}.gz: {count} passages, sha256 of the content {digest}; {store.INDEX}: its index")
    made = store.write_manifest(out)
    sizes = ", ".join(f"{split} {len(ids)}" for split, ids in made.splits.items())
    console.print(f"wrote {out} (splits: {sizes}); use it as env.data")


def _files(source: str) -> list[Path]:
    path = Path(source)
    if path.is_file():
        return [path]
    if not path.is_dir():
        path = _download(source)
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name.lower().endswith(SUFFIXES))
    files = [file for file in files if file.name != store.MANIFEST]
    if not files:
        raise DataError(f"{source} has no file of a data set ({', '.join(SUFFIXES)}).", "name another folder.")
    return files


def _download(source: str) -> Path:
    import huggingface_hub

    try:
        patterns = [f"*{suffix}" for suffix in SUFFIXES]
        return Path(huggingface_hub.snapshot_download(source, repo_type="dataset", allow_patterns=patterns))
    except (OSError, ValueError, httpx2.HTTPError) as error:
        raise DataError(
            f"{source!r} is no file or folder here, and the Hugging Face hub did not give it "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}).",
            "download it on a machine with a connection and name the folder.",
        ) from error
