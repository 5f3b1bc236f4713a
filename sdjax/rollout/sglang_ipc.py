"""Weights into SGLang servers on the trainer's own GPUs: the servers read them where they lie, through CUDA IPC.

JAX array -> torch tensor (DLPack, no copy) -> one flat buffer that torch allocated (CUDA hands out memory of its own
allocations only) -> a handle of a few hundred bytes over HTTP. Needs torch with CUDA beside JAX, and not SGLang: the
payload is made of classes that every version accepts (0.5.17 to 0.5.23 were read), see ``payload``.
"""

import base64
import inspect
import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import jax
import torch
from torch.multiprocessing import reductions

from sdjax.errors import ConfigError, EngineError
from sdjax.models.base import Model, Params
from sdjax.rollout import sglang_buckets, sglang_sync
from sdjax.rollout.sglang_http import Server, ServerLost, on_all

# Place of the GPU's number among the arguments that rebuild a tensor in another process.
_DEVICE = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters).index("storage_device")


class IpcTransfer:
    """Sends weights to servers whose GPUs are among the trainer's.

    Server and trainer must see the same GPUs under the same numbers (``CUDA_VISIBLE_DEVICES``): the server says which
    numbers it uses, and every rank gets all tensors on its own GPU.

    Args:
      dtype: of the served weights. bucket_bytes: of one buffer; all buffers of one transfer exist until it ends.

    Raises:
      ConfigError: the trainer does not run on GPUs, or torch sees none.
    """

    name, session = "ipc", True

    def __init__(self, model: Model, dtype: Any, bucket_bytes: int = sglang_buckets.BUCKET_BYTES):
        if jax.default_backend() != "gpu" or not torch.cuda.is_available():
            raise ConfigError(
                f"rollout.sglang.sync = 'ipc': JAX runs on {jax.default_backend()}, and torch "
                f"{torch.__version__} {'sees' if torch.cuda.is_available() else 'sees no'} GPU.",
                "install JAX and torch with CUDA in the trainer's environment, or use sync=disk.",
            )
        self._buckets = sglang_buckets.plan(model, dtype, bucket_bytes)

    def send(self, params: Params, label: str, servers: Sequence[Server]) -> None:
        try:
            self._send(params, label, servers)
        finally:
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()  # the trainer's own memory is JAX's

    def _send(self, params: Params, label: str, servers: Sequence[Server]) -> None:
        gpus = dict(zip([server.url for server in servers], on_all(servers, _gpus)))
        wanted = sorted({gpu for numbers in gpus.values() for gpu in numbers})
        held = []
        for bucket in self._buckets:
            flats, metadata = _flatten(bucket, params, wanted)
            held.append(flats)
            on_all(servers, lambda s, f=flats, m=metadata: _post(s, [f[gpu] for gpu in gpus[s.url]], m, label))
        # A server answers when its copies are queued, and they may still run: a bucket that is reused or freed at that
        # moment arrives garbled. So all live until one more round trip (milliseconds; the copies take less than one).
        on_all(servers, sglang_sync.flush)

    def close(self) -> None:
        pass


def payload(flat: torch.Tensor, metadata: Sequence[SimpleNamespace]) -> str:
    """What ``/update_weights_from_tensor`` takes as one rank's ``flattened_bucket``: base64 of a pickle.

    The server reads it with an allow-list, and of each entry of ``metadata`` its attributes: name, shape, dtype and the
    range of bytes ``start_idx`` to ``end_idx`` (``numel`` of them) in ``flat`` (uint8). A plain namespace has these and
    is on the list of every version; SGLang's own class would need SGLang in this process.
    """
    stream = io.BytesIO()
    _Pickler(stream).dump({"flattened_tensor": flat, "metadata": list(metadata)})
    return base64.b64encode(stream.getvalue()).decode("ascii")


class _Pickler(ForkingPickler):
    """Sends a tensor on a GPU as a handle, with the GPU's UUID: its number may be another one in the server."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor) or not obj.is_cuda:
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(obj)
        return rebuild, with_uuid(arguments, str(torch.cuda.get_device_properties(obj.device).uuid))


def with_uuid(arguments: Sequence[Any], uuid: str) -> tuple[Any, ...]:
    """Arguments of ``rebuild_cuda_tensor`` with ``uuid`` in place of the GPU's number, as SGLang's own patch has it."""
    return (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])


def flatten(named: Sequence[tuple[str, torch.Tensor]]) -> tuple[torch.Tensor, list[SimpleNamespace]]:
    """One new uint8 tensor with the bytes of all, and what is where in it."""
    metadata, end = [], 0
    for name, tensor in named:
        begin, size = end, tensor.numel() * tensor.element_size()
        end += size
        metadata.append(
            SimpleNamespace(
                name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, start_idx=begin, end_idx=end, numel=size
            )
        )
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in named]), metadata


def _flatten(
    bucket: list[sglang_buckets.Entry], params: Params, gpus: Sequence[int]
) -> tuple[dict[int, torch.Tensor], list[SimpleNamespace]]:
    """One bucket as a flat tensor on each of ``gpus``, and what is where in it."""
    arrays = jax.block_until_ready(list(sglang_buckets.tensors(bucket, params)))
    flats, metadata = {}, []
    for gpu in gpus:
        named = [(name, torch.from_dlpack(_on_gpu(array, gpu))) for name, array in arrays]
        with torch.cuda.device(gpu):
            flats[gpu], metadata = flatten(named)
    for gpu in gpus:
        torch.cuda.synchronize(gpu)  # JAX takes the arrays' memory back at once
    return flats, metadata


def _on_gpu(array: jax.Array, gpu: int) -> jax.Array:
    for shard in array.addressable_shards:
        if shard.device.local_hardware_id == gpu:
            return shard.data
    raise EngineError(
        f"a server uses GPU {gpu}, where the trainer has no weights "
        f"(it has them on {sorted(d.local_hardware_id for d in array.devices())}).",
        "put servers on the GPUs of the mesh (rollout.sglang.first_gpu, tensor_parallel), or use sync=disk.",
    )


def _gpus(server: Server) -> list[int]:
    """Numbers of the GPUs that a server's ranks use."""
    first = int(server.get("/server_info")["base_gpu_id"])
    return list(range(first, first + server.facts.tensor_parallel))


def _post(server: Server, flats: Sequence[torch.Tensor], metadata: Sequence[SimpleNamespace], label: str) -> None:
    body = {
        "serialized_named_tensors": [payload(flat, metadata) for flat in flats],
        "load_format": "flattened_bucket",
        "flush_cache": False,
    }
    try:
        server.post("/update_weights_from_tensor", body)
    except ServerLost:
        raise
    except EngineError as error:
        raise EngineError(f"weights {label} were not taken: {error.found}", "see the server's message.") from error
