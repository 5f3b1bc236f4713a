"""Prompts and answers as data: templates turn an observation into one user message, ``project`` an answer into an
action.

A template is a TOML file under ``sdjax/envs/<benchmark>/prompts``; the lineage's wording is one of them. What the model
says is only ever text here: it is never parsed as code, and nothing in it can break the loop.
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from sdjax.errors import ConfigError, DataError

_ACTION_OPEN = re.compile("<action>", re.IGNORECASE | re.ASCII)
_ACTION_CLOSE = re.compile("</action>", re.IGNORECASE | re.ASCII)
_CJK = re.compile("[\u4e00-\u9fff]")


@dataclass(frozen=True)
class Protocol:
    """Constants of a benchmark. Rewards in reward units (10 = success on ALFWorld), limits in turns and tokens. graded:
    returns measure partial success, so that a positive one is not yet a win."""

    turn_limit: int
    history: int
    reward_success: float
    invalid_penalty: float
    prompt_tokens: int
    response_tokens: int
    overlong_prompt: str
    train_temperature: float
    validation_temperature: float
    graded: bool = False


def load_protocol(benchmark: str) -> Protocol:
    """Reads ``sdjax/envs/<benchmark>/protocol.toml``."""
    return Protocol(**_read_toml(benchmark, "protocol.toml"))


@dataclass(frozen=True)
class PromptTemplate:
    """One prompt and answer format. ``history``: pairs shown at most. The other fields are explained in the data
    file."""

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

    @classmethod
    def load(cls, benchmark: str, name: str, history: int | None = None) -> "PromptTemplate":
        """Loads a shipped template. ``history`` defaults to the benchmark's protocol.

        Raises:
          ConfigError: no such template; the message lists those that exist.
        """
        table = _read_toml(benchmark, f"prompts/{name}.toml")
        answer = table.pop("answer")
        return cls(
            name=name,
            answer_format=answer["format"],
            require_thought=answer["require_thought"],
            forbid_cjk=answer["forbid_cjk"],
            fallback_characters=answer["fallback_characters"],
            history=load_protocol(benchmark).history if history is None else history,
            hidden_actions=tuple(table.pop("hidden_actions")),
            drop_from_observation=tuple(table.pop("drop_from_observation")),
            **table,
        )

    def render(
        self,
        task: str,
        observation: str,
        admissible: Sequence[str],
        history: Sequence[tuple[str, str]],
        steps_taken: int,
    ) -> str:
        """Returns the user message of one turn.

        Args:
          task: the task sentence. observation: the current observation. admissible: all admissible commands.
          history: (observation, projected action) pairs so far, oldest first; only the last ``self.history`` are shown.
          steps_taken: turns played before this one; numbers the history.
        """
        shown = [command for command in admissible if not self._hidden(command)]
        fields: dict[str, Any] = {
            "task": task,
            "observation": self._shorten(observation, task),
            "admissible": self.admissible_join.join(self.admissible_item.format(action=command) for command in shown),
            "steps_taken": steps_taken,
            "step": steps_taken + 1,
        }
        recent = list(history[-self.history :]) if self.history > 0 else []
        if not recent:
            return self.first.format(**fields)
        first_number = steps_taken - len(recent) + 1
        items = [
            self.history_item.format(number=first_number + i, observation=self._shorten(seen, task), action=action)
            for i, (seen, action) in enumerate(recent)
        ]
        return self.later.format(history=self.history_join.join(items), history_length=len(recent), **fields)

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
    """What is sent to the game for an answer.

    action: the command, lower case. valid: whether the answer format was kept (membership in the admissible list is
    not part of it). reason: why not. thought_span, action_span: half-open character ranges in the answer of the text
    between the tags, tags excluded; None where there is no such block.
    """

    action: str
    valid: bool
    reason: str | None
    thought_span: tuple[int, int] | None
    action_span: tuple[int, int] | None


def project(text: str, template: PromptTemplate) -> Projection:
    """Turns an answer into an action by the rules of verl-agent's ``projection.py``.

    The action is the text between the first ``<action>`` and the first ``</action>`` in any case, stripped and
    lower-cased; if one of them is missing, the last ``fallback_characters`` of the lower-cased answer. An answer is
    invalid without both tags, without ``<think>`` and ``</think>`` (lower case), or with a CJK character. One
    deviation: a ``</action>`` before ``<action>`` sends the same empty action, but is no action block and so counts
    as invalid.
    """
    thought_span = _thought_span(text)
    opening, closing = _ACTION_OPEN.search(text), _ACTION_CLOSE.search(text)
    if opening is None or closing is None:
        lowered = text.lower()
        return Projection(lowered[-template.fallback_characters :], False, "no action tags", thought_span, None)
    if closing.start() < opening.end():
        return Projection("", False, "action tags in reverse order", thought_span, None)
    span = (opening.end(), closing.start())
    action = text[slice(*span)].lower().strip()
    reason = None
    if template.require_thought and ("<think>" not in text or "</think>" not in text):
        reason = "no thought tags"
    elif template.forbid_cjk and _CJK.search(text):
        reason = "CJK characters"
    return Projection(action, reason is None, reason, thought_span, span)


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
