"""Configuration of WebShop."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WebshopConfig:
    """The ``env.webshop`` part of a run's configuration."""
