"""Builds what every mode needs from a config: benchmark, model, engine, player."""

import dataclasses
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from sdjax import sharding
from sdjax.config import ModelConfig, RunConfig
from sdjax.envs import make_benchmark
from sdjax.envs.base import Benchmark, Panel
from sdjax.envs.prompts import PromptTemplate, Protocol, load_protocol
from sdjax.errors import ConfigError
from sdjax.models import cudnn, delta_kernels, load_checkpoint, resolve_checkpoint
from sdjax.models.base import Model
from sdjax.models.qwen3_5 import Qwen35Model
from sdjax.models.tokenizer import Tokenizer
from sdjax.rollout.engine import Engine
from sdjax.rollout.engines import make_engine
from sdjax.rollout.episodes import Player
from sdjax.rollout.shared import SharedEngine
from sdjax.train import distributed
from sdjax.train.teacher_weights import Reference


@dataclass(frozen=True)
class Session:
    """Everything of a run that does not change while it trains. ``reference`` holds the initial weights."""

    config: RunConfig
    benchmark: Benchmark
    panel: Panel
    template: PromptTemplate
    protocol: Protocol
    model: Model
    reference: Reference
    tokenizer: Tokenizer
    checkpoint_dir: Path
    mesh: Mesh
    engine: Engine
    player: Player

    @property
    def params(self) -> Any:
        """The initial weights, on the mesh."""
        return self.reference.on_device()

    def close(self) -> None:
        self.engine.close()
        self.benchmark.close()


def with_kernels(model: Model, config: ModelConfig) -> Model:
    """The model with the kernels that the config asks for. Raises ConfigError for those that cannot run here."""
    attention = cudnn.resolve(config.attention, config.compute_dtype)
    model = dataclasses.replace(model, attention=attention, scan_layers=config.scan_layers)
    if isinstance(model, Qwen35Model):
        return dataclasses.replace(model, delta_rule=delta_kernels.resolve(config.delta_rule, config.compute_dtype))
    if config.delta_rule != "auto":
        raise ConfigError(
            f"model.delta_rule = {config.delta_rule!r}, but a {model.config.model_type} model has no such layers.",
            'use model.delta_rule = "auto".',
        )
    return model


def check_positions(config: RunConfig, positions: int) -> None:
    """Refuses rows longer than a model has ``positions``: it would compute them without an error, and badly.

    Raises:
      ConfigError: with the limits that make the longest row.
    """
    rollout, method = config.rollout, config.method.build()
    limits = {"rollout.prompt_tokens": rollout.prompt_tokens, "rollout.response_tokens": rollout.response_tokens}
    if method.views or method.acts:
        limits["teacher.privileged_tokens"] = config.teacher.privileged_tokens
    longest = sum(limits.values())
    if longest > positions:
        terms = " + ".join(f"{name} = {value}" for name, value in limits.items())
        raise ConfigError(
            f"the longest row has {longest} tokens ({terms}); the model has {positions} positions.",
            "lower one of these limits, or use a model with more positions.",
        )


def open_session(config: RunConfig, logs: Path | None = None) -> Session:
    """Loads data, weights and tokenizer, and starts the engine.

    logs: folder for the output of an engine's processes (None: a temporary one).

    Raises:
      DataError, ModelError, ConfigError, EngineError: with what is missing or does not fit.
    """
    benchmark = make_benchmark(config.env)
    panel = benchmark.panel(config.eval.panel)
    template = PromptTemplate.load(config.env.name, config.env.template, config.env.history)
    protocol = load_protocol(config.env.name)
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    model, params, tokenizer = load_checkpoint(
        config.model.path, dtype=config.model.dtype, compute_dtype=config.model.compute_dtype, mesh=mesh
    )
    model = with_kernels(model, config.model)
    check_positions(config, model.config.max_positions)
    rollout = config.rollout
    checkpoint = resolve_checkpoint(config.model.path)
    logs = Path(tempfile.gettempdir()) / f"sdjax-logs-{os.getpid()}" if logs is None else logs
    engine = make_engine(config, model, params, tokenizer, mesh, checkpoint=checkpoint, logs=logs)
    if jax.process_count() > 1:
        engine = SharedEngine(engine, distributed.Channel())
    player = Player(
        benchmark=benchmark,
        engine=engine,
        template=template,
        tokenizer=tokenizer,
        run_seed=config.seed,
        turns=config.env.turns,
        prompt_tokens=rollout.prompt_tokens,
        retries=rollout.retries,
        overlong=protocol.overlong_prompt,
    )
    return Session(
        config=config,
        benchmark=benchmark,
        panel=panel,
        template=template,
        protocol=protocol,
        model=model,
        reference=Reference(params, config.model.reference_memory),
        tokenizer=tokenizer,
        checkpoint_dir=checkpoint,
        mesh=mesh,
        engine=engine,
        player=player,
    )


def provenance(session: Session) -> dict[str, Any]:
    """Facts about data and model for provenance.json."""
    return {
        "panel": {
            "name": session.panel.name,
            "tasks": len(session.panel.task_ids),
            "sha256": session.panel.sha256,
        },
        "benchmark": session.benchmark.provenance(),
        "model": dataclasses.asdict(session.model.config),
        "kernels": {
            "attention": session.model.attention,
            "delta_rule": getattr(session.model, "delta_rule", None),
            "scan_layers": session.model.scan_layers,
        },
        "parameters": session.model.num_params(),
    }
