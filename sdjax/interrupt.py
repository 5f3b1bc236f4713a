"""SIGTERM, SIGUSR1 and Ctrl-C: a run stops at its next safe point, and at the latest when its grace is over.

Signals belong to the process, so their state lives in this module. While nobody listens (tests, notebooks, reports)
``check`` does nothing. The run itself calls ``check`` where nothing is half done: before each turn of an episode and
between the phases of a step. What was begun is done again by the next start.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator

from sdjax.errors import CTRL_C_EXIT_CODE, INTERRUPTED_EXIT_CODE, SdjaxError

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Interrupted(SdjaxError):
    """The process was asked to end. Not a failure: the same command goes on."""

    boundary = "interrupted"

    def __init__(self, number: int):
        self.number = number
        super().__init__(
            f"{signal.Signals(number).name} was received.", "start the same command again; it goes on from here."
        )

    def __reduce__(self):
        return (type(self), (self.number,))

    @property
    def exit_code(self) -> int:
        return exit_code(self.number)


class _Listener:
    """Watches the signals from a thread of its own: XLA may hold the main thread for minutes."""

    def __init__(self, grace_s: float, alone: bool):
        self.received: int | None = None
        self.alone = alone
        self._grace_s = grace_s
        self._over = threading.Event()
        self._inbox, self._outbox = socket.socketpair()
        self._outbox.setblocking(False)
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        self._previous_fd = signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="sdjax-signals", daemon=True)
        self._thread.start()

    def _handle(self, number: int, _: object) -> None:
        """Python's own handler; the thread has the byte already. A second Ctrl-C ends the process at once."""
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def _watch(self) -> None:
        number = 0
        while number not in _SIGNALS:  # the process may have handlers for other signals too
            received = self._inbox.recv(1)
            if not received:
                return
            number = received[0]
        self.received = number
        _say(f"{signal.Signals(number).name}: stopping at the next safe point, within {self._grace_s:g} s.")
        if not self._over.wait(self._grace_s):
            _say("the grace is over; what was done since the last checkpoint is done again by the next start.")
            os._exit(exit_code(number))

    def close(self) -> None:
        self._over.set()
        signal.set_wakeup_fd(self._previous_fd)
        for number, previous in self._previous.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._outbox.close()
        self._thread.join()
        self._inbox.close()


_listener: _Listener | None = None


@contextlib.contextmanager
def listen(grace_s: float, *, alone: bool = True) -> Iterator[None]:
    """Takes the signals over.

    grace_s: seconds after which the process ends wherever it is. alone: there is no other process that waits for this
    one within a step; if there is, the run must ask ``received`` and stop where all of them can.
    """
    global _listener
    _listener = _Listener(grace_s, alone)
    try:
        yield
    finally:
        _listener.close()
        _listener = None


def received() -> int | None:
    """Number of the signal that asked the process to end, or None."""
    return _listener.received if _listener is not None else None


def check() -> None:
    """A safe point. Raises Interrupted if the process was asked to end."""
    number = received()
    if number is not None and _listener is not None and _listener.alone:
        raise Interrupted(number)


def exit_code(number: int) -> int:
    return CTRL_C_EXIT_CODE if number == signal.SIGINT else INTERRUPTED_EXIT_CODE


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
