"""Several processes of one run: how they find each other, and barriers that have a name and an end.

A run on one host is one process and never touches ``jax.distributed``. A run spans several processes where

* the flags ``--coordinator=HOST:PORT --processes=N --process=I`` say so,
* the process is one of several tasks of a Slurm step (``srun``): JAX reads Slurm's own variables, or
* ``SDJAX_COORDINATOR`` and ``SDJAX_PROCESSES`` are set, as in the JobSets of ``--study=launch``; the number of the
  process is then Kubernetes' ``JOB_COMPLETION_INDEX``.

One process may drive all accelerators of its host. JAX's rule for Slurm is one accelerator a task; with one task a node
the process takes all that the step was given.
"""

import hashlib
import itertools
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

import jax

from sdjax import interrupt
from sdjax.errors import ConfigError, SdjaxError

MEETING_S = 3600.0  # the slowest process of a run may be that far behind the first at the end of a step
_counts: dict[str, itertools.count] = {}


class ProcessesError(SdjaxError):
    """The processes of a run did not meet."""

    boundary = "processes"


def initialize(coordinator: str = "", processes: int = 0, process: int = -1, *, timeout_s: int = 300) -> bool:
    """Joins this process to the others of its run; must come before the first use of a JAX device.

    Args:
      coordinator: host and port of process 0.
      processes: how many there are; 0: what the environment says, and one if it says nothing.
      process: number of this one, from 0.
      timeout_s: how long to wait for the others.

    Returns:
      Whether the run spans several processes.

    Raises:
      ConfigError: the three arguments, or the variables that stand for them, do not fit together.
      ProcessesError: the coordinator cannot be started. If the others do not come in time, JAX itself ends the process
        with a message (exit code 134), after the line that is printed here.
    """
    arguments = _arguments(coordinator, processes, process, os.environ)
    if arguments is None:
        return False
    print(f"waiting up to {timeout_s} s for the other processes of the run: {_show(arguments)}", file=sys.stderr)
    # XLA's own preemption service would take SIGTERM over from sdjax.interrupt.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(**arguments, initialization_timeout=timeout_s)
    except (RuntimeError, ValueError) as error:
        raise ProcessesError(
            f"the processes of the run could not meet ({_show(arguments)}): {error}",
            "start every process with the same coordinator and number of processes; the coordinator's port must be "
            "reachable from all hosts.",
        ) from error
    return jax.process_count() > 1


def several() -> bool:
    """Whether the run spans several processes."""
    return _client() is not None


def is_first() -> bool:
    """Whether this is the process that speaks and writes for all."""
    return not several() or jax.process_index() == 0


def barrier(name: str, *, timeout_s: float) -> None:
    """Waits until every process of the run is here; returns at once where there is one.

    Raises:
      ProcessesError: some process did not come within ``timeout_s`` seconds, or is gone.
    """
    client = _client()
    if client is None:
        return
    # An id is good for one meeting.
    key = f"sdjax/{name}/{next(_counts.setdefault(name, itertools.count()))}"
    try:
        client.wait_at_barrier(key, int(timeout_s * 1000))
    except RuntimeError as error:
        raise ProcessesError(
            f"barrier {name!r}: not every process of the run was there within {timeout_s:g} s "
            f"(this is process {jax.process_index()} of {jax.process_count()}): {error}",
            "look at the last lines of the other processes' output; start the same command again on all of them.",
        ) from error


def any_process(name: str, flag: bool, *, timeout_s: float) -> bool:
    """Whether any process of the run says so; all of them get the same answer.

    Raises:
      ProcessesError: as ``barrier``.
    """
    client = _client()
    if client is None:
        return flag
    prefix = f"sdjax/any/{name}/{next(_counts.setdefault(f'any/{name}', itertools.count()))}/"
    if flag:
        client.key_value_set(f"{prefix}{jax.process_index()}", "1")
    barrier(name, timeout_s=timeout_s)  # after it nobody says more, so that all read the same
    return bool(client.key_value_dir_get(prefix))


def agree(name: str, text: str, *, timeout_s: float) -> None:
    """Checks that all processes of the run hold the same text.

    Raises:
      ProcessesError: they do not; or as ``barrier``.
    """
    client = _client()
    if client is None:
        return
    prefix = f"sdjax/agree/{name}/{next(_counts.setdefault(f'agree/{name}', itertools.count()))}/"
    client.key_value_set(f"{prefix}{jax.process_index()}", hashlib.sha256(text.encode()).hexdigest())
    barrier(name, timeout_s=timeout_s)
    found = dict(client.key_value_dir_get(prefix))
    if len(set(found.values())) > 1:
        groups: dict[str, list[str]] = {}
        for key, digest in sorted(found.items()):
            groups.setdefault(digest, []).append(key.removeprefix(prefix))
        parts = "; ".join(f"processes {', '.join(members)}: {digest[:8]}" for digest, members in groups.items())
        raise ProcessesError(
            f"{name}: the processes of the run do not agree ({parts}).",
            "start all of them with the same command, code and data.",
        )


class Channel:
    """Text from each process to all others, over JAX's coordination service; see ``sdjax.rollout.shared``."""

    def __init__(self):
        self._client = _client()
        self.process, self.processes = jax.process_index(), jax.process_count()

    def tell(self, topic: str, number: int, text: str) -> None:
        self._client.key_value_set(f"sdjax/{topic}/{self.process}/{number}", text)

    def hear(self, topic: str, process: int, number: int, timeout_s: float) -> str | None:
        """What ``process`` told under this number; None if it has not within the time.

        Raises:
          ProcessesError: the coordinator is gone.
        """
        try:
            return self._client.blocking_key_value_get(f"sdjax/{topic}/{process}/{number}", int(timeout_s * 1000))
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise ProcessesError(
                f"process {process} of the run cannot be heard any more: {error}",
                "look at the last lines of the other processes' output; start the same command again on all of them.",
            ) from error

    def meet(self, name: str, timeout_s: float) -> None:
        barrier(name, timeout_s=timeout_s)

    def forget(self, topic: str) -> None:
        self._client.key_value_delete(f"sdjax/{topic}/")


def interruption() -> int | None:
    """Number of the signal by which this or another process of the run was asked to end; None if there is none.

    All processes get an answer at the same place, so that they stop together.
    """
    number = interrupt.received()
    asked = any_process("interrupt", number is not None, timeout_s=MEETING_S)
    return number or signal.SIGTERM if asked else None


def _client() -> Any:
    """JAX's coordination client, None in a run of one process. JAX has no public barrier with a time limit."""
    from jax._src import distributed

    return distributed.global_state.client


def _arguments(coordinator: str, processes: int, process: int, environment: Mapping[str, str]) -> dict[str, Any] | None:
    """What ``jax.distributed.initialize`` is called with; None for a run of one process."""
    if coordinator or processes or process >= 0:
        return _explicit(coordinator, processes, process, "--coordinator, --processes and --process")
    if "SDJAX_COORDINATOR" in environment or "SDJAX_PROCESSES" in environment:
        found = [environment.get(n, "") for n in ("SDJAX_PROCESSES", "JOB_COMPLETION_INDEX")]
        number, index = (int(text) if text.isdecimal() else -1 for text in found)
        names = "SDJAX_COORDINATOR, SDJAX_PROCESSES and JOB_COMPLETION_INDEX"
        return _explicit(environment.get("SDJAX_COORDINATOR", ""), number, index, names)
    # Slurm sets the number of tasks in a batch script too; only a step has tasks that run beside each other.
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in environment:
        one_a_node = environment["SLURM_STEP_NUM_TASKS"] == environment.get("SLURM_STEP_NUM_NODES")
        gpus = int(environment.get("SLURM_GPUS_ON_NODE", "0"))
        devices = list(range(gpus)) if one_a_node and gpus else None
        return {"cluster_detection_method": "slurm", "local_device_ids": devices}
    return None


def _explicit(coordinator: str, processes: int, process: int, names: str) -> dict[str, Any] | None:
    host, _, port = coordinator.rpartition(":")
    if not (host and port.isdecimal() and processes >= 1 and 0 <= process < processes):
        raise ConfigError(
            f"{names} do not fit together: coordinator {coordinator!r}, {processes} processes, process {process}.",
            "give HOST:PORT of process 0, the number of processes, and a number from 0 below it.",
        )
    if processes == 1:
        return None
    return {
        "coordinator_address": coordinator,
        "num_processes": processes,
        "process_id": process,
        "cluster_detection_method": "deactivate",  # else JAX would ask for one device a process under Slurm
    }


def _show(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in arguments.items())
