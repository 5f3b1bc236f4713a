"""The reward of a purchase, exactly as the original computes it (``compat``), and without its one-sided colours
(``fixed``).

score = r_type * (attributes + options + price) / (number of attributes + number of options + 1). An attribute counts if
it resembles one of the product or stands in its texts; an option counts if it resembles any chosen value; the price
counts if it is within the limit; r_type is below 1 if the product is of another kind.

``compat`` shortens a chosen value to the first basic colour word in it (``black2070`` -> ``black``), but not the value
that a synthetic goal asks for, so that some goals cannot reach 1.0 even with exactly their options. ``fixed`` shortens
both.
"""

import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from rapidfuzz import fuzz
from rapidfuzz.utils import default_process

from sdjax.envs.webshop.catalogue import Product
from sdjax.envs.webshop.goals import Goal

RULES = ("compat", "fixed")
_SIMILAR = 85  # percent


@dataclass(frozen=True, slots=True)
class Purchase:
    """Score in [0, 1] and what it is made of. parts: the original's names (r_type, r_att, r_option, r_price, w_att,
    w_option, w_price, query_match, category_match, title_score); an r_* is the share that counted, a w_* its weight."""

    score: float
    parts: dict[str, Any]


def score_purchase(
    product: Product,
    target: Product,
    goal: Goal,
    price: float,
    chosen: Mapping[str, str],
    nouns: Sequence[str],
    target_nouns: Sequence[str],
    rule: str = "compat",
) -> Purchase:
    """Scores buying ``product`` for ``goal``.

    Args:
      target: the product that the goal was written for. price: drawn price of ``product``, dollars. chosen: option
      group -> value. nouns, target_nouns: lower-case nouns of the two titles. rule: ``"compat"`` or ``"fixed"``.
    """
    type_parts = _type_parts(product, target, nouns, target_nouns)
    attributes = sum(_has_attribute(product, attribute) for attribute in goal.attributes)
    options = _matched_options(goal, chosen, rule)
    within_price = price <= goal.price_upper
    total = len(goal.attributes) + len(goal.options) + 1
    score = type_parts["r_type"] * ((attributes + options + within_price) / total)
    parts: dict[str, Any] = {
        **type_parts,
        "r_att": attributes / len(goal.attributes) if goal.attributes else 0.0,
        "w_att": len(goal.attributes) / total,
        "r_price": within_price,
        "w_price": 1 / total,
    }
    if goal.options:
        parts.update(r_option=options / len(goal.options), w_option=len(goal.options) / total)
    return Purchase(score, parts)


def _type_parts(product: Product, target: Product, nouns: Sequence[str], target_nouns: Sequence[str]) -> dict[str, Any]:
    query_match = product.query == target.query
    category_match = len(_category_parts(product) & _category_parts(target)) >= 2
    # The length of the list, not of the set: a title that repeats a noun scores less, in the original too.
    title_score = len(set(nouns) & set(target_nouns)) / len(target_nouns) if target_nouns else 0.2
    r_type = 1.0 if query_match or category_match or title_score > 0.2 else 0.5
    if title_score < 0.1:
        r_type = 0.1
    if title_score == 0.0:
        r_type = 0.0
    return {
        "r_type": r_type,
        "query_match": query_match,
        "category_match": category_match,
        "title_score": title_score,
    }


def _category_parts(product: Product) -> set[str]:
    return {part.strip() for part in product.product_category.split("›")}


def _has_attribute(product: Product, attribute: str) -> bool:
    return any(similar(own, attribute) for own in product.attributes) or any(
        attribute in text
        for text in (product.title.lower(), " ".join(product.bullets).lower(), product.description.lower())
    )


def _matched_options(goal: Goal, chosen: Mapping[str, str], rule: str) -> int:
    values = [shorten_color(value) for value in chosen.values()]
    wanted = [_wanted_text(option, rule) for option in goal.options]
    return sum(any(similar(value, want) for value in values) for want in wanted)


def _wanted_text(option: str | tuple[str, str], rule: str) -> str:
    if isinstance(option, str):
        return shorten_color(option)
    name, value = option
    if rule == "fixed":
        return f"{name} {shorten_color(value)}"
    # The original looks for a colour word in the pair, not in its value: only a value that is one counts.
    color = next((word for word in color_words() if word in option), None)
    return color or str(option)


def similar(left: str, right: str) -> bool:
    """Whether the two texts share words: 100 % if the words of one are among those of the other."""
    return round(fuzz.token_set_ratio(_plain(left), _plain(right))) > _SIMILAR


@functools.lru_cache(1 << 16)
def _plain(text: str) -> str:
    return default_process("".join(character for character in text if ord(character) < 128))


@functools.lru_cache(1 << 16)
def shorten_color(value: str) -> str:
    """The first basic colour word that stands anywhere in ``value`` ("ash" in "washed"), else ``value``."""
    return next((word for word in color_words() if word in value), value)


@functools.cache
def color_words() -> tuple[str, ...]:
    """The original's 102 colour words, in its order."""
    text = resources.files("sdjax.envs.webshop").joinpath("colors.toml").read_text(encoding="utf-8")
    return tuple(tomllib.loads(text)["words"])
