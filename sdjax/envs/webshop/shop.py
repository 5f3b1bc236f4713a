"""The shop: everything that the episodes of a run share, immutable."""

from collections.abc import Mapping
from dataclasses import dataclass

from sdjax.envs.webshop import generator, pages, reward, search
from sdjax.envs.webshop.catalogue import Catalogue, Product, read_catalogue
from sdjax.envs.webshop.config import WebshopConfig
from sdjax.envs.webshop.goals import SPLITS, Goal, build_goals
from sdjax.envs.webshop.nouns import NounTable, find_nouns
from sdjax.errors import ConfigError

# Values of the settings in ``WebshopConfig``.
CHOICES = {
    "goals": ("synthetic", "human"),
    "split": tuple(SPLITS),
    "reward": reward.RULES,
    "observation": pages.MODES,
    "search": search.ENGINES,
}
_RESULTS_KEPT = 50


@dataclass(frozen=True, eq=False)
class Shop:
    """Everything that the episodes of a run share. goals: by id, in their shuffled order. prices: of each asin, in
    dollars. strict_search: searches only on pages with a search bar."""

    catalogue: Catalogue
    products: Mapping[str, Product]
    prices: Mapping[str, float]
    goals: Mapping[str, Goal]
    nouns: NounTable
    engine: search.SearchEngine
    reward_rule: str = "compat"
    strict_search: bool = False

    @classmethod
    def open(
        cls,
        catalogue: Catalogue,
        nouns: NounTable,
        engine: search.SearchEngine,
        *,
        goals: str = "synthetic",
        seed: int = 233,
        reward_rule: str = "compat",
        strict_search: bool = False,
    ) -> "Shop":
        """Draws prices and goals; the arguments are those of ``WebshopConfig``."""
        prices, built = build_goals(catalogue.products, goals, seed, catalogue.label)
        products = {product.asin: product for product in catalogue.products}
        by_id = {goal.id: goal for goal in built}
        return cls(catalogue, products, prices, by_id, nouns, engine, reward_rule, strict_search)

    def find(self, query: str) -> tuple[str, ...]:
        """Asins of the first 50 hits, best first."""
        return self.engine.search(query, _RESULTS_KEPT)

    def purchase(self, goal: Goal, asin: str, chosen: Mapping[str, str]) -> reward.Purchase:
        """Scores buying ``asin`` with the chosen options (group -> value)."""
        nouns = self.nouns.nouns
        return reward.score_purchase(
            self.products[asin],
            self.products[goal.asin],
            goal,
            self.prices[asin],
            chosen,
            nouns[asin],
            nouns[goal.asin],
            self.reward_rule,
        )


def open_shop(data: str, config: WebshopConfig) -> Shop:
    """The shop of ``env.data`` (``"generated"`` or a path) with the settings of ``env.webshop``.

    Raises:
      ConfigError: a setting has no such value. DataError: the catalogue cannot be used.
    """
    for key, allowed in CHOICES.items():
        if getattr(config, key) not in allowed:
            raise ConfigError(f"env.webshop.{key} = {getattr(config, key)!r}.", f"use one of {', '.join(allowed)}.")
    if data == generator.LABEL:
        catalogue = generator.generate_catalogue(config.generator_products, config.generator_seed)
    else:
        catalogue = read_catalogue(data)
    return Shop.open(
        catalogue,
        find_nouns(catalogue, config.nouns),
        search.open_search(config.search, catalogue.products, catalogue.folder),
        goals=config.goals,
        seed=config.seed,
        reward_rule=config.reward,
        strict_search=config.strict_search,
    )
