"""The engine of a run over several processes: each completion is drawn by one process and told to the others.

All processes play all episodes, and each draws its share of the completions on its own devices. So nothing is computed
twice on an accelerator, every process holds the same trajectories, and all that asks an engine (rollouts, validation,
acting teachers, guides) needs no change. What is repeated are the environments' steps.

Who draws is a function of the request. A process numbers what it has drawn and the others read it in that order.
"""

import asyncio
import base64
import hashlib
import itertools
import json
import threading
from typing import Any, Protocol

import numpy as np

from sdjax.errors import EngineError, SdjaxError
from sdjax.rollout.engine import Completion, Engine, EngineStats, Request

_POLL_S = 1.0  # how often a reader looks whether the engine is closed


class Channel(Protocol):
    """Text from each process to all others; ``sdjax.train.distributed.Channel``."""

    process: int
    processes: int

    def tell(self, topic: str, number: int, text: str) -> None: ...

    def hear(self, topic: str, process: int, number: int, timeout_s: float) -> str | None:
        """What ``process`` told under this number; None if it has not within the time."""
        ...

    def meet(self, name: str, timeout_s: float) -> None:
        """A barrier."""
        ...

    def forget(self, topic: str) -> None:
        """Deletes what was told about ``topic``."""
        ...


class SharedEngine:
    """An ``Engine`` over the own engines of all processes.

    ``stats`` counts the tokens of all completions, and prefill, decoding steps and seconds of this process.

    Args:
      engine: draws this process's share.
      channel: to the other processes.
      timeout_s: longest wait for another process.
    """

    def __init__(self, engine: Engine, channel: Channel, *, timeout_s: float = 3600.0):
        self.engine, self.channel, self._timeout_s = engine, channel, timeout_s
        self.stats: EngineStats = engine.stats
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._lost: SdjaxError | None = None
        self._readers: list[threading.Thread] = []
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        """Starts with new weights: nothing that was drawn with the old ones counts."""
        self._epoch, self._told = epoch, 0
        self._known: dict[str, Completion] = {}
        self._waiting: dict[str, list[tuple[asyncio.AbstractEventLoop, asyncio.Future]]] = {}
        others = [process for process in range(self.channel.processes) if process != self.channel.process]
        readers = [threading.Thread(target=self._read, args=(epoch, process), daemon=True) for process in others]
        self._readers = [reader for reader in self._readers if reader.is_alive()] + readers
        for reader in readers:
            reader.start()

    async def generate(self, request: Request) -> Completion:
        """See ``Engine``. A request that was asked before under the same weights has the same answer.

        Raises:
          EngineError: as the own engine's; or another process did not tell its completion in time.
        """
        key = _key(request)
        if int(key[:8], 16) % self.channel.processes != self.channel.process:
            completion = await self._hear(key, request)
            self.stats.prompt_tokens += len(request.prompt)
            self.stats.decode_tokens += len(completion.tokens)
            return completion
        if key not in self._known:
            completion = await self.engine.generate(request)
            if key not in self._known:  # two episodes may have asked at the same time
                self._known[key] = completion
                self.channel.tell(f"completions/{self._epoch}", self._told, _encode(key, completion))
                self._told += 1
        return self._known[key]

    async def _hear(self, key: str, request: Request) -> Completion:
        with self._lock:
            if key in self._known:
                return self._known[key]
            if self._lost is not None:
                raise self._lost
            loop = asyncio.get_running_loop()
            future = loop.create_future()
            self._waiting.setdefault(key, []).append((loop, future))
            mine = self._waiting[key]
        try:
            return await asyncio.wait_for(future, self._timeout_s)
        except TimeoutError:
            raise EngineError(
                f"{request.name or 'a request'}: the process that draws it told nothing for {self._timeout_s:g} s.",
                "look at the output of the other processes; start the same command again on all of them.",
            ) from None
        finally:
            with self._lock:
                mine[:] = [entry for entry in mine if entry[1] is not future]

    def _read(self, epoch: int, process: int) -> None:
        """A thread: takes what ``process`` tells about one version of the weights."""
        number = 0
        while not self._closed.is_set() and epoch == self._epoch:
            try:
                text = self.channel.hear(f"completions/{epoch}", process, number, _POLL_S)
            except SdjaxError as error:
                return self._fail(error)
            if text is None:
                continue
            number += 1
            key, completion = _decode(text)
            with self._lock:
                if epoch != self._epoch:
                    return
                self._known[key] = completion
                for loop, future in self._waiting.pop(key, []):
                    loop.call_soon_threadsafe(_resolve, future, completion)

    def _fail(self, error: SdjaxError) -> None:
        """Nothing will be heard any more."""
        with self._lock:
            waiting, self._waiting, self._lost = self._waiting, {}, error
            for loop, future in itertools.chain(*waiting.values()):
                loop.call_soon_threadsafe(_reject, future, error)

    def update_weights(self, params: Any, version: int) -> None:
        """See ``Engine``. All processes call it together."""
        self.engine.update_weights(params, version)
        # Then all of them have heard what they waited for.
        self.channel.meet("weights of the engine", self._timeout_s)
        with self._lock:
            old = self._epoch
            self._begin(old + 1)
        if self.channel.process == 0:
            self.channel.forget(f"completions/{old}")

    def sleep(self) -> None:
        self.engine.sleep()

    def health(self) -> dict[str, Any]:
        return self.engine.health() | {"process": self.channel.process, "processes": self.channel.processes}

    def close(self) -> None:
        self._closed.set()
        self.engine.close()
        for reader in self._readers:
            reader.join()  # a thread that is still in JAX's client when Python ends aborts the process


def _resolve(future: asyncio.Future, completion: Completion) -> None:
    if not future.done():
        future.set_result(completion)


def _reject(future: asyncio.Future, error: SdjaxError) -> None:
    if not future.done():
        future.set_exception(error)


def _key(request: Request) -> str:
    digest = hashlib.sha256(np.asarray(request.prompt, np.int32).tobytes())
    digest.update(json.dumps([request.seed, request.sampling.temperature, request.sampling.max_new_tokens]).encode())
    return digest.hexdigest()


def _encode(key: str, completion: Completion) -> str:
    tokens, logps = (
        base64.b64encode(np.asarray(x, kind).tobytes()).decode()
        for x, kind in ((completion.tokens, np.int32), (completion.logps, np.float32))
    )
    return json.dumps([key, tokens, logps, completion.finish, completion.weight_version])


def _decode(text: str) -> tuple[str, Completion]:
    key, tokens, logps, finish, version = json.loads(text)
    read = lambda x, kind: np.frombuffer(base64.b64decode(x), kind)  # noqa: E731
    return key, Completion(read(tokens, np.int32), read(logps, np.float32), finish, version)
