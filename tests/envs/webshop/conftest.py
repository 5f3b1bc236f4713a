"""Shops for the tests: the generated one, a tiny one, and the 1,000 published products where they are."""

from pathlib import Path

import pytest
from webshop_shops import NOUNS, SHARED, make_shop, tiny_catalogue  # type: ignore[import-not-found]

from sdjax.envs import EnvConfig
from sdjax.envs.webshop.adapter import WebshopBenchmark
from sdjax.envs.webshop.catalogue import Catalogue, read_catalogue
from sdjax.envs.webshop.config import WebshopConfig
from sdjax.envs.webshop.nouns import NounTable, find_nouns
from sdjax.envs.webshop.search import open_search
from sdjax.envs.webshop.shop import Shop


@pytest.fixture(scope="session")
def tiny() -> Shop:
    return make_shop(tiny_catalogue())


@pytest.fixture(scope="session")
def benchmark() -> WebshopBenchmark:
    """The default: the generated catalogue."""
    return WebshopBenchmark(EnvConfig(name="webshop"))


@pytest.fixture(scope="session")
def small() -> WebshopBenchmark:
    """Few generated products, quick to make."""
    return WebshopBenchmark(EnvConfig(name="webshop", webshop=WebshopConfig(generator_products=120)))


@pytest.fixture(scope="session")
def real_folder() -> Path:
    """The 1,000 published products; skips the test where they are absent."""
    if not (SHARED / "golden" / NOUNS).is_file():
        pytest.skip("the published products are not here")
    return SHARED


@pytest.fixture(scope="session")
def real_parts(real_folder) -> tuple[Catalogue, NounTable, object]:
    catalogue = read_catalogue(real_folder)
    nouns = find_nouns(catalogue, str(real_folder / "golden" / NOUNS))
    return catalogue, nouns, open_search("bm25", catalogue.products)
