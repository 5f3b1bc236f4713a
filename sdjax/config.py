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
    """name: in reports; empty: the last part of the path. path: a Hugging Face directory, a .gguf file or
    "smollm2-135m"; training starts from (and the reference policy is) these weights. dtype: of the stored parameters.
    compute_dtype: of matrix products in trainer and engine.
    attention, delta_rule: kernels; "auto" is cudnn and pallas on a Hopper GPU with bfloat16, else xla.
    scan_layers: the training pass as a loop over layers; without it, it is a tenth faster, takes several times as long
    to compile, and is untried on more than one GPU.
    reference_memory: where the initial weights wait, which score as reference policy and frozen teacher; in host
    memory they cost the device nothing between their passes."""

    name: str = ""
    path: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    delta_rule: Literal["auto", "xla", "xla_associative", "pallas_recurrence", "pallas"] = "auto"
    scan_layers: bool = True
    reference_memory: Literal["device", "host"] = "device"


@dataclass(frozen=True)
class SglangConfig:
    """Servers of the "sglang" engine. urls: those that somebody else runs; empty: the run starts ``engines`` servers of
    its own with ``command`` (``launch/sglang_cpu`` on a machine without GPU) and ``flags`` (each ``--name=value``),
    ``tensor_parallel`` GPUs each from ``first_gpu`` on, at ``host`` from ``port`` on (0: ports that are free).
    key_variable: environment variable that holds the key of the servers; needed where ``host`` is not loopback.
    dtype: of the served weights. deterministic: a completion depends on its seed and not on the batch around it, for
    about a third of the speed; without it the servers ignore seeds.

    sync: how weights get there. "disk": safetensors in ``folder``; "tensor": shared memory of one host, "gloo" a socket
    group (both from the CPU); "ipc": GPU memory of the same devices; "nccl": a GPU group. "auto": ipc where trainer and
    own servers run on GPUs of one host, else disk.
    sleep: servers give the memory of keys and values back while the trainer updates.
    start_timeout_s, request_timeout_s: until a server is ready; for one completion. restarts: how often in a run a
    server may be lost and started again."""

    urls: tuple[str, ...] = ()
    engines: int = 1
    command: tuple[str, ...] = ("python3", "-m", "sglang.launch_server")
    flags: tuple[str, ...] = ()
    tensor_parallel: int = 1
    first_gpu: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    key_variable: str = "SDJAX_SGLANG_KEY"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    deterministic: bool = False
    sync: Literal["auto", "disk", "tensor", "gloo", "ipc", "nccl"] = "auto"
    folder: str = "/dev/shm"
    sleep: bool = False
    start_timeout_s: float = 900.0
    request_timeout_s: float = 900.0
    restarts: int = 3


@dataclass(frozen=True)
class RolloutConfig:
    """engine: who generates; the keys of "sglang" are below it, those of "embedded" are ``slots``, ``prefill_rows``,
    ``decode_chunk`` and ``cache_dtype``. slots: episodes decoded at the same time. max_length: prompt + response tokens
    of one slot (an acting teacher adds ``teacher.privileged_tokens``). top_p, top_k: only 1 and -1 (off) are unbiased.
    retries: fresh environments tried before an episode is recorded as failed. warn_gap / stop_gap: thresholds on the
    mean |log-prob gap| between engine and trainer (nats)."""

    engine: Literal["embedded", "sglang"] = "embedded"
    slots: int = 64
    max_length: int = 2560
    prompt_tokens: int = 2048
    response_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    prefill_rows: int = 16
    decode_chunk: int = 8
    cache_dtype: Literal["float32", "bfloat16"] = "float32"
    retries: int = 1
    warn_gap: float = 0.02
    stop_gap: float = 1.0
    transcripts_every: int = 10
    transcript_episodes: int = 3
    sglang: SglangConfig = field(default_factory=SglangConfig)


@dataclass(frozen=True)
class TrainConfig:
    """Section 3 of the methods: batch, surrogate, optimizer. pack_length: tokens of one packed row (the teacher's
    rows are longer by ``teacher.privileged_tokens``); pack_rows: packed rows of one micro-batch; loss_slots: response
    tokens that one packed row may hold. remat: what the backward pass computes again instead of storing it:
    nothing, all but matrix products, or whole layers. mismatch: a weight of the trainer's policy against the engine's
    for each token of the surrogate, cut off at mismatch_cap ("truncate") or 0 beyond it ("mask"); "off" as in the
    study, whose old log-probabilities are the trainer's own anyway."""

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
    mismatch: Literal["off", "truncate", "mask"] = "off"
    mismatch_cap: float = 2.0
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
    remat: Literal["none", "dots", "full"] = "full"


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
    """every: checkpoint after each multiple of this many updates (the last step is always saved). keep: newest kept.
    grace_s: seconds between SIGTERM, SIGUSR1 or Ctrl-C and the end of the process, whatever it is doing."""

    every: int = 10
    keep: int = 3
    asynchronous: bool = True
    grace_s: float = 100.0


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

    # Tuples stay tuples: the command line can override those, and no lists.
    values = _plain(RunConfig(), tuple)
    settings = registry.config_class(method)
    values["method"] = {"name": method, **_plain(settings(), tuple), **_placeholders(settings), **method_fields}
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


def _plain(value: Any, sequence: type = list) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name), sequence) for f in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return sequence(_plain(item, sequence) for item in value)
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
        "save.grace_s": config.save.grace_s,
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
    if rollout.top_p != 1 or rollout.top_k != -1:
        raise ConfigError(
            f"rollout.top_p = {rollout.top_p}, rollout.top_k = {rollout.top_k}: truncated sampling draws from a "
            "renormalised distribution, so its log-probabilities are not those that the trainer differentiates, and "
            "the policy ratio is wrong by the mass that was cut off.",
            "use rollout.top_p=1.0 and rollout.top_k=-1; lower eval.temperature for sharper evaluation.",
        )
    if train.mismatch_cap < 1:
        raise ConfigError(f"train.mismatch_cap = {train.mismatch_cap} is below 1.", "use 1 or more, as a rule 2.0.")
    if rollout.engine == "sglang":
        _check_sglang(rollout)
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


def _check_sglang(rollout: RolloutConfig) -> None:
    servers = rollout.sglang
    if rollout.temperature != 1:
        raise ConfigError(
            f"rollout.temperature = {rollout.temperature} with rollout.engine = 'sglang': its servers report "
            "log-probabilities of logits / T or of plain logits, depending on how they were started; only at T = 1 are "
            "both the policy's, and anything else biases every ratio.",
            "use rollout.temperature=1.0, or the embedded engine.",
        )
    if not servers.urls and (servers.engines < 1 or servers.tensor_parallel < 1 or not servers.command):
        raise ConfigError(
            f"rollout.sglang has engines = {servers.engines}, tensor_parallel = {servers.tensor_parallel}, "
            f"command = {servers.command}.",
            "give a command and at least one engine of one GPU, or urls of running servers.",
        )
    if servers.start_timeout_s <= 0 or servers.request_timeout_s <= 0 or servers.restarts < 0:
        raise ConfigError("rollout.sglang has a time limit or a number of restarts below 0.", "use positive numbers.")
    if servers.urls and servers.sync == "ipc":
        raise ConfigError(
            "rollout.sglang.sync = 'ipc' needs servers on the trainer's own GPUs; rollout.sglang.urls names others.",
            "use sync=disk with a folder that all hosts see, or sync=nccl.",
        )
