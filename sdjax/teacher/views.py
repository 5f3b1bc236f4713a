"""Privileged texts made from trajectories: future observations, a sibling's success, a guide from the group's
reflections.

Pure text builders: no tokenizer, no engine, no environment. The wording is data (``prompts/*.toml``). Text from
a model or a simulator is inserted as it is and never read as a template.
"""

import functools
import importlib.resources
import re
import string
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sdjax.errors import TeacherContextError


@dataclass(frozen=True)
class TurnText:
    """One turn. action: what was sent to the environment; observation: its answer to that action ("" if there
    was none, as after the final answer of Search-QA); thought: the model's reasoning, never shown to a
    teacher."""

    observation: str
    action: str
    thought: str = ""


@dataclass(frozen=True)
class TrajectoryText:
    """One trajectory. ret: return in reward units. trajectory: its id in the batch. opening: the observation before the
    first action."""

    task: str
    turns: tuple[TurnText, ...]
    success: bool
    ret: float
    trajectory: int
    opening: str = ""


# Future observations (OCSD) -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """A piece of a view. ``observation`` pieces are shown in the full view and replaced by ``ablated`` in the other."""

    text: str
    observation: bool = False
    ablated: str = ""


@dataclass(frozen=True)
class FutureViews:
    """The two matched views of one turn as segments; they differ in the observation segments and nowhere else."""

    segments: tuple[Segment, ...]

    @property
    def full(self) -> str:
        return "".join(segment.text for segment in self.segments)

    @property
    def ablated(self) -> str:
        return "".join(segment.ablated if segment.observation else segment.text for segment in self.segments)


def is_eligible(trajectory: TrajectoryText, turn: int) -> bool:
    """Whether a turn was followed by an observation, so that it has a future view."""
    return bool(trajectory.turns[turn].observation.strip())


def future_views(trajectory: TrajectoryText, turn: int, *, horizon: int = 1) -> FutureViews:
    """OCSD's views of ``turn`` (0-based): the next ``horizon`` observations and the actions between them.

    Fewer where the trajectory ends earlier. TeacherContextError if the turn was followed by no observation.
    Source: arXiv 2608.04788; the wording and the position are ours.
    """
    if horizon < 1:
        raise TeacherContextError(f"an observation horizon of {horizon} shows nothing", "set it to 1 or more.")
    if not is_eligible(trajectory, turn):
        raise TeacherContextError(
            f"turn {turn} of trajectory {trajectory.trajectory} was followed by no observation",
            "select among eligible turns only (is_eligible).",
        )
    words = _wording("views")["future"]
    segments: list[Segment] = []
    for step in trajectory.turns[turn : turn + horizon]:
        if not step.observation.strip():
            break
        frame = words["opening"] if not segments else _fill(words["between"], action=step.action)
        segments.append(Segment(frame))
        # The space belongs to the observation: a label that ends in a space would be tokenised in an unusual way.
        segments.append(Segment(" " + step.observation.strip(), observation=True, ablated=words["ablated"]))
    return FutureViews((*segments, Segment(words["closing"])))


# A sibling's success (FA-SD) ------------------------------------------------------------------------------------------


def best_sibling(
    own: TrajectoryText, group: Sequence[TrajectoryText], *, graded: bool = False, margin: float = 2.0
) -> TrajectoryText | None:
    """The other trajectory of the group to show, or None if there is no feedback for ``own``.

    Binary returns: the successful sibling with the fewest turns, ties to the lower id. ``graded``: the sibling
    with the highest return (then fewest turns, lower id) if it succeeded or its return is at least ``margin``
    reward units higher.
    """
    others = [other for other in group if other.trajectory != own.trajectory]
    if not graded:
        others = [other for other in others if other.success]
    key = (lambda t: (-t.ret, len(t.turns), t.trajectory)) if graded else (lambda t: (len(t.turns), t.trajectory))
    best = min(others, key=key, default=None)
    if best is None or not graded or best.success or best.ret >= own.ret + margin:
        return best
    return None


def sibling_text(sibling: TrajectoryText) -> str:
    """A transcript of actions and observations, without thoughts."""
    words = _wording("views")["sibling"]
    opening = words["opening"] if sibling.success else words["opening_graded"]
    parts = [_fill(opening, task=sibling.task, ret=f"{sibling.ret:g}")]
    if sibling.opening.strip():
        parts.append(_fill(words["start"], observation=sibling.opening.strip()))
    for number, turn in enumerate(sibling.turns, start=1):
        parts.append(_fill(words["action"], number=number, action=turn.action))
        if turn.observation.strip():
            parts.append(_fill(words["observation"], number=number, observation=turn.observation.strip()))
    return "".join(parts).strip()


# Group reflection (GRSD) ----------------------------------------------------------------------------------------------


def reflection_labels(
    group: Sequence[TrajectoryText], *, graded: bool = False, spread: float = 1.0
) -> tuple[tuple[bool, ...], bool]:
    """Success label of each trajectory and whether the group has a contrast.

    Success is a positive return. ``graded``: a return above the group's mean, and a contrast only if the
    returns span at least ``spread`` reward units.
    """
    returns = [trajectory.ret for trajectory in group]
    if not returns:
        return (), False
    bar = sum(returns) / len(returns) if graded else 0.0
    labels = tuple(ret > bar for ret in returns)
    contrast = any(labels) and not all(labels)
    return labels, contrast and (not graded or max(returns) - min(returns) >= spread)


def reflection_prompt(
    trajectory: TrajectoryText, success: bool, *, turns: int = 50, observation_chars: int = 400
) -> str:
    """Asks the policy for a reflection on its own trajectory.

    turns: the last so many turns are shown (ALFWorld 50, WebShop 15, Search-QA 4, ScienceWorld 30).
    observation_chars: longest observation; a longer one is cut and ends in three dots.
    """
    words = _wording("grsd")
    shown = trajectory.turns[max(len(trajectory.turns) - turns, 0) :]
    left_out = len(trajectory.turns) - len(shown)
    lines = [_fill(words["left_out"], count=left_out)] if left_out else []
    if not left_out and trajectory.opening.strip():
        lines.append(f"Start: {_cut(trajectory.opening.strip(), observation_chars)}")
    for number, turn in enumerate(shown, start=left_out + 1):
        lines.append(f"Step {number}: {turn.action}")
        if turn.observation.strip():
            lines.append(f"  Result: {_cut(turn.observation.strip(), observation_chars)}")
    history = "\n".join(lines) if trajectory.turns else words["no_history"]
    outcome = words["success" if success else "failure"]
    return _fill(words["reflection"], task=trajectory.task, outcome=outcome, history=history).strip()


def merge_prompt(task: str, reflections: Sequence[tuple[str, bool]]) -> str:
    """Asks the policy to merge (reflection, success label) pairs of one group into a DO / AVOID guide.

    TeacherContextError unless both labels occur: without a contrast the group gets no guide.
    """
    if {label for _, label in reflections} != {True, False}:
        raise TeacherContextError(
            f"a guide needs successes and failures; found {len(reflections)} reflections with one label or none",
            "merge only groups with a contrast (reflection_labels).",
        )
    words = _wording("grsd")
    items = [
        _fill(words["item"], number=number, outcome=words["success" if label else "failure"], text=text.strip())
        for number, (text, label) in enumerate(reflections, start=1)
    ]
    return _fill(words["merge"], task=task, reflections="\n\n".join(items)).strip()


def written_text(answer: str) -> str:
    """What the policy wrote, without its thought block and stray tags; "" if nothing is left."""
    answer = re.sub(r"(?is)<think>.*?(?:</think>|\Z)", "", answer)
    answer = re.sub(r"(?i)</?(?:think|action)>", "", answer)
    return answer.strip()


def guide_text(guide: str) -> str:
    """The privileged text of a guide (already stripped by ``written_text``); "" stays "" and is a missing context."""
    return _fill(_wording("grsd")["guide"], guide=guide.strip()) if guide.strip() else ""


# Wording --------------------------------------------------------------------------------------------------------------


@functools.cache
def _wording(name: str) -> dict[str, Any]:
    path = importlib.resources.files("sdjax.teacher") / "prompts" / f"{name}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _fill(template: str, **values: object) -> str:
    return string.Template(template).substitute(values)


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[:characters].rstrip() + " ..."
