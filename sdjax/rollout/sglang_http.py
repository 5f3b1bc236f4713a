"""One SGLang server as seen over HTTP: its version, its routes and what its failures mean.

Control calls (``Server.get``, ``Server.post``) block; ``/generate`` runs on an event loop and has its own client, see
``sglang.py``.
"""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx2

from sdjax.errors import EngineError

OLDEST, NEWEST = (0, 5, 17), (0, 5, 23)  # versions that were run against; newer patch releases are tried
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MESSAGE_CHARS = 500


class ServerLost(EngineError):
    """A server does not answer (any more): it may come back, with any weights."""


@dataclass(frozen=True)
class Facts:
    """What a server says of itself. version: (0, 5, 23). tensor_parallel: ranks that hold a share of the weights.
    model_type: as in config.json. longest: prompt and answer in tokens. None: it does not tell."""

    version: tuple[int, ...]
    tensor_parallel: int
    model_path: str
    model_type: str | None
    longest: int | None

    @property
    def update_session(self) -> bool:
        """Whether tensor and group updates stand between /begin_weight_update and /end_weight_update."""
        return self.version >= (0, 5, 21)

    @property
    def span_versions(self) -> bool:
        """Whether a completion says which weights drew which of its tokens."""
        return self.version >= (0, 5, 19)


class Server:
    """Blocking control calls of one server.

    Args:
      url: ``http://HOST:PORT``. key: sent as ``Authorization: Bearer``; may be "". timeout_s: for one control call.

    Raises (all calls):
      ServerLost: no answer. EngineError: the server refused; its message is in the error.
    """

    def __init__(self, url: str, *, key: str = "", timeout_s: float = 300.0):
        if not re.match(r"https?://[^/]", url):
            raise EngineError(f"{url!r} is no address of a server.", "write rollout.sglang.urls as http://HOST:PORT.")
        self.url = url.rstrip("/")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout_s = timeout_s
        self._facts: Facts | None = None
        self.incarnation = 0  # counts the processes that were seen behind the address
        # A proxy of the environment must not see a loopback server's traffic.
        self._client = httpx2.Client(base_url=self.url, headers=self.headers, trust_env=False)

    @property
    def facts(self) -> Facts:
        """Asked once; ``forget`` makes it be asked again."""
        if self._facts is None:
            self._facts = self._ask_facts()
        return self._facts

    def forget(self) -> None:
        """To be called when another process may sit behind the address."""
        self._facts = None
        self.incarnation += 1

    def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        return self._call("GET", path, None, timeout_s)

    def post(self, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        return self._call("POST", path, {} if body is None else body, timeout_s)

    def answers(self, *, timeout_s: float = 5.0) -> bool:
        """Whether the server is up, without having it generate anything."""
        try:
            self.get("/model_info", timeout_s=timeout_s)
        except ServerLost:
            return False
        return True

    def close(self) -> None:
        self._client.close()

    def _call(self, method: str, path: str, body: Any, timeout_s: float | None) -> Any:
        limit = self._timeout_s if timeout_s is None else timeout_s
        try:
            response = self._client.request(method, path, json=body, timeout=limit)
        except httpx2.TransportError as error:
            raise lost(self.url, path, error) from error
        return answer(self.url, path, response)

    def _ask_facts(self) -> Facts:
        info, model = self.get("/server_info"), self.get("/model_info")
        text = str(info.get("version", "")) if isinstance(info, dict) else ""
        numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
        if numbers is None or not isinstance(model, dict):
            raise EngineError(
                f"{self.url} is no SGLang server of a known kind: its /server_info has version {text!r}.",
                f"serve with SGLang {_dotted(OLDEST)} to {_dotted(NEWEST)}.",
            )
        version = tuple(int(n) for n in numbers.groups())
        if version < OLDEST or version[:2] > NEWEST[:2]:
            raise EngineError(
                f"{self.url} runs SGLang {text}; sdjax speaks to {_dotted(OLDEST)} to {_dotted(NEWEST)}.",
                "install one of these versions beside the engine.",
            )
        return Facts(
            version=version,
            tensor_parallel=int(info.get("tp_size") or 1),
            model_path=str(model.get("model_path", "")),
            model_type=model.get("model_type"),
            # The server keeps some positions for itself: one, and five beside the prompt.
            longest=info["max_req_input_len"] + 6 if isinstance(info.get("max_req_input_len"), int) else None,
        )


def lost(url: str, path: str, error: Exception) -> ServerLost:
    """The error for a call that got no answer."""
    return ServerLost(
        f"{url}{path} gave no answer ({type(error).__name__}: {str(error)[:200]}).",
        "look whether the server runs and at its log; check the address.",
    )


def answer(url: str, path: str, response: httpx2.Response) -> Any:
    """The JSON that a server answered.

    Raises:
      ServerLost: status 5xx, or an answer that is no JSON. EngineError: it refused (4xx).
    """
    text = response.text[:_MESSAGE_CHARS]
    if response.status_code in (401, 403):
        raise EngineError(
            f"{url}{path} refused our key (status {response.status_code}).",
            "put the server's --admin-api-key into the variable that rollout.sglang.key_variable names.",
        )
    if response.status_code >= 500:
        raise ServerLost(f"{url}{path} failed with status {response.status_code}: {text}", "look at the server's log.")
    if response.status_code >= 400:
        raise EngineError(f"{url}{path} answered {response.status_code}: {text}", "see the server's message.")
    if not response.headers.get("content-type", "").startswith("application/json"):
        return None  # /ping, /flush_cache and the like answer with text or nothing
    try:
        return response.json()
    except ValueError as error:
        raise ServerLost(f"{url}{path} answered garbage: {text!r}", "look at the server's log.") from error


def on_all(servers: Sequence[Server], call: Callable[[Server], Any]) -> list[Any]:
    """Calls all servers at the same time; returns the results in their order.

    Raises the first server's error once all calls have ended.
    """
    if len(servers) <= 1:
        return [call(server) for server in servers]
    with ThreadPoolExecutor(max_workers=len(servers), thread_name_prefix="sdjax-sglang") as pool:
        return [future.result() for future in [pool.submit(call, server) for server in servers]]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
