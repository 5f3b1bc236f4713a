"""A game with one way to win and an engine that follows a script: what continuations do can be counted by hand."""

from dataclasses import dataclass

import numpy as np

from sdjax.envs.base import Observation, Status, StepResult
from sdjax.envs.prompts import PromptTemplate
from sdjax.errors import EnvError
from sdjax.rollout.engine import Completion, SamplingParams
from sdjax.rollout.episodes import Assignment, Player, play_all
from sdjax.teacher.prompt import HEADER

SAMPLING = SamplingParams(1.0, 64)
WIN = ["a", "b", "c"]
STUDENTS = [["a", "x", "x", "x"], ["a", "y", "y", "y"], ["a", "b", "z", "z"], ["q", "q", "q", "q"]]


class Bytes:
    """A tokenizer whose ids are bytes, so that a character can be several tokens."""

    def encode(self, text, *, special=True):
        return list(text.encode())

    def decode(self, ids):
        return bytes(int(i) for i in ids if i < 256).decode(errors="replace")

    def render_chat(self, text):
        return self.encode(text)


@dataclass
class Corridor:
    """Wins after the actions of ``owner.win`` in a row; anything else leads to a dead end that tells what was done."""

    owner: "CorridorBenchmark"
    done: tuple[str, ...] = ()

    def _see(self) -> Observation:
        return Observation(" ".join(("at", *self.done, str(self.owner.noise()))), "win", ())

    async def reset(self, task_id, seed):
        self.done = ()
        return self._see()

    async def step(self, action):
        self.owner.steps += 1
        if self.owner.steps in self.owner.broken:
            raise EnvError("the worker died.", "it is restarted.")
        self.done = (*self.done, action)
        won = list(self.done) == self.owner.win
        return StepResult(self._see(), 10.0 * won, float(won), Status.SUCCESS if won else Status.RUNNING)

    async def restore(self, task_id, seed, actions):
        return [await self.reset(task_id, seed), *[(await self.step(a)).observation for a in actions]]

    async def close(self):
        pass


class CorridorBenchmark:
    def __init__(self):
        self.steps, self.broken, self.noise, self.win = 0, (), lambda: "", WIN

    def make(self):
        return Corridor(self)

    def family(self, task):
        return "pick_and_place_simple"

    def fields(self, task):
        return {"task_type": self.family(task)}


class Script:
    """An engine that answers by request name; prompts that begin with a skill are the teacher's."""

    def __init__(self, students, teacher):
        self.students, self.teacher, self.asked = students, teacher, []

    async def generate(self, request):
        text = Bytes().decode(request.prompt)
        self.asked.append((request.name, text, request.seed))
        turn = int(request.name.rsplit(" ", 1)[1])
        sample = int(request.name.split(" sample ")[1].split(" ")[0])
        action = self.teacher(sample, turn) if text.startswith(("skill", HEADER)) else self.students[sample][turn]
        tokens = np.array([*Bytes().encode(f"<think>ok</think><action>{action}</action>"), 256], np.int32)
        return Completion(tokens, np.zeros(len(tokens), np.float32), "stop", 0)


def make_player(engine, turns=4, retries=1):
    benchmark = CorridorBenchmark()
    template = PromptTemplate.load("alfworld", "compact", 2)
    return Player(benchmark, engine, template, Bytes(), 0, turns, 10_000, retries)  # type: ignore[arg-type]


def make_group(player, samples):
    return play_all(player, [Assignment("t", 0, 7 + k, k, "train", 1) for k in range(samples)], SAMPLING)


def oracle(sample, turn):
    return WIN[turn]
