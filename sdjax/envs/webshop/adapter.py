"""WebShop behind the environment protocol, played by a native simulator in this process; nothing ever waits.

Buying ends the episode. Reward is 10 if the purchase scores exactly 1.0, else 0; the score in [0, 1] is reported beside
it. An episode that buys nothing has score 0. All episodes of a run share one immutable shop.
"""

import hashlib
import importlib.metadata
import json
import tomllib
from collections.abc import Sequence
from importlib import resources
from typing import Any

from sdjax.envs.base import Environment, ExpertTurn, Observation, Panel, Status, StepResult
from sdjax.envs.config import EnvConfig
from sdjax.envs.panels import make_panel, parse_name, subset, verify
from sdjax.envs.prompts import load_protocol
from sdjax.envs.webshop.config import WebshopConfig
from sdjax.envs.webshop.expert import EXPERTS, attribute_pages, expert_episode, plan, wanted_choices
from sdjax.envs.webshop.generator import LABEL
from sdjax.envs.webshop.goals import Goal, eval_goals, split_goals
from sdjax.envs.webshop.shop import CHOICES, Shop, open_shop
from sdjax.envs.webshop.simulator import ENGINE_VERSION, Episode, observe
from sdjax.errors import ConfigError, DataError, EnvError

EVAL_PANEL = "eval"
# Settings that the goals of the generated catalogue depend on; with the defaults the evaluation set has a stored hash.
_GOAL_SETTINGS = ("goals", "seed", "split", "split_seed", "generator_products", "generator_seed")


class WebshopEnvironment:
    """One episode at a time in a shop that many share; no state outlives ``reset``."""

    def __init__(self, shop: Shop, mode: str, reward_success: float):
        self._shop, self._mode, self._reward_success = shop, mode, reward_success
        self._episode: Episode | None = None

    async def reset(self, task_id: str, seed: int) -> Observation:
        """Starts the goal ``task_id``. Play is deterministic: ``seed`` is accepted and has no effect."""
        del seed
        self._episode = Episode(self._shop, _goal(self._shop, task_id))
        return observe(self._episode, self._mode)

    async def step(self, action: str) -> StepResult:
        """Plays any text. ``info``: ``admissible``; after buying also ``termination``, ``reward_rule`` and the parts of
        the reward."""
        episode = self._started()
        if episode.page == "done":
            raise EnvError(f"the episode of {episode.goal.id} is finished.", "call reset before the next step.")
        info: dict[str, Any] = {"admissible": episode.accepts(action)}
        episode.step(action)
        observation = observe(episode, self._mode)
        if episode.purchase is None:
            return StepResult(observation, 0.0, 0.0, Status.RUNNING, info)
        score = episode.purchase.score
        won = score == 1.0
        info.update(termination="bought", reward_rule=self._shop.reward_rule, **episode.purchase.parts)
        status = Status.SUCCESS if won else Status.FAILED
        return StepResult(observation, self._reward_success if won else 0.0, score, status, info)

    async def restore(self, task_id: str, seed: int, actions: list[str]) -> list[Observation]:
        observations = [await self.reset(task_id, seed)]
        for action in actions:
            observations.append((await self.step(action)).observation)
        return observations

    def privileged(self, kind: str) -> Any:
        """``"plan"``: actions that buy the target from here, or None. ``"target"``: the product that the goal was
        written for. ``"goal"``: what is asked, and which page of the target shows each attribute. ``"task_family"``:
        product category. ``"reward_parts"``: of the purchase, None before it.

        Raises:
          EnvError: no episode, or an unknown kind.
        """
        episode = self._started()
        goal = episode.goal
        product = self._shop.products[goal.asin]
        if kind == "plan":
            return plan(episode)
        if kind == "target":
            return {
                "asin": product.asin,
                "title": product.title,
                "query": product.query,
                "product_category": product.product_category,
                "price": self._shop.prices[product.asin],
                "options": dict(wanted_choices(product, goal)),
            }
        if kind == "goal":
            return {
                "attributes": list(goal.attributes),
                "options": list(goal.values()),
                "price_upper": goal.price_upper,
                "pages": attribute_pages(product, goal),
            }
        if kind == "task_family":
            return product.category
        if kind == "reward_parts":
            return None if episode.purchase is None else dict(episode.purchase.parts)
        raise EnvError(
            f"WebShop has no privileged {kind!r}.", "ask for plan, target, goal, task_family or reward_parts."
        )

    def snapshot(self) -> Any:
        """The whole state; give it to ``resume`` of any environment of this benchmark. Cheap, never changed by play."""
        return self._started().copy()

    def resume(self, snapshot: Any) -> Observation:
        """Continues from ``snapshot``."""
        self._episode = snapshot.copy()
        return observe(self._started(), self._mode)

    def state_key(self) -> str:
        episode = self._started()
        return f"{episode.goal.id}#{episode.state_key(self._mode)}"

    async def close(self) -> None:
        self._episode = None

    def _started(self) -> Episode:
        if self._episode is None:
            raise EnvError("no episode has been started.", "call reset(task_id, seed) first.")
        return self._episode


class WebshopBenchmark:
    """All of WebShop for one run: catalogue, goals, panels, environments."""

    name = "webshop"
    experts = EXPERTS

    def __init__(self, config: EnvConfig):
        if config.engine != "native":
            raise ConfigError(f"env.engine = {config.engine!r}.", "WebShop has the engine native.")
        self._data, self._config = config.data, config.webshop
        self.shop = open_shop(config.data, config.webshop)
        self._splits = split_goals(tuple(self.shop.goals.values()), self._config.split, self._config.split_seed)
        self._catalogue_sha = self.shop.catalogue.sha256
        self._reward_success = load_protocol("webshop").reward_success

    def task_ids(self, split: str) -> tuple[str, ...]:
        return tuple(goal.id for goal in self._split(split))

    def panel(self, name: str) -> Panel:
        """``"eval"`` is the fixed set of 128 goals, ``"train"``, ``"valid"`` and ``"test"`` whole splits in order, and
        ``"<any of these>:n"`` a fixed subset of n.

        Raises:
          DataError: no such split, or not the goals that the stored hash belongs to.
        """
        split, count = parse_name(name)
        if split == EVAL_PANEL:
            goals: Sequence[Goal] = eval_goals(self._split("test"), self._config.split, self._config.seed)
        else:
            goals = self._split(split)
        by_id = {goal.id: goal for goal in goals}
        ids = tuple(by_id) if count is None else subset(tuple(by_id), count)
        panel = make_panel(name, ids, self._content_hash([by_id[task_id] for task_id in ids]))
        if name == EVAL_PANEL and self._is_default_catalogue():
            verify(panel, _stored_panels()[EVAL_PANEL])
        return panel

    def make(self) -> Environment:
        return WebshopEnvironment(self.shop, self._config.observation, self._reward_success)

    async def expert_episode(
        self, task_id: str, kind: str, seed: int, max_turns: int, noise: float = 0.0
    ) -> list[ExpertTurn]:
        goal = _goal(self.shop, task_id)
        return expert_episode(self.shop, goal, kind, seed, max_turns, noise, self._config.observation)

    def fields(self, task_id: str) -> dict[str, Any]:
        return {"instruction": _goal(self.shop, task_id).text}

    def family(self, task_id: str) -> str:
        """The category of the product, one of five in the released data."""
        return self.shop.products[_goal(self.shop, task_id).asin].category

    def provenance(self) -> dict[str, Any]:
        config, shop = self._config, self.shop
        found = {key: getattr(config, key) for key in (*CHOICES, "seed", "split_seed", "strict_search")}
        return {
            "benchmark": "webshop",
            "engine": "native",
            "engine_version": ENGINE_VERSION,
            "catalogue": shop.catalogue.label,
            "catalogue_sha256": self._catalogue_sha,
            "products": len(shop.products),
            "goal_counts": {name: len(goals) for name, goals in self._splits.items()},
            "nouns_by": shop.nouns.tagger,
            **found,
            **{name: importlib.metadata.version(name) for name in ("rapidfuzz", "nltk", "regex")},
        }

    def close(self) -> None:
        pass

    def _split(self, name: str) -> tuple[Goal, ...]:
        if not self._splits.get(name):
            raise DataError(
                f"the split {name!r} of {self.shop.catalogue.label} has no goals.",
                f"have {', '.join(f'{split} ({len(goals)})' for split, goals in self._splits.items())}.",
            )
        return self._splits[name]

    def _content_hash(self, goals: Sequence[Goal]) -> str:
        rows = [[goal.id, goal.text, goal.attributes, goal.options, goal.price_upper] for goal in goals]
        return hashlib.sha256(json.dumps([self._catalogue_sha, rows]).encode()).hexdigest()

    def _is_default_catalogue(self) -> bool:
        defaults = WebshopConfig()
        same = all(getattr(self._config, key) == getattr(defaults, key) for key in _GOAL_SETTINGS)
        return self._data == LABEL and same


def _goal(shop: Shop, task_id: str) -> Goal:
    if task_id not in shop.goals:
        raise DataError(f"no goal {task_id!r} in {shop.catalogue.label}.", "use ids as task_ids(split) lists them.")
    return shop.goals[task_id]


def _stored_panels() -> dict[str, str]:
    text = resources.files("sdjax.envs.webshop").joinpath("panels.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["generated"]
