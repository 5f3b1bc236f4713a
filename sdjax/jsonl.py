"""Append-only JSON lines that survive a crash: a torn last line is dropped when read and cut off before appending."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sdjax.errors import DataError


def read(path: Path | str) -> list[dict[str, Any]]:
    """Returns the records of ``path`` (empty if it does not exist). A torn *last* line is skipped.

    Raises:
      DataError: a line before the last one is not a JSON object.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if number == len(lines) - 1:  # no newline after it: the writer died inside this line
                break
            raise DataError(
                f"{path}: line {number + 1} is not a JSON object ({error}).",
                "the file was changed by something else than sdjax; restore it or remove that line.",
            ) from error
        records.append(record)
    return records


def append(path: Path | str, records: Iterable[dict[str, Any]], *, sync: bool = False) -> None:
    """Appends one line per record. ``sync`` forces the bytes to disk before returning."""
    path = Path(path)
    text = "".join(json.dumps(record, allow_nan=True, separators=(",", ":")) + "\n" for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def rewrite(path: Path | str, records: Iterable[dict[str, Any]]) -> None:
    """Replaces ``path`` atomically: a reader sees the old file or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    append(temporary, records, sync=True)
    if not temporary.exists():
        temporary.touch()
    temporary.replace(path)


def repair(path: Path | str) -> int:
    """Cuts a torn last line off, so that later appends start on a fresh line. Returns the bytes removed."""
    path = Path(path)
    if not path.exists():
        return 0
    data = path.read_bytes()
    keep = data.rfind(b"\n") + 1
    if keep == len(data):
        return 0
    with path.open("r+b") as file:
        file.truncate(keep)
    return len(data) - keep
