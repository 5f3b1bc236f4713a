"""Plays episodes: one coroutine each, environment and engine in turn, no barrier between episodes.

An episode that fails on its environment, or loses a completion, is played again on a fresh environment and then
recorded as failed: data, not a crash and not a reward.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from sdjax import interrupt
from sdjax.envs.base import Benchmark, Environment, Observation, Status
from sdjax.envs.prompts import PromptTemplate, project
from sdjax.errors import CompletionLost, DataError, EnvError
from sdjax.models.tokenizer import Tokenizer
from sdjax.rollout.engine import Engine, Request, SamplingParams
from sdjax.seeds import derive_seed


@dataclass(frozen=True)
class Assignment:
    """One episode to play. ``group`` and ``trajectory`` are given when tasks are drawn and never inferred later.

    purpose and step go into every seed of the episode (``"train"``, ``"validation"``, ...).
    """

    task: str
    group: int
    trajectory: int
    sample: int
    purpose: str
    step: int


@dataclass(frozen=True)
class Turn:
    """One turn, which is one row of the batch. Token arrays are what the engine saw and drew, id for id."""

    prompt: np.ndarray  # [P] int32
    response: np.ndarray  # [R] int32
    engine_logps: np.ndarray  # [R] float32
    finish: str
    weight_version: int
    observation: Observation  # what the prompt showed
    action: str
    valid: bool
    invalid_reason: str | None
    next_text: str | None  # observation that followed; None after the last turn
    overlong: bool = False  # the prompt was too long and was shortened by the benchmark's rule
    info: dict[str, Any] = field(default_factory=dict)
    # The prompt that the engine saw, where privileged text was put into it: engine_logps belong to this one.
    acting_prompt: np.ndarray | None = None


@dataclass(frozen=True)
class Trajectory:
    """One played episode. ``status`` is a Status value, or "error" when environment or engine failed for good."""

    assignment: Assignment
    status: str
    ret: float
    score: float
    turns: tuple[Turn, ...]
    family: str
    fields: dict[str, Any]  # the task's structured facts, by which skills are routed
    env_seed: int
    sampling: SamplingParams
    error: str | None = None
    attempts: int = 1

    @property
    def success(self) -> bool:
        return self.status == Status.SUCCESS.value


@dataclass(frozen=True)
class Player:
    """Everything the episodes of one run share.

    overlong: what happens to a prompt of more than ``prompt_tokens``. cut_left keeps its end; drop_history leaves out
    the oldest turns, one after the other; error stops the run. Shortened prompts are counted.
    """

    benchmark: Benchmark
    engine: Engine
    template: PromptTemplate
    tokenizer: Tokenizer
    run_seed: int
    turns: int
    prompt_tokens: int
    retries: int
    overlong: Literal["error", "cut_left", "drop_history"] = "error"

    async def play(self, assignment: Assignment, sampling: SamplingParams) -> Trajectory:
        """Plays one episode, on a fresh environment after each failure of the environment or of one completion."""
        env_seed = derive_seed(self.run_seed, f"{assignment.purpose}/env", step=assignment.step, task=assignment.task)
        attempts = 0
        while True:
            attempts += 1
            try:
                environment = self.benchmark.make()
                try:
                    played = await self._play_once(environment, assignment, sampling, env_seed)
                finally:
                    await environment.close()
                return replace(played, attempts=attempts)
            except (EnvError, CompletionLost) as error:
                if attempts <= self.retries:
                    continue
                return Trajectory(
                    assignment=assignment,
                    status="error",
                    ret=0.0,
                    score=0.0,
                    turns=(),
                    family=self.benchmark.family(assignment.task),
                    fields=self.benchmark.fields(assignment.task),
                    env_seed=env_seed,
                    sampling=sampling,
                    error=str(error),
                    attempts=attempts,
                )

    async def _play_once(self, environment, assignment: Assignment, sampling: SamplingParams, env_seed: int):
        observation = await environment.reset(assignment.task, env_seed)
        return await self.play_on(environment, observation, (), assignment, sampling, env_seed)

    async def play_on(
        self,
        environment: Environment,
        observation: Observation,
        earlier: Sequence[Turn],
        assignment: Assignment,
        sampling: SamplingParams,
        env_seed: int,
        acting: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> Trajectory:
        """Plays from the state that ``environment`` is in, within what the ``earlier`` turns left of the budget.

        ``acting`` turns the plain prompt into the one that the engine shall see. The trajectory holds the earlier turns
        too; its return is that of the new ones.
        """
        turns = list(earlier)
        past = [(turn.observation.text, turn.action) for turn in turns]
        total, score, status = 0.0, 0.0, Status.RUNNING
        while status is Status.RUNNING:
            interrupt.check()
            prompt, overlong = self.prompt(observation, past, assignment.task)
            seed = derive_seed(
                self.run_seed,
                assignment.purpose,
                step=assignment.step,
                task=assignment.task,
                sample=assignment.sample,
                turn=len(turns),
            )
            name = f"{assignment.purpose} {assignment.task} sample {assignment.sample} turn {len(turns)}"
            acting_prompt = None if acting is None else acting(prompt)
            seen = prompt if acting_prompt is None else acting_prompt
            completion = await self.engine.generate(Request(seen, seed, sampling, name, session_of(assignment)))
            if completion.finish == "abort":  # what it holds is no action that the policy chose
                raise CompletionLost(f"{name}: the engine gave up after {len(completion.tokens)} tokens.")
            text = self.tokenizer.decode(completion.tokens)
            projection = project(text, self.template)
            result = await environment.step(projection.action)
            total, score, status = total + result.reward, result.score, result.status
            if status is Status.RUNNING and len(turns) + 1 >= self.turns:
                status = Status.TRUNCATED
            turns.append(
                Turn(
                    prompt=prompt,
                    response=completion.tokens,
                    engine_logps=completion.logps,
                    finish=completion.finish,
                    weight_version=completion.weight_version,
                    observation=observation,
                    action=projection.action,
                    valid=projection.valid,
                    invalid_reason=projection.reason,
                    next_text=result.observation.text,
                    overlong=overlong,
                    info=result.info,
                    acting_prompt=acting_prompt,
                )
            )
            past.append((observation.text, projection.action))
            observation = result.observation
        return Trajectory(
            assignment=assignment,
            status=status.value,
            ret=total,
            score=score,
            turns=tuple(turns),
            family=self.benchmark.family(assignment.task),
            fields=self.benchmark.fields(assignment.task),
            env_seed=env_seed,
            sampling=sampling,
        )

    def prompt(self, observation: Observation, past: list[tuple[str, str]], task: str) -> tuple[np.ndarray, bool]:
        """The ids of one turn's prompt and whether it had to be shortened. past: (observation, action) pairs.

        Raises:
          DataError: it is too long, and the benchmark's rule does not shorten it (enough).
        """
        shown = past
        while True:
            text = self.template.render(
                observation.task, observation.text, observation.admissible, shown, len(past), observation.objects
            )
            ids = np.asarray(self.tokenizer.render_chat(text), np.int32)
            if len(ids) <= self.prompt_tokens:
                return ids, len(shown) < len(past)
            if self.overlong == "cut_left":
                return ids[-self.prompt_tokens :], True
            if self.overlong == "error" or not shown:
                raise DataError(
                    f"the prompt of {task}, turn {len(past)}, has {len(ids)} tokens; the limit is "
                    f"{self.prompt_tokens}.",
                    "raise rollout.prompt_tokens (and rollout.max_length, train.pack_length) or lower env.history.",
                )
            shown = shown[-self.template.history :][1:] if self.template.history > 0 else []


def session_of(assignment: Assignment) -> str:
    """The same for all turns of an episode, and for each of its tries."""
    return f"{assignment.purpose}/{assignment.step}/{assignment.trajectory}"


def play_all(
    player: Player,
    assignments: Sequence[Assignment],
    sampling: SamplingParams,
    on_done: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Plays all episodes at the same time; returns them in the order of ``assignments``.

    The first error that ends more than an episode cancels the rest and is raised.
    """

    async def one(assignment: Assignment) -> Trajectory:
        trajectory = await player.play(assignment, sampling)
        if on_done is not None:
            on_done(trajectory)
        return trajectory

    async def everything() -> list[Trajectory]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(a)) for a in assignments]
        except ExceptionGroup as failed:  # not except*, which wraps what is raised in it on early Python 3.11
            raise failed.exceptions[0] from failed
        return [task.result() for task in tasks]

    return asyncio.run(everything())
