"""What is known of ScienceWorld's tasks without the simulator: ids, splits, panels, gold paths.

A task id is ``task-name/variation``, e.g. ``boil/21``. Splits are the simulator's own ranges. Gold paths are the
simulator's solutions, computed once by ``sdjax.envs.scienceworld.make_gold`` and replayed before they were stored.
"""

import hashlib
import json
import lzma
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from sdjax.envs.base import Panel
from sdjax.envs.panels import make_panel, parse_name, subset, verify
from sdjax.envs.scienceworld.java import find_jar
from sdjax.errors import ConfigError, DataError

SPLITS = ("train", "dev", "test")
GOLD_SPLIT = "train_gold"  # the variations of train that have a winning gold path
SIMPLIFICATIONS = (
    "easy",
    "teleportAction",
    "selfWateringFlowerPots",
    "openContainers",
    "openDoors",
    "noElectricalAction",
)
_ELECTRICAL = ("power-component", "conductivity")
_DATA = resources.files("sdjax.envs.scienceworld").joinpath("data")


@dataclass(frozen=True)
class Gold:
    """A gold path and what its replay scored.

    actions: up to the end of the episode. score: at the end; a few paths rest on random moves inside the simulator and
    stay below 100 or end with -100. score_curve: (turn, score) at each change; turns count from 1.
    """

    task_id: str
    simplification: str
    actions: tuple[str, ...]
    score: int
    score_curve: tuple[tuple[int, int], ...]

    @property
    def wins(self) -> bool:
        return self.score == 100

    def score_at(self, turn: int) -> int:
        """Score after ``turn`` turns."""
        return next((score for at, score in reversed(self.score_curve) if at <= turn), 0)

    def turns_worth(self, limit: int) -> int:
        """Turns up to the last gain within ``limit`` turns: what follows costs turns for nothing."""
        before = (0, *(score for _, score in self.score_curve))
        gains = [at for (at, score), last in zip(self.score_curve, before) if last < score and at <= limit]
        return gains[-1] if gains else 0


class Tasks:
    """The tasks that one configuration plays.

    Args:
      simplification: of the simulator; "" for none. task_names: types in the splits; empty for all.
      data: "generated" for the gold paths that ship; or a file (or a folder with ``gold.jsonl.xz``) of further ones.
    Raises:
      ConfigError: unknown simplification or task name. DataError: a gold file is missing or damaged.
    """

    def __init__(self, simplification: str = "", task_names: Sequence[str] = (), data: str = "generated"):
        self.simplification = simplification
        self._ranges: dict[str, dict[str, Any]] = _read_toml("splits.toml")
        unknown = [name for name in simplification.split(",") if name and name not in SIMPLIFICATIONS]
        if unknown:
            raise ConfigError(
                f"env.scienceworld.simplification has {unknown[0]!r}.",
                f'use "" or names of {", ".join(SIMPLIFICATIONS)}, joined by commas without spaces.',
            )
        missing = [name for name in task_names if name not in self._ranges]
        if missing:
            raise ConfigError(
                f"env.scienceworld.task_names has {missing[0]!r}.", f"use names of {', '.join(self._ranges)}."
            )
        self._task_names = tuple(task_names) or tuple(self._ranges)
        rows = read_gold(None) if data == "generated" else [*read_gold(None), *read_gold(Path(data))]
        self._gold = {row.task_id: row for row in rows if row.simplification == simplification}

    @property
    def names(self) -> tuple[str, ...]:
        """All task names, in the order of the benchmark."""
        return tuple(self._ranges)

    def task_ids(self, split: str) -> tuple[str, ...]:
        """Ids of ``train``, ``dev``, ``test`` or ``train_gold``, by task, in the order of the variations.

        Raises:
          DataError: no such split.
        """
        if split == GOLD_SPLIT:
            return tuple(i for i in self.task_ids("train") if i in self._gold and self._gold[i].wins)
        if split not in SPLITS:
            raise DataError(f"ScienceWorld has no split {split!r}.", f"use one of {', '.join(SPLITS)}, {GOLD_SPLIT}.")
        return tuple(
            f"{name}/{variation}" for name in self._task_names for variation in range(*self._ranges[name][split])
        )

    def parse(self, task_id: str) -> tuple[str, int]:
        """``"boil/21"`` -> ("boil", 21).

        Raises:
          DataError: no such task, or it cannot be played with this simplification.
        """
        name, slash, number = task_id.partition("/")
        if name not in self._ranges or not slash or not number.isdecimal():
            raise DataError(f"no ScienceWorld task {task_id!r}.", 'write "task-name/variation", e.g. "boil/21".')
        count = self._ranges[name]["test"][1]
        if int(number) >= count:
            raise DataError(f"no ScienceWorld task {task_id!r}.", f"{name} has the variations 0 to {count - 1}.")
        if "noElectricalAction" in self.simplification and any(word in name for word in _ELECTRICAL):
            raise DataError(
                f"{task_id} cannot be solved with the simplification noElectricalAction.",
                'use "easy", which leaves it out in electrical tasks, or set env.scienceworld.task_names.',
            )
        return name, int(number)

    def gold(self, task_id: str) -> Gold | None:
        """The stored gold path of a task with this simplification, if there is one."""
        return self._gold.get(task_id)

    def panel(self, name: str) -> Panel:
        """``panel200`` and ``panel_23types``; ``"split"``, a whole split; ``"split:n"``, a fixed subset of n.

        Raises:
          DataError: unknown name; or a published panel does not have its published hash.
        """
        fixed = _read_toml("panels.toml")
        base, count = parse_name(name)
        if base in fixed:
            ids: Sequence[str] = [f"{task}/{v}" for task, numbers in fixed[base]["tasks"].items() for v in numbers]
        elif base in (*SPLITS, GOLD_SPLIT):
            ids = self.task_ids(base)
        else:
            known = ", ".join((*fixed, *SPLITS, GOLD_SPLIT))
            raise DataError(f"ScienceWorld has no panel {name!r}.", f'use one of {known}, or e.g. "test:64".')
        panel = make_panel(name, ids if count is None else subset(ids, count), self.content_hash())
        published = fixed[base]["sha256"].get(self.simplification or "none") if name in fixed else None
        if published is not None:
            verify(panel, published)
        return panel

    def content_hash(self) -> str:
        """Hash over what decides how an episode runs: the simulator and the simplification."""
        return hashlib.sha256(f"{jar_sha256()} {self.simplification}".encode()).hexdigest()


def jar_sha256() -> str:
    return hashlib.sha256(find_jar().read_bytes()).hexdigest()


def read_gold(path: Path | None) -> list[Gold]:
    """Reads a gold file; None is the one that ships. A folder means its ``gold.jsonl.xz``.

    Raises:
      DataError: the file is missing or damaged, with the line.
    """
    if path is None:
        source = _DATA.joinpath("gold.jsonl.xz")
    else:
        source = path / "gold.jsonl.xz" if path.is_dir() else path
        if not source.is_file():
            raise DataError(
                f"{source} does not exist.",
                "name a file made by python -m sdjax.envs.scienceworld.make_gold, or set env.data to generated.",
            )
    rows: list[Gold] = []
    try:
        for line in lzma.decompress(source.read_bytes()).decode().splitlines():
            rows.append(_parse_row(json.loads(line)))
    except (lzma.LZMAError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{source}, line {len(rows) + 1}, is no gold path ({type(error).__name__}: {error}).",
            "make the file again.",
        ) from error
    return rows


def write_gold(path: Path, rows: Iterable[Gold]) -> None:
    """Writes ``rows``, by task id, so that equal rows make equal files."""
    ordered = sorted(rows, key=lambda row: (row.task_id.partition("/")[0], int(row.task_id.partition("/")[2])))
    lines = [
        json.dumps(
            {
                "id": row.task_id,
                "simplification": row.simplification,
                "gold": row.actions,
                "score": row.score,
                "score_curve": row.score_curve,
            }
        )
        for row in ordered
    ]
    path.write_bytes(lzma.compress(("\n".join(lines) + "\n").encode(), preset=9))


def _parse_row(row: dict[str, Any]) -> Gold:
    curve = tuple((int(turn), int(score)) for turn, score in row["score_curve"])
    actions = tuple(row["gold"])
    if not all(isinstance(action, str) for action in actions):
        raise TypeError("an action is not a string")
    return Gold(str(row["id"]), str(row["simplification"]), actions, int(row["score"]), curve)


def _read_toml(name: str) -> dict[str, Any]:
    return tomllib.loads(_DATA.joinpath(name).read_text(encoding="utf-8"))
