"""ScienceWorld behind the environment protocol, played by the original simulator in supervised worker processes.

The return is max(final score, 0) / 10 in reward units: each step is rewarded with the change of the score, which has
partial credit for subgoals. Success is score 100. A wrong ``focus on`` scores -100 and ends the episode as failed.
Turns are counted by the agent layer alone, so waiting wins nothing. Episodes are deterministic.
"""

import hashlib
import importlib.metadata
import json
import sys
from importlib.util import find_spec
from typing import Any

from sdjax.envs.base import Environment, ExpertTurn, Observation, Panel, Status, StepResult
from sdjax.envs.config import EnvConfig
from sdjax.envs.prompts import load_protocol
from sdjax.envs.scienceworld.config import ScienceworldConfig
from sdjax.envs.scienceworld.expert import gold_episode
from sdjax.envs.scienceworld.java import find_jar, find_java, java_version
from sdjax.envs.scienceworld.session import ReplayedSession, goal_sentences, status_of
from sdjax.envs.scienceworld.store import Tasks, jar_sha256
from sdjax.envs.workers import WorkerPool
from sdjax.errors import ConfigError, EnvError

_WORKER_MODULE = "sdjax.envs.scienceworld.worker"


class ScienceworldEnvironment:
    """One episode at a time in a simulator of its own, which the worker lends between ``reset`` and ``close``."""

    def __init__(self, tasks: Tasks, config: ScienceworldConfig, reward_success: float, pool: WorkerPool):
        self._tasks = tasks
        self._config = config
        self._reward_success = reward_success
        self._pool = pool
        self._session: ReplayedSession | None = None
        self._task_id, self._seed = "", 0
        self._actions: list[str] = []
        self._first: dict[str, Any] = {}  # the simulator's answer to the reset, and to the last call
        self._last: dict[str, Any] = {}
        self._return = 0.0
        self._finished = False

    async def reset(self, task_id: str, seed: int) -> Observation:
        """Starts ``task_id`` with a look around. The episode depends on the task alone: ``seed`` has no effect.

        Raises:
          DataError: no such task.
        """
        name, variation = self._tasks.parse(task_id)
        await self.close()
        session = ReplayedSession(self._pool, self._config.restarts)
        try:
            answer = await session.call(
                "reset", task_name=name, variation=variation, simplification=self._tasks.simplification
            )
        except BaseException:
            await session.close()
            raise
        self._session = session
        self._task_id, self._seed = task_id, seed
        self._actions = []
        self._first = self._last = answer
        self._return = 0.0
        self._finished = False
        return self._observation()

    async def step(self, action: str) -> StepResult:
        """Plays any text.

        ``info``: ``admissible``, whether the command was understood; ``ambiguous``, whether the next action must be a
        number; ``raw_score`` (-100 to 100); ``failed``; ``moves``, the simulator's own time; ``worker_restarts`` in
        this episode.

        Raises:
          EnvError: the episode is finished, the simulator failed, or its worker was lost more than ``restarts`` times.
        """
        session = self._started()
        if self._finished:
            raise EnvError(f"the episode of {self._task_id} is finished.", "call reset before the next step.")
        before = max(self._last["score"], 0)
        answer = await session.call("step", action=action)
        self._actions.append(action)
        self._last = answer
        status = status_of(answer)
        self._finished = status is not Status.RUNNING
        earned = self._return_of(answer["score"], before)
        reward, self._return = earned - self._return, earned
        info = {
            "admissible": answer["admissible"],
            "ambiguous": answer["ambiguous"],
            "raw_score": answer["score"],
            "failed": status is Status.FAILED,
            "moves": answer["moves"],
            "worker_restarts": session.restarts,
        }
        return StepResult(self._observation(), reward, max(answer["score"], 0) / 100, status, info)

    def _return_of(self, score: int, before: int) -> float:
        """Return so far, in reward units. before: score before this step, 0 to 100."""
        if score >= 0:
            return score / 100 * self._reward_success
        kept = before / 100 * self._reward_success if self._config.failed_return == "keep" else 0.0
        return kept - self._config.failed_penalty

    async def restore(self, task_id: str, seed: int, actions: list[str]) -> list[Observation]:
        observations = [await self.reset(task_id, seed)]
        for action in actions:
            observations.append((await self.step(action)).observation)
        return observations

    def privileged(self, kind: str) -> Any:
        """``"gold"``: commands of the stored gold path, or None if there is none that wins. ``"plan"``: what is left of
        it, or None once another command was played. ``"goal_progress"``: goals with their state, a list of sentences.
        ``"task_family"``: name of the task.

        Raises:
          EnvError: no episode, or an unknown kind.
        """
        self._started()
        stored = self._tasks.gold(self._task_id)
        gold = list(stored.actions) if stored is not None and stored.wins else None
        played = len(self._actions)
        if kind == "gold":
            return gold
        if kind == "plan":
            return gold[played:] if gold is not None and gold[:played] == self._actions else None
        if kind == "goal_progress":
            return goal_sentences(self._last["progress"])
        if kind == "task_family":
            return self._tasks.parse(self._task_id)[0]
        raise EnvError(f"ScienceWorld has no privileged {kind!r}.", "ask for gold, plan, goal_progress or task_family.")

    def snapshot(self) -> Any:
        """What ``resume`` of any environment of this benchmark needs: the task and the actions so far."""
        self._started()
        return (self._task_id, self._seed, tuple(self._actions))

    async def resume(self, snapshot: Any) -> Observation:
        """Continues from ``snapshot`` by playing its actions again, which takes as long as before."""
        task_id, seed, actions = snapshot
        return (await self.restore(task_id, seed, list(actions)))[-1]

    def state_key(self) -> str:
        """Task and digest of the room, the inventory, the goals, and an open question."""
        self._started()
        last = self._last
        seen = [last["look"], last["inventory"], last["progress"], last["score"]]
        seen.append(last["text"] if last["ambiguous"] else "")
        return f"{self._task_id}#{hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:32]}"

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _started(self) -> ReplayedSession:
        if self._session is None:
            raise EnvError("no episode has been started.", "call reset(task_id, seed) first.")
        return self._session

    def _observation(self) -> Observation:
        last = self._last
        return Observation(
            last["text"], " ".join(self._first["task"].split()), tuple(self._first["templates"]), tuple(last["objects"])
        )


class ScienceworldBenchmark:
    """All of ScienceWorld for one run. Nothing is started before the first episode.

    Raises:
      ConfigError: no Java, no simulator, or a wrong value in ``config``. DataError: a gold file is damaged.
    """

    name = "scienceworld"
    experts = ("gold",)

    def __init__(self, config: EnvConfig):
        self._config = config.scienceworld
        self._config.check()
        self._java = find_java()
        find_jar()
        if find_spec("py4j") is None:
            raise ConfigError("scienceworld is installed without py4j.", "pip install 'sdjax[scienceworld]'.")
        self.tasks = Tasks(self._config.simplification, self._config.task_names, config.data)
        self._reward_success = load_protocol("scienceworld").reward_success
        command = [sys.executable, "-m", _WORKER_MODULE, f"--heap_mb={self._config.heap_mb}"]
        self.pool = WorkerPool(command, config.workers, config.worker_timeout_s)

    def task_ids(self, split: str) -> tuple[str, ...]:
        """``train``, ``dev``, ``test``, or ``train_gold``: what of ``train`` has a gold path that wins."""
        return self.tasks.task_ids(split)

    def panel(self, name: str) -> Panel:
        """``panel200``, ``panel_23types``, a split, or ``"split:n"``, a fixed subset."""
        return self.tasks.panel(name)

    def make(self) -> Environment:
        return ScienceworldEnvironment(self.tasks, self._config, self._reward_success, self.pool)

    def fields(self, task_id: str) -> dict[str, Any]:
        return {"task_name": self.family(task_id)}

    def family(self, task_id: str) -> str:
        """The task name, one of 30."""
        return self.tasks.parse(task_id)[0]

    async def expert_episode(
        self, task_id: str, kind: str, seed: int, max_turns: int, noise: float = 0.0
    ) -> list[ExpertTurn]:
        """The gold path, if the task has one and it reaches ``expert_score`` within ``max_turns``."""
        if kind not in self.experts:
            raise ConfigError(f"ScienceWorld has no expert {kind!r}.", f"use {', '.join(self.experts)}.")
        gold = self.tasks.gold(task_id)
        if gold is None:
            return []
        environment = self.make()
        try:
            return await gold_episode(environment, gold, seed, max_turns, self._config.expert_score, noise)
        finally:
            await environment.close()

    def provenance(self) -> dict[str, Any]:
        return {
            "benchmark": "scienceworld",
            "engine": "scienceworld " + importlib.metadata.version("scienceworld"),
            "jar_sha256": jar_sha256(),
            "java": java_version(self._java),
            "simplification": self._config.simplification,
            "train_gold": len(self.tasks.task_ids("train_gold")),
        }

    def close(self) -> None:
        self.pool.close()
