"""Fixed evaluation panels: ordered task ids, each exactly once, with a hash over the ids and the game data.

A score is only comparable with another score on the same panel. The hash goes into every result, so that a different
order, a missing game or changed data is seen at once.
"""

import hashlib
import json
from collections.abc import Sequence

from sdjax.envs.base import Panel
from sdjax.errors import DataError


def make_panel(name: str, ids: Sequence[str], data_hash: str) -> Panel:
    """Makes a panel of ``ids`` in this order. ``data_hash`` is a hash over the contents of these tasks, in this order.

    Raises:
      DataError: no ids, or an id occurs twice.
    """
    if not ids:
        raise DataError(f"panel {name} is empty.", "give it at least one task id.")
    if len(set(ids)) != len(ids):
        twice = sorted({task_id for task_id in ids if list(ids).count(task_id) > 1})
        raise DataError(
            f"panel {name} has {len(twice)} repeated ids, first {twice[0]}.", "list every task exactly once."
        )
    text = json.dumps([list(ids), data_hash], separators=(",", ":"))
    return Panel(name, tuple(ids), hashlib.sha256(text.encode()).hexdigest())


def verify(panel: Panel, expected_sha: str) -> None:
    """Raises DataError if ``panel`` is not the panel with ``expected_sha``."""
    if panel.sha256 != expected_sha:
        raise DataError(
            f"panel {panel.name} has hash {panel.sha256[:16]}, expected {expected_sha[:16]}.",
            "use the same task ids, order, game data and generator settings as the run you compare with.",
        )


def parse_name(name: str) -> tuple[str, int | None]:
    """``"valid_seen"`` -> ("valid_seen", None); ``"valid_seen:64"`` -> ("valid_seen", 64)."""
    split, colon, count = name.partition(":")
    if not colon:
        return split, None
    if not count.isdecimal() or int(count) < 1:
        raise DataError(f"panel name {name!r}.", 'write "split" or "split:number", e.g. "valid_seen:64".')
    return split, int(count)


def subset(ids: Sequence[str], count: int) -> tuple[str, ...]:
    """The first ``count`` ids of a fixed permutation that depends on the ids alone: subsets of a split are nested.

    Raises:
      DataError: there are fewer ids.
    """
    if count > len(ids):
        raise DataError(f"a panel of {count} tasks from a split of {len(ids)}.", f"ask for at most {len(ids)}.")
    return tuple(sorted(ids, key=lambda task_id: hashlib.sha256(f"panel {task_id}".encode()).digest())[:count])
