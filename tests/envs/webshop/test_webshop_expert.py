"""Experts and the oracle's plan."""

import random
from dataclasses import replace

import pytest
from webshop_shops import make_shop, tiny_catalogue  # type: ignore[import-not-found]

from sdjax.envs.webshop.check import ceiling, measure, report, steps_per_second
from sdjax.envs.webshop.expert import attribute_pages, expert_episode, instruction_query, plan, wanted_choices
from sdjax.envs.webshop.simulator import Episode
from sdjax.errors import ConfigError


def replay(shop, goal, turns, mode="quoted"):
    episode = Episode(shop, goal)
    for turn in turns:
        assert turn.observation.text == episode.observation(mode)
        assert episode.accepts(turn.action) and 0 < len(turn.thought.split()) <= 16
        episode.step(turn.action)
    return episode


def test_the_oracle_wins_every_goal_that_can_be_won(small):
    fixed = replace(small.shop, reward_rule="fixed")
    for goal in list(small.shop.goals.values())[::7]:
        turns = expert_episode(fixed, goal, "oracle", 0, 15)
        episode = replay(fixed, goal, turns)
        assert episode.purchase.score == 1.0 and episode.asin == goal.asin
        assert turns[0].action.startswith("search[") and turns[-1].action == "click[buy now]"
        chosen = dict(wanted_choices(small.shop.products[goal.asin], goal))
        winnable = small.shop.purchase(goal, goal.asin, chosen).score == 1.0
        assert bool(expert_episode(small.shop, goal, "oracle", 0, 15)) == winnable
        assert expert_episode(fixed, goal, "oracle", 0, len(turns) - 1) == []


def test_the_plan_wins_from_any_state(small):
    shop = replace(small.shop, reward_rule="fixed")
    rng = random.Random(0)
    goals = list(shop.goals.values())
    lengths = []
    for _ in range(150):
        episode = Episode(shop, rng.choice(goals))
        for _ in range(rng.randint(0, 10)):
            words = rng.sample(episode.goal.text.split(), 2)
            choices = [text for text in episode.clickables() if text not in ("search", "buy now")]
            search = not choices or rng.random() < 0.2
            episode.step(f"search[{' '.join(words)}]" if search else f"click[{rng.choice(choices)}]")
        commands = plan(episode)
        lengths.append(len(commands))
        for command in commands:
            assert episode.accepts(command)
            episode.step(command)
        assert episode.purchase.score == 1.0
        assert plan(episode) is None
    assert max(lengths) <= 14


def test_the_plan_goes_back_rather_than_search_again(tiny):
    episode = Episode(tiny, tiny.goals["tiny/B000000001#0"])
    for action in ("search[leather lamp]", "click[b000000002]", "click[features]"):
        episode.step(action)
    assert plan(episode)[:3] == ["click[< prev]", "click[< prev]", "click[b000000001]"]
    for action in ("click[< prev]", "click[< prev]", "click[b000000001]", "click[red]", "click[description]"):
        episode.step(action)
    assert plan(episode) == ["click[< prev]", "click[9]", "click[buy now]"]


def test_a_product_that_no_query_finds():
    catalogue = tiny_catalogue()
    silent = replace(catalogue.products[0], title="the", description="", bullets=(), options={})
    shop = make_shop(replace(catalogue, products=(silent, *catalogue.products[1:])))
    goal = shop.goals["tiny/B000000001#0"]
    assert plan(Episode(shop, goal)) is None and expert_episode(shop, goal, "oracle", 0, 15) == []


def test_a_value_of_two_groups_is_chosen_once(tiny):
    goal = tiny.goals["tiny/B000000003#1"]
    assert goal.options == (("kind", "plain"), ("style", "plain"))
    turns = expert_episode(replace(tiny, reward_rule="fixed"), replace(goal, attributes=("hat",)), "oracle", 0, 15)
    assert [turn.action for turn in turns][-2:] == ["click[plain]", "click[buy now]"]


def test_choices_for_crowd_written_goals():
    shop = make_shop(tiny_catalogue(), goals="human")
    goal = next(iter(shop.goals.values()))
    product = shop.products[goal.asin]
    assert wanted_choices(product, goal) == [("color", "red")]
    for wanted, found in ((("9", "blue"), [("color", "blue | grey"), ("size", "9")]), (("teal",), [])):
        assert wanted_choices(product, replace(goal, options=wanted)) == found


def test_pages_that_show_an_attribute(tiny):
    goal = replace(tiny.goals["tiny/B000000001#0"], attributes=("rubber sole", "leather", "red", "vegan"))
    assert attribute_pages(tiny.products["B000000001"], goal) == {
        "rubber sole": ("features",),
        "leather": ("description",),
        "red": ("item",),
        "vegan": (),
    }


def test_queries_survive_the_action_format(tiny):
    goal = replace(tiny.goals["tiny/B000000001#0"], text="A [big]\nShoe, and price lower than 30.00 dollars")
    assert instruction_query(goal) == "a big shoe"


def test_the_rule_agent_buys_its_first_hit(tiny, small):
    shop = replace(tiny, prices=dict.fromkeys(tiny.prices, 1.0))
    goal = replace(tiny.goals["tiny/B000000001#0"], options=(), attributes=("rubber sole",))
    turns = expert_episode(shop, goal, "rule", 0, 15)
    assert [turn.action.split("[")[0] for turn in turns] == ["search", "click", "click"]
    assert replay(shop, goal, turns).purchase.score == 1.0
    assert expert_episode(shop, replace(goal, text="the"), "rule", 0, 15) == []


def test_noise_is_seeded_and_leaves_losing_episodes_in(small):
    shop = small.shop
    goal = list(shop.goals.values())[5]
    for kind in ("oracle", "rule"):
        first = expert_episode(shop, goal, kind, 1, 15, noise=0.7)
        assert first == expert_episode(shop, goal, kind, 1, 15, noise=0.7)
        assert first != expert_episode(shop, goal, kind, 2, 15, noise=0.7)
        for seed in range(10):
            replay(shop, goal, expert_episode(shop, goal, kind, seed, 15, noise=0.7))


def test_unknown_expert(tiny):
    with pytest.raises(ConfigError, match="oracle, rule"):
        expert_episode(tiny, tiny.goals["tiny/B000000001#0"], "clever", 0, 15)


def test_difficulty_of_the_generated_catalogue(benchmark):
    shop = benchmark.shop
    goals = tuple(shop.goals[task_id] for task_id in benchmark.panel("eval").task_ids)
    found = measure(shop, goals)
    assert 0.85 < found.ceiling["compat"] < 1.0 == found.ceiling["fixed"] == ceiling(shop, goals, "fixed")
    assert 0.4 < found.rule_score < 0.8 and found.rule_success < 0.05
    assert found.first_page > 0.8 and found.found > 0.95 and 3 < found.plan_turns < 6


def test_the_report_says_what_is_measured(benchmark):
    from sdjax.envs import EnvConfig
    from sdjax.envs.webshop.config import WebshopConfig

    lines = "\n".join(
        report(EnvConfig(name="webshop", webshop=WebshopConfig(generator_products=80, split="verl_agent")))
    )
    for word in ("80 products", "success ceiling", "rule agent", "steps/s", "unseen products", "known from generation"):
        assert word in lines
    assert steps_per_second(benchmark.shop, tuple(benchmark.shop.goals.values()), "text_rich", 0.05) > 0
