"""Search-QA behind the environment protocol: a question, a few searches, one answer.

Reward is 1 for an answer that matches a golden one exactly (``scoring.py``), else 0; the score is the same number.
What a turn does is in ``episode.py``. Retrieved text is only ever shown, never read for tags.
"""

import asyncio
import tomllib
from concurrent.futures import Executor, ThreadPoolExecutor
from importlib import resources
from typing import Any

from sdjax.envs.base import Environment, ExpertTurn, Observation, Panel, Status, StepResult
from sdjax.envs.config import EnvConfig
from sdjax.envs.panels import make_panel, parse_name, subset, verify
from sdjax.envs.prompts import load_protocol
from sdjax.envs.searchqa import episode
from sdjax.envs.searchqa.backends import Hit, SearchBackend, make_backend
from sdjax.envs.searchqa.config import SearchqaConfig
from sdjax.envs.searchqa.episode import Rules, State
from sdjax.envs.searchqa.expert import EXPERTS, plan, play_expert
from sdjax.envs.searchqa.store import Store, open_store
from sdjax.errors import DataError, EnvError

KINDS = ("plan", "golden_answers", "gold_passages", "decomposition", "task_family")


class SearchqaEnvironment:
    """One episode at a time. Shares the store and the backend, which no episode changes."""

    def __init__(
        self, store: Store, backend: SearchBackend, rules: Rules, reward_success: float, threads: Executor | None
    ):
        self._store, self._backend, self._rules = store, backend, rules
        self._reward_success = reward_success
        self._threads = threads
        self._state: State | None = None

    async def reset(self, task_id: str, seed: int) -> Observation:
        """Asks the question ``task_id``. Nothing is random: ``seed`` is accepted and has no effect."""
        del seed
        self._state = episode.start(self._store.question(task_id), self._rules)
        return self._observation()

    async def step(self, action: str) -> StepResult:
        """Plays any text. ``info``: see ``episode.play``. A failed search is an observation, not an exception."""
        state = self._started()
        if state.score is not None:
            raise EnvError(f"the episode of {state.question.id} is finished.", "call reset before the next step.")
        query = episode.query_of(state, action, self._rules)
        found = await self._search(query) if query else []
        self._state, info = episode.play(state, action, found, self._rules)
        score = self._state.score
        if score is None:
            return StepResult(self._observation(), 0.0, 0.0, Status.RUNNING, info)
        status = Status.SUCCESS if score.em == 1.0 else Status.FAILED
        return StepResult(self._observation(), self._reward_success * score.em, score.em, status, info)

    async def restore(self, task_id: str, seed: int, actions: list[str]) -> list[Observation]:
        observations = [await self.reset(task_id, seed)]
        for action in actions:
            observations.append((await self.step(action)).observation)
        return observations

    def privileged(self, kind: str) -> Any:
        """``"plan"``: actions that find the gold passages and answer, from here (None: no turn is left).
        ``"golden_answers"``: list of texts. ``"gold_passages"``: list of {id, title, text}. ``"decomposition"``: list
        of lines. ``"task_family"``: the data source.

        Raises:
          EnvError: no episode, or an unknown kind.
        """
        state = self._started()
        question, corpus = state.question, self._store.corpus
        if kind == "plan":
            return plan(state, corpus, self._rules)
        if kind == "golden_answers":
            return list(question.golden_answers)
        if kind == "gold_passages":
            passages = [corpus.passage(passage_id) for passage_id in question.gold_ids] if corpus else []
            return [{"id": passage.id, "title": passage.title, "text": passage.text} for passage in passages]
        if kind == "decomposition":
            return list(question.decomposition)
        if kind == "task_family":
            return question.source
        raise EnvError(f"Search-QA has no privileged {kind!r}.", f"ask for one of {', '.join(KINDS)}.")

    def snapshot(self) -> Any:
        """The whole state, immutable; give it to ``resume`` of any environment of this benchmark."""
        return self._started()

    def resume(self, snapshot: Any) -> Observation:
        """Continues from ``snapshot``."""
        self._state = snapshot
        return self._observation()

    def state_key(self) -> str:
        return self._started().key()

    async def close(self) -> None:
        self._state = None

    async def _search(self, query: str) -> list[Hit] | str:
        try:
            if self._threads is None:
                return self._backend.search([query], self._rules.topk)[0]
            loop = asyncio.get_running_loop()
            return (await loop.run_in_executor(self._threads, self._backend.search, [query], self._rules.topk))[0]
        except EnvError as error:
            return error.found

    def _started(self) -> State:
        if self._state is None:
            raise EnvError("no episode has been started.", "call reset(task_id, seed) first.")
        return self._state

    def _observation(self) -> Observation:
        state = self._started()
        return Observation(state.text, episode.task_text(state.question, self._rules))


class SearchqaBenchmark:
    """All of Search-QA for one run: questions, corpus, search backend, panels, environments."""

    name = "searchqa"
    experts = EXPERTS

    def __init__(self, config: EnvConfig):
        self._settings = config.searchqa
        self._rules = episode.make_rules(
            self._settings.rule, config.turns, self._settings.topk, self._settings.passage_characters
        )
        self.store = open_store(config.data, self._settings)
        self._backend = make_backend(self._settings, self.store.corpus, self.store.index)
        self._threads = ThreadPoolExecutor(self._settings.connections) if self._backend.on_threads else None
        self._reward_success = load_protocol("searchqa").reward_success
        keys = ("generator_seed", "generator_train", "generator_eval")
        same = all(getattr(self._settings, key) == getattr(SearchqaConfig(), key) for key in keys)
        self._default_world = config.data == "generated" and same

    def task_ids(self, split: str) -> tuple[str, ...]:
        return self.store.task_ids(split)

    def panel(self, name: str) -> Panel:
        """``"split"`` is the whole split in order (``eval``, ``eval_3125`` ...), ``"split:n"`` a fixed subset of n.
        The hash is over questions and answers; corpus and retriever, without which no two scores compare, are in
        ``provenance``.

        Raises:
          DataError: the evaluation split of the generated data is not the one of this version.
        """
        split, count = parse_name(name)
        ids = self.store.task_ids(split)
        ids = ids if count is None else subset(ids, count)
        panel = make_panel(name, ids, self.store.content_hash(ids))
        if name == "eval" and self._default_world:
            verify(panel, _panel_hashes()["generated_eval"])
        return panel

    def make(self) -> Environment:
        return SearchqaEnvironment(self.store, self._backend, self._rules, self._reward_success, self._threads)

    def fields(self, task_id: str) -> dict[str, Any]:
        question = self.store.question(task_id)
        return {"data_source": question.source, "question": question.question}

    def family(self, task_id: str) -> str:
        """The data source, one of seven."""
        return self.store.question(task_id).source

    async def expert_episode(
        self, task_id: str, kind: str, seed: int, max_turns: int, noise: float = 0.0
    ) -> list[ExpertTurn]:
        if kind not in EXPERTS:
            raise DataError(f"Search-QA has no expert {kind!r}.", f"use one of {', '.join(EXPERTS)}.")
        return await play_expert(self.make(), task_id, kind, seed, max_turns, noise)

    def provenance(self) -> dict[str, Any]:
        return {
            "benchmark": self.name,
            "rule": self._rules.name,
            "topk": self._rules.topk,
            "passage_characters": self._rules.passage_characters,
            **self._backend.provenance(),
            **self.store.provenance(),
        }

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        self._backend.close()


def _panel_hashes() -> dict[str, str]:
    text = resources.files("sdjax.envs.searchqa").joinpath("panels.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
