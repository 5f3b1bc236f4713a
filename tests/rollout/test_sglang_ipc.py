"""What a server unpickles: its allow-list, the layout of the bytes, the GPU's name instead of its number."""

import base64
import inspect
import io
import pickle

import jax
import pytest

from sdjax.errors import ConfigError, EngineError
from sdjax.rollout import sglang_buckets
from sdjax.rollout.sglang_http import Facts
from tests.rollout.test_sglang_buckets import MODELS, random_params

torch = pytest.importorskip("torch", reason="only this way of sync needs torch")

from torch.multiprocessing import reductions  # noqa: E402

from sdjax.rollout import sglang_ipc  # noqa: E402

# Of the globals that SGLang 0.5.23 lets a payload name (sglang/srt/utils/common.py), those that are needed here.
ALLOWED = {
    ("types", "SimpleNamespace"),
    ("torch", "Tensor"),
    ("torch", "Size"),
    ("torch", "bfloat16"),
    ("torch", "float32"),
    ("torch", "uint8"),
    ("torch.storage", "UntypedStorage"),
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("torch.storage", "TypedStorage"),
}


class Reader(pickle.Unpickler):
    def find_class(self, module, name):
        assert (module, name) in ALLOWED
        return super().find_class(module, name)


@pytest.fixture(autouse=True)
def shared_memory_by_name():
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


def read(payload):
    return Reader(io.BytesIO(base64.b64decode(payload, validate=True))).load()


def test_a_payload_gives_back_names_shapes_dtypes_and_bytes():
    random = torch.Generator().manual_seed(0)
    named = [
        ("layers.0.A_log", torch.randn(6, generator=random)),
        ("layers.0.proj.weight", torch.randn(3, 5, generator=random).to(torch.bfloat16)),
        ("layers.0.conv1d.weight", torch.randn(7, 1, 4, generator=random).to(torch.bfloat16)),
    ]
    data = read(sglang_ipc.payload(*sglang_ipc.flatten(named)))
    assert data.keys() == {"flattened_tensor", "metadata"} and len(data["metadata"]) == len(named)
    flat = data["flattened_tensor"]
    assert flat.dtype == torch.uint8 and flat.numel() == data["metadata"][-1].end_idx
    for entry, (name, tensor) in zip(data["metadata"], named):
        assert (entry.name, entry.shape, entry.dtype) == (name, tuple(tensor.shape), tensor.dtype)
        assert entry.numel == entry.end_idx - entry.start_idx
        assert torch.equal(flat[entry.start_idx : entry.end_idx].view(entry.dtype).reshape(entry.shape), tensor)


def test_a_bucket_is_new_memory():
    tensor = torch.ones(4)
    flat, _ = sglang_ipc.flatten([("one", tensor)])
    tensor.zero_()
    assert torch.equal(flat.view(torch.float32), torch.ones(4))


def test_a_tensor_on_a_gpu_is_a_handle_with_the_gpus_uuid(monkeypatch):
    # The handle itself takes a GPU; its form is that of torch's own function, which this calls on the reading side.
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    number = dict.fromkeys(names, 0) | {"storage_device": 5, "tensor_size": torch.Size([3]), "storage_handle": b"h"}
    arguments = sglang_ipc.with_uuid(tuple(number.values()), "GPU-1234")
    seen = {}

    class Handle(sglang_ipc._Pickler):
        def reducer_override(self, obj):
            return (reductions.rebuild_cuda_tensor, arguments) if isinstance(obj, torch.Tensor) else NotImplemented

    stream = io.BytesIO()
    Handle(stream).dump({"flattened_tensor": torch.zeros(3, dtype=torch.uint8)})

    def rebuild(*given):  # as a server's patch takes it: under the name of torch's function
        seen.update(zip(names, given))

    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    Reader(io.BytesIO(stream.getvalue())).load()
    assert seen == number | {"storage_device": "GPU-1234"}


def test_without_gpu_the_way_is_refused():
    with pytest.raises(ConfigError, match=r"JAX runs on cpu.*use sync=disk"):
        sglang_ipc.IpcTransfer(MODELS["qwen3"], "bfloat16")


def test_a_server_on_a_gpu_that_the_trainer_does_not_use_is_named():
    array = jax.numpy.zeros(3)
    assert sglang_ipc._on_gpu(array, array.addressable_shards[0].device.local_hardware_id) is not None
    with pytest.raises(EngineError, match=r"GPU 99.*first_gpu"):
        sglang_ipc._on_gpu(array, 99)


class Served:
    """A server of two ranks on GPUs 2 and 3 that keeps what it is sent."""

    url, facts = "http://one", Facts((0, 5, 17), 2, "", None, None)

    def __init__(self, refuses: bool = False):
        self.calls, self.tensors, self.refuses = [], [{}, {}], refuses

    def get(self, path):
        return {"base_gpu_id": 2}

    def post(self, path, body=None):
        self.calls.append(path)
        if path != "/update_weights_from_tensor":
            return
        if self.refuses:
            raise EngineError("no.")
        assert body["load_format"] == "flattened_bucket" and body["flush_cache"] is False
        for rank, text in zip(self.tensors, body["serialized_named_tensors"], strict=True):
            data = read(text)
            for entry in data["metadata"]:
                flat = data["flattened_tensor"][entry.start_idx : entry.end_idx]
                rank[entry.name] = flat.view(entry.dtype).reshape(entry.shape)


@pytest.fixture
def on_host(monkeypatch):
    """The transfer with host memory in place of that of GPUs."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for name, value in {"is_available": True, "ipc_collect": None, "empty_cache": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)

    def flatten(bucket, params, gpus):
        named = [(n, torch.from_dlpack(jax.block_until_ready(a))) for n, a in sglang_buckets.tensors(bucket, params)]
        _, metadata = sglang_ipc.flatten(named)
        return {gpu: sglang_ipc.flatten(named)[0] for gpu in gpus}, metadata

    monkeypatch.setattr(sglang_ipc, "_flatten", flatten)


def test_every_rank_gets_every_tensor_and_the_cache_is_emptied_last(on_host):
    model, server = MODELS["qwen3_5"], Served()
    params = random_params(model)
    sglang_ipc.IpcTransfer(model, "bfloat16", 2000).send(params, "v1", [server])
    assert server.calls[-1] == "/flush_cache" and len(server.calls) > 5 and len(set(server.calls)) == 2
    wanted = {}
    for bucket in sglang_buckets.plan(model, "bfloat16"):
        wanted |= dict(sglang_buckets.tensors(bucket, params))
    for rank in server.tensors:
        assert rank.keys() == wanted.keys()
        assert all(torch.equal(rank[name], torch.from_dlpack(array)) for name, array in wanted.items())


def test_a_refusal_names_the_weights_and_ends_the_transfer(on_host):
    server = Served(refuses=True)
    with pytest.raises(EngineError, match="weights v7 were not taken: no"):
        sglang_ipc.IpcTransfer(MODELS["qwen3"], "bfloat16").send(random_params(MODELS["qwen3"]), "v7", [server])
    assert server.calls == ["/update_weights_from_tensor"]
