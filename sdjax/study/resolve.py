"""A cell's configuration exactly as its command makes it: the same flags, parsed in this process."""

from collections.abc import Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from sdjax import config as config_lib
from sdjax.config import RunConfig
from sdjax.errors import ConfigError, SdjaxError


def config_of(arguments: Sequence[str], what: str) -> RunConfig:
    """The configuration of ``--config=FILE --config.key=value ...``. what: named in errors.

    Raises:
      ConfigError: it does not load.
    """
    argv = ["sdjax", *arguments]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    try:
        values(argv)
        return config_lib.load(values["config"].value)
    except SdjaxError as error:
        raise ConfigError(f"{what}: {error.found}", error.fix) from error
    except Exception as error:  # a config file is a program of its own
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{what} does not load: {type(error).__name__}: {reason} ({' '.join(arguments)}).",
            "correct the config file, its arguments or the override.",
        ) from error


def option(key: str, value: Any) -> str:
    """``--config.key=value``."""
    return f"--config.{key}={value if isinstance(value, str) else repr(value)}"
