"""Supervision of worker processes, with a worker that misbehaves on demand."""

import asyncio
import sys
from pathlib import Path

import pytest

from sdjax.envs.workers import WorkerPool
from sdjax.errors import ConfigError, EnvError

WORKER = """
import json, os, sys, time
for line in sys.stdin:
    request = json.loads(line)
    method, answer = request["method"], {"id": request["id"], "result": {"pid": os.getpid(), **request["params"]}}
    if method == "die":
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)
    if method == "hang":
        time.sleep(600)
    if method == "half":
        sys.stdout.write('{"id": '); sys.stdout.flush(); os._exit(0)
    if method == "garbage":
        sys.stdout.write("Segmentation fault\\n"); sys.stdout.flush(); continue
    if method == "bytes":
        sys.stdout.buffer.write(b"\\xff\\xfe\\n"); sys.stdout.flush(); continue
    if method == "deep":
        sys.stdout.write("[" * 100000 + "\\n"); sys.stdout.flush(); continue
    if method == "litter":
        open(os.path.join(os.environ["TMPDIR"], "large file"), "w").close()
        answer["result"]["folder"] = os.environ["TMPDIR"]
    if method == "list":
        answer["result"] = [1]
    if method == "wrong id":
        answer["id"] = -1
    if method == "nothing":
        del answer["result"]
    if method == "refuse":
        answer = {"id": request["id"], "error": "no such game"}
    sys.stdout.write(json.dumps(answer) + "\\n"); sys.stdout.flush()
"""


@pytest.fixture
def make_pool():
    pools = []

    def make(workers: int = 1, timeout_s: float = 20.0) -> WorkerPool:
        pools.append(WorkerPool([sys.executable, "-c", WORKER], workers, timeout_s))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_calls_carry_any_json_text(make_pool):
    async def play():
        session = make_pool().session()
        text = 'tab\t newline\n nul\x00 quote" \U0001f600 ' + "x" * 300_000
        assert (await session.call("echo", action=text))["action"] == text

    asyncio.run(play())


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("die", "died during 'die'"),
        ("half", "died during 'half'"),
        ("garbage", "garbage"),
        ("bytes", "garbage"),
        ("deep", "garbage"),
        ("list", "garbage"),
        ("wrong id", "garbage"),
        ("nothing", "garbage"),
    ],
)
def test_a_failing_worker_is_an_env_error_and_a_fresh_session_works(make_pool, method, message):
    async def play():
        pool = make_pool()
        session = pool.session()
        before = (await session.call("echo"))["pid"]
        with pytest.raises(EnvError, match=message):
            await session.call(method)
        with pytest.raises(EnvError, match="worker process"):
            await session.call("echo")  # the old session stays lost
        await session.close()
        fresh = pool.session()
        assert (await fresh.call("echo"))["pid"] != before

    asyncio.run(play())


def test_the_last_words_of_a_worker_are_in_the_error(make_pool):
    with pytest.raises(EnvError, match="last words"):
        asyncio.run(make_pool().session().call("die"))


def test_a_hanging_worker_is_ended_at_the_time_limit(make_pool):
    async def play():
        pool = make_pool(timeout_s=1.0)
        session = pool.session()
        with pytest.raises(EnvError, match="within 1 s"):
            await session.call("hang")
        return (await pool.session().call("echo"))["pid"]

    assert asyncio.run(play())


def test_a_worker_that_stops_reading_is_ended_too(make_pool):
    pool = WorkerPool([sys.executable, "-c", "import time; time.sleep(600)"], 1, 1.0)
    with pytest.raises(EnvError, match="within 1 s"):
        asyncio.run(pool.session().call("echo", action="x" * 5_000_000))
    pool.close()


def test_a_refusal_leaves_the_worker_and_other_sessions_alone(make_pool):
    async def play():
        pool = make_pool()
        one, two = pool.session(), pool.session()
        pids = {(await one.call("echo"))["pid"], (await two.call("echo"))["pid"]}
        with pytest.raises(EnvError, match="no such game"):
            await one.call("refuse")
        pids |= {(await one.call("echo"))["pid"], (await two.call("echo"))["pid"]}
        assert len(pids) == 1

    asyncio.run(play())


def test_sessions_of_a_dead_worker_all_learn_of_it_but_other_workers_live(make_pool):
    async def play():
        pool = make_pool(workers=2)
        sessions = [pool.session() for _ in range(4)]
        pids = [(await session.call("echo"))["pid"] for session in sessions]
        assert len(set(pids)) == 2 and sorted(map(pids.count, set(pids))) == [2, 2]
        with pytest.raises(EnvError):
            await sessions[0].call("die")
        fresh = pool.session()
        assert (await fresh.call("echo"))["pid"] not in pids[:1]
        for session, pid in list(zip(sessions, pids, strict=True))[1:]:
            if pid == pids[0]:
                with pytest.raises(EnvError, match=r"replaced|ended"):
                    await session.call("echo")
            else:
                assert (await session.call("echo"))["pid"] == pid

    asyncio.run(play())


def test_one_pool_serves_several_event_loops_and_waits_do_not_block(make_pool):
    pool = make_pool(workers=2)
    session = pool.session()
    first = asyncio.run(session.call("echo"))["pid"]
    assert asyncio.run(session.call("echo"))["pid"] == first

    async def together():
        return await asyncio.gather(*(pool.session().call("echo", n=n) for n in range(30)))

    assert [answer["n"] for answer in asyncio.run(together())] == list(range(30))


def test_a_program_that_does_not_exist_or_cannot_start(make_pool):
    pool = WorkerPool([sys.executable, "-m", "sdjax.no_such_module"], 1, 20.0)
    with pytest.raises(EnvError, match="no_such_module"):
        asyncio.run(pool.session().call("echo"))
    pool.close()


def test_closing_does_not_wait_for_a_hanging_call(make_pool):
    async def play():
        pool = WorkerPool([sys.executable, "-c", WORKER], 1, 600.0)
        session = pool.session()
        await session.call("echo")
        call = asyncio.create_task(session.call("hang"))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(pool.close)
        with pytest.raises(EnvError, match="died"):
            await call

    asyncio.run(play())


def test_temporary_files_of_a_worker_go_with_it(make_pool):
    pool = make_pool()
    folder = Path(asyncio.run(pool.session().call("litter"))["folder"])
    assert (folder / "large file").exists()
    pool.close()
    assert not folder.exists()


def test_closed_sessions_and_wrong_settings(make_pool):
    session = make_pool().session()
    asyncio.run(session.close())
    with pytest.raises(EnvError, match="closed"):
        asyncio.run(session.call("echo"))
    for workers, timeout_s in ((0, 1.0), (1, 0.0)):
        with pytest.raises(ConfigError, match=r"env\.worker"):
            WorkerPool("x", workers, timeout_s)
