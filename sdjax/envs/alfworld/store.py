"""Where ALFWorld games come from: the official tree, the compact form of the same games, or the generator.

A store hands out rows (id, goal, walkthrough, PDDL problem) and parsed games by task id. Games are parsed on first use;
the hash of a released game is checked then. What is missing or damaged is an error that names the file.
"""

import hashlib
import json
import lzma
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sdjax.envs.alfworld import generator
from sdjax.envs.alfworld.engine import TASK_TYPES, Game
from sdjax.envs.alfworld.vocabulary import load_vocabulary
from sdjax.envs.config import GeneratorConfig
from sdjax.errors import ConfigError, DataError

OFFICIAL_COUNTS = {"train": 3553, "valid_seen": 140, "valid_unseen": 134, "valid_train": 200}
_GOAL_MARK = "Your task is to: "
_GET_DATA = "fetch the games with alfworld-download (or copy the compact files) and point env.data at them."
_PARSED_GAMES = 512  # about 130 kB each


@dataclass(frozen=True)
class GameRow:
    """One game. sha256: of the released game file, None for generated games."""

    id: str
    goal: str
    walkthrough: tuple[str, ...]
    pddl_problem: str
    sha256: str | None = None


class GameStore(Protocol):
    """A source of games. ``splits`` are those it can serve; ids of a split have a fixed order."""

    splits: tuple[str, ...]

    def task_ids(self, split: str) -> tuple[str, ...]: ...

    def row(self, task_id: str) -> GameRow: ...

    def game(self, task_id: str) -> Game: ...

    def game_file(self, task_id: str) -> dict[str, Any]:
        """The game as the real engine reads it. Without domain and grammar where the store has none."""
        ...

    def content_hash(self, ids: Sequence[str]) -> str: ...

    def provenance(self) -> dict[str, Any]: ...


def open_store(data: str, config: GeneratorConfig | None = None) -> GameStore:
    """Opens the store that ``data`` names: ``"generated"``, a folder or a ``*.jsonl.xz`` file.

    Raises:
      ConfigError: the path does not exist or is no ALFWorld data.
    """
    if data == "generated":
        return GeneratedStore(config or GeneratorConfig())
    path = Path(data).expanduser()
    if path.is_file() and path.name.endswith(".jsonl.xz"):
        return CompactStore(path)
    if not path.is_dir():
        raise ConfigError(f"env.data = {data!r} does not exist.", _GET_DATA)
    if (path / "json_2.1.1").is_dir():
        path = path / "json_2.1.1"
    if next(path.glob("*/*/*/game.tw-pddl"), None) is not None:
        return TreeStore(path)
    if any(path.glob("*.jsonl.xz")):
        return CompactStore(path)
    raise ConfigError(f"env.data = {data!r} holds neither <split>/<task>/<trial>/ nor <split>.jsonl.xz.", _GET_DATA)


def task_type_of(task_id: str) -> str:
    """Task type in a task id such as ``train/pick_and_place_simple-Mug-None-Desk-308/trial_...``."""
    parts = task_id.split("/")
    task_type = parts[-2].split("-", 1)[0] if len(parts) >= 2 else ""
    if task_type not in TASK_TYPES:
        raise DataError(f"task id {task_id!r} has no known task type.", "use ids as the split lists them.")
    return task_type


class _ParsedGames:
    """The games parsed last."""

    def __init__(self) -> None:
        self._games: OrderedDict[str, Game] = OrderedDict()

    def get(self, row: GameRow) -> Game:
        game = self._games.get(row.id)
        if game is None:
            try:
                game = Game(row.pddl_problem, row.goal)
            except DataError as error:
                raise DataError(f"game {row.id}: {error.found}", error.fix) from error
            self._games[row.id] = game
            if len(self._games) > _PARSED_GAMES:
                self._games.popitem(last=False)
        else:
            self._games.move_to_end(row.id)
        return game


def _check_count(split: str, found: int, where: Path) -> None:
    expected = OFFICIAL_COUNTS.get(split)
    if expected is not None and found != expected:
        raise DataError(
            f"{where}: {found} games of split {split}, the released data has {expected}.",
            "a short split gives scores that cannot be compared; " + _GET_DATA,
        )


def _unknown_task(task_id: str, where: str) -> DataError:
    return DataError(f"no game {task_id!r} in {where}.", "use ids as task_ids(split) lists them.")


def _hash_lines(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class TreeStore:
    """The official tree ``<split>/<task>/<trial>/game.tw-pddl``."""

    def __init__(self, root: Path):
        self._root = root
        self._ids: dict[str, tuple[str, ...]] = {}
        self._parsed = _ParsedGames()
        self.splits = tuple(sorted({path.relative_to(root).parts[0] for path in root.glob("*/*/*/game.tw-pddl")}))

    def task_ids(self, split: str) -> tuple[str, ...]:
        if split not in self._ids:
            folder = self._root / split
            if split not in self.splits:
                raise DataError(f"{folder} holds no games.", f"have {', '.join(self.splits)}; {_GET_DATA}")
            found = sorted(path.parent.relative_to(self._root).as_posix() for path in folder.glob("*/*/game.tw-pddl"))
            _check_count(split, len(found), folder)
            self._ids[split] = tuple(found)
        return self._ids[split]

    def _read(self, task_id: str) -> tuple[bytes, dict[str, Any]]:
        path = self._root / task_id / "game.tw-pddl"
        if task_id not in self.task_ids(task_id.split("/", 1)[0]):
            raise _unknown_task(task_id, str(self._root))
        try:
            data = path.read_bytes()
            game = json.loads(data)
            _check_row({"goal": _goal_of(game["grammar"]), **game})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is not a complete game file ({error!r}).", _GET_DATA) from error
        return data, game

    def row(self, task_id: str) -> GameRow:
        data, game = self._read(task_id)
        sha256 = hashlib.sha256(data).hexdigest()
        return GameRow(task_id, _goal_of(game["grammar"]), tuple(game["walkthrough"]), game["pddl_problem"], sha256)

    def game(self, task_id: str) -> Game:
        return self._parsed.get(self.row(task_id))

    def game_file(self, task_id: str) -> dict[str, Any]:
        return self._read(task_id)[1]

    def content_hash(self, ids: Sequence[str]) -> str:
        return _hash_lines([hashlib.sha256(self._read(task_id)[0]).hexdigest() for task_id in ids])

    def provenance(self) -> dict[str, Any]:
        return {"store": "official tree", "splits": list(self.splits)}


def _goal_of(grammar: object) -> str:
    if not isinstance(grammar, str) or _GOAL_MARK not in grammar:
        raise ValueError("the grammar holds no task sentence")
    start = grammar.index(_GOAL_MARK) + len(_GOAL_MARK)
    return grammar[start : grammar.index('"', start)]


def _check_row(row: dict[str, Any]) -> None:
    """Raises ValueError or KeyError for a game whose parts are missing or of the wrong kind."""
    if not (row["goal"] and all(isinstance(row[key], str) for key in ("goal", "pddl_problem"))):
        raise ValueError("goal or pddl_problem is no text")
    commands = row["walkthrough"]
    if not (isinstance(commands, list) and all(isinstance(command, str) for command in commands)):
        raise ValueError("walkthrough is no list of commands")


class CompactStore:
    """``<split>.jsonl.xz`` files with one game a line, and ``game_common.json`` with the domain and grammar they share.

    From both a released game file is rebuilt byte for byte and its sha256 is checked when the game is first used. A
    single file is a store with one split named after it.
    """

    def __init__(self, path: Path):
        self._folder = path if path.is_dir() else path.parent
        files = sorted(path.glob("*.jsonl.xz")) if path.is_dir() else [path]
        self._files = {file.name.removesuffix(".jsonl.xz"): file for file in files}
        self._packed: dict[str, bytes] = {}  # task id -> compressed line; the plain text of train alone is 190 MB
        self._ids: dict[str, tuple[str, ...]] = {}
        self._common: dict[str, str] | None = None
        self._parsed = _ParsedGames()
        self.splits = tuple(split for split in OFFICIAL_COUNTS if split in self._files) or tuple(self._files)

    def task_ids(self, split: str) -> tuple[str, ...]:
        if split not in self._ids:
            self._load(split)
        return self._ids[split]

    def _load(self, split: str) -> None:
        path = self._files.get(split)
        if path is None:
            raise DataError(
                f"{self._folder / split}.jsonl.xz does not exist.", f"have {', '.join(self.splits)}; {_GET_DATA}"
            )
        ids = []
        try:
            with lzma.open(path, "rb") as file:
                for line in file:
                    row = json.loads(line)
                    _check_row(row)
                    ids.append(str(row["id"]))
                    self._packed[ids[-1]] = zlib.compress(line, 1)
        except (lzma.LZMAError, EOFError, ValueError, KeyError, TypeError, OSError) as error:
            where = f"{path} is damaged or holds no games"
            raise DataError(f"{where} (after {len(ids)} games: {error!r}).", _GET_DATA) from error
        if len(set(ids)) != len(ids):
            raise DataError(f"{path} lists a game twice.", _GET_DATA)
        if (self._folder / "game_common.json").is_file():
            _check_count(split, len(ids), path)
        self._ids[split] = tuple(sorted(ids))

    def _unpack(self, task_id: str) -> dict[str, Any]:
        if task_id not in self._packed:
            split = task_id.split("/", 1)[0]
            for name in (split,) if split in self._files else self.splits:
                self.task_ids(name)
        if task_id not in self._packed:
            raise _unknown_task(task_id, str(self._folder))
        return json.loads(zlib.decompress(self._packed[task_id]))

    def row(self, task_id: str) -> GameRow:
        row = self._unpack(task_id)
        if row.get("sha256"):
            found = hashlib.sha256(json.dumps(self._rebuild(row)).encode()).hexdigest()
            if found != row["sha256"]:
                raise DataError(f"{self._folder}: game {task_id} rebuilds to another file than released.", _GET_DATA)
        return GameRow(row["id"], row["goal"], tuple(row["walkthrough"]), row["pddl_problem"], row.get("sha256"))

    def _rebuild(self, row: dict[str, Any]) -> dict[str, Any]:
        if self._common is None:
            path = self._folder / "game_common.json"
            try:
                common = json.loads(path.read_text(encoding="utf-8"))
                self._common = {"pddl_domain": common["pddl_domain"], "grammar": common["grammar"]}
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path} is missing or damaged ({error!r}).", _GET_DATA) from error
        return {
            "pddl_domain": self._common["pddl_domain"],
            "grammar": self._common["grammar"].replace(f"{_GOAL_MARK}UNKNOWN GOAL.", f"{_GOAL_MARK}{row['goal']}"),
            "pddl_problem": row["pddl_problem"],
            "solvable": True,
            "walkthrough": row["walkthrough"],
        }

    def game(self, task_id: str) -> Game:
        return self._parsed.get(self.row(task_id))

    def game_file(self, task_id: str) -> dict[str, Any]:
        row = self._unpack(task_id)
        return self._rebuild(row) if row.get("sha256") else _bare_game_file(self.row(task_id))

    def content_hash(self, ids: Sequence[str]) -> str:
        rows = (self.row(task_id) for task_id in ids)
        return _hash_lines([row.sha256 or _row_hash(row.goal, row.pddl_problem) for row in rows])

    def provenance(self) -> dict[str, Any]:
        return {"store": "compact", "splits": list(self.splits)}


def _row_hash(goal: str, problem: str) -> str:
    return hashlib.sha256(f"{goal}\n{problem}".encode()).hexdigest()


def _bare_game_file(row: GameRow) -> dict[str, Any]:
    return {
        "goal": row.goal,
        "pddl_problem": row.pddl_problem,
        "solvable": True,
        "walkthrough": list(row.walkthrough),
    }


class GeneratedStore:
    """Games made on demand. Ids cost microseconds, games milliseconds; nothing is written to disk."""

    splits = generator.SPLITS

    def __init__(self, config: GeneratorConfig):
        generator.check_knobs(config)
        self._config = config
        self._ids: dict[str, tuple[str, ...]] = {}
        self._rows: OrderedDict[str, GameRow] = OrderedDict()
        self._parsed = _ParsedGames()

    def task_ids(self, split: str) -> tuple[str, ...]:
        if split not in self._ids:
            if split not in self.splits:
                raise DataError(f"generated games have no split {split!r}.", f"use one of {', '.join(self.splits)}.")
            count = getattr(self._config, f"{split}_games")
            numbers = (generator.game_number(self._config.seed, split, index) for index in range(count))
            self._ids[split] = tuple(generator.draft(number, self._config).task_id for number in numbers)
        return self._ids[split]

    def row(self, task_id: str) -> GameRow:
        row = self._rows.get(task_id)
        if row is not None:
            return row
        number = task_id.rsplit("_", 1)[-1]
        if not number.isdecimal() or generator.draft(int(number), self._config).task_id != task_id:
            raise _unknown_task(task_id, "the generated games with these settings")
        made = generator.generate(int(number), self._config)
        row = GameRow(made["id"], made["goal"], tuple(made["walkthrough"]), made["pddl_problem"])
        self._rows[task_id] = row
        if len(self._rows) > _PARSED_GAMES:
            self._rows.popitem(last=False)
        return row

    def game(self, task_id: str) -> Game:
        return self._parsed.get(self.row(task_id))

    def game_file(self, task_id: str) -> dict[str, Any]:
        return _bare_game_file(self.row(task_id))

    def content_hash(self, ids: Sequence[str]) -> str:
        rows = (self.row(task_id) for task_id in ids)
        return _hash_lines([_row_hash(row.goal, row.pddl_problem) for row in rows])

    def provenance(self) -> dict[str, Any]:
        return {
            "store": "generated",
            "generator_version": generator.GENERATOR_VERSION,
            "vocabulary_sha256": load_vocabulary().sha256,
            "seed": self._config.seed,
        }
