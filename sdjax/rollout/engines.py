"""The one place that knows which engines there are."""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from sdjax import sharding
from sdjax.config import RunConfig, SglangConfig
from sdjax.errors import ConfigError, EngineError
from sdjax.models.base import Model, Params
from sdjax.models.tokenizer import Tokenizer
from sdjax.rollout import embedded_steps, sglang_client, sglang_process
from sdjax.rollout.embedded import EmbeddedEngine
from sdjax.rollout.engine import Engine
from sdjax.rollout.sglang import Limits, Member, SglangEngine
from sdjax.rollout.sglang_http import LOOPBACK, Server, on_all
from sdjax.rollout.sglang_process import ServerProcess
from sdjax.rollout.sglang_sync import DiskTransfer, Transfer


def make_engine(
    config: RunConfig, model: Model, params: Params, tokenizer: Tokenizer, mesh: Mesh, *, checkpoint: Path, logs: Path
) -> Engine:
    """Starts the engine that ``rollout.engine`` names, with ``params`` as version 0.

    checkpoint: Hugging Face directory of the model. logs: folder for the output of servers.

    Raises:
      EngineError: it does not start, or serves another model. ConfigError: its settings do not fit this machine.
    """
    rollout = config.rollout
    # An acting teacher's prompts are longer by its own budget.
    max_length = rollout.max_length + (config.teacher.privileged_tokens if config.method.acts else 0)
    if rollout.engine == "sglang":
        if jax.process_count() > 1:
            raise ConfigError(
                "rollout.engine = 'sglang' in a run over several processes.", "use rollout.engine = 'embedded' there."
            )
        return _sglang(config, model, params, tokenizer, max_length, checkpoint, logs)
    prepare = None
    if jax.process_count() > 1:  # each process draws on its own devices, see ``rollout.shared``
        prepare = functools.partial(_own_weights, model, mesh)
        mesh = sharding.local_mesh()
        model = dataclasses.replace(model, mesh=mesh if mesh.size > 1 else None)
    return EmbeddedEngine(
        model,
        params,
        stop_ids=tokenizer.stop_ids,
        sampling_mask_V=tokenizer.sampling_mask_V,
        slots=rollout.slots,
        max_length=max_length,
        prefill_rows=rollout.prefill_rows,
        decode_chunk=rollout.decode_chunk,
        cache_dtype=rollout.cache_dtype,
        mesh=mesh,
        prepare=prepare,
    )


def _own_weights(model: Model, mesh: Mesh, params: Params) -> Params:
    """The weights of the engine on the devices of this process, from parameters that are divided over all processes."""
    return sharding.localize(embedded_steps.engine_params(model, params, mesh))


def _sglang(
    config: RunConfig,
    model: Model,
    params: Params,
    tokenizer: Tokenizer,
    max_length: int,
    checkpoint: Path,
    logs: Path,
) -> SglangEngine:
    settings = config.rollout.sglang
    key = os.environ.get(settings.key_variable, "")
    transfer, reload = make_transfers(settings, model)
    members: list[Member] = []
    try:
        members += [Member(Server(url, key=key), None) for url in settings.urls] or own_members(
            settings, checkpoint, logs, key=key, seed=config.seed
        )
        for member in members:
            if member.process is not None:
                member.process.start()
        for member in members:
            if member.process is not None:
                member.process.wait_ready()
        on_all([m.server for m in members], lambda server: check_model(server, model, max_length))
    except BaseException:
        for member in members:
            if member.process is not None:
                member.process.stop()
            member.server.close()
        transfer.close()
        raise
    return SglangEngine(
        members,
        transfer,
        params,
        protocol=sglang_client.Protocol(tuple(tokenizer.stop_ids), tokenizer.sampling_mask_V),
        limits=Limits(max_length, settings.request_timeout_s, settings.start_timeout_s, settings.restarts),
        reload=reload,
        sleep=settings.sleep,
    )


def own_members(settings: SglangConfig, checkpoint: Path, logs: Path, *, key: str, seed: int) -> list[Member]:
    """Servers to start on this machine, one a line of GPUs.

    Raises:
      ConfigError: they would listen to the network without a key. EngineError: a port is taken.
    """
    if settings.host not in LOOPBACK and not key:
        raise ConfigError(
            f"rollout.sglang.host = {settings.host!r}: anyone who reaches it could replace the weights.",
            f"put a key into ${settings.key_variable}, or use host=127.0.0.1.",
        )
    members = []
    for number in range(settings.engines):
        port = settings.port + number if settings.port else sglang_process.free_port(settings.host)
        sglang_process.check_port(settings.host, port)
        server = Server(f"http://{settings.host}:{port}", key=key)
        command = [*settings.command, *server_flags(settings, checkpoint, port, number, key=key, seed=seed)]
        log = logs / f"sglang_{number}.log"
        members.append(Member(server, ServerProcess(command, server, log, timeout_s=settings.start_timeout_s)))
    return members


def server_flags(settings: SglangConfig, checkpoint: Path, port: int, number: int, *, key: str, seed: int) -> list[str]:
    """Flags of server ``number``; those of ``rollout.sglang.flags`` come last and win."""
    flags = [
        f"--model-path={checkpoint}",
        f"--host={settings.host}",
        f"--port={port}",
        f"--dtype={settings.dtype}",
        f"--tp-size={settings.tensor_parallel}",
        f"--base-gpu-id={settings.first_gpu + number * settings.tensor_parallel}",
        f"--random-seed={seed + number}",
        "--skip-tokenizer-init",  # ids in, ids out
        "--skip-server-warmup",
    ]
    flags += ["--enable-deterministic-inference"] if settings.deterministic else []
    flags += ["--enable-memory-saver"] if settings.sleep else []
    flags += [f"--api-key={key}", f"--admin-api-key={key}"] if key else []
    return [*flags, *settings.flags]


def make_transfers(settings: SglangConfig, model: Model) -> tuple[Transfer, Transfer | None]:
    """The way weights take, and the way from disk that its first use is compared with (None: it is that way).

    Raises:
      ConfigError: this machine or environment cannot do it.
    """
    kind = settings.sync
    if kind == "auto":
        kind = "ipc" if jax.default_backend() == "gpu" and not settings.urls else "disk"
    disk = DiskTransfer(model, settings.dtype, settings.folder)
    if kind == "disk":
        return disk, None
    try:
        # torch is no requirement of the trainer: these ways alone want it.
        if kind == "ipc":
            from sdjax.rollout.sglang_ipc import IpcTransfer

            return IpcTransfer(model, settings.dtype), disk
        from sdjax.rollout.sglang_tensor import GroupTransfer, TensorTransfer

        if kind == "tensor":
            return TensorTransfer(model, settings.dtype), disk
        return GroupTransfer(model, settings.dtype, kind), disk
    except ImportError as error:
        disk.close()
        raise ConfigError(
            f"rollout.sglang.sync = {settings.sync!r} (here: {kind}) needs torch beside JAX: {error}.",
            "install torch in the trainer's environment, or use sync=disk.",
        ) from error
    except ConfigError:
        disk.close()
        raise


def check_model(server: Server, model: Model, max_length: int) -> None:
    """Raises EngineError where ``server`` serves another model than ``model``, or one that is too short."""
    facts = server.facts
    served, ours = facts.model_type, model.config.model_type
    if served is not None and served.removesuffix("_text") != ours.removesuffix("_text"):
        raise EngineError(
            f"{server.url} serves a {served} model ({facts.model_path}); the run trains a {ours} model.",
            "start the server with the checkpoint of model.path.",
        )
    if facts.longest is not None and facts.longest < max_length:
        raise EngineError(
            f"{server.url} takes {facts.longest} tokens; prompts and answers of the run have up to {max_length}.",
            "start it with a larger --context-length, or lower rollout.max_length.",
        )
    rows = model.config.vocab_size
    if not _knows(server, rows - 1) or _knows(server, rows):
        raise EngineError(
            f"the vocabulary of {server.url} ({facts.model_path}) has not the {rows} rows of the run's model.",
            "start the server with the checkpoint of model.path.",
        )


def _knows(server: Server, token: int) -> bool:
    """Whether ``token`` is in the vocabulary: a bias on an id outside it is refused before anything is computed."""
    body: dict[str, Any] = {
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 1, "logit_bias": {str(token): 0.0}},
    }
    try:
        server.post("/generate", body)
    except EngineError as error:
        if "logit_bias" in error.found:
            return False
        raise
    return True
