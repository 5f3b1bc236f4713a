"""Client of a retrieval server: ours, Search-R1's (``queries``) or verl-agent's (``query``).

Everything is bounded: the time of a try, the number of tries, the connections and the size of an answer that is
believed. While the server is failing, a search is tried once only, so that hundreds of episodes do not each wait for
all tries.
"""

import json
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urljoin

import httpx2

from sdjax.envs.searchqa.backends import Hit
from sdjax.envs.searchqa.corpus import Passage
from sdjax.errors import ConfigError, EnvError

PAYLOADS = ("queries", "query")
_FIRST_PAUSE_S = 0.5
_MAX_ANSWER_BYTES = 16 * 1024 * 1024
_RETRY_STATUS = frozenset({429, 500, 502, 503, 504})


class _TryAgain(Exception):
    """A failure that another try may not have."""


class HttpBackend:
    """Args:
      url: the full address, with ``/retrieve``. payload: one of ``PAYLOADS``. timeout_s: for one try. retries: further
      tries after the first. connections: at most so many at once. token: sent as ``Authorization: Bearer``; may be "".

    Raises:
      ConfigError: an unknown payload, or an address that is not http(s).
    """

    on_threads = True

    def __init__(
        self,
        url: str,
        payload: str = "queries",
        *,
        timeout_s: float = 10.0,
        retries: int = 2,
        connections: int = 16,
        token: str = "",
    ):
        if payload not in PAYLOADS:
            raise ConfigError(f"env.searchqa.payload = {payload!r}.", "use queries or query.")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"env.searchqa.url = {url!r}.", "write it as http://HOST:PORT/retrieve.")
        if timeout_s <= 0 or retries < 0 or connections < 1:
            raise ConfigError(
                f"env.searchqa has timeout_s {timeout_s}, retries {retries}, connections {connections}.",
                "use a positive time, no or more retries and at least one connection.",
            )
        self._url, self._payload, self._retries, self._timeout_s = url, payload, retries, timeout_s
        # How the last search ended. Threads may race for it; that changes a number of tries, nothing else.
        self._failing = False
        self._client = httpx2.Client(
            timeout=timeout_s,
            limits=httpx2.Limits(max_connections=connections),
            headers={"Authorization": f"Bearer {token}"} if token else {},
            trust_env=False,  # a proxy of the environment must not see a loopback server's traffic
        )

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        # Lone surrogates cannot be sent.
        texts = [query.encode("utf-8", "replace").decode() for query in queries]
        asked = [text for text in texts if text.strip()]
        found: list[list[Hit]] = []
        if asked and self._payload == "queries":
            found = self._ask({"queries": asked}, len(asked), k)
        elif asked:
            found = [hits for text in asked for hits in self._ask({"query": text}, 1, k)]
        answers = iter(found)
        return [next(answers) if text.strip() else [] for text in texts]

    def _ask(self, body: dict[str, Any], count: int, k: int) -> list[list[Hit]]:
        failure, tries = "", 1 if self._failing else self._retries + 1
        for attempt in range(tries):
            if attempt:
                time.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                found = _read(self._post({**body, "topk": k, "return_scores": True}), count, k)
                self._failing = False
                return found
            except _TryAgain as error:
                failure = str(error)
        self._failing = True
        raise EnvError(
            f"the retrieval server {self._url} failed {tries} times: {failure}.",
            "start it, or correct env.searchqa.url.",
        )

    def _post(self, body: dict[str, Any]) -> Any:
        """The JSON value of one answer. The whole try ends with the time limit, however slowly bytes drip in."""
        deadline = time.monotonic() + self._timeout_s
        content = bytearray()
        try:
            with self._client.stream("POST", self._url, json=body) as response:
                if response.status_code in _RETRY_STATUS:
                    raise _TryAgain(f"status {response.status_code}")
                for part in response.iter_bytes():
                    content += part
                    if len(content) > _MAX_ANSWER_BYTES:
                        raise EnvError(f"an answer of {self._url} is over {_MAX_ANSWER_BYTES} bytes.", "lower topk.")
                    if time.monotonic() > deadline:
                        raise _TryAgain(f"no whole answer within {self._timeout_s} s")
        except httpx2.HTTPError as error:
            raise _TryAgain(f"{type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise EnvError(
                f"the retrieval server {self._url} answered {response.status_code}: {bytes(content[:200])!r}.",
                f"check url and token, and env.searchqa.payload (now {self._payload}; verl-agent wants query).",
            )
        try:
            return json.loads(content)
        except ValueError as error:
            raise _TryAgain(f"the answer is not JSON ({error})") from error

    def provenance(self) -> dict[str, Any]:
        """``retriever_server``: what a server of this project says of itself (corpus hash ...); None for others."""
        facts = {"retriever": "http", "retriever_url": self._url, "retriever_payload": self._payload}
        return {**facts, "retriever_server": self._health()}

    def close(self) -> None:
        self._client.close()

    def _health(self) -> Any:
        try:
            response = self._client.get(urljoin(self._url, "healthz"))
            return response.json() if response.status_code == 200 else None
        except (httpx2.HTTPError, ValueError):
            return None


def _read(answer: Any, count: int, k: int) -> list[list[Hit]]:
    """Checks the shape ``{"result": [[{"document": {...}, "score": s} or {...}, ...], ...]}``."""
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, list) or len(result) != count or not all(isinstance(hits, list) for hits in result):
        raise _TryAgain(f"the answer has not the form of a result for {count} queries")
    return [[_hit(item) for item in hits[:k]] for hits in result]


def _hit(item: Any) -> Hit:
    document = item.get("document", item) if isinstance(item, dict) else None
    contents = document.get("contents") if isinstance(document, dict) else None
    if not isinstance(document, dict) or not isinstance(contents, str):
        raise _TryAgain("a document of the answer has no contents")
    # Lone surrogates, which JSON can spell, are in no vocabulary.
    passage = Passage(str(document.get("id", "")), contents.encode("utf-8", "replace").decode())
    score = item.get("score", 0.0)
    return Hit(passage, float(score) if isinstance(score, int | float) else 0.0)
