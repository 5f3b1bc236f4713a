"""SGLang servers as a rollout engine: own child processes, or servers that somebody else runs.

All HTTP of completions runs on one event loop in a thread of its own, so that connections live as long as the engine
and not as long as one rollout. A server that is lost is started again and gets the current weights; requests for it
wait meanwhile. What it was drawing fails with ``CompletionLost``: the episode is played again on a fresh environment.
"""

import asyncio
import hashlib
import threading
import time
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np

from sdjax.errors import CompletionLost, EngineError
from sdjax.models.base import Params
from sdjax.rollout import scheduler, sglang_client, sglang_process, sglang_sync
from sdjax.rollout.engine import Completion, EngineStats, Request
from sdjax.rollout.sglang_http import Server, ServerLost, answer, on_all
from sdjax.rollout.sglang_process import ServerProcess
from sdjax.rollout.sglang_sync import Transfer

_LEAVING_S = 1.0


@dataclass(eq=False)
class Member:
    """One server. process: None where somebody else runs it. restarts: how often it was lost so far. asleep: it has
    given the memory of keys and values back."""

    server: Server
    process: ServerProcess | None
    restarts: int = 0
    asleep: bool = False
    error: EngineError | None = None
    revival: "asyncio.Task[None] | None" = field(default=None, repr=False)

    @property
    def down(self) -> bool:
        return self.process is not None and not self.process.alive


@dataclass(frozen=True)
class Limits:
    """max_length: prompt + new tokens of one request. request_timeout_s: for one completion. start_timeout_s: until a
    lost server that somebody else runs is back. restarts: of one server."""

    max_length: int
    request_timeout_s: float = 900.0
    start_timeout_s: float = 900.0
    restarts: int = 3


class SglangEngine:
    """An ``Engine`` over HTTP. Completions of one episode go to one server, which has its prefix in the cache.

    Args:
      members: the servers; started and ready. The engine owns them from here on.
      transfer: how weights get there. reload: the same weights another way; the first update is compared with it.
      params: the first weights.
      protocol: stop ids and the ids that may be drawn.
      sleep: give the memory of keys and values back in ``sleep``.
      version: version of ``params``.

    Raises:
      EngineError: a server does not take the weights.
    """

    def __init__(
        self,
        members: Sequence[Member],
        transfer: Transfer,
        params: Params,
        *,
        protocol: sglang_client.Protocol,
        limits: Limits,
        reload: Transfer | None = None,
        sleep: bool = False,
        version: int = 0,
    ):
        self.stats = EngineStats(extra={"lost": 0, "restarts": 0, "aborted": 0, "wrong_version": 0})
        self._members = list(members)
        self._transfer, self._reload, self._sleep = transfer, reload, sleep
        self._protocol, self._limits = protocol, limits
        self._bias = protocol.bias()
        self._run = uuid.uuid4().hex[:8]  # two runs never take each other's weights for their own
        self._updates, self._closed = 0, False
        self._in_flight, self._busy_since = 0, 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sdjax-sglang", daemon=True)
        self._thread.start()
        # As many connections as there are episodes; a proxy of the environment must not see loopback traffic.
        self._client = httpx2.AsyncClient(limits=httpx2.Limits(max_connections=None), trust_env=False)
        try:
            self.update_weights(params, version)
        except BaseException:
            self.close()
            raise

    @property
    def servers(self) -> list[Server]:
        return [member.server for member in self._members]

    async def generate(self, request: Request) -> Completion:
        """Draws one completion. A cancelled caller ends its request.

        Raises:
          CompletionLost: this completion failed, by an accident that another try may not have.
          EngineError: the request cannot be served, or a server is gone for good.
        """
        if self._closed:
            raise EngineError("the engine is closed.", "make a new engine.")
        if any(member.asleep for member in self._members):
            raise EngineError("the engine sleeps until it gets new weights.", "call update_weights first.")
        prompt = scheduler.check_request(
            request, vocab_size=len(self._protocol.sampling_mask_V), max_length=self._limits.max_length
        )
        try:
            return await asyncio.wrap_future(self._spawn(self._generate(request, prompt)))
        except asyncio.CancelledError:
            if self._closed:  # the caller was not cancelled: its engine went away
                raise EngineError("the engine was closed.", "make a new engine.") from None
            raise

    def update_weights(self, params: Params, version: int) -> None:
        """Hands ``params`` to all servers; nothing computed with the old weights is kept.

        Raises:
          EngineError: requests are in flight, a server refuses the weights, or it is gone for good.
        """
        if not self._quiet():
            raise EngineError(
                f"weights of version {version} arrived while {self._in_flight} requests are in flight.",
                "await or cancel all completions before updating the weights.",
            )
        # Unique even where a version is handed over again: a teacher's weights may come between two of the student's.
        self._updates += 1
        self._params, self._version, self._label = params, version, f"{self._run}-{self._updates}-v{version}"
        while True:
            for member in self._members:
                self._wait_for_revival(member)
            try:
                sglang_sync.push(self._transfer, params, self._label, self.servers)
                break
            except ServerLost as lost:
                self._revive_lost(lost)
        if self._reload is not None:
            self._compare(self._reload)
            self._reload = None
        on_all(
            [m.server for m in self._members if m.asleep],
            lambda s: s.post("/resume_memory_occupation", {"tags": ["kv_cache"]}),
        )
        for member in self._members:
            member.asleep = False

    def sleep(self) -> None:
        """Frees the memory of keys and values until the next ``update_weights``, if the engine was made for it."""
        if not self._sleep:
            return
        for member in self._members:
            self._wait_for_revival(member)
        awake = [m for m in self._members if not m.asleep]
        on_all([m.server for m in awake], sglang_sync.flush)
        on_all([m.server for m in awake], lambda s: s.post("/release_memory_occupation", {"tags": ["kv_cache"]}))
        for member in awake:
            member.asleep = True

    def health(self) -> dict[str, Any]:
        """A snapshot for logs."""
        return {
            "ok": not self._closed and all(m.error is None and not m.down for m in self._members),
            "engine": "sglang",
            "weight_version": self._version,
            "label": self._label,
            "sync": self._transfer.name,
            "in_flight": self._in_flight,
            "servers": [
                {"url": m.server.url, "restarts": m.restarts, "down": m.down, "error": m.error and m.error.found}
                for m in self._members
            ],
        }

    def close(self) -> None:
        """Ends own servers; requests in flight fail. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._spawn(self._stop()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        # Before the servers: a group for weights says goodbye to them.
        self._transfer.close()
        if self._reload is not None:
            self._reload.close()
        for member in self._members:
            if member.process is not None:
                member.process.stop()
            member.server.close()

    # ---- on the engine's own loop ----

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _stop(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    async def _generate(self, request: Request, prompt: np.ndarray) -> Completion:
        member = self._members[_hash(request.session or request.name) % len(self._members)]
        if member.down and member.revival is None:
            self._start_revival(member, "its process ended")
        if member.revival is not None:
            await asyncio.shield(member.revival)
        if member.error is not None:
            raise EngineError(member.error.found, member.error.fix)
        if not self._in_flight:
            self._busy_since = time.perf_counter()
        self._in_flight += 1
        try:
            return await self._ask(member, request, prompt)
        except CompletionLost:
            self.stats.extra["lost"] += 1
            raise
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self.stats.seconds += time.perf_counter() - self._busy_since

    async def _ask(self, member: Member, request: Request, prompt: np.ndarray) -> Completion:
        url, label, version = member.server.url, self._label, self._version
        asked = member.server.incarnation
        body = sglang_client.body(request, prompt, self._protocol.stop_ids, self._bias, label)
        try:
            response = await self._client.post(
                url + "/generate", json=body, headers=member.server.headers, timeout=self._limits.request_timeout_s
            )
            parsed = answer(url, "/generate", response)
            completion, cached = sglang_client.completion(
                parsed, request, self._protocol, label=label, version=version, url=url
            )
        except httpx2.TransportError as error:
            why = f"/generate gave no answer ({type(error).__name__})"
            if asked == member.server.incarnation:  # else it is the old process that did not answer
                self._start_revival(member, why)
            name = scheduler.request_label(request)
            raise CompletionLost(f"{name} was lost: {url}{why}.", "look at its log.") from error
        except ServerLost as error:
            raise CompletionLost(f"{scheduler.request_label(request)} was lost: {error.found}", error.fix) from error
        except sglang_client.WrongVersion as error:
            self.stats.extra["wrong_version"] += 1
            if asked == member.server.incarnation:
                self._start_revival(member, error.found)
            raise
        self.stats.prompt_tokens += len(prompt)
        self.stats.prefill_tokens += len(prompt) - cached
        self.stats.decode_tokens += len(completion.tokens)
        self.stats.extra["aborted"] += completion.finish == "abort"
        return completion

    # ---- servers that were lost ----

    def _start_revival(self, member: Member, why: str) -> None:
        """Everything that asks this server from now on waits until it is back."""
        if member.revival is None and member.error is None:
            member.revival = self._loop.create_task(self._revival(member, why))

    async def _revival(self, member: Member, why: str) -> None:
        try:
            await asyncio.to_thread(self._revive, member, why, True)
        except EngineError as error:
            member.error = error
        except Exception as error:
            # Whatever it is, those who wait must hear of it, and nobody may try it again for ever.
            member.error = EngineError(f"{member.server.url} was lost ({why}) and cannot be brought back: {error!r}")
        finally:
            member.revival = None

    def _revive(self, member: Member, why: str, weights: bool) -> None:
        """Brings one server back, with the current weights if ``weights``. Blocks.

        Raises:
          EngineError: it was lost too often, or does not come back.
        """
        while True:
            member.restarts += 1
            self.stats.extra["restarts"] += 1
            if member.restarts > self._limits.restarts:
                raise EngineError(
                    f"{member.server.url} was lost {member.restarts} times; the last time: {why}",
                    "see its log; rollout.sglang.restarts bounds how often it is brought back.",
                )
            if self._closed:
                raise EngineError("the engine is closed.", "make a new engine.")
            member.server.forget()
            member.asleep = False
            if member.process is not None:
                member.process.start()
                member.process.wait_ready()
            else:
                self._wait_for_remote(member.server)
            if not weights:
                return
            try:
                sglang_sync.push(self._transfer, self._params, self._label, [member.server])
                return
            except ServerLost as error:
                why = error.found

    def _wait_for_remote(self, server: Server) -> None:
        deadline = time.monotonic() + self._limits.start_timeout_s
        while not sglang_process.ready(server):
            if time.monotonic() > deadline or self._closed:
                raise EngineError(
                    f"{server.url} did not come back in {self._limits.start_timeout_s:g} s.",
                    "start the server again; the run goes on from its last checkpoint.",
                )
            time.sleep(1.0)

    def _quiet(self) -> bool:
        """Whether nothing is in flight; completions whose callers are gone get a moment to end."""
        deadline = time.monotonic() + _LEAVING_S
        while self._in_flight and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self._in_flight

    def _wait_for_revival(self, member: Member) -> None:
        async def wait() -> None:
            if member.revival is not None:
                await asyncio.shield(member.revival)

        self._spawn(wait()).result()
        if member.error is not None:
            raise EngineError(member.error.found, member.error.fix)

    def _revive_lost(self, lost: ServerLost) -> None:
        """Brings those servers back that do not answer; they get their weights with all the others."""
        gone = [m for m in self._members if m.down or not sglang_process.ready(m.server)]
        for member in gone or self._members:
            self._revive(member, lost.found, False)

    def _compare(self, reload: Transfer) -> None:
        """Compares what the servers hold with the same weights sent by ``reload``, which stay in the servers.

        Raises:
          EngineError: they differ.
        """
        sent = on_all(self.servers, sglang_sync.checksums)
        sglang_sync.push(reload, self._params, self._label, self.servers)
        loaded = on_all(self.servers, sglang_sync.checksums)
        reload.close()
        for server, first, second in zip(self.servers, sent, loaded):
            if first is not None and first != second:
                raise EngineError(
                    f"{server.url} holds other weights after sync by {self._transfer.name} than after a load from "
                    "disk.",
                    "use rollout.sglang.sync=disk and report the two checksums: "
                    f"{str(first)[:200]} and {str(second)[:200]}.",
                )


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")
