"""Names that Kubernetes accepts."""

import re
from collections.abc import Sequence

from sdjax.errors import ConfigError
from sdjax.study.manifest import Entry

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035, as Kubernetes checks services and JobSets
LIMIT = 63


def cluster_names(entries: Sequence[Entry], longest: int) -> dict[str, str]:
    """Entry name -> name on the cluster, of at most ``longest`` characters: ``qwen3.5-2b`` becomes ``qwen3-5-2b``.

    Long names keep their end, which holds the hash of the configuration.

    Raises:
      ConfigError: a name that is still none, or two that become the same.
    """
    found: dict[str, str] = {}
    for entry in entries:
        name = re.sub(r"[._]", "-", entry.name.lower())
        if len(name) > longest:
            head, _, tail = name.rpartition("-")
            name = f"{head[: longest - len(tail) - 1].rstrip('-')}-{tail}"
        if not _LABEL.fullmatch(name) or len(name) > longest:
            raise ConfigError(
                f"{entry.name!r} cannot be the name of a Kubernetes object (it would be {name!r}).",
                "use letters, digits, '-', '.' and '_' in the axes of the study, and begin with a letter.",
            )
        if name in found.values():
            other = next(key for key, value in found.items() if value == name)
            raise ConfigError(f"{entry.name} and {other} would both be {name} on the cluster.", "rename an axis value.")
        found[entry.name] = name
    return found
