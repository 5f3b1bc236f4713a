"""The SGLang engine against a server that misbehaves on demand. What a real one does is in tests/sglang."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import fake_sglang
import jax
import numpy as np
import psutil
import pytest
from fake_sglang import STOP, VOCAB, Fake, draw

from sdjax.config import SglangConfig, load
from sdjax.errors import CompletionLost, ConfigError, EngineError
from sdjax.models.config import ModelConfig
from sdjax.models.dense import DenseModel
from sdjax.rollout import engines, sglang_guard, sglang_sync
from sdjax.rollout.engine import Completion, Request, SamplingParams
from sdjax.rollout.sglang import Limits, Member, SglangEngine
from sdjax.rollout.sglang_client import Protocol
from sdjax.rollout.sglang_http import Server
from sdjax.rollout.sglang_process import ServerProcess
from sdjax.rollout.sglang_sync import DiskTransfer
from tests.methods.corridor import WIN, make_group, make_player

MODEL = DenseModel(
    ModelConfig(
        model_type="llama", vocab_size=VOCAB, hidden_size=8, intermediate_size=8, layers=1, heads=1, kv_heads=1,
        head_dim=8, max_positions=512, tie_embeddings=True,
    )
)  # fmt: skip
PARAMS = MODEL.init(jax.random.key(0))
PROTOCOL = Protocol((STOP,), np.arange(VOCAB) < VOCAB - 1)
FAKE = [sys.executable, "-I", fake_sglang.__file__]


@pytest.fixture
def fake():
    with Fake() as server:
        yield server


def make_engine(members, folder, **options):
    limits = Limits(256, request_timeout_s=2.0, start_timeout_s=5.0, restarts=options.pop("restarts", 3))
    members = [m if isinstance(m, Member) else Member(Server(m.url), None) for m in members]
    transfer = options.pop("transfer", None) or DiskTransfer(MODEL, "bfloat16", folder)
    return SglangEngine(members, transfer, PARAMS, protocol=PROTOCOL, limits=limits, **options)


@pytest.fixture
def engine(fake, tmp_path):
    made = make_engine([fake], tmp_path)
    yield made
    made.close()


def request(seed=4, prompt=(5, 6, 7), *, new=8, temperature=1.0, session=""):
    return Request(np.array(prompt), seed, SamplingParams(temperature, new), f"r{seed}", session)


def ask(engine, *requests):
    async def all_of_them():
        return await asyncio.gather(*(engine.generate(r) for r in requests), return_exceptions=True)

    return asyncio.run(all_of_them())


def test_a_request_says_everything_and_an_answer_is_a_completion(engine, fake):
    (done,) = ask(engine, request(4, temperature=0.0))
    tokens, logps = draw([5, 6, 7], 4, 8)
    assert done.tokens.tolist() == tokens and done.tokens.dtype == np.int32 and done.finish == "stop"
    assert done.logps.tolist() == logps and done.weight_version == 0
    sent = fake.calls[-1][1]
    assert sent["sampling_params"] == {
        "temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 8, "sampling_seed": 4,
        "stop_token_ids": [STOP], "skip_special_tokens": False, "logit_bias": {str(VOCAB - 1): -1e9},
    }  # fmt: skip
    assert (sent["input_ids"], sent["return_logprob"], sent["logprob_start_len"]) == ([5, 6, 7], True, -1)
    assert sent["extra_key"] == fake.label == engine.health()["label"]
    assert ask(engine, request(4, new=2))[0].finish == "length"
    stats = engine.stats
    assert (stats.prompt_tokens, stats.prefill_tokens, stats.decode_tokens) == (6, 2, len(tokens) + 2)
    assert stats.seconds > 0


@pytest.mark.parametrize(
    "fault", ["500", "garbage", "short", "outside", "nothing", "stale", "two versions", "reset", "hang"]
)
def test_a_fault_costs_one_completion(engine, fake, fault):
    fake.faults = [fault]
    first, *others = ask(engine, request(4))
    assert isinstance(first, CompletionLost), first
    assert not others and engine.stats.extra["lost"] == 1
    done = ask(engine, request(4), request(9))
    assert [d.tokens.tolist() for d in done] == [draw([5, 6, 7], seed, 8)[0] for seed in (4, 9)]


@pytest.mark.parametrize(
    ("fault", "message"),
    [("null", "not finite"), ("other stop", "none of our stop ids"), ("400", "no such field")],
)
def test_what_no_other_try_mends_ends_the_run(engine, fake, fault, message):
    fake.faults = [fault]
    (failed,) = ask(engine, request())
    assert isinstance(failed, EngineError) and not isinstance(failed, CompletionLost)
    assert message in str(failed)


@pytest.mark.parametrize(("fault", "tokens"), [("abort", 1), ("empty", 0)])
def test_an_aborted_completion_is_data(engine, fake, fault, tokens):
    fake.faults = [fault]
    (done,) = ask(engine, request())
    assert done.finish == "abort" and len(done.tokens) == len(done.logps) == tokens
    assert engine.stats.extra["aborted"] == 1


def test_ids_outside_the_vocabulary_never_leave(engine, fake):
    before = len(fake.calls)
    for prompt in ([5, VOCAB], [-1], []):
        (failed,) = ask(engine, request(prompt=prompt))
        assert isinstance(failed, EngineError)
    assert len(fake.calls) == before


class Talker:
    """Plays the winning actions, and loses a completion where the engine does."""

    def __init__(self, engine):
        self.engine = engine

    async def generate(self, asked):
        await self.engine.generate(request(asked.seed % 1000, session=asked.session))
        turn = int(asked.name.rsplit(" ", 1)[1])
        tokens = np.array([*f"<think>ok</think><action>{WIN[turn]}</action>".encode()], np.int32)
        return Completion(tokens, np.zeros(len(tokens), np.float32), "stop", 0)


@pytest.mark.parametrize("fault", ["reset", "short", "500"])
def test_a_lost_completion_has_its_episode_played_again(engine, fake, fault):
    fake.faults = ["", fault]
    (episode,) = make_group(make_player(Talker(engine)), 1)
    assert episode.success and episode.attempts == 2 and episode.error is None


def test_an_episode_that_keeps_losing_completions_is_recorded_as_failed(engine, fake):
    fake.faults = ["short"] * 2
    (episode,) = make_group(make_player(Talker(engine)), 1)
    assert episode.status == "error" and not episode.turns and "cannot be used" in episode.error


def test_an_aborted_answer_is_no_action(engine, fake):
    class Aborting(Talker):
        async def generate(self, asked):
            done = await self.engine.generate(request(asked.seed % 1000))
            return done if done.finish == "abort" else await super().generate(asked)

    fake.faults = ["abort"]
    (episode,) = make_group(make_player(Aborting(engine)), 1)
    assert episode.success and episode.attempts == 2


def test_new_weights_come_in_this_order(fake, engine):
    fake.calls.clear()
    engine.update_weights(PARAMS, 7)
    assert [r for r in fake.routes if r not in ("server_info", "model_info")] == [
        "pause_generation", "flush_cache", "update_weights_from_disk", "update_weight_version", "flush_cache",
        "continue_generation",
    ]  # fmt: skip
    assert fake.label == engine.health()["label"] and fake.label.endswith("-v7")
    assert ask(engine, request())[0].weight_version == 7


def test_the_same_version_twice_is_two_labels(fake, engine):
    other = jax.tree.map(lambda x: x + 1, PARAMS)
    labels, weights = [], []
    for params in (PARAMS, other, PARAMS):
        engine.update_weights(params, 3)
        labels.append(fake.label)
        weights.append(fake.weights)
    assert len(set(labels)) == 3
    assert weights[0] == weights[2] != weights[1]


class Wire:
    """A transfer that only shows between which calls it stands."""

    name, session = "wire", True

    def send(self, params, label, servers):
        for server in servers:
            server.get("/model_info")

    def close(self):
        pass


@pytest.mark.parametrize(("version", "opened"), [("0.5.17", False), ("0.5.20", False), ("0.5.21", True)])
def test_an_update_session_is_opened_where_the_server_has_one(tmp_path, version, opened):
    with Fake(version=version) as fake:
        engine = make_engine([fake], tmp_path, transfer=Wire())
        fake.calls.clear()
        engine.update_weights(PARAMS, 1)
        assert ask(engine, request())[0].weight_version == 1
        engine.close()
    sent = fake.routes.index("model_info")
    around = [fake.routes[sent - 1], fake.routes[sent + 1]]
    assert (around == ["begin_weight_update", "end_weight_update"]) == opened
    assert opened or around == ["flush_cache", "update_weight_version"]


def test_the_first_update_is_compared_with_a_load_from_disk(tmp_path):
    with Fake() as fake, pytest.raises(EngineError, match="other weights after sync by wire"):
        make_engine([fake], tmp_path, transfer=Wire(), reload=DiskTransfer(MODEL, "bfloat16", tmp_path))
    assert not list(tmp_path.iterdir())


def test_the_cache_is_emptied_before_anything_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(sglang_sync, "FLUSH_PAUSE_S", 0.01)
    with Fake(refusals=3) as fake:
        make_engine([fake], tmp_path).close()
        assert fake.routes.count("flush_cache") == 5
        fake.refusals = 10_000
        with pytest.raises(EngineError, match="did not empty its cache"):
            make_engine([fake], tmp_path)


def test_weights_that_vanish_on_the_way_are_named(fake, engine):
    fake.delete_before_load = True
    with pytest.raises(EngineError, match=r"were not loaded from disk.*is gone"):
        engine.update_weights(PARAMS, 1)
    fake.delete_before_load = False
    engine.update_weights(PARAMS, 2)
    assert ask(engine, request())[0].weight_version == 2


def test_a_folder_that_cannot_be_made(tmp_path):
    with pytest.raises(EngineError, match=r"rollout\.sglang\.folder"):
        DiskTransfer(MODEL, "bfloat16", tmp_path / "nowhere")


def test_weights_of_killed_processes_are_removed(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    prefix = f"sdjax-weights-{socket.gethostname()}-"
    for pid in (gone.pid, os.getpid()):
        (tmp_path / f"{prefix}{pid}-x").mkdir()
    (tmp_path / "sdjax-weights-elsewhere-1-x").mkdir()
    made = sglang_sync.make_folder(tmp_path)
    left = {"sdjax-weights-elsewhere-1-x", f"{prefix}{os.getpid()}-x", made.name}
    assert {folder.name for folder in tmp_path.iterdir()} == left


def test_episodes_keep_to_one_server(tmp_path):
    with Fake() as one, Fake() as two:
        engine = make_engine([one, two], tmp_path)
        one.calls.clear()
        two.calls.clear()
        done = ask(engine, *(request(seed, session=f"episode {e}") for e in range(20) for seed in (e, 100 + e)))
        engine.close()
    assert all(isinstance(one_of, Completion) for one_of in done)
    seen = [{c["sampling_params"]["sampling_seed"] % 100 for r, c in f.calls if r == "generate"} for f in (one, two)]
    assert seen[0] and seen[1] and not seen[0] & seen[1]


def test_no_weights_while_something_is_in_flight(fake, engine, monkeypatch):
    monkeypatch.setattr("sdjax.rollout.sglang._LEAVING_S", 0.05)
    fake.faults = ["hang"]

    async def update_meanwhile():
        task = asyncio.create_task(engine.generate(request()))
        while not any(body and "sampling_params" in body for _, body in fake.calls):
            await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match="in flight"):
            engine.update_weights(PARAMS, 1)
        task.cancel()

    asyncio.run(update_meanwhile())
    engine.update_weights(PARAMS, 2)


def test_a_closed_engine_says_so(engine):
    engine.close()
    engine.close()
    assert "closed" in str(ask(engine, request())[0])
    assert not engine.health()["ok"]


def test_sleep_gives_the_cache_back_until_the_next_weights(fake, tmp_path):
    engine = make_engine([fake], tmp_path, sleep=True)
    fake.calls.clear()
    engine.sleep()
    engine.sleep()
    assert fake.routes == ["flush_cache", "release_memory_occupation"]
    assert "sleeps" in str(ask(engine, request())[0])
    engine.update_weights(PARAMS, 1)
    assert fake.routes.index("update_weights_from_disk") < fake.routes.index("resume_memory_occupation")
    assert fake.calls[-1] == ("resume_memory_occupation", {"tags": ["kv_cache"]})
    assert ask(engine, request())[0].weight_version == 1
    engine.close()


# ---- servers that are lost ----


def test_a_remote_server_that_was_restarted_gets_the_weights_again(tmp_path):
    with Fake() as first:
        port = first.server_address[1]
        engine = make_engine([first], tmp_path)
        engine.update_weights(PARAMS, 5)
    with Fake(port) as second:
        assert isinstance(ask(engine, request())[0], CompletionLost)
        assert ask(engine, request())[0].weight_version == 5
        assert second.weights != "from start" and engine.stats.extra["restarts"] == 1
        engine.close()


def test_somebody_elses_weights_are_replaced_a_few_times_and_then_refused(fake, tmp_path):
    engine = make_engine([fake], tmp_path, restarts=1)
    fake.label = "another run"
    assert isinstance(ask(engine, request())[0], CompletionLost)
    assert ask(engine, request())[0].weight_version == 0
    fake.label = "another run"
    ask(engine, request())
    assert "another run" in str(ask(engine, request())[0]) and not engine.health()["ok"]
    engine.close()


def test_a_late_failure_of_the_lost_server_does_not_end_the_new_one(engine, fake):
    fake.faults = ["reset", "hang"]
    first, second = ask(engine, request(4), request(9))
    assert isinstance(first, CompletionLost) and isinstance(second, CompletionLost)
    assert ask(engine, request())[0].finish == "stop"
    assert engine.stats.extra["restarts"] == 1


def test_who_waits_when_the_engine_is_closed_hears_of_it(engine, fake):
    fake.faults = ["hang"]

    async def close_meanwhile():
        task = asyncio.create_task(engine.generate(request()))
        while not any(body and "sampling_seed" in body["sampling_params"] for r, body in fake.calls if r == "generate"):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineError, match="closed"):
            await task

    asyncio.run(close_meanwhile())


def own(tmp_path, *flags, timeout_s=20.0):
    settings = SglangConfig(command=tuple(FAKE), flags=flags, start_timeout_s=timeout_s)
    (member,) = engines.own_members(settings, Path("/model"), tmp_path / "logs", key="", seed=0)
    assert member.process is not None
    member.process.start()
    return member


def server_pid(member):
    (child,) = psutil.Process(member.process.pid).children()
    return child.pid


def test_a_killed_server_is_started_again_with_the_current_weights(tmp_path):
    member = own(tmp_path)
    member.process.wait_ready()
    engine = make_engine([member], tmp_path)
    engine.update_weights(PARAMS, 3)
    os.kill(server_pid(member), signal.SIGKILL)
    outcome = ask(engine, request(1))[0]
    while isinstance(outcome, CompletionLost):
        outcome = ask(engine, request(1))[0]
    assert outcome.weight_version == 3 and engine.stats.extra["restarts"] == 1
    os.kill(server_pid(member), signal.SIGKILL)
    engine.update_weights(PARAMS, 4)
    assert ask(engine, request(1))[0].weight_version == 4
    pid = server_pid(member)
    engine.close()
    assert not psutil.pid_exists(pid)
    log = (tmp_path / "logs" / "sglang_0.log").read_text()
    assert log.count("loading /model") == 3 and log.startswith("$ ")


@pytest.mark.parametrize(
    ("flag", "limit", "message"),
    [("--crash=1", 20.0, r"(?s)exit code 3.*out of memory"), ("--slow=1", 0.7, "was not ready after 0.7 s")],
)
def test_a_server_that_does_not_start_shows_its_log(tmp_path, flag, limit, message):
    member = own(tmp_path, flag, timeout_s=limit)
    with pytest.raises(EngineError, match=message):
        member.process.wait_ready()
    member.process.stop()


def test_a_command_that_does_not_exist(tmp_path):
    process = ServerProcess(["no-such-program"], Server("http://127.0.0.1:1"), tmp_path / "log", timeout_s=1.0)
    with pytest.raises(EngineError, match="no-such-program"):
        process.start()


def test_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = SglangConfig(port=taken.getsockname()[1])
        with pytest.raises(EngineError, match="cannot be used"):
            engines.own_members(settings, Path("/model"), Path("/logs"), key="", seed=0)


def test_servers_never_listen_to_the_network_without_a_key(tmp_path):
    settings = SglangConfig(host="0.0.0.0", key_variable="SDJAX_TEST_KEY")
    with pytest.raises(ConfigError, match="SDJAX_TEST_KEY"):
        engines.own_members(settings, Path("/model"), tmp_path, key="", seed=0)
    flags = engines.server_flags(settings, Path("/model"), 1, 0, key="secret", seed=0)
    assert {"--api-key=secret", "--admin-api-key=secret"} <= set(flags)
    process = ServerProcess(["true", *flags], Server("http://127.0.0.1:1"), tmp_path / "log", timeout_s=1.0)
    process.start()
    process.stop()
    assert "secret" not in (tmp_path / "log").read_text()


def test_the_server_ends_with_the_process_that_wanted_it():
    child = "import time, sys; sys.stdout.write('up\\n'); sys.stdout.flush(); time.sleep(60)"
    guard = subprocess.Popen(
        [sys.executable, "-I", sglang_guard.__file__, sys.executable, "-c", child],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert guard.stdin is not None and guard.stdout is not None and guard.stdout.readline() == b"up\n"
    (server,) = psutil.Process(guard.pid).children()
    guard.stdin.close()  # what the kernel does when the owner is killed
    assert guard.wait(20) == 128 + signal.SIGTERM
    assert not server.is_running()
    guard.stdout.close()


# ---- servers that are not the right ones ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"version": "0.5.16"}, "runs SGLang 0.5.16"),
        ({"version": "0.6.0"}, "runs SGLang 0.6.0"),
        ({"version": "dev"}, "no SGLang server of a known kind"),
        ({"model_type": "qwen3"}, "serves a qwen3 model"),
        ({"vocab": VOCAB + 1}, "vocabulary"),
        ({"vocab": VOCAB - 1}, "vocabulary"),
        ({"longest": 200}, "takes 200 tokens"),
        ({"key": "other"}, "refused our key"),
    ],
)
def test_a_server_that_does_not_fit_is_refused(options, message):
    with Fake(**options) as fake, pytest.raises(EngineError, match=message):
        engines.check_model(Server(fake.url, key="mine"), MODEL, 256)


def test_a_key_opens_the_server(tmp_path):
    with Fake(key="mine") as fake:
        engines.check_model(Server(fake.url, key="mine"), MODEL, 256)
        engine = make_engine([Member(Server(fake.url, key="mine"), None)], tmp_path)
        assert ask(engine, request())[0].finish == "stop"
        engine.close()


def test_nobody_at_the_address():
    with pytest.raises(EngineError, match="gave no answer"):
        engines.check_model(Server("http://127.0.0.1:9"), MODEL, 256)
    with pytest.raises(EngineError, match="no address"):
        Server("127.0.0.1:9")


# ---- settings ----


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"temperature": 0.7}, "biases every ratio"),
        ({"top_p": 0.9}, "wrong by the mass that was cut off"),
        ({"top_k": 20}, "wrong by the mass that was cut off"),
        ({"sglang": {"engines": 0}}, "at least one engine"),
        ({"sglang": {"request_timeout_s": 0.0}}, "below 0"),
        ({"sglang": {"urls": ("http://h:1",), "sync": "ipc"}}, "names others"),
        ({"sglang": {"sync": "carrier pigeon"}}, "carrier pigeon"),
    ],
)
def test_settings_that_cannot_work(keys, message):
    values = {"method": {"name": "grpo"}, "model": {"path": "/m"}, "rollout": {"engine": "sglang", **keys}}
    with pytest.raises(ConfigError, match=message):
        load(values)


@pytest.mark.parametrize(("sync", "name", "compared"), [("auto", "disk", False), ("tensor", "tensor", True)])
def test_the_way_of_the_weights(tmp_path, sync, name, compared):
    transfer, reload = engines.make_transfers(SglangConfig(sync=sync, folder=str(tmp_path)), MODEL)
    assert transfer.name == name and (reload is not None) == compared
    for opened in (transfer, reload):
        if opened is not None:
            opened.close()


@pytest.mark.parametrize("sync", ["ipc", "nccl"])
def test_ways_that_need_a_gpu_say_so_and_leave_nothing(tmp_path, sync):
    with pytest.raises(ConfigError, match=r"GPU|JAX runs on cpu"):
        engines.make_transfers(SglangConfig(sync=sync, folder=str(tmp_path)), MODEL)
    assert not list(tmp_path.iterdir())
