"""The products of a shop and the instructions written for them.

A catalogue is read from the benchmark's published files (the JSON schema of ``items_shuffle*.json``, any size), or from
the compact store that ``--mode=prepare`` makes of them. Reading follows the original: a product with a repeated or an
over-long asin is skipped, an empty price is 100 dollars, names and values of options are lower-cased.
"""

import functools
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from sdjax.errors import DataError

STORE_FILE = "store.json"
STORE_FORMAT = 1
PRODUCTS_FILE = "products.jsonl.gz"
INDEX_FILE = "bm25.npz"
OFFICIAL_FILES = ("items_shuffle", "items_ins_v2", "items_human_ins")
_FIX = (
    "point env.data at a folder with items_shuffle_1000.json and items_ins_v2_1000.json (or the full files), at one "
    "items_shuffle*.json, or at what --mode=prepare wrote."
)
# What reading a damaged text, gzip or JSON file raises.
UNREADABLE = (OSError, EOFError, ValueError, zlib.error)
_CHUNK = 1 << 20
_BLANK = re.compile(r"[ \t\r\n]*")
_LONGEST_ASIN = 10


@dataclass(frozen=True, slots=True)
class HumanGoal:
    """One crowd-written instruction. options: the values that it asks for."""

    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """One product. prices: one price, or the two ends of a range, in dollars. options: group -> values, in the order
    of the page. instruction, instruction_attributes: of the synthetic goals; None where there is none."""

    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    prices: tuple[float, ...]
    options: dict[str, tuple[str, ...]]
    category: str
    product_category: str
    query: str
    attributes: tuple[str, ...] = ("DUMMY_ATTR",)
    instruction: str | None = None
    instruction_attributes: tuple[str, ...] = ()
    human: tuple[HumanGoal, ...] = ()

    @property
    def price_tag(self) -> str:
        return " to ".join(f"${price}" for price in self.prices)


@dataclass(frozen=True)
class Catalogue:
    """Products in the order of the file. label: a short name, the first part of task ids. folder: where the files of
    the catalogue are; None if it was generated. nouns: nouns of each title by asin, where they are known already."""

    label: str
    products: tuple[Product, ...]
    folder: Path | None = None
    nouns: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @functools.cached_property
    def sha256(self) -> str:
        """Of what was read; the published files and their compact store give the same."""
        digest = hashlib.sha256()
        for product in self.products:
            digest.update(_dump(product).encode())
        return digest.hexdigest()


def _dump(product: Product) -> str:
    return json.dumps(
        product, separators=(",", ":"), default=lambda row: {key: getattr(row, key) for key in row.__slots__}
    )


def index_text(product: Product) -> str:
    """The text by which a product is found."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    first_bullet = product.bullets[0] if product.bullets else ""
    return f"{product.title} {product.description} {first_bullet} {options}".lower()


def read_catalogue(data: str | Path) -> Catalogue:
    """Reads the catalogue at ``data``: a folder, or one ``items_shuffle*.json`` or ``.json.gz`` file.

    Raises:
      DataError: nothing there, more than one catalogue there, or a file that is not in the schema.
    """
    path = Path(data).expanduser()
    if path.is_dir() and (path / STORE_FILE).is_file():
        return _read_store(path)
    if path.is_dir():
        found = sorted(entry for entry in path.iterdir() if _stem(entry).startswith(OFFICIAL_FILES[0]))
        if len(found) != 1:
            names = ", ".join(entry.name for entry in found) or "no items_shuffle*.json"
            raise DataError(f"{path} holds {names}.", _FIX)
        path = found[0]
    if not path.is_file():
        raise DataError(f"{path} does not exist.", _FIX)
    size = _stem(path).removeprefix(OFFICIAL_FILES[0])  # "" or "_1000"
    instructions = _beside(path, OFFICIAL_FILES[1], size)
    human = _beside(path, OFFICIAL_FILES[2], size) or _beside(path, OFFICIAL_FILES[2], "")
    return read_files(path, instructions, human)


def read_files(items: Path, instructions: Path | None, human: Path | None) -> Catalogue:
    """Reads published files; without ``instructions`` or ``human`` there are no such goals. DataError as above."""
    with open_text(items) as file:
        rows = json_array(file, items)
        products = tuple(parse_items(rows, _read_object(instructions), _read_object(human), str(items)))
    return Catalogue(_stem(items), products, items.parent)


def write_store(catalogue: Catalogue, folder: Path) -> None:
    """Writes the compact store: what the simulator uses of each product, one product a line."""
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(folder / PRODUCTS_FILE, "wt", encoding="utf-8") as file:
        for product in catalogue.products:
            file.write(_dump(product) + "\n")
    store = {
        "format": STORE_FORMAT,
        "label": catalogue.label,
        "products": len(catalogue.products),
        "sha256": catalogue.sha256,
    }
    (folder / STORE_FILE).write_text(json.dumps(store, indent=2) + "\n", encoding="utf-8")


def _read_store(folder: Path) -> Catalogue:
    fix = "run --mode=prepare again."
    try:
        store = json.loads((folder / STORE_FILE).read_text(encoding="utf-8"))
        if store["format"] != STORE_FORMAT:
            raise DataError(f"{folder / STORE_FILE} has format {store['format']!r}.", fix)
        with open_text(folder / PRODUCTS_FILE) as file:
            products = tuple(_stored_product(json.loads(line)) for line in file)
        catalogue = Catalogue(store["label"], products, folder)
    except (*UNREADABLE, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"the store {folder} is damaged ({error!r}).", fix) from error
    if catalogue.sha256 != store["sha256"]:
        raise DataError(f"the products of {folder} are not those that were stored.", fix)
    return catalogue


def _stored_product(row: dict[str, Any]) -> Product:
    lists = ("bullets", "prices", "attributes", "instruction_attributes")
    row.update({key: tuple(row[key]) for key in lists})
    row["options"] = {name: tuple(values) for name, values in row["options"].items()}
    row["human"] = tuple(
        HumanGoal(goal["instruction"], tuple(goal["attributes"]), tuple(goal["options"])) for goal in row["human"]
    )
    return Product(**row)


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".json") if ".json" in path.suffixes else ""


def _beside(path: Path, name: str, size: str) -> Path | None:
    names = (f"{name}{size}.json", f"{name}{size}.json.gz")
    return next((path.with_name(name) for name in names if path.with_name(name).is_file()), None)


def open_text(path: Path) -> IO[str]:
    """Opens a text file that may be gzipped."""
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _read_object(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        with open_text(path) as file:
            content = json.load(file)
    except UNREADABLE as error:
        raise DataError(f"{path} cannot be read ({error!r}).", "download it again.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no table from asin to instructions.", _FIX)
    return content


def json_array(file: IO[str], path: Path) -> Iterator[Any]:
    """The elements of one JSON array, read one after the other: the full file has 5 GB."""
    decoder = json.JSONDecoder()
    fix = "download it again."
    try:
        text = file.read(_CHUNK).lstrip()
        if not text.startswith("["):
            raise DataError(f"{path} is no JSON list.", fix)
        at, may_end = 1, True
        while True:
            at = _BLANK.match(text, at).end()  # type: ignore[union-attr]  # matches always
            if text.startswith("]", at) and may_end:
                return
            try:
                element, end = decoder.raw_decode(text, at)
                end = _BLANK.match(text, end).end()  # type: ignore[union-attr]
            except ValueError:
                end = len(text)
            if end == len(text):  # the element, or what follows it, is not read yet
                more = file.read(max(_CHUNK, len(text) - at))
                if not more:
                    raise DataError(f"{path} is cut off or damaged near {text[at : at + 40]!r}.", fix)
                text, at = text[at:] + more, 0
                continue
            if text[end] not in ",]":
                raise DataError(f"{path} is damaged near {text[end : end + 40]!r}.", fix)
            yield element
            may_end = text[end] == "]"
            at = end if may_end else end + 1
    except UNREADABLE as error:
        raise DataError(f"{path} cannot be read ({error!r}).", fix) from error


def parse_items(
    items: Iterable[Any], instructions: dict[str, Any], human: dict[str, Any], source: str
) -> Iterator[Product]:
    """Products from rows in WebShop's JSON schema.

    Args:
      items: rows of ``items_shuffle*.json``. instructions: asin -> attributes and instruction (``items_ins_v2*.json``).
      human: asin -> crowd-written instructions (``items_human_ins*.json``). source: what errors call the items.
    Raises:
      DataError: no items, or one that is not in the schema.
    """
    seen: set[str] = set()
    for number, item in enumerate(items):
        try:
            asin = item["asin"]
            if asin == "nan" or len(asin) > _LONGEST_ASIN or asin in seen:
                continue
            seen.add(asin)
            yield _product(item, instructions.get(asin, {}), human.get(asin, ()))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(
                f"{source}: product {number} is not in WebShop's schema ({error!r}).",
                "use the published files unchanged.",
            ) from error
    if not seen:
        raise DataError(f"{source} holds no products.", _FIX)


def _product(item: dict[str, Any], extra: dict[str, Any], human: Iterable[dict[str, Any]]) -> Product:
    bullets = item["small_description"]
    instruction = extra.get("instruction")
    return Product(
        asin=item["asin"],
        title=_text(item["name"]),
        description=_text(item["full_description"]),
        bullets=_texts(bullets if isinstance(bullets, list) else [bullets]),
        prices=_prices(item.get("pricing")),
        options=_options(item.get("customization_options")),
        category=_text(item["category"]),
        product_category=_text(item["product_category"]),
        query=item["query"].lower().strip(),
        attributes=_texts(extra.get("attributes", ("DUMMY_ATTR",))),
        instruction=None if instruction is None else _text(instruction),
        instruction_attributes=_texts(extra.get("instruction_attributes") or ()),
        human=tuple(
            HumanGoal(
                _text(goal["instruction"]), _texts(goal["instruction_attributes"]), _texts(goal["instruction_options"])
            )
            for goal in human
        ),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is no text")
    return value


def _texts(values: Iterable[Any]) -> tuple[str, ...]:
    if isinstance(values, str):
        raise TypeError(f"{values!r:.60} is no list")
    return tuple(_text(value) for value in values)


def _prices(pricing: Any) -> tuple[float, ...]:
    """One price or the ends of a range. ``"$3.78$11.38"`` -> (3.78, 11.38)."""
    if not pricing:
        return (100.0,)
    prices = tuple(float(re.sub(r"[^\d.]", "", piece)) for piece in _text(pricing).split("$")[1:])
    if not prices:
        raise ValueError(f"price {pricing!r:.60} without a dollar sign")
    return prices[:2]


def _options(groups: Any) -> dict[str, tuple[str, ...]]:
    return {
        name.lower(): tuple(_text(value["value"]).strip().replace("/", " | ").lower() for value in values)
        for name, values in (groups or {}).items()
        if values is not None
    }
