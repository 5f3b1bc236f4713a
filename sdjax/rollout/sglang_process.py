"""One SGLang server as a child process: started, watched and ended."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from sdjax.errors import EngineError
from sdjax.rollout import sglang_guard
from sdjax.rollout.sglang_http import Server, ServerLost

_POLL_S = 0.25
_TAIL_LINES, _TAIL_CHARS = 25, 3000
_STOP_S = 15.0


class ServerProcess:
    """Args:
    command: with all flags. server: where it will answer. log: its output is appended to this file.
    timeout_s: from start to ready.
    """

    def __init__(self, command: Sequence[str], server: Server, log: Path, *, timeout_s: float):
        self._command, self._server, self._log, self._timeout_s = list(command), server, log, timeout_s
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the server and returns at once.

        Raises:
          EngineError: the command does not exist or its port is taken.
        """
        self.stop()
        if shutil.which(self._command[0]) is None:
            raise EngineError(
                f"the command {self._command[0]!r} of rollout.sglang.command does not exist.",
                "install SGLang there, or use command=('launch/sglang_cpu',) on a machine without GPU.",
            )
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            log.write(f"$ {' '.join(_without_key(self._command))}\n".encode())
            log.flush()
            # The guard ends the server when this process is gone; its own session keeps Ctrl-C away from the server.
            self._popen = subprocess.Popen(
                [sys.executable, "-I", sglang_guard.__file__, *self._command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )

    @property
    def alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def pid(self) -> int | None:
        """Of the guard, whose only child is the server."""
        return None if self._popen is None else self._popen.pid

    def wait_ready(self) -> None:
        """Blocks until the server takes requests.

        Raises:
          EngineError: it ended or the time is over; the end of its log is in the error.
        """
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            if not self.alive:
                raise EngineError(
                    f"the SGLang server for {self._server.url} ended while it started, with exit code "
                    f"{None if self._popen is None else self._popen.returncode}. The end of {self._log}:\n"
                    f"{self.tail()}",
                    "see the log; out of memory: lower --mem-fraction-static in rollout.sglang.flags.",
                )
            if ready(self._server):
                return
            time.sleep(_POLL_S)
        self.stop()
        raise EngineError(
            f"the SGLang server for {self._server.url} was not ready after {self._timeout_s:g} s. "
            f"The end of {self._log}:\n{self.tail()}",
            "see the log, or raise rollout.sglang.start_timeout_s.",
        )

    def tail(self) -> str:
        """The last lines of the log."""
        with contextlib.suppress(OSError), self._log.open(encoding="utf-8", errors="replace") as log:
            return "".join(deque(log, _TAIL_LINES))[-_TAIL_CHARS:].rstrip()
        return "(there is no log)"

    def stop(self) -> None:
        """Ends the server and everything it started. May be called twice."""
        if self._popen is None:
            return
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):
            self._popen.stdin.close()
        try:
            self._popen.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._popen = None


def ready(server: Server) -> bool:
    """Whether the server takes requests. The health routes are not asked: they generate a token and wait a second."""
    try:
        server.get("/ready", timeout_s=5.0)
    except ServerLost:
        return False
    except EngineError:  # versions without this route answer nothing before they are ready
        return server.answers()
    return True


def check_port(host: str, port: int) -> None:
    """Raises EngineError where another process listens."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EngineError(
                f"port {port} of {host} cannot be used for an SGLang server: {error.strerror}.",
                "end the process that has it, or set rollout.sglang.port (0: any free port).",
            ) from error


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _without_key(command: Sequence[str]) -> list[str]:
    return [re.sub(r"(api-key=).*", r"\1***", part) for part in command]
