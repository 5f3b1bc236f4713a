"""Weights into SGLang servers without a file: through shared memory of one host, or through a group of processes.

Both need torch beside JAX, and not SGLang: the servers build the tensors from what torch itself sends.
"""

import contextlib
import socket
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from urllib.parse import urlsplit

import jax
import numpy as np
import torch
import torch.distributed
import torch.distributed.distributed_c10d as distributed_c10d
import torch.multiprocessing

from sdjax.errors import ConfigError, EngineError
from sdjax.models.base import Model, Params
from sdjax.rollout import sglang_buckets
from sdjax.rollout.sglang_http import LOOPBACK, Server, ServerLost, on_all
from sdjax.rollout.sglang_ipc import flatten, payload

_GROUP_TIMEOUT_S = 120.0
_REFUSAL_S = 0.2  # a server that refuses an update does so at once


class TensorTransfer:
    """Flat tensors in shared memory, which servers of this host map. For servers on the CPU.

    Args:
      dtype: of the served weights. bucket_bytes: of one flat tensor.
    """

    name, session = "tensor", True

    def __init__(self, model: Model, dtype: str, bucket_bytes: int = sglang_buckets.BUCKET_BYTES):
        self._buckets = sglang_buckets.plan(model, dtype, bucket_bytes)
        # The other strategy hands file descriptors over a socket that asks for a key which servers do not have.
        torch.multiprocessing.set_sharing_strategy("file_system")

    def send(self, params: Params, label: str, servers: Sequence[Server]) -> None:
        for bucket in self._buckets:
            flat, metadata = flatten(list(_on_host(bucket, params)))
            on_all(servers, lambda s, f=flat, m=metadata: self._post(s, f, m, label))

    def _post(self, server: Server, flat: torch.Tensor, metadata: list, label: str) -> None:
        body = {
            "serialized_named_tensors": [payload(flat, metadata)] * server.facts.tensor_parallel,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        _refused(label, lambda: server.post("/update_weights_from_tensor", body))

    def close(self) -> None:
        pass


class GroupTransfer:
    """Broadcast in a process group of the trainer (rank 0) and all ranks of all servers.

    The group is made again when the servers are not those of the last time, or one of them was started again.

    Args:
      dtype: of the served weights. backend: "gloo" (sockets, from host memory) or "nccl" (from the trainer's first
        GPU, which no server may use).

    Raises:
      ConfigError: nccl without GPU.
    """

    session = True

    def __init__(self, model: Model, dtype: str, backend: str):
        if backend == "nccl" and (jax.default_backend() != "gpu" or not torch.cuda.is_available()):
            raise ConfigError("rollout.sglang.sync = 'nccl' needs a GPU for JAX and for torch.", "use gloo or disk.")
        self.name, self._backend = backend, backend
        self._buckets = sglang_buckets.plan(model, dtype)
        self._group: torch.distributed.ProcessGroup | None = None
        self._group_name = ""
        self._members: tuple[tuple[Server, int], ...] = ()

    def send(self, params: Params, label: str, servers: Sequence[Server]) -> None:
        members = tuple((server, server.incarnation) for server in servers)
        if self._group is None or members != self._members:
            self._leave()
            self._join(servers)
            self._members = members
        try:
            for bucket in self._buckets:
                self._broadcast(bucket, params, label, servers)
        except BaseException:
            self._leave()  # its members may be at different places
            raise

    def close(self) -> None:
        self._leave()

    def _join(self, servers: Sequence[Server]) -> None:
        self._group_name = f"sdjax-{uuid.uuid4().hex[:12]}"
        sizes = [server.facts.tensor_parallel for server in servers]
        address = _own_address(servers)
        timeout = timedelta(seconds=_GROUP_TIMEOUT_S)
        store = torch.distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            address, 0, 1 + sum(sizes), is_master=True, timeout=timeout, wait_for_workers=False
        )
        body = {
            "master_address": address,
            "master_port": store.port,
            "world_size": 1 + sum(sizes),
            "group_name": self._group_name,
            "backend": self._backend,
        }
        offsets = [1 + sum(sizes[:i]) for i in range(len(servers))]
        with ThreadPoolExecutor(max_workers=len(servers)) as pool:
            replies = [
                pool.submit(server.post, "/init_weights_update_group", body | {"rank_offset": offset})
                for server, offset in zip(servers, offsets)
            ]
            _raise_refusal(replies)
            try:
                # The servers make their side with this function: torch has no public one for a group beside the
                # default group that processes of other programs can join.
                self._group, _ = distributed_c10d._new_process_group_helper(
                    1 + sum(sizes),
                    0,
                    [],
                    torch.distributed.Backend(self._backend),
                    distributed_c10d.PrefixStore(self._group_name, store),
                    group_name=distributed_c10d.GroupName(self._group_name),
                    timeout=timeout,
                )
            except RuntimeError as error:
                raise _broken("made", error) from error
            for reply in replies:
                reply.result()

    def _leave(self) -> None:
        if self._group is None:
            return
        for server, incarnation in self._members:
            if server.incarnation == incarnation:
                with contextlib.suppress(EngineError):  # it is gone, and the group with it
                    server.post("/destroy_weights_update_group", {"group_name": self._group_name}, timeout_s=30.0)
        self._group, self._members = None, ()

    def _broadcast(
        self, bucket: list[sglang_buckets.Entry], params: Params, label: str, servers: Sequence[Server]
    ) -> None:
        named = list(_on_gpu(bucket, params) if self._backend == "nccl" else _on_host(bucket, params))
        body = {
            "names": [name for name, _ in named],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
            "shapes": [list(tensor.shape) for _, tensor in named],
            "group_name": self._group_name,
            "flush_cache": False,
        }
        assert self._group is not None
        with ThreadPoolExecutor(max_workers=len(servers)) as pool:
            replies = [
                pool.submit(_refused, label, lambda s=server: s.post("/update_weights_from_distributed", body))
                for server in servers
            ]
            _raise_refusal(replies)
            try:
                works = [self._group.broadcast(tensor, 0) for _, tensor in named]
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise _broken("used", error) from error
            for reply in replies:
                reply.result()


def _on_host(bucket: list[sglang_buckets.Entry], params: Params) -> Iterator[tuple[str, torch.Tensor]]:
    for name, array in sglang_buckets.tensors(bucket, params):
        host = np.ascontiguousarray(np.asarray(array))
        # numpy has no bfloat16 of its own, so torch gets the bytes.
        flat = torch.from_numpy(host.reshape(-1).view(np.uint8).copy())
        yield name, flat.view(getattr(torch, host.dtype.name)).reshape(host.shape)


def _on_gpu(bucket: list[sglang_buckets.Entry], params: Params) -> Iterator[tuple[str, torch.Tensor]]:
    for name, array in sglang_buckets.tensors(bucket, params):
        yield name, torch.from_dlpack(jax.block_until_ready(array.addressable_shards[0].data))


def _refused(label: str, call) -> None:
    try:
        call()
    except ServerLost:
        raise
    except EngineError as error:
        raise EngineError(f"weights {label} were not taken: {error.found}", "see the server's message.") from error


def _raise_refusal(replies: Sequence[Future]) -> None:
    """Raises what a server answered at once: whoever waits for it in a group waits in vain."""
    for reply in replies:
        try:
            failure = reply.exception(timeout=_REFUSAL_S / len(replies))
        except TimeoutError:
            continue
        if failure is not None:
            raise failure


def _broken(when: str, error: Exception) -> ServerLost:
    return ServerLost(
        f"the group for weights could not be {when} ({str(error)[:300]}).", "look at the logs of the servers."
    )


def _own_address(servers: Sequence[Server]) -> str:
    """Address of this host under which all servers reach it."""
    if all(urlsplit(server.url).hostname in LOOPBACK for server in servers):
        return "127.0.0.1"
    return socket.gethostbyname(socket.gethostname())
