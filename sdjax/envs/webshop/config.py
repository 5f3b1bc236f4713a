"""Configuration of WebShop."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WebshopConfig:
    """The ``env.webshop`` part of a run's configuration.

    goals: ``"synthetic"``, one for each combination of a product's options, or ``"human"``, the crowd-written ones.
    seed: draws the prices of products with a price range and the price limits of goals, and shuffles the goals.

    split: ``"by_product"`` (no product has goals in two splits) or ``"verl_agent"``, the index rule of the released
    code: goals 0-499 of the shuffled list are ``test``, the others ``train``, so that products are in both.
    split_seed: another seed, other products in ``valid`` and ``test``.

    reward: ``"compat"``, the reward of the original, or ``"fixed"``, which shortens colours to a basic colour word on
    both sides of a comparison, not only on the buyer's. strict_search: refuse ``search[...]`` on pages without a search
    bar, where the original accepts it.

    observation: ``"quoted"``, the parts of the page after the instruction, each in quotes, as verl-agent shows them;
    ``"text"``, the whole page; or ``"text_rich"``, one line for each part, with buttons and choices marked.

    search: ``"bm25"``, equal to the original's Lucene, or ``"bm25s"``, the package of that name (same words, nearly the
    same ranking). nouns: file with the nouns of the titles, as ``python -m sdjax.envs.webshop.nouns`` writes it; empty:
    the one beside the catalogue.

    generator_products, generator_seed: of the generated catalogue, about five goals a product.
    """

    goals: str = "synthetic"
    seed: int = 233
    split: str = "by_product"
    split_seed: int = 233
    reward: str = "compat"
    strict_search: bool = False
    observation: str = "quoted"
    search: str = "bm25"
    nouns: str = ""
    generator_products: int = 1000
    generator_seed: int = 0
