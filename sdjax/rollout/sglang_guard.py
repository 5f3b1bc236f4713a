"""Runs a command and ends it, with all its children, when the process that started this is gone.

    python sglang_guard.py COMMAND ...

A killed trainer cannot end its servers, and a server that lives on holds a GPU. Standard input is a pipe from the
trainer: when it closes, for whatever reason, the command gets SIGTERM, and ten seconds later its process group SIGKILL.
Imports nothing of sdjax, so that it starts at once.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

_GRACE_S = 10.0


def main(command: list[str]) -> int:
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def end_with_parent() -> None:
        while os.read(0, 1024):
            pass
        child.terminate()  # it ends its children itself; one that is ended under it looks like a crash to it
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
        _kill(child.pid, signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    code = child.wait()
    _kill(child.pid, signal.SIGKILL)  # children that the command left behind
    return code if code >= 0 else 128 - code


def _kill(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
