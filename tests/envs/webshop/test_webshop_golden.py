"""The simulator against recordings of the original environment: goals, prices, rewards, every page of every episode."""

import pytest
from webshop_shops import golden  # type: ignore[import-not-found]

from sdjax.envs.webshop.shop import Shop
from sdjax.envs.webshop.simulator import Episode

pytestmark = pytest.mark.shared


@pytest.fixture(scope="module")
def shop(real_parts) -> Shop:
    catalogue, nouns, engine = real_parts
    return Shop.open(catalogue, nouns, engine, seed=42)


@pytest.fixture(scope="module")
def human_shop(real_parts) -> Shop:
    catalogue, nouns, engine = real_parts
    return Shop.open(catalogue, nouns, engine, seed=42, goals="human")


def test_goals_and_prices(shop, real_folder):
    rows = golden(real_folder, "goals_synthetic_seed42.jsonl.gz")
    assert len(shop.goals) == len(rows) == 6910
    for goal, row in zip(shop.goals.values(), rows):
        assert (goal.asin, goal.text, goal.price_upper) == (row["asin"], row["instruction_text"], row["price_upper"])
        assert (list(goal.attributes), dict(goal.options)) == (row["attributes"], row["goal_options"])
        assert goal.weight == pytest.approx(row["weight"], rel=1e-12)
    assert [shop.prices] == golden(real_folder, "prices_seed42.jsonl.gz")


def test_rewards(shop, real_folder):
    goals = list(shop.goals.values())
    rows = golden(real_folder, "rewards_synthetic_seed42.jsonl.gz")
    assert len(rows) == 4000
    for row in rows:
        purchase = shop.purchase(goals[row["goal"]], row["asin"], row["options"])
        assert purchase.score == row["reward"]
        assert purchase.parts == {name: value for name, value in row["info"].items() if value is not None}


@pytest.mark.parametrize(
    ("name", "shop_name", "mode", "steps"),
    [
        ("traces_text_synthetic_seed42", "shop", "text", 1968),
        ("traces_text_rich_synthetic_seed42", "shop", "text_rich", 585),
        ("traces_text_human_seed42", "human_shop", "text", 281),
    ],
)
def test_traces(name, shop_name, mode, steps, real_folder, request):
    shop = request.getfixturevalue(shop_name)
    goals = list(shop.goals.values())
    played = 0
    for row in golden(real_folder, f"{name}.jsonl.gz"):
        episode = Episode(shop, goals[row["goal"]])
        assert episode.observation(mode) == row["reset_observation"]
        for step in row["steps"]:
            assert list(episode.clickables()) == step["available"]["clickables"]
            assert episode.has_search_bar() == step["available"]["has_search_bar"]
            episode.step(step["action"])
            assert episode.observation(mode) == step["observation"]
            assert (episode.page == "done") == step["done"]
            assert (episode.purchase.score if episode.purchase else 0.0) == step["reward"]
            played += 1
    assert played == steps


def test_the_ceiling_of_the_released_goals(shop):
    from sdjax.envs.webshop.check import ceiling

    goals = tuple(shop.goals.values())
    assert round(ceiling(shop, goals, "compat") * len(goals)) == 6452
    assert ceiling(shop, goals, "fixed") == 1.0
