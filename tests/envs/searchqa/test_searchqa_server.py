"""The retrieval server and its client, over real sockets: both payloads, bad requests, limits, failing servers."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2
import pytest
import uvicorn

from sdjax.envs import EnvConfig
from sdjax.envs.base import Status
from sdjax.envs.searchqa import serve
from sdjax.envs.searchqa.adapter import SearchqaBenchmark
from sdjax.envs.searchqa.backends import Bm25Backend
from sdjax.envs.searchqa.client import HttpBackend
from sdjax.envs.searchqa.config import SearchqaConfig
from sdjax.errors import ConfigError, EnvError

ROOT = Path(__file__).resolve().parents[3]


@contextlib.contextmanager
def served(app):
    """The address of ``app`` on a free port of this machine."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/retrieve"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def backend(world):
    return Bm25Backend(world.corpus)


@pytest.fixture(scope="module")
def url(backend):
    with served(serve.make_app(backend, facts={"store": "generated"})) as address:
        yield address


def post(url, body, **headers):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx2.post(url, content=content, headers=headers, trust_env=False, timeout=30)


def titles(world, count):
    return [passage.title for passage in world.corpus.passages[:count]]


def test_both_payloads_have_the_wire_form_of_the_originals(url, world):
    query = titles(world, 1)[0]
    many = post(url, {"queries": [query, "zzzzqq"], "topk": 2, "return_scores": True}).json()
    assert list(many) == ["result"] and len(many["result"]) == 2 and many["result"][1] == []
    item = many["result"][0][0]
    assert set(item) == {"document", "score"} and isinstance(item["score"], float)
    assert {"id", "title", "text", "contents"} <= set(item["document"]) and len(many["result"][0]) == 2
    assert item["document"]["contents"] == world.corpus.passages[0].contents
    one = post(url, {"query": query, "topk": 2, "return_scores": True}).json()
    assert one == {"result": many["result"][:1]}
    bare = post(url, {"queries": [query], "topk": 2}).json()
    assert bare["result"][0] == [item["document"] for item in many["result"][0]]
    for topk in (None, 0):
        assert len(post(url, {"queries": [query], "topk": topk}).json()["result"][0]) == 3
    assert post(url, {"queries": []}).json() == {"result": []}
    assert post(url, {"queries": ["", " "]}).json() == {"result": [[], []]}
    assert post(url, {"query": ""}).json() == {"result": [[]]}


def test_health_says_what_is_served(url):
    answer = httpx2.get(url.replace("/retrieve", "/healthz"), trust_env=False)
    assert answer.status_code == 200 and answer.json() == {"status": "ok", "topk": 3, "store": "generated"}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        ({}, 400),
        ({"query": 1}, 400),
        ({"query": None}, 400),
        ({"queries": "text"}, 400),
        ({"queries": ["a", 2]}, 400),
        ({"queries": ["a"], "query": "a"}, 400),
        ({"queries": ["a"], "topk": -1}, 400),
        ({"queries": ["a"], "topk": 101}, 400),
        ({"queries": ["a"], "topk": True}, 400),
        ({"queries": ["a"], "topk": "3"}, 400),
        ({"queries": ["a"], "return_scores": 1}, 400),
        ({"queries": ["a"] * 513}, 400),
        ({"query": "a" * 4001}, 400),
        ({"query": "a" * 1_100_000}, 413),
    ],
)
def test_bad_requests_are_refused_and_the_server_lives_on(url, body, status):
    answer = post(url, body)
    assert answer.status_code == status and answer.json()["error"]
    assert post(url, {"query": "Bridge"}).status_code == 200


def test_other_methods_and_paths_are_no_search(url):
    assert httpx2.get(url, trust_env=False).status_code == 405
    assert httpx2.get(url.replace("retrieve", "other"), trust_env=False).status_code == 404


def test_a_token_is_checked(backend):
    with served(serve.make_app(backend, token="secret")) as address:
        body = {"query": "Bridge"}
        assert post(address, body).status_code == 401
        assert post(address, body, authorization="Bearer wrong").status_code == 401
        assert post(address, body, authorization="Bearer secret").status_code == 200
        assert HttpBackend(address, token="secret").search(["Bridge"], 1)[0]
        with pytest.raises(EnvError, match="401"):
            HttpBackend(address).search(["Bridge"], 1)


def test_the_command_serves_until_it_is_ended(world):
    command = [sys.executable, "-m", "sdjax.envs.searchqa.serve", "--port", "0", "--topk", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            health = httpx2.get(address.replace("/retrieve", "/healthz"), trust_env=False, timeout=30).json()
            assert health["corpus_sha256"] == world.corpus.sha256 and health["retriever"] == "bm25"
            assert len(post(address, {"query": "Bridge"}).json()["result"][0]) == 2
        finally:
            process.terminate()
    assert process.returncode is not None


def test_only_loopback_needs_no_token(capsys, monkeypatch):
    monkeypatch.delenv("SDJAX_SEARCH_TOKEN", raising=False)
    for host in ("127.0.0.1", "::1", "localhost"):
        serve.check_address(host, "")
    for host in ("0.0.0.0", "::", "10.0.0.4", "example"):
        serve.check_address(host, "secret")
        with pytest.raises(ConfigError, match="SDJAX_SEARCH_TOKEN"):
            serve.check_address(host, "")
    assert serve.main(["--host", "0.0.0.0"]) == 1 and "token" in capsys.readouterr().err
    assert serve.main(["--topk", "0"]) == 1


@pytest.mark.parametrize("payload", ["queries", "query"])
def test_the_client_gets_what_the_backend_finds(url, backend, world, payload):
    client = HttpBackend(url, payload)
    queries = [*titles(world, 5), "", "\ud800", "zzzzqq", "看 é"]
    assert client.search(queries, 4) == backend.search([*queries[:6], "?", *queries[7:]], 4)
    assert client.search([], 3) == []
    assert client.provenance()["retriever_url"] == url
    client.close()


def test_requests_at_the_same_time_get_their_own_answers(url, backend, world):
    queries = titles(world, 40)
    wanted = dict(zip(queries, backend.search(queries, 5), strict=True))

    async def ask():
        async with httpx2.AsyncClient(trust_env=False, timeout=30) as client:
            jobs = [client.post(url, json={"query": q, "topk": 1 + i % 5}) for i, q in enumerate(queries)]
            return await asyncio.gather(*jobs)

    for i, (query, answer) in enumerate(zip(queries, asyncio.run(ask()), strict=True)):
        found = [document["id"] for document in answer.json()["result"][0]]
        assert found == [hit.passage.id for hit in wanted[query][: 1 + i % 5]]


def test_a_backend_that_fails_is_an_answer_and_not_the_end(backend):
    class Broken:
        on_threads = False
        error: Exception = EnvError("the index is gone.")

        def search(self, queries, k):
            raise self.error

    broken = Broken()
    with served(serve.make_app(broken)) as address:
        assert post(address, {"query": "a"}).status_code == 503
        broken.error = RuntimeError("bug")
        assert post(address, {"query": "a"}).status_code == 500
        assert httpx2.get(address.replace("retrieve", "healthz"), trust_env=False).status_code == 200
        broken.search = backend.search
        assert post(address, {"query": "Bridge"}).status_code == 200


class Faulty(BaseHTTPRequestHandler):
    """Answers by ``server.mode``; counts requests."""

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        self.server.bodies.append(json.loads(self.rfile.read(length)))
        mode = self.server.modes.pop(0) if len(self.server.modes) > 1 else self.server.modes[0]
        if mode == "hang":
            time.sleep(1.5)
            return
        status = mode if isinstance(mode, int) else 200
        body = {"good": GOOD, "empty": b"", "garbage": b"<html>", "wrong": b'{"result": [[{"x": 1}]]}'}
        content = body.get(mode, b'{"result": []}') if isinstance(mode, str) else b"no"
        if mode == "huge":
            content = b" " * (17 * 1024 * 1024)
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if mode == "drip":
            with contextlib.suppress(OSError):
                for _ in range(20):
                    self.wfile.write(b" ")
                    time.sleep(0.1)
            return
        with contextlib.suppress(OSError):
            self.wfile.write(content)

    def log_message(self, format, *args):
        pass


GOOD = json.dumps({"result": [[{"document": {"id": 4, "contents": '"T"\ntext'}, "score": 1}]]}).encode()


@pytest.fixture
def faulty():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Faulty)
    server.daemon_threads = True
    server.bodies, server.modes = [], ["good"]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_address[1]}/retrieve"
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("sdjax.envs.searchqa.client._FIRST_PAUSE_S", 0.01)


def test_a_good_answer_after_failures_counts(faulty):
    faulty.modes = [503, "garbage", "good"]
    hits = HttpBackend(faulty.url, retries=2).search(["q"], 3)
    assert hits[0][0].passage.id == "4" and hits[0][0].passage.title == "T" and len(faulty.bodies) == 3
    assert faulty.bodies[0] == {"queries": ["q"], "topk": 3, "return_scores": True}


@pytest.mark.parametrize("mode", [500, 503, 429, "empty", "garbage", "wrong", "few", "hang", "drip"])
def test_failures_are_tried_again_and_then_raised(faulty, mode):
    faulty.modes = [mode]
    client = HttpBackend(faulty.url, retries=1, timeout_s=0.4)
    with pytest.raises(EnvError, match="failed 2 times"):
        client.search(["q"], 3)
    assert len(faulty.bodies) == 2
    with pytest.raises(EnvError, match="failed 1 times"):  # while it is failing, one try is enough
        client.search(["q"], 3)
    assert len(faulty.bodies) == 3
    faulty.modes = ["good"]
    assert client.search(["q"], 3)[0]


@pytest.mark.parametrize("mode", [400, 401, 404, 422, "huge"])
def test_what_another_try_cannot_mend_is_raised_at_once(faulty, mode):
    faulty.modes = [mode]
    with pytest.raises(EnvError, match=r"bytes|answered"):
        HttpBackend(faulty.url, retries=3).search(["q"], 3)
    assert len(faulty.bodies) == 1


def test_a_server_that_is_down_is_raised():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(EnvError, match="failed 2 times"):
        HttpBackend(f"http://127.0.0.1:{port}/retrieve", retries=1, timeout_s=1.0).search(["q"], 3)


def test_episodes_play_on_over_http_and_through_failures(faulty, url, benchmark):
    """The same episode as in this process; then a server that fails: text for the agent, a counter for the run."""

    def made(address, **settings):
        searchqa = SearchqaConfig(retriever="http", url=address, retries=0, cache=0, **settings)
        return SearchqaBenchmark(EnvConfig(name="searchqa", turns=4, searchqa=searchqa))

    async def play(environment, task, actions):
        await environment.reset(task, 0)
        return [await environment.step(action) for action in actions]

    task = benchmark.task_ids("eval")[0]
    actions = ["<search>Bridge</search>", "<search>river</search>", "<answer>x</answer>"]
    alone = asyncio.run(play(benchmark.make(), task, actions))
    for payload in ("queries", "query"):
        over_http = made(url, payload=payload)
        assert asyncio.run(play(over_http.make(), task, actions)) == alone
        assert over_http.provenance()["retriever_server"]["store"] == "generated"
        over_http.close()

    faulty.modes = ["garbage"]
    failing = made(faulty.url)
    assert failing.provenance()["retriever_server"] is None
    results = asyncio.run(play(failing.make(), task, actions))
    assert results[0].observation.text == "<information>The search failed.</information>"
    assert [result.info["search_errors"] for result in results] == [1, 2, 2]
    assert "not JSON" in results[0].info["search_error"] and results[2].info["search_error"] is None
    assert results[0].status is Status.RUNNING and results[2].status is Status.FAILED
    failing.close()
