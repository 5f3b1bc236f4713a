"""Configuration of Search-QA."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchqaConfig:
    """The ``env.searchqa`` part of a run's configuration."""
