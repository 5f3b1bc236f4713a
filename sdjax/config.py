"""The typed configuration of a run.

A config file defines ``get_config(arguments) -> ConfigDict``; ``load`` turns that into the frozen dataclasses below.
Unknown keys, wrong types and combinations that cannot work fail here, before anything is loaded, with the key, the
value, the nearest known key and the fix in the message.
"""

import dataclasses
import difflib
import hashlib
import json
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

import ml_collections
from ml_collections import config_dict

from sdjax.envs.config import EnvConfig
from sdjax.errors import ConfigError

EXTRA_VALIDATIONS = ("greedy", "sampled", "teacher_weights")


@dataclass(frozen=True)
class ModelConfig:
    """path: a Hugging Face directory, a .gguf file or "smollm2-135m"; training starts from (and the reference
    policy is)
    these weights. dtype: of the stored parameters. compute_dtype: of matrix products in trainer and engine.
    attention: kernel of the trainer; "auto" is cudnn on a Hopper GPU with bfloat16, else xla."""

    path: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["auto", "xla", "cudnn"] = "auto"


@dataclass(frozen=True)
class RolloutConfig:
    """engine: who generates. slots: episodes decoded at the same time. max_length: prompt + response tokens of one slot
    (an acting teacher adds ``teacher.privileged_tokens``).
    retries: fresh environments tried before an episode is recorded as failed. warn_gap / stop_gap: thresholds on the
    mean |log-prob gap| between engine and trainer (nats)."""

    engine: Literal["embedded"] = "embedded"
    slots: int = 64
    max_length: int = 2560
    prompt_tokens: int = 2048
    response_tokens: int = 512
    temperature: float = 1.0
    prefill_rows: int = 16
    decode_chunk: int = 8
    cache_dtype: Literal["float32", "bfloat16"] = "float32"
    retries: int = 1
    warn_gap: float = 0.02
    stop_gap: float = 1.0
    transcripts_every: int = 10
    transcript_episodes: int = 3


@dataclass(frozen=True)
class TrainConfig:
    """Section 3 of the methods: batch, surrogate, optimizer. pack_length: tokens of one packed row (the teacher's
    rows are longer by ``teacher.privileged_tokens``); pack_rows: packed rows of one micro-batch; loss_slots: response
    tokens that one packed row may hold."""

    steps: int = 100
    tasks_per_step: int = 16
    group_size: int = 8
    minibatch_rows: int = 256
    minibatch_order: Literal["trajectory", "shuffle"] = "trajectory"
    agg: Literal["minibatch", "micro"] = "minibatch"
    micro_rows: int = 32
    adv_stats: Literal["row", "trajectory"] = "row"
    adv_norm_std: bool = True
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    kl_coef: float = 0.01
    entropy_coef: float = 0.001
    learning_rate: float = 1e-6
    warmup_share: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    pack_length: int = 4096
    pack_rows: int = 4
    loss_slots: int = 1024
    remat: bool = True


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; parameters are sharded over ``fsdp`` and ``tensor``, batches over ``data`` and
    ``fsdp``.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1


@dataclass(frozen=True)
class TeacherConfig:
    """bank: name of a shipped skill bank or a directory. weights: whose parameters score under the privileged prompt
    ("method": what the method declares). ema_decay: share of the old average kept per global step. privileged_tokens:
    the teacher's own budget on top of the student's prompt limit; dynamic texts are cut at their end to fit.

    Texts from trajectories. horizon, observation_tokens: how many next observations are shown and the longest of them.
    sibling_margin: on graded returns, by how much a failed sibling must be better to be shown (reward units).
    contrast_spread: on graded returns, the spread that a group needs for a guide. reflection_turns,
    reflection_observation_chars, reflection_tokens: how much of an episode its reflection reads, and the longest
    reflection or guide."""

    bank: str = ""
    weights: Literal["method", "theta_old", "ema", "init"] = "method"
    ema_decay: float = 0.95
    placement: Literal["before_chat", "user_turn"] = "before_chat"
    truncation: Literal["own_budget", "released_left"] = "own_budget"
    privileged_tokens: int = 2048
    on_missing: Literal["error", "count"] = "error"
    horizon: int = 1
    observation_tokens: int = 1024
    sibling_margin: float = 2.0
    contrast_spread: float = 1.0
    reflection_turns: int = 50
    reflection_observation_chars: int = 400
    reflection_tokens: int = 512


@dataclass(frozen=True)
class EvalConfig:
    """every: validation after each multiple of this many updates, and before the first. final_seeds: rollout seeds of
    the final evaluation. panel: name of the fixed panel (``valid_seen``, ``valid_seen:64``, ...). extra_validations:
    further ones beside those that the method asks for ("greedy", "sampled", "teacher_weights"), at the last step and
    at each multiple of ``extra_every`` that has a validation."""

    every: int = 5
    extra_every: int = 20
    extra_validations: tuple[str, ...] = ()
    panel: str = "valid"
    temperature: float = 0.4
    final_seeds: int = 8
    final_temperature: float = 0.4


@dataclass(frozen=True)
class SaveConfig:
    """every: checkpoint after each multiple of this many updates (the last step is always saved). keep: newest kept."""

    every: int = 10
    keep: int = 3
    asynchronous: bool = True


@dataclass(frozen=True)
class SftConfig:
    """Warm start from expert episodes. expert: one that the benchmark has, "" for its first (ALFWorld: ``search`` sees
    only what an agent sees, ``plan`` plays the shortest plan). noise: probability that a turn of the expert is a random
    one, so that imitation leaves something to learn.
    privileged_share: share of episodes that carry the teacher's text in front and have no noise, so that a small model
    learns to act better when it reads that text."""

    expert: str = ""
    episodes: int = 1000
    steps: int = 300
    batch_rows: int = 32
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    weight_decay: float = 0.01
    noise: float = 0.0
    privileged_share: float = 0.0


@dataclass(frozen=True)
class RunConfig:
    """One run. ``method`` holds ``name`` and the fields of that method's own configuration class."""

    name: str = "run"
    seed: int = 0
    method: Any = None
    model: ModelConfig = field(default_factory=ModelConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    sft: SftConfig = field(default_factory=SftConfig)


def defaults(method: str = "grpo", **method_fields: Any) -> Any:
    """Returns every key with its default value, for ``get_config`` to edit.

    ``method`` selects the method's own keys.
    """
    from sdjax.methods import registry

    values = _plain(RunConfig())
    settings = registry.config_class(method)
    values["method"] = {"name": method, **_plain(settings()), **_placeholders(settings), **method_fields}
    return ml_collections.ConfigDict(values)


def _placeholders(cls: type) -> dict[str, Any]:
    """Typed stand-ins for the keys that are None, without which the command line could not set them."""
    stand_ins = {}
    for name, hint in typing.get_type_hints(cls).items():
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        if len(kinds) < len(typing.get_args(hint)):
            kind = str if typing.get_origin(kinds[0]) is Literal else kinds[0]
            stand_ins[name] = config_dict.placeholder(kind)
    return stand_ins


def load(values: Any) -> RunConfig:
    """Builds the typed config from a ConfigDict or a plain nested dictionary.

    Raises:
      ConfigError: an unknown key, a wrong type or a combination that cannot work.
    """
    from sdjax.methods import registry

    if isinstance(values, ml_collections.ConfigDict):
        values = values.to_dict()
    if not isinstance(values, dict):
        raise ConfigError(f"the configuration is a {type(values).__name__}.", "return a ConfigDict from get_config().")
    values = dict(values)
    method = dict(values.pop("method", None) or {})
    name = method.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError("method.name is missing.", f"set it to one of {', '.join(registry.names())}.")
    method_config = _build(registry.config_class(name), method, "method")
    config = _build(RunConfig, values, "")
    config = dataclasses.replace(config, method=registry.resolve(name, method_config, config.env.name))
    _check(config)
    return config


def resolved(config: RunConfig) -> dict[str, Any]:
    """The whole config as plain JSON types, as it is written to ``config.json``."""
    plain = _plain(dataclasses.replace(config, method=None))
    plain["method"] = {"name": config.method.name, **_plain(config.method.settings)}
    return plain


def fingerprint(plain: dict[str, Any]) -> str:
    """sha256 of a resolved config."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def difference(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Human-readable lines ``key: old -> new`` for every leaf that differs."""
    lines = []
    for key in sorted(set(old) | set(new)):
        a, b, name = old.get(key, "(absent)"), new.get(key, "(absent)"), prefix + key
        if isinstance(a, dict) and isinstance(b, dict):
            lines += difference(a, b, name + ".")
        elif a != b:
            lines.append(f"{name}: {a!r} -> {b!r}")
    return lines


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _build(cls: type, values: dict[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls)]
    arguments = {}
    for key, value in values.items():
        name = f"{prefix}.{key}" if prefix else key
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys here: {', '.join(known)}."
            raise ConfigError(f"unknown key {name!r} (value {value!r}).", hint)
        arguments[key] = _convert(hints[key], value, name)
    return cls(**arguments)


def _convert(hint: Any, value: Any, name: str) -> Any:
    origin = typing.get_origin(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        if isinstance(value, dict):
            return _build(typing.cast(type, hint), value, name)
        raise ConfigError(f"{name} = {value!r} is not a group of keys.", f"set {name}.<key> instead.")
    if origin is Literal:
        options = typing.get_args(hint)
        if value in options:
            return value
        near = difflib.get_close_matches(str(value), [str(o) for o in options], n=1)
        raise ConfigError(
            f"{name} = {value!r} is not one of {', '.join(map(repr, options))}.",
            f"did you mean {near[0]!r}?" if near else "use one of these values.",
        )
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        return _convert(next(o for o in options if o is not type(None)), value, name)
    if origin is tuple:
        if isinstance(value, list | tuple):
            item = typing.get_args(hint)[0]
            return tuple(_convert(item, v, f"{name}[{i}]") for i, v in enumerate(value))
        raise ConfigError(f"{name} = {value!r} is not a list.", f"write {name}=[...].")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    wanted = getattr(hint, "__name__", str(hint))
    raise ConfigError(f"{name} = {value!r} is a {type(value).__name__}.", f"give a value of type {wanted}.")


def _check(config: RunConfig) -> None:
    """Combinations that cannot work."""
    train, rollout = config.train, config.rollout
    positive = {
        "train.steps": train.steps + 1,  # 0 steps: only validation
        "train.tasks_per_step": train.tasks_per_step,
        "train.group_size": train.group_size,
        "train.minibatch_rows": train.minibatch_rows,
        "train.pack_rows": train.pack_rows,
        "rollout.slots": rollout.slots,
        "rollout.response_tokens": rollout.response_tokens,
        "eval.every": config.eval.every,
        "eval.extra_every": config.eval.extra_every,
        "save.every": config.save.every,
        "env.turns": config.env.turns,
        "teacher.horizon": config.teacher.horizon,
        "teacher.reflection_tokens": config.teacher.reflection_tokens,
    }
    for key, value in positive.items():
        if value < 1:
            raise ConfigError(f"{key} = {value} is too small.", "use a positive number.")
    if not config.model.path:
        raise ConfigError("model.path is empty.", "set it to a checkpoint directory, a .gguf file or 'smollm2-135m'.")
    if rollout.temperature <= 0:
        raise ConfigError(
            f"rollout.temperature = {rollout.temperature}: training needs samples of the policy.",
            "use 1.0; greedy decoding exists for evaluation only (eval.temperature).",
        )
    longest = rollout.prompt_tokens + rollout.response_tokens
    if rollout.max_length < longest:
        raise ConfigError(
            f"rollout.max_length = {rollout.max_length} holds no prompt of {rollout.prompt_tokens} and response of "
            f"{rollout.response_tokens} tokens.",
            f"set rollout.max_length >= {longest}.",
        )
    if config.method.needs_teacher and not config.teacher.bank:
        raise ConfigError(
            f"method.name = {config.method.name!r} reads a skill bank, but teacher.bank is empty.",
            f"set teacher.bank, e.g. {config.env.name!r}.",
        )
    unknown = set(config.eval.extra_validations) - set(EXTRA_VALIDATIONS)
    if unknown:
        raise ConfigError(
            f"eval.extra_validations names {', '.join(sorted(unknown))}.", f"use {', '.join(EXTRA_VALIDATIONS)}."
        )
    if not 0 <= config.teacher.ema_decay <= 1:
        raise ConfigError(f"teacher.ema_decay = {config.teacher.ema_decay} is no share.", "use a value from 0 to 1.")
    if train.pack_length < longest:
        raise ConfigError(
            f"train.pack_length = {train.pack_length} is shorter than the longest row, {longest} tokens "
            "(rollout.prompt_tokens + rollout.response_tokens).",
            f"set train.pack_length >= {longest} or lower the limits.",
        )
    if train.loss_slots < rollout.response_tokens:
        raise ConfigError(
            f"train.loss_slots = {train.loss_slots} is below rollout.response_tokens = {rollout.response_tokens}.",
            f"set train.loss_slots >= {rollout.response_tokens}.",
        )
    if train.pack_rows % (config.mesh.data * config.mesh.fsdp):
        raise ConfigError(
            f"train.pack_rows = {train.pack_rows} does not divide over mesh.data x mesh.fsdp = "
            f"{config.mesh.data} x {config.mesh.fsdp}.",
            "use a multiple of their product.",
        )
