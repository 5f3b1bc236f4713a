"""A tiny shop written by hand, and where the published products are."""

import gzip
import json
from pathlib import Path

from sdjax.envs.webshop.catalogue import Catalogue, parse_items
from sdjax.envs.webshop.nouns import find_nouns
from sdjax.envs.webshop.search import open_search
from sdjax.envs.webshop.shop import Shop

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "webshop"
NOUNS = "title_nouns_en_core_web_sm_3.8.0.jsonl.gz"


def item(asin: object, **changes) -> dict:
    """A product in the published schema."""
    row = {
        "asin": asin,
        "name": f"{asin} Red Shoe",
        "full_description": "A shoe of soft leather.",
        "small_description": ["rubber sole", "daily wear"],
        "pricing": "$12.5",
        "product_category": "Clothing › Men › Shoes",
        "category": "fashion",
        "query": " Men's Shoes ",
        "customization_options": {"Color": [{"value": "Red"}, {"value": "Blue/Grey "}], "Size": [{"value": "9"}]},
    }
    return {**row, **changes}


ITEMS = [
    item("B000000001"),
    item("B000000002", name="Green Lamp", pricing="$3.78$11.38", customization_options="", query="lamps",
         product_category="Home › Light", category="garden", full_description="Glass lamp.",
         small_description="bright"),
    item("B000000003", name="Features Hat", pricing="", query="hats", product_category="Clothing › Hats",
         full_description="Felt.",
         customization_options={"Style": [{"value": "Features"}, {"value": "plain"}], "Kind": [{"value": "Plain"}],
                                "Gone": None}),
]  # fmt: skip
INSTRUCTIONS = {
    "B000000001": {
        "attributes": ["rubber sole", "soft leather"],
        "instruction": "Find me rubber sole men's shoes",
        "instruction_attributes": ["rubber sole"],
    },
    "B000000003": {
        "attributes": ["warm"],
        "instruction": "Find me a warm hat",
        "instruction_attributes": ["warm"],
    },
}
HUMAN = {
    "B000000001": [
        {"instruction": "i want red shoes.", "instruction_attributes": ["rubber sole"], "instruction_options": ["red"]},
        {"instruction": "nothing to check", "instruction_attributes": [], "instruction_options": []},
    ]
}


def write_files(folder: Path, items=ITEMS, instructions=INSTRUCTIONS, human=HUMAN, size: str = "_1000") -> Path:
    """Writes the published files; returns the one with the products."""
    (folder / f"items_ins_v2{size}.json").write_text(json.dumps(instructions), encoding="utf-8")
    (folder / "items_human_ins.json").write_text(json.dumps(human), encoding="utf-8")
    path = folder / f"items_shuffle{size}.json"
    path.write_text(json.dumps(items), encoding="utf-8")
    return path


def tiny_catalogue() -> Catalogue:
    products = tuple(parse_items(ITEMS, INSTRUCTIONS, HUMAN, "tiny"))
    nouns = {product.asin: tuple(product.title.lower().split()) for product in products}
    return Catalogue("tiny", products, nouns=nouns)


def make_shop(catalogue: Catalogue, **settings) -> Shop:
    return Shop.open(catalogue, find_nouns(catalogue), open_search("bm25", catalogue.products), **settings)


def golden(folder: Path, name: str) -> list[dict]:
    with gzip.open(folder / "golden" / name, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]
