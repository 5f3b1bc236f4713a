"""The engine over several processes, with a channel in memory: who draws, what is told, and what a silence does."""

import asyncio
import threading

import numpy as np
import pytest

from sdjax.errors import EngineError, SdjaxError
from sdjax.rollout.engine import Completion, EngineStats, Request, SamplingParams
from sdjax.rollout.shared import SharedEngine


class Board:
    """What all processes have told."""

    def __init__(self):
        self.texts, self.changed, self.broken = {}, threading.Condition(), False
        self.barrier = threading.Barrier(2)


class Channel:
    def __init__(self, board, process, processes=2):
        self.board, self.process, self.processes = board, process, processes

    def tell(self, topic, number, text):
        with self.board.changed:
            assert (topic, self.process, number) not in self.board.texts
            self.board.texts[topic, self.process, number] = text
            self.board.changed.notify_all()

    def hear(self, topic, process, number, timeout_s):
        key = (topic, process, number)
        with self.board.changed:
            self.board.changed.wait_for(lambda: key in self.board.texts or self.board.broken, min(timeout_s, 0.05))
            if self.board.broken:
                raise SdjaxError("the line is dead.", "start again.")
            return self.board.texts.get(key)

    def meet(self, name, timeout_s):
        self.board.barrier.wait(timeout_s)

    def forget(self, topic):
        with self.board.changed:
            for key in [key for key in self.board.texts if key[0] == topic]:
                del self.board.texts[key]


class Drawer:
    """An engine whose answers show who drew them, under which weights, and how often."""

    def __init__(self, process):
        self.process, self.version, self.stats, self.drawn = process, 0, EngineStats(), []

    async def generate(self, request):
        await asyncio.sleep(0.001)
        self.drawn.append(request.seed)
        tokens = np.array([self.process, self.version, len(self.drawn)], np.int32)
        return Completion(tokens, np.array([-0.1, -1e-9, -3.5], np.float32), "stop", self.version)

    def update_weights(self, params, version):
        self.version = version

    def sleep(self):
        pass

    def health(self):
        return {"ok": True}

    def close(self):
        pass


def request(seed, temperature=1.0):
    return Request(np.arange(1 + seed % 7, dtype=np.int32), seed, SamplingParams(temperature, 4), f"request {seed}")


def play(engine, seeds):
    async def run():
        return await asyncio.gather(*(engine.generate(request(seed)) for seed in seeds))

    return asyncio.run(run())


def both(work):
    """Runs ``work(process)`` for both processes at the same time; returns the results, or raises the first error."""
    found = [None, None]

    def call(process):
        try:
            found[process] = work(process)
        except BaseException as error:
            found[process] = error

    threads = [threading.Thread(target=call, args=(process,)) for process in range(2)]
    [thread.start() for thread in threads]
    [thread.join(30) for thread in threads]
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


@pytest.fixture
def pair():
    board = Board()
    engines = [SharedEngine(Drawer(i), Channel(board, i), timeout_s=5) for i in range(2)]
    yield board, engines
    for engine in engines:
        engine.close()


def same(a, b):
    assert a.tokens.tolist() == b.tokens.tolist() and a.logps.tobytes() == b.logps.tobytes()
    assert (a.finish, a.weight_version) == (b.finish, b.weight_version)


def test_each_completion_is_drawn_once_and_all_processes_have_the_same(pair):
    _, engines = pair
    seeds = [*range(40), 3, 4, 5]  # some are asked twice
    first, second = both(lambda process: play(engines[process], seeds))
    for a, b in zip(first, second, strict=True):
        same(a, b)
    drawn = [engine.engine.drawn for engine in engines]
    assert set(drawn[0]) | set(drawn[1]) == set(range(40)) and not set(drawn[0]) & set(drawn[1])
    assert min(len(set(d)) for d in drawn) > 8
    for a, again in zip(first[3:6], first[40:], strict=True):
        same(a, again)
    assert engines[0].stats.decode_tokens > 0 and engines[0].stats.prompt_tokens > 0


def test_new_weights_draw_anew_and_what_was_told_is_forgotten(pair):
    board, engines = pair
    for version in (1, 2):
        both(lambda process: play(engines[process], range(10)))
        both(lambda process, v=version: engines[process].update_weights(None, v))
        assert not [key for key in board.texts if key[0] == f"completions/{version - 1}"]
        first, _ = both(lambda process: play(engines[process], range(10)))
        assert {completion.weight_version for completion in first} == {version}


def test_a_silent_process_and_a_dead_line_are_errors(pair):
    board, engines = pair
    engines[0]._timeout_s = 0.2
    with pytest.raises(EngineError, match=r"told nothing for 0\.2 s"):
        play(engines[0], range(10))
    engines[0]._timeout_s = 5
    threading.Timer(0.2, lambda: setattr(board, "broken", True)).start()
    with pytest.raises(SdjaxError, match="the line is dead"):
        play(engines[0], range(10))
    with pytest.raises(SdjaxError, match="the line is dead"):
        play(engines[0], range(20, 30))
