"""A Slurm of one machine for tests: the real daemons, in a temporary folder, on ports of their own."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

# cred_expire: a job that was put back into the queue waits that long before it may start again.
_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=cred_expire=5,socket={folder}/munge.sock
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
JobRequeue=1
KillWait=5
MaxArraySize=1001
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no Slurm here, or an empty text."""
    if os.geteuid() != 0:
        return "the daemons of Slurm need root"
    absent = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    return f"{', '.join(absent)} not installed (launch/extras installs slurm)" if absent else ""


class Slurm:
    """A running cluster; ``call`` runs one of its commands and returns what it printed."""

    def __init__(self, folder: Path):
        self.folder = folder
        # Manifests of the tests have a root of their own, from which the package would not be found.
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": _PATH,
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }

    def call(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def states(self) -> dict[str, str]:
        """State of every element that is not finished and forgotten: ``{"7_0": "RUNNING"}``."""
        lines = self.call("squeue", "--noheader", "--array", "--states=all", "--format=%i %T").splitlines()
        return dict(line.split() for line in lines)

    def signal(self, element: str, arrived: Callable[[], bool]) -> None:
        """Sends SIGTERM to the shell of an element, as Slurm does when time is nearly over.

        In an array with a limit on running elements, scancel of Slurm 22.05 sends the signal, takes the answer for a
        refusal and sends it again after some seconds; it is stopped as soon as the signal was seen to arrive.
        """
        command = ["scancel", "--batch", "--signal=TERM", element]
        with subprocess.Popen(command, env=self.environment, stderr=subprocess.DEVNULL) as process:
            try:
                wait_until(arrived)
            finally:
                process.kill()


@contextlib.contextmanager
def cluster() -> Iterator[Slurm]:
    """Starts the daemons; they end with the block, and so do all jobs."""
    folder = Path(tempfile.mkdtemp(prefix="sdjax-slurm-"))  # the path of a socket must be short
    slurm = Slurm(folder)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    ports = [_free_port() for _ in range(2)]
    (folder / "slurm.conf").write_text(_CONF.format(host=socket.gethostname(), ports=ports, folder=folder))
    munge = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    daemons = [
        ["munged", "--foreground", "--force", *(f"--{key}={folder / name}" for key, name in munge.items())],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D"],
    ]
    with (folder / "daemons.log").open("w") as log, contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for command in daemons:
            process = subprocess.Popen(command, env=slurm.environment, stdout=log, stderr=log)
            stack.callback(_end, process)
            if command[0] == "munged":
                wait_until(lambda: (folder / "munge.sock").exists(), process)
        wait_until(lambda: "idle" in _try(slurm, "sinfo", "--noheader", "--format=%t"), process)
        stack.callback(_cancel, slurm)
        yield slurm


def _cancel(slurm: Slurm) -> None:
    _try(slurm, "scancel", "--full", "--signal=KILL", "--user=root")
    _try(slurm, "scancel", "--user=root")
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: not _try(slurm, "squeue", "--noheader"), seconds=30)


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _try(slurm: Slurm, *command: str) -> str:
    return subprocess.run(command, env=slurm.environment, capture_output=True, text=True).stdout


def wait_until(condition: Callable[[], bool], process: subprocess.Popen | None = None, seconds: float = 170.0) -> None:
    """Waits; ends at once if ``process`` does."""
    end = time.monotonic() + seconds
    while not condition():
        if process is not None and process.poll() is not None:
            raise ChildProcessError(f"{process.args} ended with {process.returncode}")
        if time.monotonic() > end:
            raise TimeoutError("not within the time")
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
