"""Goals, splits and the evaluation set."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from webshop_shops import tiny_catalogue  # type: ignore[import-not-found]

from sdjax.envs.webshop.generator import generate_catalogue, title_nouns
from sdjax.envs.webshop.goals import Goal, build_goals, eval_goals, split_goals
from sdjax.errors import ConfigError, DataError


def goals_of(catalogue, kind="synthetic", seed=0):
    return build_goals(catalogue.products, kind, seed, catalogue.label)


def test_one_goal_for_each_combination_of_options():
    prices, goals = goals_of(tiny_catalogue())
    by_id = {goal.id: goal for goal in goals}
    assert set(by_id) == {"tiny/B000000001#0", "tiny/B000000001#1", "tiny/B000000003#0", "tiny/B000000003#1"}
    blue = by_id["tiny/B000000001#1"]
    assert blue.options == (("color", "blue | grey"), ("size", "9")) and blue.values() == ("blue | grey", "9")
    assert blue.text.startswith("Find me rubber sole men's shoes with color: blue | grey, and size: 9, and price lower")
    assert 3.78 <= prices["B000000002"] <= 11.38 and prices["B000000003"] == 100.0
    for goal in goals:
        assert goal.price_upper in [10.0 * n for n in range(1, 100)]
        assert prices[goal.asin] < goal.price_upper <= prices[goal.asin] + 40
        assert goal.text.endswith(f", and price lower than {goal.price_upper:.2f} dollars")


def test_no_price_limit_above_the_highest():
    catalogue = tiny_catalogue()
    dear = tuple(replace(product, prices=(985.0,)) for product in catalogue.products)
    _, goals = build_goals(dear, "synthetic", 0, "dear")
    assert {goal.price_upper for goal in goals} == {1000000} and not any("price" in goal.text for goal in goals)


def test_crowd_written_goals_keep_bare_values_and_need_attributes():
    _, goals = goals_of(tiny_catalogue(), "human")
    assert [(goal.id, goal.options, goal.weight) for goal in goals] == [("tiny/B000000001#h0", ("red",), 1.0)]
    assert goals[0].text.startswith("i want red shoes, and price lower than ")


def test_ids_do_not_depend_on_the_seed_and_the_order_does():
    catalogue = generate_catalogue(60, 0)
    first, second = goals_of(catalogue, seed=1)[1], goals_of(catalogue, seed=2)[1]
    assert {goal.id for goal in first} == {goal.id for goal in second}
    assert [goal.id for goal in first] != [goal.id for goal in second]
    assert goals_of(catalogue, seed=1)[1] == first


def test_products_without_instructions():
    catalogue = tiny_catalogue()
    bare = [replace(product, instruction=None, human=()) for product in catalogue.products]
    for kind in ("synthetic", "human"):
        with pytest.raises(DataError, match=f"none of the 3 products of x has a {kind} instruction"):
            build_goals(bare, kind, 0, "x")


def test_no_product_is_in_two_splits_and_splits_ignore_the_rest():
    catalogue = generate_catalogue(400, 3)
    splits = split_goals(goals_of(catalogue)[1], "by_product", 233)
    asins = {name: {goal.asin for goal in goals} for name, goals in splits.items()}
    assert list(splits) == ["train", "valid", "test"] and sum(map(len, splits.values())) == len(goals_of(catalogue)[1])
    assert not asins["train"] & asins["valid"] and not (asins["train"] | asins["valid"]) & asins["test"]
    shares = {name: len(members) / sum(map(len, asins.values())) for name, members in asins.items()}
    assert 0.6 < shares["train"] < 0.8 and 0.05 < shares["valid"] < 0.2 and 0.1 < shares["test"] < 0.3
    written = split_goals(goals_of(catalogue, "human", 9)[1], "by_product", 233)
    for name, goals in written.items():
        others = set().union(*(asins[other] for other in asins if other != name))
        assert not {goal.asin for goal in goals} & others
    assert split_goals(goals_of(catalogue)[1], "by_product", 1)["test"] != splits["test"]


def test_the_released_rule_cuts_the_shuffled_list():
    goals = goals_of(generate_catalogue(400, 3))[1]
    splits = split_goals(goals, "verl_agent", 233)
    assert splits == {"train": goals[500:], "test": goals[:500]}
    expected = np.random.RandomState(1042).choice(range(500), 128, replace=False)
    assert eval_goals(splits["test"], "verl_agent", 42) == tuple(goals[index] for index in expected)


def goal_of(asin: str, number: int) -> Goal:
    return Goal(f"x/{asin}#{number}", asin, "text", ("a",), 10.0, ())


def test_the_evaluation_set_limits_one_product_and_ignores_the_order():
    goals = [goal_of("BIG", n) for n in range(900)] + [goal_of(f"B{n}", 0) for n in range(126)]
    chosen = eval_goals(goals, "by_product", 0)
    assert len(set(chosen)) == 128 and Counter(goal.asin for goal in chosen)["BIG"] <= 4
    assert eval_goals(goals[::-1], "by_product", 7) == chosen
    few = [goal_of(f"B{n % 3}", n) for n in range(130)]
    assert len(set(eval_goals(few, "by_product", 0))) == 128
    with pytest.raises(DataError, match="has 127"):
        eval_goals(goals[:127], "by_product", 0)


def test_generated_catalogues_repeat_and_differ_by_seed():
    one, again, other = generate_catalogue(50, 1), generate_catalogue(50, 1), generate_catalogue(50, 2)
    assert one == again and one.sha256 == again.sha256 != other.sha256
    assert generate_catalogue(20, 1).products == one.products[:20]
    with pytest.raises(ConfigError, match="generator_products = 0"):
        generate_catalogue(0, 1)


def test_generated_products_look_like_shop_products():
    products = generate_catalogue(600, 0).products
    assert len({product.asin for product in products}) == 600
    assert len({product.category for product in products}) == 5 and len({product.query for product in products}) == 30
    for product in products:
        shown = [name for name in product.attributes if name in product.title.lower()]
        text = f"{product.description} {' '.join(product.bullets)}".lower()
        hidden = [name for name in product.attributes if name in text]
        assert shown and hidden and set(shown) | set(hidden) == set(product.attributes)
    ranges = sum(len(product.prices) == 2 for product in products)
    assert 30 < ranges < 100 and any(product.prices == (100.0,) for product in products)


@pytest.mark.parametrize(
    ("title", "nouns"),
    [
        ("Daza Power Adapters Water Resistant", ("daza", "power", "adapters", "water")),
        ("Bele Men's Boots Open Toe, New Season", ("bele", "men", "boots", "toe", "season")),
        ("Hasu Lip Care Cruelty Free (Upgraded)", ("hasu", "lip", "care")),
    ],
)
def test_nouns_of_generated_titles(title, nouns):
    assert title_nouns(title) == nouns
