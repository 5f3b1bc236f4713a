"""The environment protocol that every benchmark implements.

An environment plays one episode at a time and knows nothing of turn budgets, history, prompts or answer formats: those
belong to the agent layer. Privileged information never appears in an observation; it is asked for by name.
Methods are coroutines, because some benchmarks live in other processes; in-process engines simply do not wait.
"""

import enum
from dataclasses import dataclass, field
from typing import Any, Protocol


class Status(str, enum.Enum):
    """State of an episode. ``TRUNCATED`` is set by the agent layer when the turn budget is spent."""

    RUNNING = "running"
    SUCCESS = "success"
    FAILED = "failed"
    TRUNCATED = "truncated"


@dataclass(frozen=True)
class Observation:
    """What the agent may see.

    text: the environment's answer, unchanged. task: the instruction, one line. admissible: commands (or templates) that
    the benchmark shows to the agent; empty where it shows none. objects: names that the templates can be filled with,
    where the benchmark shows them.
    """

    text: str
    task: str
    admissible: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepResult:
    """reward: this step's reward in reward units (10 = success on ALFWorld). score: the benchmark's own score so far,
    in [0, 1]. info: per-step facts for metrics (e.g. ``admissible``: whether the command was in the list)."""

    observation: Observation
    reward: float
    score: float
    status: Status
    info: dict[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """One episode at a time; ``reset`` is the only way to start one. Stepping a finished episode raises EnvError."""

    async def reset(self, task_id: str, seed: int) -> Observation: ...

    async def step(self, action: str) -> StepResult: ...

    async def restore(self, task_id: str, seed: int, actions: list[str]) -> list[Observation]:
        """Resets and replays ``actions``; returns every observation, so that the caller can compare them."""
        ...

    def privileged(self, kind: str) -> Any:
        """Privileged facts of the current state, by name (e.g. ``"plan"``, ``"task_family"``)."""
        ...

    def snapshot(self) -> Any: ...

    def state_key(self) -> str:
        """Equal for equal states; used for anchors and search."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class ExpertTurn:
    """One turn of an expert, for warm starts: what it saw, what it thought (a few words) and what it did."""

    observation: Observation
    action: str
    thought: str


@dataclass(frozen=True)
class Panel:
    """A fixed evaluation set: ordered task ids, each exactly once, with a hash over ids and data."""

    name: str
    task_ids: tuple[str, ...]
    sha256: str


class Benchmark(Protocol):
    """What a run needs to know of one benchmark. Made once per run from the ``env`` part of the config."""

    name: str

    @property
    def experts(self) -> tuple[str, ...]:
        """Names for ``expert_episode``; the first is the default of warm starts."""
        ...

    def task_ids(self, split: str) -> tuple[str, ...]: ...

    def panel(self, name: str) -> Panel: ...

    def make(self) -> Environment: ...

    def fields(self, task_id: str) -> dict[str, Any]:
        """Structured facts of a task by which skill banks are routed (``sdjax.teacher.routing``)."""
        ...

    def family(self, task_id: str) -> str:
        """Short name of the kind of task, for scores by kind."""
        ...

    async def expert_episode(
        self, task_id: str, kind: str, seed: int, max_turns: int, noise: float = 0.0
    ) -> list[ExpertTurn]:
        """A winning episode of an expert, or an empty list if it did not win within ``max_turns``.

        With ``noise``, the probability of a random turn, the episode is returned whether it wins or not.
        """
        ...

    def provenance(self) -> dict[str, Any]:
        """Engine name, package versions and data hashes, written to provenance.json."""
        ...

    def close(self) -> None: ...
