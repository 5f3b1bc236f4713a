"""Builds what every mode needs from a config: benchmark, model, engine, player."""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from sdjax import sharding
from sdjax.config import RunConfig
from sdjax.envs import make_benchmark
from sdjax.envs.base import Benchmark, Panel
from sdjax.envs.prompts import PromptTemplate, Protocol, load_protocol
from sdjax.models import cudnn, load_checkpoint, resolve_checkpoint
from sdjax.models.base import Model
from sdjax.models.tokenizer import Tokenizer
from sdjax.rollout.embedded import EmbeddedEngine
from sdjax.rollout.engine import Engine
from sdjax.rollout.episodes import Player


@dataclass(frozen=True)
class Session:
    """Everything of a run that does not change while it trains. ``params`` are the initial weights, on the mesh."""

    config: RunConfig
    benchmark: Benchmark
    panel: Panel
    template: PromptTemplate
    protocol: Protocol
    model: Model
    params: Any
    tokenizer: Tokenizer
    checkpoint_dir: Path
    mesh: Mesh
    engine: Engine
    player: Player

    def engine_params(self, params: Any) -> Any:
        """The weights as the engine reads them: in the compute dtype, so that decoding moves fewer bytes."""
        dtype = jnp.dtype(self.config.model.compute_dtype)
        return params if jnp.dtype(self.config.model.dtype) == dtype else _cast(params, dtype)

    def close(self) -> None:
        self.engine.close()
        self.benchmark.close()


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(params: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype), params)


def open_session(config: RunConfig) -> Session:
    """Loads data, weights and tokenizer, and starts the engine.

    Raises:
      DataError, ModelError, ConfigError: with what is missing or does not fit.
    """
    benchmark = make_benchmark(config.env)
    panel = benchmark.panel(config.eval.panel)
    template = PromptTemplate.load(config.env.name, config.env.template, config.env.history)
    protocol = load_protocol(config.env.name)
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    model, params, tokenizer = load_checkpoint(
        config.model.path, dtype=config.model.dtype, compute_dtype=config.model.compute_dtype
    )
    attention = cudnn.resolve(config.model.attention, config.model.compute_dtype)
    model = dataclasses.replace(model, attention=attention)
    params = jax.device_put(params, sharding.parameter_shardings(mesh, model.logical_axes(), params))
    rollout = config.rollout
    engine = EmbeddedEngine(
        model,
        params,
        stop_ids=tokenizer.stop_ids,
        sampling_mask_V=tokenizer.sampling_mask_V,
        slots=rollout.slots,
        # An acting teacher's prompts are longer by its own budget.
        max_length=rollout.max_length + (config.teacher.privileged_tokens if config.method.acts else 0),
        prefill_rows=rollout.prefill_rows,
        decode_chunk=rollout.decode_chunk,
        cache_dtype=rollout.cache_dtype,
        mesh=mesh,
    )
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
    session = Session(
        config=config,
        benchmark=benchmark,
        panel=panel,
        template=template,
        protocol=protocol,
        model=model,
        params=params,
        tokenizer=tokenizer,
        checkpoint_dir=resolve_checkpoint(config.model.path),
        mesh=mesh,
        engine=engine,
        player=player,
    )
    engine.update_weights(session.engine_params(params), 0)
    return session


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
        "attention": session.model.attention,
        "parameters": session.model.num_params(),
    }
