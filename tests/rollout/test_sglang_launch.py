"""launch/sglang_server: the commands that it starts, and what it refuses."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sdjax.config import SglangConfig
from sdjax.rollout.engines import server_flags

SCRIPT = Path(__file__).parents[2] / "launch" / "sglang_server"


def launch(*flags, key=""):
    environment = {k: v for k, v in os.environ.items() if k != "SDJAX_SGLANG_KEY"}
    environment |= {"SDJAX_SGLANG_KEY": key} if key else {}
    return subprocess.run([SCRIPT, *flags], capture_output=True, text=True, env=environment, check=False, timeout=30)


def test_the_commands_are_those_of_a_run_that_starts_its_own_servers():
    done = launch(
        "--model=/a b", "--engines=2", "--tp=2", "--first-port=400", "--deterministic", "--print", "--", "--x=1"
    )
    first, second, config = done.stdout.splitlines()
    settings = SglangConfig(tensor_parallel=2, deterministic=True, flags=("--x=1",))
    for number, line in enumerate((first, second)):
        command = shlex.split(line)
        assert command[:3] == ["python3", "-m", "sglang.launch_server"]
        assert command[3:] == server_flags(settings, Path("/a b"), 400 + number, number, key="", seed=0)
    assert "urls = ('http://127.0.0.1:400','http://127.0.0.1:401',)" in config


def test_the_network_wants_a_key_which_is_never_shown():
    refused = launch("--model=/m", "--host=0.0.0.0", "--print")
    assert refused.returncode == 2 and "SDJAX_SGLANG_KEY" in refused.stderr
    done = launch("--model=/m", "--host=0.0.0.0", "--engines=1", "--print", key="secret")
    assert done.returncode == 0 and "--admin-api-key=***" in done.stdout and "secret" not in done.stdout


@pytest.mark.parametrize("flags", [(), ("--model=/m", "--engines=0"), ("--model=/m", "--tp=x"), ("--modle=/m",)])
def test_bad_flags(flags):
    assert launch(*flags, "--print").returncode == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_all_servers_end_with_the_script(tmp_path, number):
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import time; time.sleep(60)'\n")
    fake.chmod(0o755)
    script = subprocess.Popen(
        [SCRIPT, "--model=/m", "--engines=2", f"--python={fake}"],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        # A shell that was started in the background hands Ctrl-C on as ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while len(children := psutil.Process(script.pid).children()) < 2:
        time.sleep(0.02)
    script.send_signal(number)
    script.wait(20)
    assert not psutil.wait_procs(children, timeout=20)[1]
