"""ALFWorld behind the environment protocol, played by the native engine or by the real TextWorld engine.

The native engine runs in this process and never waits. The real one runs in supervised worker processes
(``sdjax.envs.workers``) and is shadowed by the native engine, which answers for plans and state keys and must agree
with it at every step. Reward is 10 on the winning step, else 0; there is no partial credit and a game is never lost.
"""

import importlib.metadata
import tomllib
from collections.abc import Sequence
from importlib import resources
from importlib.util import find_spec
from typing import Any

from sdjax.envs.alfworld.engine import Episode
from sdjax.envs.alfworld.expert import EXPERTS, expert_episode
from sdjax.envs.alfworld.planner import describe_facts, plan
from sdjax.envs.alfworld.store import OFFICIAL_COUNTS, GameStore, GeneratedStore, open_store, task_type_of
from sdjax.envs.base import Environment, ExpertTurn, Observation, Panel, Status, StepResult
from sdjax.envs.config import GeneratorConfig, GeneratorKnobs
from sdjax.envs.panels import make_panel, parse_name, subset, verify
from sdjax.envs.prompts import load_protocol
from sdjax.envs.workers import WorkerPool
from sdjax.errors import ConfigError, EnvError

ENGINE_VERSION = 1
_WORKER_MODULE = "sdjax.envs.alfworld.textworld_worker"


class AlfworldEnvironment:
    """One episode at a time on the native engine, which it shares with nobody: no state outlives ``reset``."""

    def __init__(self, store: GameStore, reward_success: float):
        self._store = store
        self._reward_success = reward_success
        self._task_id = ""
        self._episode: Episode | None = None
        self._finished = False

    async def reset(self, task_id: str, seed: int) -> Observation:
        """Starts the game ``task_id``. ALFWorld is deterministic: ``seed`` is accepted and has no effect."""
        del seed
        self._task_id = task_id
        self._episode = Episode(self._store.game(task_id))
        self._finished = False
        return self._observation()

    async def step(self, action: str) -> StepResult:
        """Plays any text. ``info``: ``admissible``; ``same_place_go``, a ``go to`` a receptacle where the agent
        stands."""
        episode = self._running()
        info = {
            "admissible": episode.operator(action) is not None,
            "same_place_go": _is_same_place_go(episode, action),
        }
        episode.step(action)
        self._finished = episode.won()
        return self._result(info)

    async def restore(self, task_id: str, seed: int, actions: list[str]) -> list[Observation]:
        observations = [await self.reset(task_id, seed)]
        for action in actions:
            observations.append((await self.step(action)).observation)
        return observations

    def privileged(self, kind: str) -> Any:
        """``"plan"``: winning commands from here, or None (dead end). ``"task_family"``: task type. ``"facts"``: list
        of sentences on where the wanted things are.

        Raises:
          EnvError: no episode, or an unknown kind.
        """
        episode = self._started()
        if kind == "plan":
            return plan(episode)
        if kind == "task_family":
            return episode.game.task_type
        if kind == "facts":
            return describe_facts(episode)
        raise EnvError(f"ALFWorld has no privileged {kind!r}.", "ask for plan, task_family or facts.")

    def snapshot(self) -> Any:
        """The whole state; give it to ``resume`` of any environment of this benchmark. Cheap, never changed by play."""
        return (self._task_id, self._started().copy(), self._finished)

    def resume(self, snapshot: Any) -> Observation:
        """Continues from ``snapshot``."""
        self._task_id, episode, self._finished = snapshot
        self._episode = episode.copy()
        return self._observation()

    def state_key(self) -> str:
        return f"{self._task_id}#{self._started().state_key()}"

    async def close(self) -> None:
        self._episode = None

    def _started(self) -> Episode:
        if self._episode is None:
            raise EnvError("no episode has been started.", "call reset(task_id, seed) first.")
        return self._episode

    def _running(self) -> Episode:
        episode = self._started()
        if self._finished:
            raise EnvError(f"the episode of {self._task_id} is finished.", "call reset before the next step.")
        return episode

    def _observation(self) -> Observation:
        episode = self._started()
        return Observation(episode.text, episode.game.goal_text, episode.admissible)

    def _result(self, info: dict[str, Any]) -> StepResult:
        won = self._finished
        status = Status.SUCCESS if won else Status.RUNNING
        return StepResult(self._observation(), self._reward_success if won else 0.0, float(won), status, info)


class TextworldEnvironment(AlfworldEnvironment):
    """The real engine in a worker process, checked against the native one at every step."""

    def __init__(self, store: GameStore, reward_success: float, pool: WorkerPool):
        super().__init__(store, reward_success)
        self._pool = pool
        self._session = pool.session()

    async def reset(self, task_id: str, seed: int) -> Observation:
        await self._session.close()
        self._session = self._pool.session()
        game_file = self._store.game_file(task_id)
        observation = await super().reset(task_id, seed)
        self._compare("reset", await self._session.call("reset", game=game_file))
        return observation

    async def step(self, action: str) -> StepResult:
        self._running()
        answer = await self._session.call("step", action=action)
        result = await super().step(action)
        self._compare(action, answer)
        return result

    def resume(self, snapshot: Any) -> Observation:
        raise EnvError("the real engine cannot jump to a snapshot.", "replay the actions with restore.")

    async def close(self) -> None:
        await self._session.close()
        await super().close()

    def _compare(self, action: str, answer: dict[str, Any]) -> None:
        episode = self._started()
        native = {"text": episode.text, "admissible": list(episode.admissible), "won": episode.won()}
        differing = [key for key, value in native.items() if answer.get(key) != value]
        if differing:
            raise EnvError(
                f"the real engine differs from the native one in {', '.join(differing)} after {action[:80]!r} in "
                f"{self._task_id}.",
                "check the versions of alfworld and textworld; report the game id if they are the supported ones.",
            )


class AlfworldBenchmark:
    """All of ALFWorld for one run: games, panels, environments. ``data`` and ``generator`` as in ``EnvConfig``."""

    name = "alfworld"
    experts = EXPERTS

    def __init__(
        self,
        data: str = "generated",
        engine: str = "native",
        generator: GeneratorConfig | GeneratorKnobs | None = None,
        workers: int = 2,
        worker_timeout_s: float = 120.0,
    ):
        if engine not in ("native", "textworld"):
            raise ConfigError(f"env.engine = {engine!r}.", 'use "native" or "textworld".')
        if engine == "textworld" and None in (find_spec("alfworld"), find_spec("textworld")):
            raise ConfigError(
                "env.engine is textworld, but alfworld is not installed.", "pip install 'sdjax[alfworld]'."
            )
        if generator is not None and not isinstance(generator, GeneratorConfig):
            generator = GeneratorConfig(**vars(generator))
        self.store = open_store(data, generator)
        self._engine = engine
        self._reward_success = load_protocol("alfworld").reward_success
        self._pool = WorkerPool(_WORKER_MODULE, workers, worker_timeout_s) if engine == "textworld" else None

    def task_ids(self, split: str) -> tuple[str, ...]:
        return self.store.task_ids(split)

    def panel(self, name: str) -> Panel:
        """``"split"`` is the whole split in order, ``"split:n"`` a fixed subset of n.

        Raises:
          DataError: a whole released split does not have the hash of the released games.
        """
        split, count = parse_name(name)
        ids: Sequence[str] = self.store.task_ids(split)
        if count is not None:
            ids = subset(ids, count)
        panel = make_panel(name, ids, self.store.content_hash(ids))
        if len(ids) == OFFICIAL_COUNTS.get(name) and not isinstance(self.store, GeneratedStore):
            verify(panel, _official_panels()[name])
        return panel

    def make(self) -> Environment:
        if self._pool is None:
            return AlfworldEnvironment(self.store, self._reward_success)
        return TextworldEnvironment(self.store, self._reward_success, self._pool)

    async def expert_episode(
        self, task_id: str, kind: str, seed: int, max_turns: int, noise: float = 0.0
    ) -> list[ExpertTurn]:
        return expert_episode(self.store.game(task_id), kind, seed, max_turns=max_turns, noise=noise)

    def fields(self, task_id: str) -> dict[str, Any]:
        return {"task_type": task_type_of(task_id)}

    def family(self, task_id: str) -> str:
        """The task type, one of six."""
        return task_type_of(task_id)

    def provenance(self) -> dict[str, Any]:
        found: dict[str, Any] = {"benchmark": "alfworld", "engine": self._engine, "engine_version": ENGINE_VERSION}
        found.update(self.store.provenance())
        if self._engine == "textworld":
            found.update({name: importlib.metadata.version(name) for name in ("alfworld", "textworld")})
        return found

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def _official_panels() -> dict[str, str]:
    text = resources.files("sdjax.envs.alfworld").joinpath("panels.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["official"]


def _is_same_place_go(episode: Episode, action: str) -> bool:
    names = episode.game.names
    here = episode.game.receptacles_at.get(episode.location, ())
    return action.strip() in {f"go to {names[receptacle]}" for receptacle in here}
