"""From WebShop's published files to a compact store: ``--mode=prepare --env=webshop --source=FOLDER --workdir=OUT``.

Sources are folders, files, or ids of Hugging Face datasets that hold the published files. Wanted are the products
(``items_shuffle.json`` or ``items_shuffle_1000.json``) and their attributes and instructions (``items_ins_v2*.json``);
the crowd-written instructions (``items_human_ins.json``) and a table of nouns are taken where they are. Without a table
the titles are tagged with spaCy. The store keeps what the simulator uses, with an index, and opens in seconds.
"""

import gzip
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdjax.envs.webshop.catalogue import (
    INDEX_FILE,
    OFFICIAL_FILES,
    UNREADABLE,
    Catalogue,
    read_files,
    write_store,
)
from sdjax.envs.webshop.nouns import DEFAULT_MODEL, FILE_PREFIX, NounTable, find_nouns, make_nouns, write_nouns
from sdjax.envs.webshop.search import save_index
from sdjax.errors import DataError

_ITEMS, _INSTRUCTIONS, _HUMAN = OFFICIAL_FILES
_WHERE = "github.com/princeton-nlp/WebShop, setup.sh, downloads it from Google Drive"
# Known of the published files: products after repeated asins are dropped, and the sha256 of the unpacked file.
_PRODUCTS = {"items_shuffle_1000": 1000}
_SHA256 = {"items_ins_v2_1000": "f88a36314a397b53b3d9c3fa5878e5f7b26d35019a51ec83fbedeca61a948f6f"}
_DATASET_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def prepare(sources: Sequence[str], out: Path, console: Any) -> None:
    """Writes the store to ``out``, which ``env.data`` then names. ``console``: has ``print``.

    Raises:
      DataError: a file is missing, not in the schema, or not the published one; the hub cannot be reached.
      ConfigError: there is no table of nouns and spaCy is not installed.
    """
    if not sources:
        wanted = f"{_ITEMS}*.json and {_INSTRUCTIONS}*.json"
        raise DataError("no source for WebShop.", f"name a folder with {wanted}; {_WHERE}.")
    files = _files([_folder(source) for source in sources])
    items = _one(files, _ITEMS, "the products", sources)
    size = _name(items).removeprefix(_ITEMS)
    instructions = files.get(f"{_INSTRUCTIONS}{size}")
    if instructions is None:
        raise DataError(
            f"{_INSTRUCTIONS}{size}.json (attributes and instructions of {items.name}) is not in {', '.join(sources)}.",
            f"{_WHERE}.",
        )
    human = files.get(f"{_HUMAN}{size}") or files.get(_HUMAN)
    for path in (items, instructions, *([human] if human else [])):
        _check_hash(path)
    catalogue = read_files(items, instructions, human)
    _check_count(catalogue)
    nouns = _nouns(catalogue, files)
    write_store(catalogue, out)
    write_nouns(nouns, out / f"{FILE_PREFIX}.jsonl.gz")
    save_index(catalogue.products, out / INDEX_FILE)
    synthetic = sum(product.instruction is not None for product in catalogue.products)
    written = sum(bool(product.human) for product in catalogue.products)
    console.print(f"{out}: {len(catalogue.products)} products of {items.name}, nouns by {nouns.tagger}")
    console.print(f"{synthetic} products with a synthetic instruction, {written} with crowd-written ones")
    if human is None:
        console.print(f"no {_HUMAN}.json: goals=human is not available ({_WHERE})")


def _folder(source: str) -> Path:
    path = Path(source).expanduser()
    if path.exists():
        return path
    if not _DATASET_ID.fullmatch(source):
        raise DataError(f"{source} does not exist.", f"give the folder with the published files; {_WHERE}.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, repo_type="dataset"))
    except Exception as error:  # the hub's client has a class for each way to fail
        raise DataError(
            f"{source} is no path here, and the hub gave no dataset of that name ({type(error).__name__}).",
            f"check the name and the network, or give the folder with the published files; {_WHERE}.",
        ) from error


def _files(sources: Sequence[Path]) -> dict[str, Path]:
    """Name without endings -> file, of everything that may be of use."""
    found: dict[str, Path] = {}
    for source in sources:
        entries = sorted(entry for entry in source.rglob("*") if entry.is_file()) if source.is_dir() else [source]
        for entry in entries:
            if _name(entry).startswith((*OFFICIAL_FILES, FILE_PREFIX)):
                found.setdefault(_name(entry), entry)
    return found


def _name(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")


def _one(files: dict[str, Path], prefix: str, what: str, sources: Sequence[str]) -> Path:
    found = [path for name, path in files.items() if name.startswith(prefix)]
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or f"no {prefix}*.json ({what})"
        raise DataError(f"{', '.join(sources)}: {names}.", f"give a source with one such file; {_WHERE}.")
    return found[0]


def _nouns(catalogue: Catalogue, files: dict[str, Path]) -> NounTable:
    found = [path for name, path in files.items() if name.startswith(FILE_PREFIX)]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise DataError(f"several tables of nouns: {names}.", "give the sources with one of them.")
    return find_nouns(catalogue, str(found[0])) if found else make_nouns(catalogue, DEFAULT_MODEL)


def _check_hash(path: Path) -> None:
    expected = _SHA256.get(_name(path))
    if expected is None:
        return
    try:
        content = path.read_bytes()
        found = hashlib.sha256(gzip.decompress(content) if path.suffix == ".gz" else content).hexdigest()
    except UNREADABLE as error:
        raise DataError(f"{path} cannot be read ({error!r}).", f"{_WHERE}.") from error
    if found != expected:
        raise DataError(f"{path} has sha256 {found[:16]}, the published file {expected[:16]}.", f"{_WHERE}.")


def _check_count(catalogue: Catalogue) -> None:
    expected = _PRODUCTS.get(catalogue.label)
    if expected not in (None, len(catalogue.products)):
        raise DataError(
            f"{catalogue.label} has {len(catalogue.products)} products, the published file {expected}.", f"{_WHERE}."
        )
