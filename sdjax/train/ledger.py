"""Where the wall time of a run goes.

The clock is always in exactly one phase, so the phases of a step add up to its wall time by construction. Compilation
is taken out of the phase in which it happened. Totals are part of every checkpoint, so cost survives restarts.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import jax

NET: tuple[str, ...] = ("rollout", "teacher", "score", "update", "sync", "other")  # net training time, section 8
PHASES: tuple[str, ...] = (*NET, "validation", "save", "compile", "startup")
# Tracing is left out: its events nest, and would be counted twice.
_COMPILE_EVENTS = (
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


class Ledger:
    """Seconds by phase, for the current step and in total.

    Args:
      devices: accelerators charged for every second.
      attempt: number of this start of the run, from 1.
      totals: totals of earlier attempts, from the checkpoint.
    """

    def __init__(self, *, devices: int = 1, attempt: int = 1, totals: dict[str, float] | None = None):
        self.devices = devices
        self.attempt = attempt
        self.totals = dict.fromkeys(PHASES, 0.0) | dict(totals or {})
        self.records: list[dict[str, Any]] = []
        self._step = dict.fromkeys(PHASES, 0.0)
        self._phase = "startup"
        self._mark = time.perf_counter()
        self._compiled = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def begin(self) -> None:
        """Ends the start-up phase."""
        self._switch("other")

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charges the time inside the block to ``name``; blocks may nest (the outer one is paused)."""
        outer, start = self._phase, time.time()
        before = self._step[name]
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)
            self.records.append(
                {
                    "attempt": self.attempt,
                    "phase": name,
                    "seconds": round(self._step[name] - before, 6),
                    "start": round(start, 3),
                    "end": round(time.time(), 3),
                    "devices": self.devices,
                }
            )

    def close_step(self, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Ends a step: returns its seconds by phase and its ledger lines, and starts the next one."""
        self._switch("other")
        seconds = dict(self._step)
        for phase, value in seconds.items():
            self.totals[phase] += value
        lines = [{"step": step, **record} for record in self.records]
        for phase in ("startup", "other", "compile"):
            if seconds[phase]:
                lines.append(
                    {
                        "step": step,
                        "attempt": self.attempt,
                        "phase": phase,
                        "seconds": round(seconds[phase], 6),
                        "devices": self.devices,
                    }
                )
        self.records = []
        self._step = dict.fromkeys(PHASES, 0.0)
        return seconds, lines

    def running_totals(self) -> dict[str, float]:
        """Totals including the step that is still open, for a checkpoint written inside it."""
        self._switch(self._phase)
        return {phase: self.totals[phase] + self._step[phase] for phase in PHASES}

    def net_seconds(self) -> float:
        return sum(self.totals[phase] for phase in NET)

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _switch(self, name: str) -> None:
        now = time.perf_counter()
        elapsed = now - self._mark
        compiled = min(self._compiled, elapsed)
        self._step[self._phase] += elapsed - compiled
        self._step["compile"] += compiled
        self._phase, self._mark, self._compiled = name, now, 0.0

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        if event in _COMPILE_EVENTS:
            self._compiled += duration_secs
