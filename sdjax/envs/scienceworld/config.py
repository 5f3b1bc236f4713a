"""Configuration of ScienceWorld."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ScienceworldConfig:
    """The ``env.scienceworld`` part of a run's configuration."""
