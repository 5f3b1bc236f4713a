"""The corpus: passages with an id, in Search-R1's form, in memory."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdjax.envs.searchqa import rows
from sdjax.errors import DataError


@dataclass(frozen=True, slots=True)
class Passage:
    """contents: the title in double quotes, a line break, the text."""

    id: str
    contents: str

    @property
    def title(self) -> str:
        return self.contents.partition("\n")[0].strip().strip('"')

    @property
    def text(self) -> str:
        return self.contents.partition("\n")[2]


class Corpus:
    """Passages in a fixed order. ``sha256``: over ids and contents in this order.

    Raises:
      DataError: no passages, or an id that is not unique.
    """

    def __init__(self, passages: Iterable[Passage]):
        self.passages = tuple(passages)
        self._row_of = {passage.id: row for row, passage in enumerate(self.passages)}
        if not self.passages:
            raise DataError("a corpus without passages.", "give it at least one.")
        if len(self._row_of) != len(self.passages):
            seen: set[str] = set()
            twice = next(p.id for p in self.passages if p.id in seen or seen.add(p.id))
            raise DataError(f"the passage id {twice!r} occurs twice.", "give every passage an id of its own.")
        digest = hashlib.sha256()
        for passage in self.passages:
            digest.update(f"{passage.id}\0{passage.contents}\0".encode())
        self.sha256 = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.passages)

    def __iter__(self) -> Iterator[Passage]:
        return iter(self.passages)

    def __contains__(self, passage_id: str) -> bool:
        return passage_id in self._row_of

    def passage(self, passage_id: str) -> Passage:
        return self.passages[self._row_of[passage_id]]


def read_corpus(path: Path) -> Corpus:
    """Reads a .jsonl or .jsonl.gz file of ``{"id", "contents"}`` or ``{"id", "title", "text"}``.

    Raises:
      DataError: a blank or repeated id, a passage without text, or a line that is no object.
    """
    return Corpus(_passage(row, where) for where, row in rows.read(path))


def _passage(row: dict[str, Any], where: str) -> Passage:
    if isinstance(row.get("id"), int):
        row = {**row, "id": str(row["id"])}
    passage_id = rows.text(row, "id", where)
    if "contents" in row:
        return Passage(passage_id, rows.text(row, "contents", where))
    return Passage(passage_id, f'"{rows.text(row, "title", where)}"\n{rows.text(row, "text", where)}')
