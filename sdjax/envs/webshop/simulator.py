"""Episodes: light objects that walk through the pages of a shop that all of them share.

Pages and moves are those of the original's text environment: start -> results -> item -> sub page (description,
features, reviews), ``back to search`` from everywhere, ``buy now`` on an item ends the episode. Every page of results
forgets the chosen options. The back doors of the original's search (``<r>``, ``<a>``, ``<c>``, ``<q>``) are plain words
here. Actions are only ever compared and searched for, never parsed as code, in time linear in their length.
"""

import hashlib
import json

from sdjax.envs.base import Observation
from sdjax.envs.webshop import pages
from sdjax.envs.webshop.catalogue import Product
from sdjax.envs.webshop.goals import Goal
from sdjax.envs.webshop.reward import Purchase
from sdjax.envs.webshop.shop import Shop

ENGINE_VERSION = 1
SUB_PAGES = ("description", "features", "reviews")
QUERY_FORM = "search[<your query>]"
_START_BUTTON = "search"


def split_action(action: str) -> tuple[str, str] | None:
    """``"search[red shoes]"`` -> ("search", "red shoes"); None if it is no action.

    The last bracket that can open the argument splits; what follows its last closing bracket is ignored; a line break
    ends the action. The argument is lower-cased. The same as matching ``(.+)\\[(.+)\\]``, in linear time.
    """
    line = action.split("\n", 1)[0]
    closing = line.rfind("]")
    opening = line.rfind("[", 1, max(closing - 1, 0))
    if opening < 0:
        return None
    return line[:opening], line[opening + 1 : closing].lower()


class Episode:
    """One walk through the shop for one goal. Read its attributes, change it through ``step`` only.

    page: ``start``, ``results``, ``item``, one of SUB_PAGES, or ``done``. number: page of the results, from 1. asin:
    the open product. chosen: option group -> value. opened: products opened since the search began. purchase: what was
    bought, once it was.
    """

    __slots__ = ("_moves", "asin", "chosen", "goal", "number", "opened", "page", "purchase", "query", "results", "shop")

    def __init__(self, shop: Shop, goal: Goal):
        self.shop, self.goal = shop, goal
        self.purchase: Purchase | None = None
        self._go_to_start()

    def copy(self) -> "Episode":
        """An independent episode in the same state."""
        other = object.__new__(Episode)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        other.chosen = dict(self.chosen)
        return other

    @property
    def product(self) -> Product | None:
        return None if self.asin is None else self.shop.products[self.asin]

    def window(self) -> tuple[str, ...]:
        """Asins on the current page of results."""
        return self.results[(self.number - 1) * pages.PER_PAGE : self.number * pages.PER_PAGE]

    def clickables(self) -> tuple[str, ...]:
        """What can be clicked, lower case, in the order of the original."""
        return tuple(self._targets())

    def has_search_bar(self) -> bool:
        return self.page == "start"

    def accepts(self, action: str) -> bool:
        """Whether ``action`` does something here."""
        parts = split_action(action)
        if parts is None:
            return False
        name, argument = parts
        if name == "search":
            return self._may_search()
        return name == "click" and argument != _START_BUTTON and argument in self._targets()

    def step(self, action: str) -> None:
        """Plays any text; what is not accepted changes nothing."""
        parts = split_action(action)
        if parts is None or self.page == "done":
            return
        name, argument = parts
        if name == "search" and self._may_search():
            self.query = argument
            self._go_to_results(1)
        elif name == "click" and argument != _START_BUTTON:
            move = self._targets().get(argument)
            if move is not None:
                self._click(*move)

    def observation(self, mode: str) -> str:
        """The page as text; ``mode`` as in ``WebshopConfig.observation``."""
        return pages.render(self, mode)

    def state_key(self, mode: str) -> str:
        """Equal for equal states. Products opened before are part of it in the one ``mode`` that marks them."""
        opened = sorted(self.opened) if mode == "text_rich" else []
        state = (self.page, self.query, self.number, self.asin, sorted(self.chosen.items()), opened)
        return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:24]

    def _may_search(self) -> bool:
        return self.page != "done" and (self.has_search_bar() or not self.shop.strict_search)

    def _targets(self) -> dict[str, tuple[str, ...]]:
        """What each text that can be clicked does; of two with the same text the later one counts."""
        if self._moves is None:
            self._moves = self._find_targets()
        return self._moves

    def _find_targets(self) -> dict[str, tuple[str, ...]]:
        if self.page == "start":
            return {_START_BUTTON: ("stay",)}
        if self.page == "done":
            return {}
        moves: dict[str, tuple[str, ...]] = {"back to search": ("start",)}
        if self.page == "results":
            if self.number > 1:
                moves["< prev"] = ("previous page",)
            moves["next >"] = ("next page",)
            moves.update((asin.lower(), ("item", asin)) for asin in self.window())
            return moves
        moves["< prev"] = ("up",)
        product = self.product
        if self.page == "item" and product is not None:
            moves.update((name, ("sub page", name)) for name in SUB_PAGES)
            moves["buy now"] = ("buy",)
            moves.update(
                (value, ("option", name, value)) for name, values in product.options.items() for value in values
            )
        return moves

    def _click(self, kind: str, *what: str) -> None:
        if kind == "start":
            self._go_to_start()
        elif kind == "previous page":
            self._go_to_results(self.number - 1)
        elif kind == "next page":
            self._go_to_results(self.number + 1)
        elif kind == "up" and self.page == "item":
            self._go_to_results(self.number)
        elif kind == "up":
            self._show("item")
        elif kind == "item":
            self.asin = what[0]
            self.opened |= {what[0]}
            self._show("item")
        elif kind == "sub page":
            self._show(what[0])
        elif kind == "option":
            name, value = what
            self.chosen[name] = value
        elif kind == "buy":
            assert self.asin is not None  # only an item page has the button
            self.purchase = self.shop.purchase(self.goal, self.asin, self.chosen)
            self._show("done")

    def _show(self, page: str) -> None:
        self.page, self._moves = page, None

    def _go_to_start(self) -> None:
        self.opened: frozenset[str] = frozenset()
        self.query, self.number, self.asin, self.results = "", 0, None, ()
        self.chosen: dict[str, str] = {}
        self._show("start")

    def _go_to_results(self, number: int) -> None:
        self.results, self.number, self.asin = self.shop.find(self.query), number, None
        self.chosen = {}
        self._show("results")


def observe(episode: Episode, mode: str) -> Observation:
    """What the agent sees: the page, and what can be done on it as the lineage's prompt lists it."""
    searches = (QUERY_FORM,) if episode.has_search_bar() else ()
    clicks = tuple(f"click[{text}]" for text in episode.clickables())
    return Observation(episode.observation(mode), episode.goal.text.strip(), searches + clicks)
