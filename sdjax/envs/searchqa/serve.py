"""A retrieval server for clients of Search-R1 (``queries``) and of verl-agent (``query``).

``python -m sdjax.envs.searchqa.serve --data PATH [--host 127.0.0.1] [--port 8000] [--topk 3]``

``POST /retrieve`` takes ``{"queries": [...]}`` or ``{"query": "..."}`` with optional ``topk`` (null or 0: the
server's) and ``return_scores``, and answers ``{"result": [[{"document": {...}, "score": s}, ...], ...]}``, one inner
list for each query; without scores the documents themselves. ``GET /healthz`` says what is served. Requests that come
while a search runs are searched together after it. An address other than loopback needs a token in the environment
variable SDJAX_SEARCH_TOKEN, which clients send as ``Authorization: Bearer TOKEN``.
"""

import argparse
import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sdjax.envs.searchqa.backends import TOKEN_VARIABLE, Hit, SearchBackend, make_backend
from sdjax.envs.searchqa.config import SearchqaConfig
from sdjax.envs.searchqa.store import open_corpus
from sdjax.errors import ConfigError, EnvError, SdjaxError

_BATCH_QUERIES = 256  # searched in one call at most


@dataclass(frozen=True)
class Limits:
    """What one request may ask for."""

    body_bytes: int = 1024 * 1024
    queries: int = 512
    query_characters: int = 4000
    topk: int = 100


class BadRequest(Exception):
    """status: of the answer; the text tells the client what to change."""

    def __init__(self, text: str, status: int = 400):
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Asked:
    queries: list[str]
    topk: int
    scores: bool


def read_request(body: bytes, topk: int, limits: Limits) -> Asked:
    """Checks the body of one request. Raises BadRequest."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON ({error})") from error
    if not isinstance(asked, dict):
        raise BadRequest("the body is not an object")
    if ("queries" in asked) == ("query" in asked):
        raise BadRequest('send either "queries" (a list) or "query" (a text)')
    queries = asked["queries"] if "queries" in asked else [asked["query"]]
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise BadRequest("a query is not a text")
    if len(queries) > limits.queries:
        raise BadRequest(f"{len(queries)} queries, at most {limits.queries} are taken")
    if any(len(query) > limits.query_characters for query in queries):
        raise BadRequest(f"a query has more than {limits.query_characters} characters")
    k = asked.get("topk")
    if k is not None and (not isinstance(k, int) or isinstance(k, bool) or not 0 <= k <= limits.topk):
        raise BadRequest(f'"topk" is not a number from 0 to {limits.topk}')
    scores = asked.get("return_scores", False)
    if not isinstance(scores, bool):
        raise BadRequest('"return_scores" is not true or false')
    return Asked(queries, k or topk, scores)


class Batcher:
    """Searches for many requests at once: whatever waits when a search ends goes into the next one."""

    def __init__(self, backend: SearchBackend):
        self._backend = backend
        self._waiting: asyncio.Queue[tuple[list[str], int, asyncio.Future]] = asyncio.Queue()

    async def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        answer: asyncio.Future[list[list[Hit]]] = asyncio.get_running_loop().create_future()
        await self._waiting.put((queries, k, answer))
        return await answer

    async def run(self) -> None:
        """Serves until it is cancelled."""
        while True:
            batch = [await self._waiting.get()]
            while not self._waiting.empty() and sum(len(item[0]) for item in batch) < _BATCH_QUERIES:
                batch.append(self._waiting.get_nowait())
            queries = [query for item in batch for query in item[0]]
            try:
                most = max(k for _, k, _ in batch)
                found = iter(await asyncio.to_thread(self._backend.search, queries, most))
                answers: list[Any] = [[next(found)[:k] for _ in asked] for asked, k, _ in batch]
            except Exception as error:  # one bad batch must not end the server
                answers = [error] * len(batch)
            for (_, _, future), answer in zip(batch, answers):
                if future.cancelled():
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)


def make_app(
    backend: SearchBackend, *, topk: int = 3, token: str = "", limits: Limits | None = None, facts: Any = None
) -> Starlette:
    """The ASGI application. token: clients must send it; "" asks for none. facts: shown by ``/healthz``."""
    limits = limits or Limits()
    batcher = Batcher(backend)

    async def retrieve(request: Request) -> Response:
        try:
            _authorise(request, token)
            asked = read_request(await _body(request, limits.body_bytes), topk, limits)
        except BadRequest as error:
            return JSONResponse({"error": str(error)}, error.status)
        try:
            found = await batcher.search(asked.queries, asked.topk) if asked.queries else []
        except EnvError as error:
            return JSONResponse({"error": error.found}, 503)
        return JSONResponse({"result": [[_document(hit, asked.scores) for hit in hits] for hits in found]})

    async def healthz(request: Request) -> Response:
        return JSONResponse({"status": "ok", "topk": topk, **(facts or {})})

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        running = asyncio.create_task(batcher.run())
        try:
            yield
        finally:
            running.cancel()

    routes = [Route("/retrieve", retrieve, methods=["POST"]), Route("/healthz", healthz, methods=["GET"])]
    return Starlette(routes=routes, lifespan=lifespan)


def check_address(host: str, token: str) -> None:
    """Raises ConfigError where a server without a token could be reached from other machines."""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback and not token:
        raise ConfigError(
            f"--host={host} can be reached from other machines and there is no token.",
            f"set the environment variable {TOKEN_VARIABLE}, or use --host=127.0.0.1.",
        )


def _authorise(request: Request, token: str) -> None:
    sent = request.headers.get("authorization", "")
    if token and not hmac.compare_digest(sent.encode(), f"Bearer {token}".encode()):
        raise BadRequest("the token is missing or wrong", 401)


async def _body(request: Request, limit: int) -> bytes:
    """The body, read only as far as it is allowed to be."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise BadRequest(f"the body has more than {limit} bytes", 413)
    return bytes(body)


def _document(hit: Hit, scores: bool) -> dict[str, Any]:
    passage = hit.passage
    document = {"id": passage.id, "title": passage.title, "text": passage.text, "contents": passage.contents}
    return {"document": document, "score": hit.score} if scores else document


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sdjax.envs.searchqa.serve", description=__doc__)
    parser.add_argument("--data", default="generated", help='folder with corpus.jsonl, or "generated"')
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one, which is printed")
    parser.add_argument("--topk", type=int, default=3, help="passages where a request does not say how many")
    parser.add_argument("--retriever", default="bm25", choices=["bm25", "dense"])
    parser.add_argument("--embeddings", default="", help="of --retriever=dense, see sdjax.envs.searchqa.embed")
    parser.add_argument("--encoder", default="minilm", help="of --retriever=dense")
    parsed = parser.parse_args(arguments)
    token = os.environ.get(TOKEN_VARIABLE, "")
    config = SearchqaConfig(retriever=parsed.retriever, embeddings=parsed.embeddings, encoder=parsed.encoder)
    try:
        check_address(parsed.host, token)
        if not 1 <= parsed.topk <= Limits.topk:
            raise ConfigError(f"--topk={parsed.topk}.", f"use a number from 1 to {Limits.topk}.")
        corpus = open_corpus(parsed.data, config)
        backend = make_backend(config, corpus)
    except SdjaxError as error:
        print(error, file=sys.stderr)
        return 1
    facts = {**backend.provenance(), "corpus_passages": len(corpus), "corpus_sha256": corpus.sha256}
    app = make_app(backend, topk=parsed.topk, token=token, facts=facts)
    _serve(app, parsed.host, parsed.port)
    return 0


def _serve(app: Starlette, host: str, port: int) -> None:
    server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="warning", access_log=False))

    async def announce() -> None:
        while not server.started:
            await asyncio.sleep(0.05)
        address = server.servers[0].sockets[0].getsockname()
        Console().print(f"serving http://{address[0]}:{address[1]}/retrieve", soft_wrap=True)

    async def everything() -> None:
        announcing = asyncio.create_task(announce())
        try:
            await server.serve()
        finally:
            announcing.cancel()

    asyncio.run(everything())


if __name__ == "__main__":
    sys.exit(main())
