"""Worker process around one Java process with many simulators. Run by ``sdjax.envs.workers``.

Methods: ``reset`` (task_name, variation, simplification), ``step`` (action), ``close``, ``status``. What the simulator
or the installation refuses comes back as ``{"refused": text, "fix": text}`` and leaves the worker running. If Java
dies, this process ends with it; its sessions can be replayed on the next one.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import IO, Any

from sdjax.envs.scienceworld.config import episodes_in_heap
from sdjax.errors import EnvError, SdjaxError


class _Simulators:
    """One simulator for each session; those of closed sessions are used again, which is cheaper than making one."""

    def __init__(self, heap_mb: int):
        # Without py4j this import fails; that must become an answer, not a dead process.
        from sdjax.envs.scienceworld.simulator import Jvm, Simulator

        self._jvm = Jvm(heap_mb)
        self._make: Callable[[], Simulator] = lambda: Simulator(self._jvm)
        self._limit = episodes_in_heap(heap_mb)
        self._open: dict[int, Simulator] = {}
        self._free: list[Simulator] = []

    def handle(self, session: int, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "reset":
            return self._simulator(session).reset(**params)
        if method == "step":
            return self._open[session].step(params["action"])
        if method == "close":
            if session in self._open:
                self._free.append(self._open.pop(session))
            return {}
        if method == "status":
            return self._status()
        raise EnvError(f"unknown method {method!r}.", "use reset, step, close or status.")

    def _simulator(self, session: int) -> Any:
        if session not in self._open:
            if len(self._open) >= self._limit:
                raise EnvError(
                    f"{self._limit} episodes are played at once in one Java process; its memory holds no more.",
                    "raise env.workers or env.scienceworld.heap_mb.",
                )
            self._open[session] = self._free.pop() if self._free else self._make()
        return self._open[session]

    def _status(self) -> dict[str, Any]:
        """Process ids, CPU seconds and resident memory (MB) of this process and its Java; Linux only."""
        pids = [os.getpid(), self._jvm.process.pid]
        return {
            "pids": pids,
            "episodes": len(self._open),
            "cpu_s": sum(_cpu_seconds(pid) for pid in pids),
            "rss_mb": sum(_resident_mb(pid) for pid in pids),
        }


def _cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_mb(pid: int) -> float:
    with open(f"/proc/{pid}/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def serve(requests: IO[str], answers: IO[str], heap_mb: int) -> None:
    """Answers requests, one JSON object a line, until the input ends. Java starts with the first."""
    simulators: _Simulators | None = None
    for line in requests:
        request = json.loads(line)
        try:
            if simulators is None:
                simulators = _Simulators(heap_mb)
            result = simulators.handle(request["session"], request["method"], request["params"])
        except SdjaxError as error:
            result = {"refused": error.found, "fix": error.fix}
        except ImportError as error:
            result = {"refused": f"{error}.", "fix": "pip install 'sdjax[scienceworld]'."}
        answers.write(json.dumps({"id": request["id"], "result": result}) + "\n")
        answers.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sdjax.envs.scienceworld.worker", description=__doc__)
    parser.add_argument("--heap_mb", type=int, default=2048, help="memory limit of the Java process")
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the libraries print must not mix with the answers
    serve(sys.stdin, answers, arguments.heap_mb)


if __name__ == "__main__":
    main()
