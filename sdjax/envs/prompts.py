"""Prompts and answers as data: templates turn an observation into one user message, ``project`` an answer into an
action.

A template is a TOML file under ``sdjax/envs/<benchmark>/prompts``; the lineage's wording is one of them. What the model
says is only ever text here: it is never parsed as code, and nothing in it can break the loop.

Keys of a template: ``first`` and ``later`` (the message without and with history; placeholders {task} {observation}
{admissible} {objects} {steps_taken} {step}, in ``later`` also {history} {history_length}), ``history_item``
(placeholders {number} {observation} {action}), the ``*_item`` and ``*_join`` of the lists, and a table ``[answer]``.
Optional keys are the fields of ``PromptTemplate`` that have a default.
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from sdjax.errors import ConfigError, DataError

_ACTION_OPEN = re.compile("<action>", re.IGNORECASE | re.ASCII)
_ACTION_CLOSE = re.compile("</action>", re.IGNORECASE | re.ASCII)
_CJK = re.compile("[\u4e00-\u9fff]")
_ANSWER_KEYS = {"format": "answer_format", "kind": "answer_kind"}


@dataclass(frozen=True)
class Protocol:
    """Constants of a benchmark. Rewards in reward units (10 = success on ALFWorld), limits in turns and tokens. graded:
    returns measure partial success, so that a positive one is not yet a win. overlong_prompt: see ``Player``."""

    turn_limit: int
    history: int
    reward_success: float
    invalid_penalty: float
    prompt_tokens: int
    response_tokens: int
    overlong_prompt: Literal["error", "cut_left", "drop_history"]
    train_temperature: float
    validation_temperature: float
    graded: bool = False


def load_protocol(benchmark: str) -> Protocol:
    """Reads ``sdjax/envs/<benchmark>/protocol.toml``."""
    return Protocol(**_read_toml(benchmark, "protocol.toml"))


@dataclass(frozen=True)
class PromptTemplate:
    """One prompt and answer format. ``history``: pairs shown at most.

    object_item, object_join: how ``objects`` are listed. history_shows: whether an item of the history shows the
    observation ``before`` its action or the one ``after`` it. drop_history_over: characters of the longest message that
    keeps its history; a longer one is written as ``first`` (0: no limit). answer_kind: the projection, ``action`` or
    ``search``; lower: whether it lower-cases the action.
    """

    name: str
    first: str
    later: str
    history_item: str
    history_join: str
    admissible_item: str
    admissible_join: str
    hidden_actions: tuple[str, ...]
    drop_from_observation: tuple[str, ...]
    answer_format: str
    require_thought: bool
    forbid_cjk: bool
    fallback_characters: int
    history: int
    object_item: str = "{object}"
    object_join: str = ", "
    history_shows: Literal["before", "after"] = "before"
    drop_history_over: int = 0
    answer_kind: Literal["action", "search"] = "action"
    lower: bool = True

    @classmethod
    def load(cls, benchmark: str, name: str, history: int | None = None) -> "PromptTemplate":
        """Loads a shipped template. ``history`` defaults to the benchmark's protocol.

        Raises:
          ConfigError: no such template; the message lists those that exist.
          DataError: the file has an unknown key, or lacks one.
        """
        table = _read_toml(benchmark, f"prompts/{name}.toml")
        answer = {_ANSWER_KEYS.get(key, key): value for key, value in table.pop("answer", {}).items()}
        lists = {key: tuple(value) for key, value in table.items() if isinstance(value, list)}
        shown = load_protocol(benchmark).history if history is None else history
        try:
            return cls(name=name, history=shown, **{**table, **answer, **lists})
        except TypeError as error:
            raise DataError(f"template {benchmark}/prompts/{name}.toml: {error}.", "correct the file.") from error

    def render(
        self,
        task: str,
        observation: str,
        admissible: Sequence[str],
        history: Sequence[tuple[str, str]],
        steps_taken: int,
        objects: Sequence[str] = (),
    ) -> str:
        """Returns the user message of one turn.

        Args:
          task: the task sentence. observation: the current observation. admissible: all admissible commands.
          history: (observation, projected action) pairs so far, oldest first; only the last ``self.history`` are shown.
          steps_taken: turns played before this one; numbers the history. objects: names to fill the commands with.
        """
        shown = [command for command in admissible if not self._hidden(command)]
        fields: dict[str, Any] = {
            "task": task,
            "observation": self._shorten(observation, task),
            "admissible": self.admissible_join.join(self.admissible_item.format(action=command) for command in shown),
            "objects": self.object_join.join(self.object_item.format(object=name) for name in objects),
            "steps_taken": steps_taken,
            "step": steps_taken + 1,
        }
        first = self.first.format(**fields)
        if not history or self.history <= 0:
            return first
        pairs = list(history)
        if self.history_shows == "after":
            following = [seen for seen, _ in pairs[1:]] + [observation]
            pairs = [(seen, action) for seen, (_, action) in zip(following, pairs)]
        recent = pairs[-self.history :]
        first_number = steps_taken - len(recent) + 1
        items = [
            self.history_item.format(number=first_number + i, observation=self._shorten(seen, task), action=action)
            for i, (seen, action) in enumerate(recent)
        ]
        text = self.later.format(history=self.history_join.join(items), history_length=len(recent), **fields)
        return first if 0 < self.drop_history_over < len(text) else text

    def answer(self, thought: str, action: str) -> str:
        """The answer that an expert would give, in this template's format (for warm starts)."""
        return self.answer_format.format(thought=thought, action=action)

    def _hidden(self, command: str) -> bool:
        return command.split(" ", 1)[0] in self.hidden_actions

    def _shorten(self, observation: str, task: str) -> str:
        for text in self.drop_from_observation:
            observation = observation.replace(text.format(task=task), "")
        return observation


@dataclass(frozen=True)
class Projection:
    """What is sent to the environment for an answer.

    action: the command ("" if there is none). valid: whether the answer format was kept (membership in the admissible
    list is not part of it). reason: why not. thought_span, action_span: half-open character ranges in the answer of the
    text between the tags, tags excluded; None where there is no such block.
    """

    action: str
    valid: bool
    reason: str | None
    thought_span: tuple[int, int] | None
    action_span: tuple[int, int] | None


def project(text: str, template: PromptTemplate) -> Projection:
    """Turns an answer into an action by verl-agent's rules for the template's kind of answer."""
    if template.answer_kind == "search":
        return _project_search(text, template)
    return _project_action(text, template)


def _project_action(text: str, template: PromptTemplate) -> Projection:
    """The action is the text between the first ``<action>`` and the first ``</action>`` in any case, stripped and
    lower-cased; if one of them is missing, the last ``fallback_characters`` of the lower-cased answer. An answer is
    invalid without both tags, without ``<think>`` and ``</think>`` (lower case), or with a CJK character. One
    deviation: a ``</action>`` before ``<action>`` sends the same empty action, but is no action block and so counts
    as invalid.
    """
    thought_span = _thought_span(text)
    opening, closing = _ACTION_OPEN.search(text), _ACTION_CLOSE.search(text)
    if opening is None or closing is None:
        lowered = text.lower() if template.lower else text
        # A slice from -0 would be the whole answer.
        rest = lowered[-template.fallback_characters :] if template.fallback_characters else ""
        return Projection(rest, False, "no action tags", thought_span, None)
    if closing.start() < opening.end():
        return Projection("", False, "action tags in reverse order", thought_span, None)
    span = (opening.end(), closing.start())
    action = text[slice(*span)].strip()
    reason = _format_error(text, template)
    return Projection(action.lower() if template.lower else action, reason is None, reason, thought_span, span)


def _project_search(text: str, template: PromptTemplate) -> Projection:
    """The text is cut behind the first ``</search>``, else behind the first ``</answer>``; the action is the search
    block, else the answer block, of what is left, with its tags (case matters). An answer is invalid without a block,
    with tags of both kinds or with a tag twice.
    """
    thought_span = _thought_span(text)
    ends = [text.find("</search>"), text.find("</answer>")]
    end = ends[0] if ends[0] >= 0 else ends[1]
    tag = "search" if ends[0] >= 0 else "answer"
    start = text.find(f"<{tag}>", 0, max(end, 0))
    if start < 0 and tag == "search":  # a stray </search>: an answer block before it counts
        tag, end = "answer", text.find("</answer>", 0, end)
        start = text.find("<answer>", 0, max(end, 0))
    if start < 0:
        return Projection("", False, "no search or answer block", thought_span, None)
    span = (start + len(f"<{tag}>"), end)
    action = f"<{tag}>{text[slice(*span)].strip()}</{tag}>"
    counts = [text.count(mark) for mark in ("<search>", "</search>", "<answer>", "</answer>")]
    reason = _format_error(text, template)
    if any(counts[:2]) and any(counts[2:]):
        reason = "search and answer tags"
    elif max(counts) > 1:
        reason = "a tag twice"
    return Projection(action.lower() if template.lower else action, reason is None, reason, thought_span, span)


def _format_error(text: str, template: PromptTemplate) -> str | None:
    if template.require_thought and ("<think>" not in text or "</think>" not in text):
        return "no thought tags"
    if template.forbid_cjk and _CJK.search(text):
        return "CJK characters"
    return None


def _thought_span(text: str) -> tuple[int, int] | None:
    start, end = text.find("<think>"), text.find("</think>")
    if start < 0 or end < start + len("<think>"):
        return None
    return (start + len("<think>"), end)


def _read_toml(benchmark: str, path: str) -> dict[str, Any]:
    folder = resources.files("sdjax.envs").joinpath(benchmark)
    file = folder.joinpath(path)
    if not file.is_file():
        kind = "benchmark" if not folder.is_dir() else "file"
        parent = folder.parent if kind == "benchmark" else file.parent  # type: ignore[attr-defined]
        names = sorted(entry.name.removesuffix(".toml") for entry in parent.iterdir() if not entry.name.startswith("_"))
        raise ConfigError(f"no {kind} for {benchmark}/{path}.", f"use one of {', '.join(names)}.")
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{benchmark}/{path} is not valid TOML ({error}).", "reinstall sdjax.") from error
