"""A made-up catalogue in WebShop's JSON schema: any size, any number of times the same from one seed.

Nothing in it comes from a real shop. Like the real one it has price ranges and missing prices, titles that say only
some of a product's attributes, and options; the other attributes stand in the bullets and the description. The nouns of
a title are known, because every word of the vocabulary that is not a noun is listed.
"""

import functools
import random
import string
import tomllib
from importlib import resources
from typing import Any

from sdjax.envs.webshop.catalogue import Catalogue, parse_items
from sdjax.errors import ConfigError

GENERATOR_VERSION = 1
LABEL = "generated"
_ANY_FEW = ("color", "flavor")  # values that may stand in any order
_INSTRUCTED = 0.42  # share of products with a synthetic instruction, as in the real catalogue
_WRITTEN = 0.2  # share with a crowd-written one
_NO_PRICE, _PRICE_RANGE = 0.05, 0.1


def generate_catalogue(products: int, seed: int) -> Catalogue:
    """Makes ``products`` products from ``seed``.

    Raises:
      ConfigError: fewer than one product.
    """
    if products < 1:
        raise ConfigError(f"env.webshop.generator_products = {products}.", "make at least one product.")
    vocabulary = _vocabulary()
    rng = random.Random(f"webshop catalogue {GENERATOR_VERSION} {seed}")
    items: list[dict[str, Any]] = []
    instructions: dict[str, dict[str, Any]] = {}
    human: dict[str, list[dict[str, Any]]] = {}
    while len(items) < products:
        item = _item(vocabulary, rng)
        asin = item["asin"]
        if asin in instructions:
            continue
        items.append(item)
        attributes = item.pop("attributes")
        instructions[asin] = {"attributes": attributes}
        if rng.random() < _INSTRUCTED:
            instructions[asin].update(_instruction(vocabulary, item, attributes, rng))
        if rng.random() < _WRITTEN:
            human[asin] = [_written(vocabulary, item, attributes, rng)]
    parsed = tuple(parse_items(items, instructions, human, LABEL))
    return Catalogue(LABEL, parsed, nouns={product.asin: title_nouns(product.title) for product in parsed})


def title_nouns(title: str) -> tuple[str, ...]:
    """Lower-case nouns of a generated title, in order."""
    words = (word.strip("(),").lower().removesuffix("'s") for word in title.split())
    return tuple(word for word in words if word and word not in _not_nouns())


def _item(vocabulary: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(vocabulary["types"])
    asin = "B0" + "".join(rng.choices(string.ascii_uppercase + string.digits, k=8))
    syllables = range(rng.choice([2, 3]))
    onsets, vowels = vocabulary["brand_onsets"], vocabulary["brand_vowels"]
    brand = "".join(rng.choice(onsets) + rng.choice(vowels) for _ in syllables).capitalize()
    pool = vocabulary["attributes"][kind["pool"]]
    attributes = rng.sample(pool, rng.randint(3, 8))
    shown = attributes[: rng.randint(1, min(3, len(attributes) - 2))]
    hidden = attributes[len(shown) :]
    title = " ".join([brand, *(word.capitalize() for word in [*kind["query"].split(), *" ".join(shown).split()])])
    phrases = vocabulary["phrases"]
    bullets = [_sentence(phrases["bullet"].format(attribute=name, query=kind["query"])) for name in hidden[:-1]]
    bullets.append(phrases["package"].format(pieces=rng.randint(1, 4), brand=brand))
    rng.shuffle(bullets)
    model = f"{brand[:3].upper()}-{rng.randint(100, 999)}"
    offer = phrases["offer"].format(attribute=hidden[-1])
    return {
        "asin": asin,
        "name": title + rng.choice(vocabulary["title_ends"]),
        "full_description": phrases["description"].format(brand=brand, query=kind["query"], hidden=offer, model=model),
        "small_description": bullets,
        "pricing": _pricing(kind["price"], rng),
        "product_category": kind["path"],
        "category": kind["category"],
        "query": kind["query"],
        "customization_options": {
            name.title(): [{"value": value.title()} for value in _values(vocabulary, key, rng)]
            for name, key in kind["options"].items()
        },
        "attributes": attributes,
    }


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _values(vocabulary: dict[str, Any], key: str, rng: random.Random) -> list[str]:
    values = vocabulary["values"][key]
    if key in _ANY_FEW:
        return rng.sample(values, rng.randint(2, 8))
    chosen = set(rng.sample(values, rng.randint(2, len(values))))
    return [value for value in values if value in chosen]


def _pricing(bounds: list[float], rng: random.Random) -> str:
    price = rng.uniform(*bounds)
    draw = rng.random()
    if draw < _NO_PRICE:
        return ""
    if draw < _NO_PRICE + _PRICE_RANGE:
        return f"${price:.2f}${price * rng.uniform(1.1, 1.9):.2f}"
    return f"${price:.2f}"


def _instruction(
    vocabulary: dict[str, Any], item: dict[str, Any], attributes: list[str], rng: random.Random
) -> dict[str, Any]:
    asked = rng.sample(attributes, rng.randint(2, min(4, len(attributes))))
    half = max(1, len(asked) // 2)
    text = vocabulary["phrases"]["instruction"].format(
        first=", ".join(asked[:half]), query=item["query"], second=", ".join(asked[half:])
    )
    return {"instruction": text, "instruction_attributes": asked}


def _written(
    vocabulary: dict[str, Any], item: dict[str, Any], attributes: list[str], rng: random.Random
) -> dict[str, Any]:
    asked = rng.sample(attributes, rng.randint(1, 2))
    options = [rng.choice(values)["value"].lower() for values in item["customization_options"].values()]
    options = options[: rng.randint(0, len(options))]
    text = rng.choice(vocabulary["phrases"]["human"]).format(
        query=item["query"],
        attributes=" and ".join(asked),
        options="".join(f", in {option}" for option in options),
        options_first="".join(f"{option} " for option in options),
    )
    return {"instruction": text, "instruction_attributes": asked, "instruction_options": options}


@functools.cache
def _vocabulary() -> dict[str, Any]:
    text = resources.files("sdjax.envs.webshop").joinpath("vocabulary.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@functools.cache
def _not_nouns() -> frozenset[str]:
    return frozenset(_vocabulary()["not_nouns"])
