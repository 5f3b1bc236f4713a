"""Experts that shop with short thoughts, for warm starts, and the oracle's plan from any state.

``oracle`` knows the product that the goal was written for: it searches, opens it, takes the goal's options and buys.
``rule`` is the baseline of the benchmark: search the instruction, open the first hit, buy.
"""

import random
from collections.abc import Mapping

from sdjax.envs.base import ExpertTurn
from sdjax.envs.webshop.catalogue import Product
from sdjax.envs.webshop.goals import Goal
from sdjax.envs.webshop.pages import PER_PAGE
from sdjax.envs.webshop.reward import Purchase, shorten_color, similar
from sdjax.envs.webshop.shop import Shop
from sdjax.envs.webshop.simulator import SUB_PAGES, Episode, observe
from sdjax.errors import ConfigError

EXPERTS = ("oracle", "rule")
RANDOM_THOUGHT = "I look around."
_PRICE_TEXT = ", and price lower than "
_THOUGHTS = {
    "click[back to search]": "I start a new search.",
    "click[< prev]": "I go back.",
    "click[next >]": "I look at the next page.",
    "click[buy now]": "This is right. I buy it.",
}


def expert_episode(
    shop: Shop, goal: Goal, kind: str, seed: int, max_turns: int, noise: float = 0.0, mode: str = "quoted"
) -> list[ExpertTurn]:
    """Plays ``goal`` from its start; the last turn of a winning episode buys.

    Args:
      kind: ``"oracle"`` or ``"rule"``. mode: how pages are shown. noise: probability that a turn is random, drawn from
      ``seed``.
    Returns:
      The turns. An expert without noise that did not win in time gives an empty list, one with noise what it played.
    Raises:
      ConfigError: unknown ``kind``.
    """
    if kind not in EXPERTS:
        raise ConfigError(f"no expert {kind!r}.", f"use one of {', '.join(EXPERTS)}.")
    rng = random.Random(f"webshop expert {seed} {goal.id}")
    episode = Episode(shop, goal)
    turns: list[ExpertTurn] = []
    while len(turns) < max_turns and episode.page != "done":
        if noise > 0 and rng.random() < noise:
            action, thought = _random_action(episode, rng), RANDOM_THOUGHT
        else:
            action = _next_action(episode, kind)
            if action is None:
                break
            thought = _thought(episode, action)
        turns.append(ExpertTurn(observe(episode, mode), action, thought))
        episode.step(action)
    won = episode.purchase is not None and episode.purchase.score == 1.0
    return turns if won or noise > 0 else []


def plan(episode: Episode) -> list[str] | None:
    """The fewest actions that buy the goal's product with the goal's options from here; None if the episode is over or
    no query of the oracle finds the product. In ``compat``, not every goal can be won even so."""
    if episode.page == "done":
        return None
    target = episode.goal.asin
    if episode.asin == target:
        up = [] if episode.page == "item" else ["click[< prev]"]
        return up + _choose_and_buy(episode.shop, episode.goal, episode.chosen)
    ways = [way for way in (_back_to_results(episode), _new_search(episode)) if way is not None]
    if not ways:
        return None
    return [*min(ways, key=len), f"click[{target.lower()}]", *_choose_and_buy(episode.shop, episode.goal, {})]


def rule_purchase(shop: Shop, goal: Goal) -> Purchase | None:
    """What the rule agent buys; None if its search finds nothing."""
    episode = Episode(shop, goal)
    while episode.page != "done":
        action = _next_action(episode, "rule")
        if action is None:
            return None
        episode.step(action)
    return episode.purchase


def instruction_query(goal: Goal) -> str:
    """The instruction without its price, as a query."""
    return _clean(goal.text.split(_PRICE_TEXT, 1)[0])


def wanted_choices(product: Product, goal: Goal) -> list[tuple[str, str]]:
    """(group, value) pairs of ``product`` that meet the goal's options, in the order of the page."""
    pairs = [(name, value) for name, values in product.options.items() for value in values]
    taken: dict[str, str] = {}
    for option in goal.options:
        free = [pair for pair in pairs if pair[0] not in taken]
        if not isinstance(option, str):
            fitting = [pair for pair in free if pair == option]
        else:
            fitting = [pair for pair in free if pair[1] == option.lower()]
            fitting += [pair for pair in free if similar(shorten_color(pair[1]), shorten_color(option))]
        taken.update(fitting[:1])
    return [(name, taken[name]) for name in product.options if name in taken]


def attribute_pages(product: Product, goal: Goal) -> dict[str, tuple[str, ...]]:
    """Attribute of the goal -> pages of the product that say it (``item``, ``description``, ``features``)."""
    texts = {
        "item": product.title.lower(),
        "description": product.description.lower(),
        "features": " ".join(product.bullets).lower(),
    }
    return {name: tuple(page for page, text in texts.items() if name in text) for name in goal.attributes}


def _choose_and_buy(shop: Shop, goal: Goal, chosen: Mapping[str, str]) -> list[str]:
    choices = wanted_choices(shop.products[goal.asin], goal)
    # Whatever the group: of a value that two groups have, only one can be chosen, and the reward asks for no more.
    missing = dict.fromkeys(value for _, value in choices if value not in chosen.values())
    return [*(f"click[{value}]" for value in missing), "click[buy now]"]


def _back_to_results(episode: Episode) -> list[str] | None:
    """From where the episode stands to the page of its own results that shows the target."""
    if episode.goal.asin not in episode.results:
        return None
    up = 0 if episode.page == "results" else 1 if episode.page == "item" else 2
    return ["click[< prev]"] * up + _turn_pages(episode.number, episode.results.index(episode.goal.asin))


def _new_search(episode: Episode) -> list[str] | None:
    """A search that finds the target. Of the queries that need the fewest page turns the first, the plainest one."""
    goal, shop = episode.goal, episode.shop
    product = shop.products[goal.asin]
    queries = (
        instruction_query(goal),
        _clean(" ".join([product.query, *goal.attributes, *goal.values()])),
        _clean(product.title),
    )
    ways = []
    for query in queries:
        results = shop.find(query) if query else ()
        if goal.asin in results:
            ways.append([f"search[{query}]", *_turn_pages(1, results.index(goal.asin))])
    if not ways:
        return None
    return ([] if episode.page == "start" else ["click[back to search]"]) + min(ways, key=len)


def _turn_pages(number: int, position: int) -> list[str]:
    pages = position // PER_PAGE + 1 - number
    return ["click[next >]" if pages > 0 else "click[< prev]"] * abs(pages)


def _clean(text: str) -> str:
    """A query that survives the action format: one line, no brackets, lower case."""
    return " ".join(text.translate({ord("["): " ", ord("]"): " "}).lower().split())


def _next_action(episode: Episode, kind: str) -> str | None:
    if kind == "oracle":
        commands = plan(episode)
        return commands[0] if commands else None
    if episode.page == "start":
        return f"search[{_clean(episode.goal.text)}]"
    if episode.page == "results":
        window = episode.window()
        return f"click[{window[0].lower()}]" if window else None
    return "click[< prev]" if episode.page in SUB_PAGES else "click[buy now]"


def _random_action(episode: Episode, rng: random.Random) -> str:
    if episode.has_search_bar():
        words = _clean(episode.goal.text).split() or ["shop"]
        return f"search[{' '.join(rng.sample(words, min(2, len(words))))}]"
    return f"click[{rng.choice(episode.clickables())}]"


def _thought(episode: Episode, action: str) -> str:
    if action in _THOUGHTS:
        return _THOUGHTS[action]
    if action.startswith("search["):
        return f"I search for {episode.shop.products[episode.goal.asin].query}."
    if episode.page == "results":
        return "This one may fit. I open it."
    return f"I need {action.removeprefix('click[')[:-1]}."
