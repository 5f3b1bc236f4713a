"""Goals: what the agent is asked to buy. Built as the original builds them, from one seed; split without leaks.

The original draws the prices of products with a price range, then a price limit for each goal, then shuffles the list.
One ``random.Random`` seeded once gives the prices and limits, another with the same seed the order, which reproduces
what the released code does when its worker has that seed.
"""

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sdjax.envs.webshop.catalogue import Product
from sdjax.errors import DataError

SPLITS = {"by_product": ("train", "valid", "test"), "verl_agent": ("train", "test")}
EVAL_GOALS = 128
_EVAL_GOALS_OF_A_PRODUCT = 4
_NO_LIMIT = 1000000
_LIMITS = tuple(10.0 * tens for tens in range(1, 100))
_LIMITS_TRIED = 4
_SHARES = {"test": 0.2, "valid": 0.1}  # of the products
_RELEASED_TEST_GOALS = 500  # released rule: goals 0-499 of the shuffled list
_RELEASED_SEED_OFFSET = 1000  # released rule: the evaluation draws with seed + 1000


@dataclass(frozen=True, slots=True)
class Goal:
    """One task.

    id: ``<catalogue>/<asin>#<number>``, the number counting the product's goals in the order in which they are built
    (``#h<number>`` for crowd-written ones); it does not depend on the shuffle. text: the instruction that the agent
    reads. options: (group, value) pairs of a synthetic goal, or the bare values of a crowd-written one. weight: rarity
    of its attributes, as the original computes it for weighted sampling.
    """

    id: str
    asin: str
    text: str
    attributes: tuple[str, ...]
    price_upper: float
    options: tuple[tuple[str, str], ...] | tuple[str, ...]
    weight: float = 1.0

    def values(self) -> tuple[str, ...]:
        """The option values that it asks for."""
        return tuple(option if isinstance(option, str) else option[1] for option in self.options)


def build_goals(
    products: Sequence[Product], kind: str, seed: int, label: str
) -> tuple[dict[str, float], tuple[Goal, ...]]:
    """Draws prices and goals.

    Returns:
      The price of each asin in dollars, and all goals in their shuffled order.
    Raises:
      DataError: no product has an instruction of this kind.
    """
    rng = random.Random(seed)
    prices = {
        product.asin: product.prices[0] if len(product.prices) == 1 else rng.uniform(*product.prices)
        for product in products
    }
    goals: list[Goal] = []
    for product in products:
        goals += (_human if kind == "human" else _synthetic)(product, prices[product.asin], rng, label)
    if not goals:
        raise DataError(
            f"none of the {len(products)} products of {label} has a {kind} instruction.",
            "put the file with the instructions of these products beside the catalogue.",
        )
    if kind == "synthetic":
        goals = _weighted(goals)
    random.Random(seed).shuffle(goals)
    return prices, tuple(goals)


def _price_limit(price: float, rng: random.Random) -> tuple[float, str]:
    limits = [limit for limit in _LIMITS if limit > price][:_LIMITS_TRIED]
    if len(limits) < 2:
        return _NO_LIMIT, ""
    upper = max(rng.sample(limits, 2))
    return upper, f", and price lower than {upper:.2f} dollars"


def _synthetic(product: Product, price: float, rng: random.Random, label: str) -> list[Goal]:
    """One goal for each combination of options; all share one price limit."""
    if product.instruction is None:
        return []
    upper, limit_text = _price_limit(price, rng)
    names = sorted(product.options)
    goals = []
    for number, values in enumerate(itertools.product(*(product.options[name] for name in names))):
        wanted = tuple(zip(names, values))
        options_text = ", and ".join(f"{name}: {value}" for name, value in wanted)
        text = product.instruction + (f" with {options_text}" if wanted else "") + limit_text
        goal_id = f"{label}/{product.asin}#{number}"
        goals.append(Goal(goal_id, product.asin, text, product.instruction_attributes, upper, wanted))
    return goals


def _human(product: Product, price: float, rng: random.Random, label: str) -> list[Goal]:
    goals = []
    for number, written in enumerate(product.human):
        if not written.attributes:
            continue
        upper, limit_text = _price_limit(price, rng)
        text = written.instruction.strip(".") + limit_text
        goal_id = f"{label}/{product.asin}#h{number}"
        goals.append(Goal(goal_id, product.asin, text, written.attributes, upper, written.options))
    return goals


def _weighted(goals: Iterable[Goal]) -> list[Goal]:
    goals = list(goals)
    counts = Counter(attribute for goal in goals for attribute in goal.attributes)
    weighted = []
    for goal in goals:
        rarity = [1 / counts[attribute] for attribute in goal.attributes]
        weight = sum(rarity) / len(rarity) if rarity else 1.0
        weighted.append(Goal(goal.id, goal.asin, goal.text, goal.attributes, goal.price_upper, goal.options, weight))
    return weighted


def split_goals(goals: Sequence[Goal], rule: str, seed: int) -> dict[str, tuple[Goal, ...]]:
    """Split name -> its goals, in their order. ``by_product`` decides by asin and ``seed`` alone, so that a product is
    in the same split whatever else the catalogue holds and whatever kind of goals are built."""
    if rule == "verl_agent":
        return {"train": tuple(goals[_RELEASED_TEST_GOALS:]), "test": tuple(goals[:_RELEASED_TEST_GOALS])}
    splits: dict[str, list[Goal]] = {name: [] for name in SPLITS["by_product"]}
    for goal in goals:
        draw = _hash_unit(f"split {seed} {goal.asin}")
        name = "test" if draw < _SHARES["test"] else "valid" if draw < sum(_SHARES.values()) else "train"
        splits[name].append(goal)
    return {name: tuple(members) for name, members in splits.items()}


def eval_goals(test: Sequence[Goal], rule: str, seed: int) -> tuple[Goal, ...]:
    """The fixed evaluation set of 128 goals of the split ``test``.

    ``verl_agent``: the first draw of the released code with ``seed``. Else goals in an order that depends on their ids
    alone, at most four of one product: a few products with hundreds of combinations of options would make up most of a
    plain sample. Where that gives too few, the goals left out follow in the same order.

    Raises:
      DataError: the split has fewer goals.
    """
    if len(test) < EVAL_GOALS:
        raise DataError(
            f"the evaluation set needs {EVAL_GOALS} goals; the split test has {len(test)}.",
            'evaluate on the panel "test", or use a larger catalogue.',
        )
    if rule == "verl_agent":
        drawn = np.random.RandomState(seed + _RELEASED_SEED_OFFSET).choice(len(test), EVAL_GOALS, replace=False)
        return tuple(test[index] for index in drawn)
    taken: Counter[str] = Counter()
    chosen, spare = [], []
    for goal in sorted(test, key=lambda goal: _hash_unit(f"eval {goal.id}")):
        taken[goal.asin] += 1
        (chosen if taken[goal.asin] <= _EVAL_GOALS_OF_A_PRODUCT else spare).append(goal)
    return tuple((chosen + spare)[:EVAL_GOALS])


def _hash_unit(text: str) -> float:
    """A number in [0, 1) that depends on ``text`` alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48
