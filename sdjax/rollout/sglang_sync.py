"""How new weights reach SGLang servers, whichever way the bytes take.

``push`` is the one sequence that keeps every completion on one version of the weights: pause, open the update, send,
close it, set the label, empty the prefix cache until the server accepts that, continue. A ``Transfer`` only sends.
"""

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from sdjax.errors import EngineError, ModelError
from sdjax.models.base import Model, Params
from sdjax.models.hf import save_checkpoint
from sdjax.models.registry import family_of
from sdjax.models.tensors import get, put
from sdjax.rollout.sglang_http import Server, ServerLost, on_all

FLUSH_TRIES, FLUSH_PAUSE_S = 60, 0.5


class Transfer(Protocol):
    """One way of sending weights.

    name: as in ``rollout.sglang.sync``. session: the servers need begin and end around it (where they have these).
    """

    name: str
    session: bool

    def send(self, params: Params, label: str, servers: Sequence[Server]) -> None:
        """Returns when all servers have loaded ``params``. The caller has paused them and empties their caches.

        params: as the trainer holds them, on its devices, in its dtype. label: name of this version of the weights.

        Raises:
          ServerLost: a server is gone. EngineError: a server refused.
        """
        ...

    def close(self) -> None: ...


def push(transfer: Transfer, params: Params, label: str, servers: Sequence[Server]) -> None:
    """Brings ``params`` into all ``servers`` under the name ``label``. Blocks.

    Whatever is in flight is aborted: its tokens would belong to two versions.

    Raises:
      ServerLost: a server is gone. EngineError: a server refused, or kept its cache.
    """
    on_all(servers, lambda s: s.post("/pause_generation", {"mode": "abort"}))
    # On 0.5.17 an update that finds live requests while it empties the cache kills the server.
    on_all(servers, flush)
    sessions = [s for s in servers if transfer.session and s.facts.update_session]
    on_all(sessions, lambda s: s.post("/begin_weight_update"))
    transfer.send(params, label, servers)
    on_all(sessions, lambda s: s.post("/end_weight_update"))
    on_all(servers, lambda s: s.post("/update_weight_version", {"new_version": label, "abort_all_requests": False}))
    on_all(servers, flush)
    on_all(servers, lambda s: s.post("/continue_generation"))


def flush(server: Server) -> None:
    """Empties the prefix cache; a server refuses while aborted requests are still leaving."""
    for attempt in range(FLUSH_TRIES):
        try:
            server.post("/flush_cache")
            return
        except ServerLost:
            raise
        except EngineError as error:
            if attempt == FLUSH_TRIES - 1:
                raise EngineError(
                    f"{server.url} did not empty its cache in {FLUSH_TRIES * FLUSH_PAUSE_S:g} s: {error.found}",
                    "keys and values of old weights must not live on: look at the server's log and restart it.",
                ) from error
            time.sleep(FLUSH_PAUSE_S)


def checksums(server: Server) -> list[Any] | None:
    """Checksums of the served weights, one a rank; None where the server does not offer them."""
    try:
        ranks = server.post("/weights_checker", {"action": "checksum"})["ranks"]
        return [rank["per_gpu_checksum"] for rank in ranks]
    except ServerLost:
        raise
    except (EngineError, TypeError, KeyError):
        return None


def served(model: Model, params: Params, dtype: Any) -> Params:
    """``params`` in the engine's dtype, except for those that no checkpoint holds in less than float32."""
    out: Params = {}
    for tensor in family_of(model.config.model_type).tensors(model.config):
        value = get(params, tensor.path)
        wanted = jnp.promote_types(dtype, jnp.float32) if tensor.float32 else jnp.dtype(dtype)
        put(out, tensor.path, value if value.dtype == wanted else _cast(value, wanted))
    return out


_cast = jax.jit(lambda value, dtype: value.astype(dtype), static_argnames="dtype")


class DiskTransfer:
    """Safetensors in a folder that the servers read: shared memory on one host, a network file system on several.

    Args:
      dtype: of the files. folder: parent of the directory that is written here, again and again.
    """

    name, session = "disk", False

    def __init__(self, model: Model, dtype: Any, folder: str | Path):
        self._model, self._dtype = model, dtype
        self._folder = make_folder(folder)
        self._written = ""

    def send(self, params: Params, label: str, servers: Sequence[Server]) -> None:
        directory = self._write(params, label)
        body = {"model_path": str(directory), "weight_version": label, "flush_cache": False}
        try:
            on_all(servers, lambda s: s.post("/update_weights_from_disk", body))
        except ServerLost:
            raise
        except EngineError as error:
            missing = "" if (directory / "config.json").is_file() else f" {directory} is gone."
            raise EngineError(
                f"weights {label} were not loaded from disk: {error.found}{missing}",
                "see the server's message; rollout.sglang.folder must be one that trainer and servers see.",
            ) from error

    def _write(self, params: Params, label: str) -> Path:
        """Writes ``params`` as a checkpoint, over the one before. A server that comes back reads it again."""
        directory = self._folder / "weights"
        if self._written != label or not (directory / "config.json").is_file():
            try:
                save_checkpoint(directory, self._model, served(self._model, params, self._dtype))
            except ModelError as error:
                raise EngineError(f"weights {label} cannot be handed over: {error.found}", error.fix) from error
            self._written = label
        return directory

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def make_folder(parent: str | Path) -> Path:
    """A new folder of this process below ``parent``; those of processes that were killed on this host are removed.

    Raises:
      EngineError: it cannot be made.
    """
    prefix = f"sdjax-weights-{socket.gethostname()}-"
    try:
        for folder in Path(parent).glob(prefix + "*"):
            owner = folder.name.removeprefix(prefix).split("-")[0]
            if owner.isdigit() and not _alive(int(owner)):
                shutil.rmtree(folder, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent))
    except OSError as error:
        raise EngineError(
            f"no folder for weights can be made in {parent}: {error}", "set rollout.sglang.folder."
        ) from error


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
