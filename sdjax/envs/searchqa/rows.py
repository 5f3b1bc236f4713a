"""JSON-lines files, plain or gzipped, of data that somebody else wrote: read strictly, with the line in every error."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sdjax.errors import DataError


def find(folder: Path, name: str) -> Path | None:
    """``folder/name`` or ``folder/name.gz``; None if there is neither.

    Raises:
      DataError: there are both.
    """
    found = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
    if len(found) > 1:
        raise DataError(f"{folder} has both {name} and {name}.gz.", "remove the one that is out of date.")
    return found[0] if found else None


def read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("FILE, line N", object).

    Raises:
      DataError: the file cannot be read, or a line is not a JSON object.
    """
    number = 0
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("it is not an object")
                if b"\\ud" in line.lower():  # an escaped surrogate, perhaps without its partner
                    json.dumps(row, ensure_ascii=False).encode()
                yield f"{path}, line {number}", row
        except (ValueError, OSError, EOFError, zlib.error) as error:
            where = f"{path}, line {number}"
            raise DataError(f"{where} is not a JSON object: {error}.", "write one JSON object a line.") from error


def write(path: Path, rows: Iterable[dict[str, Any]]) -> tuple[int, str]:
    """Writes ``rows`` to a .jsonl.gz file that depends on nothing but them. Returns their number and the sha256 of the
    unpacked content."""
    digest, count = hashlib.sha256(), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as raw, gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as file:
        for row in rows:
            line = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n").encode()
            digest.update(line)
            file.write(line)
            count += 1
    temporary.replace(path)
    return count, digest.hexdigest()


def text(row: dict[str, Any], key: str, where: str) -> str:
    """The non-blank string ``row[key]``; DataError otherwise. Numbers are not turned into text."""
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: {key!r} is {value!r:.80}.", "give it a text that is not blank.")
    return value
