"""Supervised worker processes for engines that must not live in the trainer's process.

A worker is a spawned Python process (``python -m module``) that reads one JSON request a line from its standard input
and writes one JSON answer a line to its standard output. Nothing is pickled and nothing is forked. Every call has a
time limit. A worker that dies, hangs or answers garbage is killed and the call raises EnvError; its other sessions
are lost with it and say so at their next call. The next session starts a fresh process, so a caller recovers by
retrying the episode on a fresh environment.

Request: ``{"id": n, "session": s, "method": name, "params": {...}}``. Answer: ``{"id": n, "result": {...}}`` or
``{"id": n, "error": text}``. An error answer leaves the worker running.
"""

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import sdjax
from sdjax.errors import ConfigError, EnvError

_MAX_ANSWER_BYTES = 16 * 1024 * 1024
_MAX_LOG_BYTES = 2000
_PACKAGE_ROOT = str(Path(sdjax.__file__).resolve().parent.parent)


class _Process:
    """One worker process. Its calls run one after the other on one thread, so asyncio is never blocked."""

    def __init__(self, command: Sequence[str], timeout_s: float):
        self._command = list(command)
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sdjax-worker")
        self._numbers = itertools.count()
        self._popen: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # its temporary files, gone with it
        self._log: IO[bytes] | None = None
        self.generation = 0  # how often a process was started here; a session belongs to one of them
        self.sessions = 0
        self._closed = False

    async def call(self, session: int, generation: int | None, method: str, params: dict[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._call, session, generation, method, params)

    def _call(self, session: int, generation: int | None, method: str, params: dict[str, Any]) -> Any:
        """Returns (generation, result). ``generation`` None opens a session, on a fresh process if there is none."""
        if self._popen is None or self._popen.poll() is not None:
            if generation is not None:
                raise self._lost(f"a worker process ended before {method!r}", kill=True)
            self._start()
        elif generation is not None and generation != self.generation:
            raise self._lost(f"the worker process of this episode was replaced before {method!r}", kill=False)
        number = next(self._numbers)
        request = {"id": number, "session": session, "method": method, "params": params}
        answer = self._exchange(json.dumps(request).encode() + b"\n", method)
        if not isinstance(answer, dict) or answer.get("id") != number or not ({"result", "error"} & answer.keys()):
            raise self._lost(f"a worker answered garbage to {method!r}: {str(answer)[:200]!r}", kill=True)
        if "error" in answer:
            raise EnvError(f"a worker refused {method!r}: {str(answer['error'])[:2000]}", "see the message above.")
        if not isinstance(answer["result"], dict):
            raise self._lost(f"a worker answered garbage to {method!r}: {str(answer)[:200]!r}", kill=True)
        return self.generation, answer["result"]

    def _exchange(self, request: bytes, method: str) -> Any:
        popen = self._popen
        assert popen is not None and popen.stdin is not None and popen.stdout is not None
        expired = threading.Event()

        def expire() -> None:
            # Killing the process ends a blocked write as well as a blocked read.
            expired.set()
            popen.kill()

        timer = threading.Timer(self._timeout_s, expire)
        timer.daemon = True
        timer.start()
        line = b""
        try:
            popen.stdin.write(request)
            popen.stdin.flush()
            line = popen.stdout.readline(_MAX_ANSWER_BYTES)
        except OSError:
            line = b""  # a broken pipe: the process is gone; the cause is told apart below
        finally:
            timer.cancel()
        if expired.is_set():
            raise self._lost(f"a worker gave no answer to {method!r} within {self._timeout_s:g} s", kill=True)
        if not line.endswith(b"\n"):
            raise self._lost(f"a worker died during {method!r}", kill=True)
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise self._lost(f"a worker answered garbage to {method!r}: {line[:200]!r}", kill=True) from None

    def _start(self) -> None:
        self._stop()
        # Engines leave large files behind when they are killed: each process gets a folder that goes with it.
        self._folder = tempfile.TemporaryDirectory(prefix="sdjax-worker-", ignore_cleanup_errors=True)
        self._log = open(Path(self._folder.name) / "stderr", "w+b")  # noqa: SIM115 (closed in _stop)
        paths = [_PACKAGE_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": self._folder.name}
        self._popen = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the trainer, which then closes its workers in order
        )
        self.generation += 1

    def _lost(self, found: str, *, kill: bool) -> EnvError:
        tail = ""
        if kill:
            self._stop_process()
            tail = self._log_tail()
        fix = (
            "retry on a fresh environment; if it repeats, raise env.worker_timeout_s or look at the worker's last words"
        )
        return EnvError(f"{found}.", fix + (f": {tail}" if tail else "."))

    def _log_tail(self) -> str:
        if self._log is None:
            return ""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _MAX_LOG_BYTES))
        return self._log.read().decode(errors="replace").strip()

    def _stop_process(self) -> None:
        if self._popen is None:
            return
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue  # unsent bytes to a dead process: nothing is lost
        self._popen = None

    def _stop(self) -> None:
        self._stop_process()
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def close(self) -> None:
        """Ends the process. Closing twice is allowed."""
        if self._closed:
            return
        self._closed = True
        popen = self._popen
        if popen is not None:
            popen.kill()  # a call that is under way fails at once instead of keeping us waiting
        self._thread.submit(self._stop).result()
        self._thread.shutdown()


class WorkerSession:
    """One environment inside a worker. The first call opens it; after an EnvError it is lost: take a new session."""

    def __init__(self, process: _Process, number: int):
        self._process = process
        self._number = number
        self._generation: int | None = None
        self._closed = False
        process.sessions += 1

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls ``method`` in the worker and returns its result (a JSON object).

        Raises:
          EnvError: the worker died, hung, answered garbage or refused.
        """
        if self._closed:
            raise EnvError(f"{method!r} was called on a closed session.", "take a new session from the pool.")
        self._generation, result = await self._process.call(self._number, self._generation, method, params)
        return result

    async def close(self) -> None:
        """Frees the environment in the worker. A session whose worker is gone closes silently."""
        if self._closed:
            return
        if self._generation is not None:
            with contextlib.suppress(EnvError):  # gone with its process
                await self.call("close")
        self._closed = True
        self._process.sessions -= 1


class WorkerPool:
    """``workers`` processes that share the sessions evenly. Processes start when first used.

    Args:
      module: module run as ``python -m module``, or a full command line as a list.
      timeout_s: limit of every call, the start of the process included.
    """

    def __init__(self, module: str | Sequence[str], workers: int, timeout_s: float):
        if workers < 1 or timeout_s <= 0:
            raise ConfigError(
                f"env.workers = {workers}, env.worker_timeout_s = {timeout_s}.",
                "use at least one worker and a positive time limit.",
            )
        command = [sys.executable, "-m", module] if isinstance(module, str) else list(module)
        self._processes = [_Process(command, timeout_s) for _ in range(workers)]
        self._numbers = itertools.count()

    def session(self) -> WorkerSession:
        """A new session on the process that has the fewest."""
        process = min(self._processes, key=lambda candidate: candidate.sessions)
        return WorkerSession(process, next(self._numbers))

    def close(self) -> None:
        """Ends all processes. Sessions that are still open are lost."""
        for process in self._processes:
            process.close()
