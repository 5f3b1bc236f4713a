"""Environments: the protocol, the benchmarks, prompts and projections, panels, supervised worker processes."""

from sdjax.envs.base import Benchmark
from sdjax.envs.config import EnvConfig, GeneratorConfig, GeneratorKnobs
from sdjax.errors import ConfigError

__all__ = ["EnvConfig", "GeneratorConfig", "GeneratorKnobs", "make_benchmark"]


def make_benchmark(config: EnvConfig) -> Benchmark:
    """Makes the benchmark that ``config`` names. Benchmarks are imported here, each only when it is used."""
    if config.name == "alfworld":
        from sdjax.envs.alfworld.adapter import AlfworldBenchmark

        return AlfworldBenchmark(config.data, config.engine, config.generator, config.workers, config.worker_timeout_s)
    raise ConfigError(f"env.name = {config.name!r}.", "use alfworld.")
