"""From the structured fields that an environment reports to the skill families of a task.

The tables are data (``routing.toml``). A value that the tables do not know is an error, because privileged text that is
silently missing turns a self-distillation run into something else. Only where a rule names that fallback is an empty
result allowed; it means "general skills only" and is counted.
"""

import difflib
import functools
import importlib.resources
import re
import tomllib
from collections.abc import Iterable
from typing import Any

from sdjax.errors import TeacherContextError

# Environments where one task may have several families at once.
MULTI_FAMILY = frozenset({"webshop"})


@functools.cache
def tables() -> dict[str, Any]:
    """The routing tables of the package: environment -> tables."""
    path = importlib.resources.files("sdjax.teacher") / "routing.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def route(environment: str, fields: dict[str, Any]) -> tuple[str, ...]:
    """Families of a task of ``environment``; () = general skills only. TeacherContextError for an unknown
    environment."""
    if environment not in _ROUTES:
        raise _unknown("environment", environment, _ROUTES)
    return _ROUTES[environment](fields)


def route_alfworld(fields: dict[str, Any]) -> tuple[str, ...]:
    """By ``task_type``, else by the type inside ``task_id`` (or game-file path), else by keywords of the
    ``task`` text."""
    by_type = tables()["alfworld"]["task_type"]
    task_type = fields.get("task_type")
    if task_type:
        if task_type not in by_type:
            raise _unknown("ALFWorld task type", task_type, by_type)
        return (by_type[task_type],)
    if fields.get("task_id"):
        found = [name for name in by_type if re.search(rf"(^|[/\\]){name}-", fields["task_id"])]
        if not found:
            raise _unknown("ALFWorld task type in the task id", fields["task_id"], by_type)
        return (by_type[found[0]],)
    text = _text(fields, "ALFWorld", ("task",)).lower()
    for family, words in tables()["alfworld"]["keywords"].items():
        if _matcher(tuple(words)).search(text):
            return (family,)
    return ()


def route_webshop(fields: dict[str, Any]) -> tuple[str, ...]:
    """Every family with a keyword in the lower-cased ``prompt`` (if given, as the public code does) or ``instruction``.

    The instruction gives one answer for the whole episode; the prompt also matches words of the current page.
    """
    text = _text(fields, "WebShop", ("prompt", "instruction", "task")).lower()
    families = tables()["webshop"]["keywords"]
    return tuple(family for family, words in families.items() if _matcher(tuple(words)).search(text))


def route_searchqa(fields: dict[str, Any]) -> tuple[str, ...]:
    """By ``data_source``; sources of mixed questions by words of ``question``; an unknown source is general only."""
    source = fields.get("data_source")
    if not source:
        raise TeacherContextError(
            "a Search-QA task reports no data_source", "let the environment report it with the task."
        )
    table = tables()["searchqa"]
    if source in table["source"]:
        return (table["source"][source],)
    words = set(re.findall(r"[a-z]+", _text(fields, "Search-QA", ("question", "task")).lower()))
    if {"which", "or"} <= words and "for" not in words:
        return ("comparison",)
    return ("multi_hop",) if source in table["by_text"] else ()


def route_scienceworld(fields: dict[str, Any]) -> tuple[str, ...]:
    """By the exact task name, in ``task_name`` or before the slash of ``task_id`` (``boil/21``)."""
    name = fields.get("task_name") or str(fields.get("task_id") or "").split("/")[0]
    by_task = tables()["scienceworld"]["task"]
    if name not in by_task:
        raise _unknown("ScienceWorld task", name, by_task)
    return (by_task[name],)


_ROUTES = {
    "alfworld": route_alfworld,
    "webshop": route_webshop,
    "searchqa": route_searchqa,
    "scienceworld": route_scienceworld,
}


@functools.cache
def _matcher(words: tuple[str, ...]) -> re.Pattern[str]:
    # Whole words, so that "tan" in "standard" or "hot" in "photo" cannot route a task; a plural ending is allowed.
    return re.compile(r"(?<![\w-])(?:" + "|".join(map(re.escape, words)) + r")(?:e?s)?(?![\w-])")


def _text(fields: dict[str, Any], environment: str, keys: tuple[str, ...]) -> str:
    for key in keys:
        if fields.get(key):
            return str(fields[key])
    raise TeacherContextError(
        f"a {environment} task reports none of {', '.join(keys)}; found the fields {sorted(fields)}",
        "let the environment report the task's structured fields.",
    )


def _unknown(what: str, value: str, known: Iterable[str]) -> TeacherContextError:
    names = list(known)
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return TeacherContextError(f"unknown {what} {value!r}", f"{hint}known: {', '.join(names)}.")
