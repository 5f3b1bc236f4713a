"""What only the teacher may know never reaches a student's prompt, unless the benchmark itself shows it.

Each episode is played three times side by side: in an environment that is asked for everything privileged at every
turn, in one that is never asked, and in the bare engine below the adapter, which says what is public. A privileged
string in the prompt of the first must be in what the engine has shown, and the prompt of the second must be the same.
"""

import asyncio
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from sdjax.envs import EnvConfig, make_benchmark
from sdjax.envs.alfworld.engine import Episode as AlfworldEpisode
from sdjax.envs.base import Environment, Observation, Status
from sdjax.envs.config import GeneratorConfig
from sdjax.envs.prompts import PromptTemplate, load_protocol
from sdjax.envs.scienceworld.config import ScienceworldConfig
from sdjax.envs.searchqa.actions import parse
from sdjax.envs.searchqa.backends import make_backend
from sdjax.envs.searchqa.config import SearchqaConfig
from sdjax.envs.webshop.config import WebshopConfig
from sdjax.envs.webshop.simulator import QUERY_FORM
from sdjax.envs.webshop.simulator import Episode as WebshopEpisode
from sdjax.errors import ConfigError

# The bare engine: takes a task, then one action after the other, and yields the texts that it shows.
Engine = Callable[[str], Any]


@dataclass
class World:
    """One benchmark with everything that the test must know of it.

    engine: plays a task without the adapter; an async generator that yields what is shown and is sent the next action.
    kinds: what privileged() offers. hidden: those that not even the first observation may show.
    """

    name: str
    benchmark: Any
    engine: Engine
    kinds: tuple[str, ...]
    hidden: tuple[str, ...]
    tasks: tuple[str, ...]
    turns: int
    make: Callable[[], Environment] = field(init=False)

    def __post_init__(self):
        self.make = self.benchmark.make


# --- the four benchmarks ----------------------------------------------------------------------------------------------


def alfworld(tasks: int) -> World:
    games = GeneratorConfig(train_games=tasks, valid_games=1, test_games=1, receptacles_max=10, distractors_max=8)
    benchmark: Any = make_benchmark(EnvConfig(generator=games))

    async def engine(task_id):
        episode = AlfworldEpisode(benchmark.store.game(task_id))
        while True:
            action = yield [episode.text, episode.game.goal_text, *episode.admissible]
            episode.step(action)

    ids = benchmark.task_ids("train")
    return World("alfworld", benchmark, engine, ("plan", "facts", "task_family"), ("facts",), ids, 20)


def webshop(tasks: int) -> World:
    config = EnvConfig(name="webshop", webshop=WebshopConfig(generator_products=150))
    benchmark: Any = make_benchmark(config)

    async def engine(task_id):
        episode = WebshopEpisode(benchmark.shop, benchmark.shop.goals[task_id])
        while True:
            clicks = [f"click[{text}]" for text in episode.clickables()]
            action = yield [episode.goal.text, episode.observation("text"), QUERY_FORM, *clicks]
            episode.step(action)

    kinds = ("plan", "target", "goal", "task_family", "reward_parts")
    return World("webshop", benchmark, engine, kinds, ("target", "goal"), benchmark.task_ids("train")[:tasks], 15)


def searchqa(tasks: int) -> World:
    settings = SearchqaConfig(generator_train=-(-tasks // 7), generator_eval=1)
    benchmark: Any = make_benchmark(EnvConfig(name="searchqa", turns=4, searchqa=settings))
    backend = make_backend(settings, benchmark.store.corpus, benchmark.store.index)

    async def engine(task_id):
        shown = [benchmark.store.question(task_id).question]
        for _ in range(4):
            action = parse((yield shown))
            hits = backend.search([action.text], settings.topk)[0] if action.kind == "search" else []
            shown = [hit.passage.contents for hit in hits]
        yield shown

    kinds = ("plan", "golden_answers", "gold_passages", "decomposition", "task_family")
    hidden = ("golden_answers", "gold_passages", "decomposition")
    return World("searchqa", benchmark, engine, kinds, hidden, benchmark.task_ids("train"), 4)


def scienceworld(tasks: int) -> World:
    config = EnvConfig(name="scienceworld", workers=1, scienceworld=ScienceworldConfig(heap_mb=700))
    try:
        benchmark: Any = make_benchmark(config)
    except ConfigError as error:
        pytest.skip(f"the simulator is not here: {error}")

    async def engine(task_id):
        session = benchmark.pool.session()
        name, variation = benchmark.tasks.parse(task_id)
        try:
            answer = first = await session.call("reset", task_name=name, variation=variation, simplification="")
            while True:
                action = yield [answer["text"], first["task"], *first["templates"], *answer["objects"]]
                answer = await session.call("step", action=action)
        finally:
            await session.close()

    ids = benchmark.task_ids("train_gold")
    chosen = tuple(ids[:: len(ids) // tasks][:tasks])
    kinds = ("gold", "plan", "goal_progress", "task_family")
    return World("scienceworld", benchmark, engine, kinds, ("goal_progress",), chosen, 15)


# How to open it, tasks, and the prompts that must at least come together in two passes over them.
WORLDS = {
    "alfworld": (alfworld, 40, 1000),
    "webshop": (webshop, 80, 1000),
    "searchqa": (searchqa, 140, 700),
    "scienceworld": (scienceworld, 12, 250),
}
EVERYWHERE = [pytest.param(name, marks=pytest.mark.scienceworld if name == "scienceworld" else ()) for name in WORLDS]


@pytest.fixture(scope="module")
def worlds() -> Iterator[Callable[[str], World]]:
    made: dict[str, World] = {}

    def get(name: str) -> World:
        if name not in made:
            open_world, tasks, _ = WORLDS[name]
            made[name] = open_world(tasks)
        return made[name]

    yield get
    for world in made.values():
        world.benchmark.close()


# --- what is checked --------------------------------------------------------------------------------------------------


def strings(value: Any) -> Iterator[str]:
    """All texts in what privileged() gave; of longer ones also each sentence."""
    if isinstance(value, str):
        yield from {value, *re.split(r"(?<=[.?!])\s+", value)}
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


def plain(text: str) -> str:
    return " ".join(text.lower().split())


def says(text: str, secret: str) -> bool:
    """Whether ``secret`` occurs in ``text`` as whole words; both are ``plain``."""
    return bool(secret) and re.search(rf"(?<!\w){re.escape(secret)}(?!\w)", text) is not None


def check(prompt: str, unasked: str, secrets: set[str], public: str) -> None:
    assert prompt == unasked, "what the agent sees depends on whether somebody asked for privileged facts"
    shown, known = plain(prompt), plain(public)
    leaked = [secret for secret in sorted(secrets) if says(shown, secret) and not says(known, secret)]
    assert not leaked, f"only the teacher may know {leaked}"


def render(template: PromptTemplate, seen: Observation, past: list[tuple[str, str]]) -> str:
    return template.render(seen.task, seen.text, seen.admissible, past, len(past), seen.objects)


def random_action(world: World, seen: Observation, rng: random.Random) -> str:
    if world.name == "searchqa":
        words = seen.task.split()
        return f"<search>{' '.join(rng.sample(words, min(3, len(words))))}</search>" if rng.random() < 0.9 else "what?"
    action = rng.choice(seen.admissible or ("look",))
    if world.name == "scienceworld":
        return re.sub("OBJ", lambda _: rng.choice(seen.objects), action)
    return f"search[{' '.join(seen.task.split()[2:6])}]" if action == QUERY_FORM else action


async def watch(world: World, task_id: str, template: PromptTemplate, expert: float, rng: random.Random) -> int:
    """Plays one episode and checks every prompt. expert: probability of the plan's action. Returns the prompts."""
    asked, unasked, engine = world.make(), world.make(), world.engine(task_id)
    wording = template.first.format_map(_Nothing()) + template.later.format_map(_Nothing())
    past: list[tuple[str, str]] = []
    public = [wording]
    prompts = 0
    try:
        seen, same, shown = await asked.reset(task_id, 0), await unasked.reset(task_id, 0), await anext(engine)
        status = Status.RUNNING
        while True:
            public += shown
            secrets = {plain(s) for kind in world.kinds for s in strings(asked.privileged(kind))} - {""}
            known = "\n".join([*public, *(action for _, action in past)])
            check(render(template, seen, past), render(template, same, past), secrets, known)
            if not past:
                hidden = {plain(s) for kind in world.hidden for s in strings(asked.privileged(kind))}
                check(render(template, seen, past), render(template, same, past), hidden, wording + seen.task)
            prompts += 1
            if status is not Status.RUNNING or len(past) == world.turns:
                return prompts
            plan = asked.privileged("plan")
            action = plan[0] if plan and rng.random() < expert else random_action(world, seen, rng)
            past.append((seen.text, action))
            result, other = await asked.step(action), await unasked.step(action)
            seen, same, status = result.observation, other.observation, result.status
            shown = await engine.asend(action)
    finally:
        await engine.aclose()
        await asked.close()
        await unasked.close()


class _Nothing(dict):
    def __missing__(self, key: str) -> str:
        return ""


def play(world: World, template_name: str, expert: float, tasks: int | None = None) -> int:
    template = PromptTemplate.load(world.name, template_name, load_protocol(world.name).history)

    async def everything() -> int:
        rng = random.Random(f"{world.name} {expert}")
        return sum([await watch(world, task_id, template, expert, rng) for task_id in world.tasks[:tasks]])

    return asyncio.run(everything())


@pytest.mark.parametrize("name", EVERYWHERE)
def test_no_privileged_string_reaches_a_prompt(worlds, name):
    world = worlds(name)
    template = "standard" if name == "scienceworld" else "verl_agent"
    counted = [play(world, template, expert) for expert in (0.8, 0.1)]
    assert sum(counted) > WORLDS[name][2], counted


@pytest.mark.parametrize("name", EVERYWHERE)
def test_no_privileged_string_reaches_a_compact_prompt(worlds, name):
    assert play(worlds(name), "compact", 0.6, tasks=12) >= 30


# --- the check can fail -----------------------------------------------------------------------------------------------


class Leaking:
    """Shows what it knows: always, or only behind a question for it."""

    def __init__(self, inner, kind: str, always: bool):
        self.inner, self.kind, self.always, self.was_asked = inner, kind, always, False

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def privileged(self, kind):
        self.was_asked = True
        return self.inner.privileged(kind)

    async def reset(self, task_id, seed):
        return self._shown(await self.inner.reset(task_id, seed))

    async def step(self, action):
        result = await self.inner.step(action)
        return replace(result, observation=self._shown(result.observation))

    def _shown(self, seen):
        if not (self.always or self.was_asked):
            return seen
        return replace(seen, text=f"{seen.text} {' '.join(strings(self.inner.privileged(self.kind)))}")


@pytest.mark.parametrize(
    ("name", "kind", "always", "message"),
    [
        ("alfworld", "facts", True, "only the teacher may know"),
        ("alfworld", "plan", False, "depends on whether somebody asked"),
        ("webshop", "target", True, "only the teacher may know"),
        ("searchqa", "golden_answers", True, "only the teacher may know"),
        ("searchqa", "gold_passages", False, "depends on whether somebody asked"),
        pytest.param(
            "scienceworld", "goal_progress", True, "only the teacher may know", marks=pytest.mark.scienceworld
        ),
    ],
)
def test_a_leaking_environment_is_found(worlds, name, kind, always, message):
    world = replace(worlds(name))
    inner = world.make
    world.make = lambda: Leaking(inner(), kind, always)
    with pytest.raises(AssertionError, match=message):
        play(world, "compact", 0.5, tasks=3)
