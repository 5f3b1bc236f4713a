"""Runs of two steps on ScienceWorld, WebShop and Search-QA: a tiny policy that has learnt to write answers, and luck.

The policy of 0.02 M parameters knows how answers look and nothing else. Luck makes up for it: some texts play the
expert's next action, so that episodes get somewhere. It is a function of state and text alone, so a replay is the same.
"""

import contextvars
import dataclasses
import functools
import zlib
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sdjax import jsonl
from sdjax.config import RunConfig, defaults, load
from sdjax.envs import EnvConfig, make_benchmark
from sdjax.envs.base import Benchmark, Environment, ExpertTurn, Observation, StepResult
from sdjax.envs.demos import ChatTurn, Demonstration, chat_turns, play_experts
from sdjax.envs.prompts import PromptTemplate
from sdjax.envs.scienceworld.store import Tasks
from sdjax.envs.searchqa.config import SearchqaConfig
from sdjax.envs.webshop.config import WebshopConfig
from sdjax.errors import ConfigError
from sdjax.models import load_checkpoint, save_checkpoint, tiny
from sdjax.rollout import engines
from sdjax.rollout.embedded import EmbeddedEngine
from sdjax.rollout.engine import Completion
from sdjax.teacher.prompt import HEADER
from sdjax.teacher.skills import SkillBank
from sdjax.train import trainer
from tests.train.tiny_run import run

ENVIRONMENTS = ("webshop", "searchqa", "scienceworld")
_SCIENCE = ("lifespan-longest-lived-then-shortest-lived",)  # short gold paths, points on the way
_SETTINGS: dict[str, dict[str, Any]] = {
    "webshop": {"turns": 8, "webshop": WebshopConfig(generator_products=60)},
    "searchqa": {"turns": 4, "searchqa": SearchqaConfig(generator_train=3, generator_eval=1)},
    "scienceworld": {"turns": 8, "train_split": "train_gold", "workers": 1},
}
_PANELS = {"webshop": "test:2", "searchqa": "eval:2", "scienceworld": "train_gold:2"}
_VOCABULARY, _TAIL = 900, 40


def open_environment(name: str) -> tuple[EnvConfig, Benchmark]:
    """A small one; skips the test where Java or the simulator is missing."""
    config = EnvConfig(name=name, template="compact", history=1, **_SETTINGS[name])
    if name == "scienceworld":
        config = dataclasses.replace(
            config, scienceworld=dataclasses.replace(config.scienceworld, task_names=_SCIENCE, heap_mb=700)
        )
    try:
        return config, make_benchmark(config)
    except ConfigError as error:
        if name != "scienceworld":
            raise
        pytest.skip(f"the simulator is not here: {error}")


# --- the policy -------------------------------------------------------------------------------------------------------


def write_policy(out: Path) -> Path:
    """One checkpoint for all three environments; the simulator of ScienceWorld is not needed."""
    chats = [chat for name in ENVIRONMENTS for chat in _chats(name)]
    texts = [text for name in ENVIRONMENTS for text in SkillBank.load(name).texts().values()]
    with pytest.MonkeyPatch.context() as patch:
        # Search-QA's tags as single tokens, like the tags that the other environments share.
        patch.setattr(tiny, "FORMAT_TAGS", (*tiny.FORMAT_TAGS, "<search>", "</search>", "<answer>", "</answer>"))
        corpus = [*texts, *(text for chat in chats for text in (chat.prompt, chat.answer))]
        tiny.write_tiny_checkpoint(
            out,
            corpus,
            vocab_size=_VOCABULARY,
            hidden=16,
            layers=1,
            heads=2,
            kv_heads=1,
            intermediate=32,
            max_positions=8192,
        )
    _learn_formats(out, chats)
    return out


def _chats(name: str) -> list[ChatTurn]:
    """Turns of experts with a short thought. Of ScienceWorld only the commands: its rooms need the simulator."""
    template = PromptTemplate.load(name, "compact", 1)
    if name == "scienceworld":
        tasks, room = Tasks(task_names=_SCIENCE), Observation("a room", "do it", ("look around",), ("door",))
        stored = [tasks.gold(task_id) for task_id in tasks.task_ids("train_gold")]
        turns = [ExpertTurn(room, action, "ok") for gold in stored if gold for action in gold.actions]
        return [chat for turn in turns for chat in chat_turns([turn], template)]
    config, benchmark = open_environment(name)
    wanted = [Demonstration(task_id, 0) for task_id in benchmark.task_ids("train")[:24]]
    episodes = play_experts(benchmark, wanted, "", config.turns)
    benchmark.close()
    short = [[dataclasses.replace(turn, thought="ok") for turn in turns] for turns in episodes]
    return [chat for turns in short for chat in chat_turns(turns, template)]


def _learn_formats(path: Path, chats: list[ChatTurn], steps: int = 100) -> None:
    """Plain imitation of answers behind the ends of their prompts, which are too long to be worth reading."""
    model, params, tokenizer = load_checkpoint(str(path), dtype="float32", compute_dtype="float32")
    T = 2 * _TAIL
    ids_NT, answer_NT = np.zeros((len(chats), T), np.int32), np.zeros((len(chats), T), bool)
    for i, chat in enumerate(chats):
        head = tokenizer.render_chat(chat.prompt)[-_TAIL:]
        ids = [*head, *tokenizer.encode(chat.answer), tokenizer.turn_end_id][:T]
        ids_NT[i, : len(ids)], answer_NT[i, len(head) : len(ids)] = ids, True
    optimizer = optax.adam(2e-2)

    def loss(params, ids_BT, answer_BT):
        B = len(ids_BT)
        hidden = model.hidden(params, ids_BT, jnp.tile(jnp.arange(T), (B, 1)), jnp.ones((B, T), jnp.int32))
        logps = jax.nn.log_softmax(model.logits(params, hidden[:, :-1]))
        taken = jnp.take_along_axis(logps, ids_BT[:, 1:, None], axis=-1)[..., 0]
        return -jnp.where(answer_BT[:, 1:], taken, 0).sum() / answer_BT[:, 1:].sum()

    def step(carry, index_B):
        params, state = carry
        grads = jax.grad(loss)(params, jnp.asarray(ids_NT)[index_B], jnp.asarray(answer_NT)[index_B])
        updates, state = optimizer.update(grads, state)
        return (optax.apply_updates(params, updates), state), None

    order = np.random.default_rng(0).integers(0, len(chats), (steps, 16))
    (params, _), _ = jax.jit(lambda p, order: jax.lax.scan(step, (p, optimizer.init(p)), order))(params, order)
    save_checkpoint(path, model, jax.device_get(params), tokenizer_from=path)


# --- luck -------------------------------------------------------------------------------------------------------------

_RESTORED = contextvars.ContextVar[Any]("restored", default=None)


class Lucky:
    """An environment that plays the expert's next action for two texts of three.

    may_win: also where it is the last one; without, that action does nothing, until a teacher takes over.
    """

    def __init__(self, inner: Environment, may_win: bool):
        self.inner, self.may_win = inner, may_win
        self._gold: list[str] | None = None  # what is left of a stored path; only ScienceWorld has one
        self._asked = False  # ScienceWorld wants a number
        self._played: list[str] = []
        self._taught = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def reset(self, task_id: str, seed: int) -> Observation:
        observation = await self.inner.reset(task_id, seed)
        self._gold = list(self.inner.privileged("gold")) if task_id.split("/")[0] in _SCIENCE else None
        self._asked, self._played = False, []
        return observation

    async def step(self, action: str) -> StepResult:
        plan = self.plan()
        if plan and zlib.crc32(action.encode()) % 3:
            action = plan[0]
        if plan and len(plan) == 1 and action == plan[0] and not (self.may_win or self._taught):
            action = ""
        result = await self.inner.step(action)
        self._played.append(action)
        if self._gold and not self._asked and action.lower() == self._gold[0].lower():
            del self._gold[0]
        self._asked = bool(result.info.get("ambiguous"))
        return result

    async def restore(self, task_id: str, seed: int, actions: list[str]) -> list[Observation]:
        """What the texts play is found by playing them; then the environment restores that itself."""
        _RESTORED.set(self)
        await self.reset(task_id, seed)
        for action in actions:
            await self.step(action)
        self._taught = True
        return await self.inner.restore(task_id, seed, list(self._played))

    def plan(self) -> list[str] | None:
        if self._gold is None:
            return self.inner.privileged("plan")
        # A gold path still fits after commands that were not its own, if a question they opened is answered.
        return ["0", *self._gold] if self._asked and self._gold[:1] != ["0"] else self._gold


class LuckyBenchmark:
    """A benchmark that several runs share: runs close it, and it stays open."""

    def __init__(self, inner: Benchmark, may_win: bool):
        self.inner, self.may_win = inner, may_win

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def make(self) -> Environment:
        return cast(Environment, Lucky(self.inner.make(), self.may_win))

    def close(self) -> None:
        pass


class OracleEngine:
    """The real engine, except that an acting teacher gives the expert's answers (each episode is a task of its own)."""

    def __init__(self, opened):
        self.opened = opened

    async def generate(self, request):
        environment, tokenizer = _RESTORED.get(), self.opened.tokenizer
        reads_skills = tokenizer.decode(request.prompt, skip_special=False).startswith(HEADER)
        assert reads_skills == (environment is not None)
        plan = environment.plan() if environment is not None else None
        if not plan:
            return await self.opened.engine.generate(request)
        answer = self.opened.template.answer("ok", plan[0])
        tokens = np.array([*tokenizer.encode(answer), tokenizer.turn_end_id], np.int32)
        return Completion(tokens, np.zeros(len(tokens), np.float32), "stop", 0)


# --- the runs ---------------------------------------------------------------------------------------------------------


def run_config(env: EnvConfig, model: Path, method: str, **settings: Any) -> RunConfig:
    """Two steps of one task and four episodes; the skill bank is the environment's own."""
    values = defaults(method, **settings)
    values.name, values.model.path = f"{env.name}-{method}", str(model)
    values.env.name = env.name  # decides on the method's constants
    rollout = values.rollout
    rollout.prompt_tokens, rollout.response_tokens, rollout.max_length = 1024, 64, 1088
    rollout.slots, rollout.prefill_rows, rollout.decode_chunk, rollout.stop_gap = 6, 6, 8, 0.01
    train = values.train
    train.steps, train.tasks_per_step, train.group_size, train.minibatch_rows = 2, 1, 4, 32
    train.learning_rate, train.pack_length, train.pack_rows, train.loss_slots = 1e-3, 1088, 2, 128
    train.remat = "none"
    teacher = values.teacher
    teacher.bank, teacher.privileged_tokens = env.name, 2880
    teacher.reflection_tokens, teacher.reflection_observation_chars = 24, 60
    values.eval.every, values.eval.panel, values.eval.final_seeds = 10, _PANELS[env.name], 0
    return dataclasses.replace(load(values), env=env)


def play_run(config: RunConfig, benchmark: Benchmark, path: Path, *, may_win: bool = True) -> list[dict[str, Any]]:
    """Trains; returns the lines of metrics.jsonl. may_win: whether the policy can be lucky enough to win."""
    open_session = trainer.session.open_session

    def open_with_oracle(config, logs):
        opened = open_session(config, logs)
        if not config.method.acts:
            return opened
        return dataclasses.replace(opened, player=dataclasses.replace(opened.player, engine=OracleEngine(opened)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.session, "make_benchmark", lambda config: LuckyBenchmark(benchmark, may_win))
        patch.setattr(trainer.session, "open_session", open_with_oracle)
        # Few shapes: these runs spend their time in compilation.
        patch.setattr(engines, "EmbeddedEngine", functools.partial(EmbeddedEngine, prefill_buckets=(512, 1088)))
        run(config, path)
    return jsonl.read(path / "metrics.jsonl")
