"""Environments: the protocol, the benchmarks, prompts and projections, panels, supervised worker processes."""

from sdjax.envs.base import Benchmark
from sdjax.envs.config import EnvConfig, GeneratorConfig, GeneratorKnobs
from sdjax.errors import ConfigError

__all__ = ["BENCHMARKS", "EnvConfig", "GeneratorConfig", "GeneratorKnobs", "make_benchmark"]

BENCHMARKS = ("alfworld", "scienceworld", "webshop", "searchqa")


def make_benchmark(config: EnvConfig) -> Benchmark:
    """Makes the benchmark that ``config`` names. Benchmarks are imported here, each only when it is used."""
    if config.name == "alfworld":
        from sdjax.envs.alfworld.adapter import AlfworldBenchmark

        return AlfworldBenchmark(config.data, config.engine, config.generator, config.workers, config.worker_timeout_s)
    if config.name == "scienceworld":
        from sdjax.envs.scienceworld.adapter import ScienceworldBenchmark

        return ScienceworldBenchmark(config)
    if config.name == "webshop":
        from sdjax.envs.webshop.adapter import WebshopBenchmark

        return WebshopBenchmark(config)
    if config.name == "searchqa":
        from sdjax.envs.searchqa.adapter import SearchqaBenchmark

        return SearchqaBenchmark(config)
    raise ConfigError(f"env.name = {config.name!r}.", f"use one of {', '.join(BENCHMARKS)}.")
