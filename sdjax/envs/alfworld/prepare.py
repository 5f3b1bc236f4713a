"""From the official ALFWorld games to the compact store: ``--mode=prepare --env=alfworld --source=PATH --workdir=OUT``.

PATH is the folder ``json_2.1.1`` that ``alfworld-download`` makes (or the folder that holds it), or the archive
``json_2.1.2_tw-pddl.zip`` that it downloads. Wanted are the files ``<split>/<task>/<trial>/game.tw-pddl`` of the splits
train, valid_seen, valid_unseen and valid_train; nothing else is read. The store is a fiftieth of their size, and every
game is rebuilt from it byte for byte.
"""

import contextlib
import json
import lzma
import re
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from sdjax.envs.alfworld.adapter import AlfworldBenchmark
from sdjax.envs.alfworld.store import OFFICIAL_COUNTS, TreeStore, open_store
from sdjax.errors import ConfigError, DataError

_WHERE = "alfworld-download (pip install alfworld==0.4.2) fetches json_2.1.2_tw-pddl.zip and unpacks json_2.1.1"
_COMMON_FILE = "game_common.json"
# The last parts of a member's name. They become paths, so that nothing but plain names may be in them.
_MEMBER = re.compile(r"(?:^|/)((?:[A-Za-z0-9_-][A-Za-z0-9_.-]*/){3})game\.tw-pddl$")
_LARGEST_GAME = 4 * 1024 * 1024  # bytes; the released ones have up to 200 kB


def prepare(sources: Sequence[str], out: Path, console: Console) -> None:
    """Writes ``<split>.jsonl.xz`` and ``game_common.json`` to ``out``, which ``env.data`` then names.

    ``out`` changes only after the new files were read back and compared with the hashes of the released games.

    Raises:
      DataError: no games, a split with another number of games or other games than released, a damaged file.
    """
    if not sources:
        raise DataError("no source for ALFWorld.", f"name the folder json_2.1.1 or the archive; {_WHERE}.")
    with contextlib.ExitStack() as stack:
        bars = stack.enter_context(Progress(console=console, transient=True, disable=not console.is_terminal))
        stores = [_open(source, stack, bars) for source in sources]
        splits: dict[str, TreeStore] = {}
        for source, store in zip(sources, stores):
            for split in store.splits:
                if split in splits:
                    raise DataError(f"{source} has the split {split} a second time.", "name one source of it.")
                splits[split] = store
        out.mkdir(parents=True, exist_ok=True)
        # Beside the final place, so that the files can be moved there.
        made = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".prepare-", dir=out)))
        _write(splits, made, bars)
        counts = {split: len(store.task_ids(split)) for split, store in splits.items()}
        hashes = _verify(made, list(splits), bars)
        for path in sorted(made.iterdir()):
            path.replace(out / path.name)
    for split, digest in hashes.items():
        known = "equal to the released games" if split in OFFICIAL_COUNTS else "not a released split"
        console.print(f"{split}: {counts[split]} games, {known}, panel sha256 {digest[:16]}", highlight=False)
    for split in OFFICIAL_COUNTS:
        if split not in splits:
            console.print(
                f"{split}: missing, no {split}/<task>/<trial>/game.tw-pddl in {', '.join(sources)}; {_WHERE}",
                highlight=False,
                markup=False,
            )
    console.print(f"wrote {out}; use it as env.data", highlight=False, markup=False)


def _open(source: str, stack: contextlib.ExitStack, bars: Progress) -> TreeStore:
    path = Path(source).expanduser()
    if not path.exists():
        raise DataError(f"{source} does not exist.", f"{_WHERE}.")
    if path.is_file():
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sdjax-alfworld-")))
        _unpack(path, folder, bars)
        path = folder
    try:
        store = open_store(str(path))
    except ConfigError as error:
        raise DataError(
            f"{source} holds no <split>/<task>/<trial>/game.tw-pddl.",
            f"the archives json_2.1.1_json.zip and json_2.1.1_pddl.zip have no games; {_WHERE}.",
        ) from error
    if not isinstance(store, TreeStore):
        raise DataError(f"{source} is in the compact form already.", "use it as env.data.")
    return store


def _unpack(path: Path, folder: Path, bars: Progress) -> None:
    """Writes the game files of an archive, and nothing else of it, to ``folder``."""
    try:
        with zipfile.ZipFile(path) as archive:
            for member in bars.track(archive.infolist(), description="unpacking"):
                match = _MEMBER.search(member.filename)
                if match is None:
                    continue
                if member.file_size > _LARGEST_GAME:
                    raise DataError(f"{path}: {member.filename} has {member.file_size} bytes.", f"{_WHERE}.")
                game = folder / match.group(1) / "game.tw-pddl"
                if game.exists():
                    raise DataError(f"{path} holds {match.group(1)}game.tw-pddl twice.", "repair the archive.")
                game.parent.mkdir(parents=True, exist_ok=True)
                game.write_bytes(archive.read(member))
    # RuntimeError: encrypted. NotImplementedError: a compression that Python lacks.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, OSError) as error:
        raise DataError(
            f"{path} cannot be read as a zip archive ({error!r}).", f"download it again; {_WHERE}."
        ) from error


def _write(splits: dict[str, TreeStore], folder: Path, bars: Progress) -> None:
    common: dict[str, Any] = {}
    for split, store in splits.items():
        with lzma.open(folder / f"{split}.jsonl.xz", "wt", encoding="utf-8") as file:
            for task_id in bars.track(store.task_ids(split), description=f"reading {split}"):
                row = store.row(task_id)
                if not common:
                    common = _common(store.game_file(task_id), row.goal)
                line = {
                    "id": row.id,
                    "goal": row.goal,
                    "walkthrough": list(row.walkthrough),
                    "pddl_problem": row.pddl_problem,
                    "sha256": row.sha256,
                }
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
    (folder / _COMMON_FILE).write_text(json.dumps(common), encoding="utf-8")


def _common(game: dict[str, Any], goal: str) -> dict[str, str]:
    """The parts that all games share; the place of the goal sentence in the grammar is marked as ALFWorld does it."""
    grammar = game["grammar"].replace(f"Your task is to: {goal}", "Your task is to: UNKNOWN GOAL.")
    return {"pddl_domain": game["pddl_domain"], "grammar": grammar}


def _verify(folder: Path, splits: Sequence[str], bars: Progress) -> dict[str, str]:
    """Reads the new store back: every game must rebuild to its own hash, a released split to the hash of its panel."""
    benchmark = AlfworldBenchmark(str(folder))
    return {
        split: benchmark.panel(split).sha256 for split in bars.track(splits, description="checking against the hashes")
    }
