"""Static skill banks: privileged text that only the teacher reads.

A bank is a directory: ``general.md`` (numbered principles for the whole benchmark), ``families/<family>.md`` (a
few more for one kind of task) and ``bank.toml`` (which environment it is for). Shipped banks live in
``skills/``; any directory of the same form can be used instead. There is no retrieval and no learning: the text
of a task depends on its family alone.
"""

import hashlib
import importlib.resources
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdjax.errors import TeacherContextError
from sdjax.teacher.routing import MULTI_FAMILY, route

SHIPPED = importlib.resources.files("sdjax.teacher") / "skills"


def shipped_banks() -> tuple[str, ...]:
    """Names of the banks that come with the package."""
    return tuple(sorted(entry.name for entry in SHIPPED.iterdir() if entry.is_dir()))


@dataclass(frozen=True)
class SkillBank:
    """Texts of one bank. Made by ``SkillBank.load``.

    name: shipped name or directory. environment: whose routing rule applies ("" if the bank does not say).
    general: text of every row. family_texts: family name -> text, in file-name order.
    """

    name: str
    environment: str
    general: str
    family_texts: dict[str, str]

    @classmethod
    def load(cls, name: str) -> "SkillBank":
        """Reads a shipped bank by name or a bank directory by path; TeacherContextError for anything missing or
        empty."""
        root = SHIPPED / name if name in shipped_banks() else Path(name)
        if not root.is_dir():
            raise TeacherContextError(
                f"there is no skill bank {name!r}: neither a shipped bank nor a directory",
                f"use one of {', '.join(shipped_banks())} or a directory with general.md and families/*.md.",
            )
        folder = root / "families"
        entries = sorted(folder.iterdir(), key=lambda entry: entry.name) if folder.is_dir() else []
        texts = {entry.name[:-3]: _read(entry, name) for entry in entries if entry.name.endswith(".md")}
        if not texts:
            raise TeacherContextError(
                f"skill bank {name!r} has no families", f"put at least one text into {folder}, e.g. {folder}/clean.md."
            )
        return cls(name, _environment(root, name), _read(root / "general.md", name), texts)

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(self.family_texts)

    @property
    def combines(self) -> bool:
        """Whether one task may have several families, whose texts are concatenated."""
        return self.environment in MULTI_FAMILY

    @property
    def sha256(self) -> str:
        """Hash over all texts, for provenance."""
        parts = [self.general, *(f"{name}\n{text}" for name, text in self.family_texts.items())]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def route(self, fields: dict[str, Any]) -> tuple[str, ...]:
        """Families of a task from the structured fields that its environment reports; () means general skills only."""
        if not self.environment:
            raise TeacherContextError(
                f"skill bank {self.name!r} does not say for which environment it is",
                'add a file bank.toml with the line environment = "alfworld" (or webshop, searchqa, scienceworld).',
            )
        return route(self.environment, fields)

    def text(self, family: str | Iterable[str] | None) -> tuple[str, bool]:
        """Privileged text of a task and whether it is the general part alone.

        family: one family, several (concatenated in the given order) or none. A family without a text is an error: it
        means that the routing and the bank do not belong together.
        """
        names = (family,) if isinstance(family, str) else tuple(family or ())
        for name in names:
            if name not in self.family_texts:
                raise TeacherContextError(
                    f"skill bank {self.name!r} has no text for the family {name!r}",
                    f"add families/{name}.md to the bank, or use one of its families: {', '.join(self.families)}.",
                )
        return "\n\n".join([self.general, *(self.family_texts[name] for name in names)]), not names

    def texts(self) -> dict[str, str]:
        """Every text that bounds the bank's length: label -> text.

        General alone, general with each family and, where families combine, general with all of them.
        """
        found = {"general": self.general} | {name: self.text(name)[0] for name in self.families}
        if self.combines:
            found["all families"] = self.text(self.families)[0]
        return found


def _read(path: Any, bank: str) -> str:
    if not path.is_file():
        raise TeacherContextError(
            f"skill bank {bank!r} has no file {path}", "write it; plain text or Markdown, not empty."
        )
    try:
        text = path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise TeacherContextError(f"{path} is not UTF-8 text ({error})", "save the file as UTF-8.") from error
    if not text:
        raise TeacherContextError(f"{path} is empty", "write its principles or remove the family.")
    return text


def _environment(root: Any, bank: str) -> str:
    path = root / "bank.toml"
    if not path.is_file():
        return ""
    try:
        value = tomllib.loads(path.read_text(encoding="utf-8")).get("environment")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TeacherContextError(
            f"{path} of skill bank {bank!r} cannot be read ({error})", "correct the file."
        ) from error
    if not isinstance(value, str):
        raise TeacherContextError(f"{path} has no text value 'environment'", 'write e.g. environment = "alfworld".')
    return value
