"""The reward, by hand-made cases of every rule."""

from dataclasses import replace

import pytest

from sdjax.envs.webshop.catalogue import Product
from sdjax.envs.webshop.goals import Goal
from sdjax.envs.webshop.reward import color_words, score_purchase, shorten_color, similar

SHOE = Product(
    asin="B1",
    title="Red Running Shoe",
    description="Soft leather.",
    bullets=("rubber sole", "daily wear"),
    prices=(20.0,),
    options={"color": ("black2070", "red"), "size": ("9", "large")},
    category="fashion",
    product_category="Clothing › Men › Shoes",
    query="shoes",
    attributes=("machine wash",),
)
NOUNS = ("shoe",)
GOAL = Goal("x/B1#0", "B1", "text", ("rubber sole",), 30.0, (("color", "red"), ("size", "9")))


def score(product=SHOE, goal=GOAL, price=20.0, chosen=None, nouns=NOUNS, target_nouns=NOUNS, rule="compat"):
    chosen = {"color": "red", "size": "9"} if chosen is None else chosen
    return score_purchase(product, SHOE, goal, price, chosen, nouns, target_nouns, rule)


def test_everything_right_is_exactly_one():
    assert score().score == 1.0
    assert score().parts["r_option"] == score().parts["r_att"] == 1.0 and score().parts["r_price"] is True


def test_each_missing_part_costs_its_share():
    assert score(price=30.01).score == 3 / 4
    assert score(chosen={"color": "red"}).score == 3 / 4
    assert score(chosen={}).score == 2 / 4
    assert score(goal=replace(GOAL, attributes=("vegan",))).score == 3 / 4
    weights = [score().parts[name] for name in ("w_att", "w_option", "w_price")]
    assert weights == [1 / 4, 2 / 4, 1 / 4]


def test_options_count_in_any_group_and_by_shared_words():
    assert score(chosen={"size": "red", "color": "9"}).score == 1.0
    large = replace(GOAL, options=(("size", "3x-large"),))
    assert score(goal=large, chosen={"size": "large"}).score == 1.0
    assert "r_option" not in score(goal=replace(GOAL, options=())).parts


def test_attributes_count_by_likeness_or_by_the_texts():
    for name in ("washable machine wash", "rubber sole", "running", "soft leather", "machine-wash"):
        assert score(goal=replace(GOAL, attributes=(name,))).parts["r_att"] == 1.0
    assert score(goal=replace(GOAL, attributes=())).parts["r_att"] == 0.0


@pytest.mark.parametrize(
    ("query", "category", "nouns", "target_nouns", "r_type"),
    [
        ("shoes", "Other", ("shoe",), ("shoe",), 1.0),
        ("other", "Clothing › Men › Hats", ("shoe",), ("shoe", "a", "b", "c", "d", "e"), 1.0),
        ("other", "Clothing › Women", ("shoe",), ("shoe", "a", "b", "c", "d", "e"), 0.5),
        ("other", "Other", ("shoe",), ("shoe", "a", "b"), 1.0),
        ("other", "Other", ("shoe",), (), 0.5),
        ("shoes", "Other", ("shoe",), ("shoe", *"abcdefghij"), 0.1),
        ("shoes", "Clothing › Men › Shoes", ("lamp",), ("shoe",), 0.0),
        ("other", "Other", ("shoe",), ("shoe", "shoe", "shoe", "shoe", "shoe"), 0.5),
    ],
)
def test_products_of_another_kind(query, category, nouns, target_nouns, r_type):
    other = replace(SHOE, query=query, product_category=category)
    purchase = score(product=other, nouns=nouns, target_nouns=target_nouns)
    assert purchase.parts["r_type"] == r_type == purchase.score


def test_colors_are_shortened_on_one_side_in_compat_and_on_both_in_fixed():
    goal = replace(GOAL, options=(("color", "black2070"),))
    assert score(goal=goal, chosen={"color": "black2070"}).score == 2 / 3
    assert score(goal=goal, chosen={"color": "black2070"}, rule="fixed").score == 1.0
    written = replace(GOAL, options=("black2070",))
    assert score(goal=written, chosen={"color": "black2070"}).score == 1.0
    assert score(goal=replace(GOAL, options=(("color", "red"),)), chosen={"color": "red"}, rule="fixed").score == 1.0


def test_colors():
    assert len(color_words()) == len(set(color_words())) == 102
    assert [shorten_color(value) for value in ("black2070", "washed 3", "rectangular", "9")] == [
        "black",
        "ash",
        "tan",
        "9",
    ]


def test_likeness():
    assert similar("Size: LARGE", "large") and similar("(a) b", "b a") and not similar("small", "large")
    assert not similar("", "") and not similar("é", "é") and similar("café au", "caf")
