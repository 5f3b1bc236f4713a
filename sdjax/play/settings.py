"""Which benchmark is played, and with which run's settings."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sdjax.envs import BENCHMARKS, EnvConfig
from sdjax.envs.prompts import load_protocol
from sdjax.errors import ConfigError, RunDirError

if TYPE_CHECKING:  # the config of a run imports JAX, which a look at an environment does not need
    from sdjax.config import RunConfig

_PANELS = {"alfworld": "valid", "scienceworld": "panel200", "webshop": "eval", "searchqa": "eval"}


@dataclass(frozen=True)
class Settings:
    """panel: whose first task is played. bank: the teacher's skill bank. run: the whole config, None with ``--env``."""

    env: EnvConfig
    panel: str
    bank: str
    seed: int = 0
    run: "RunConfig | None" = None


def find_settings(config: "RunConfig | None", name: str | None, workdir: Path | None) -> Settings:
    """From a config, else the name of a benchmark, else the config that a run directory was started with.

    Raises:
      ConfigError: none or more than one of them is given, or there is no such benchmark.
      RunDirError: the config of the run directory cannot be read.
    """
    if config is not None and name:
        raise ConfigError("--config and --env are both given.", "leave one of them out.")
    if name:
        if name not in BENCHMARKS:
            raise ConfigError(f"--env={name}.", f"use one of {', '.join(BENCHMARKS)}.")
        protocol = load_protocol(name)
        env = EnvConfig(name=name, turns=protocol.turn_limit, history=protocol.history)
        return Settings(env, _PANELS[name], bank=name)
    if config is None:
        config = _config_of(workdir)
    bank = config.teacher.bank or config.env.name
    return Settings(config.env, config.eval.panel, bank, config.seed, config)


def _config_of(workdir: Path | None) -> "RunConfig":
    path = None if workdir is None else workdir / "config.json"
    if path is None or not path.is_file():
        raise ConfigError(
            "nothing says what to play.",
            f"add --env=NAME ({', '.join(BENCHMARKS)}), --config=experiments/quickstart.py, or the --workdir of a run.",
        )
    from sdjax.config import load

    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunDirError(f"{path} cannot be read ({error}).", "give the run's --config as well.") from error
    return load(plain)
