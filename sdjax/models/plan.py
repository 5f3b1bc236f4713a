"""Command: how much memory training a model takes on each device.

    python -m sdjax.models.plan --model=qwen3.5-9b --devices=8
    python -m sdjax.models.plan --model=PATH --config=experiments/webshop.py:grpo --gpu_gib=141 --compile

The formulas are in ``sdjax.train.memory``; like ``sdjax.main`` this command may use every part of sdjax. ``--compile``
asks XLA too: the real step is compiled for virtual CPU devices from shapes alone. A CPU computes bfloat16 in float32
and fuses less, so its temporaries are an upper bound for a GPU's.
"""

import argparse
import dataclasses
import json
import runpy
import sys
from typing import TYPE_CHECKING, Any

import jax
from rich.console import Console
from rich.table import Table

from sdjax.errors import ConfigError, SdjaxError
from sdjax.models.shapes import SHAPES

if TYPE_CHECKING:
    from sdjax.config import RunConfig
    from sdjax.models.config import ModelConfig
    from sdjax.train.memory import Compiled, Plan, Workload

_GIB = 2**30
_RUNTIME_GIB = 3.0  # CUDA context, NCCL buffers and the allocator's slack on 8 GPUs, an estimate
_PREALLOCATED = 0.75  # JAX takes this share of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sdjax.models.plan", description="Memory of training, per device.")
    add = parser.add_argument
    add("--model", required=True, help=f"one of {', '.join(SHAPES)}, or a checkpoint directory (its config.json)")
    add("--devices", type=int, help="number of devices; default: those of --mesh")
    add("--mesh", help="data,fsdp,tensor; default: 1,DEVICES,1, or that of --config")
    add("--config", help="FILE[:arguments] with get_config(), for everything that is not given here")
    add("--pack_rows", type=int, help="packed rows of a micro-batch, all devices; default: one for each")
    add("--pack_length", type=int, help="tokens of a packed row (default 8192)")
    add("--loss_slots", type=int, help="response tokens of a packed row (default 1024)")
    add("--slots", type=int, help="completions decoded at the same time (default 64; 0: no embedded engine)")
    add("--context", type=int, help="tokens of a slot (default 2560)")
    add("--compute_dtype", choices=("bfloat16", "float32"), help="of matrix products (default bfloat16)")
    add("--gpu_gib", type=float, default=80.0, help="memory of one device")
    add("--compile", action="store_true", help="compile the step and print XLA's account beside the formula")
    add("--json", action="store_true", help="print JSON")
    return parser.parse_args(argv)


def model_config(name: str) -> "ModelConfig":
    """A published shape or that of a checkpoint directory. Raises ModelError."""
    from sdjax.models import load_model, resolve_checkpoint

    return SHAPES[name] if name in SHAPES else load_model(resolve_checkpoint(name)).config


def _run_config(path: str) -> "RunConfig":
    from sdjax.config import load

    file, _, arguments = path.partition(":")
    try:
        get_config = runpy.run_path(file)["get_config"]
    except (OSError, KeyError, SyntaxError) as error:
        raise ConfigError(f"{file} is no config file: {error!r}.", "name a file with get_config().") from error
    return load(get_config(arguments) if arguments else get_config())


def _mesh(options: argparse.Namespace, config: "RunConfig | None") -> tuple[int, int, int]:
    if options.mesh:
        try:
            data, fsdp, tensor = (int(size) for size in options.mesh.split(","))
        except ValueError:
            raise ConfigError(f"--mesh={options.mesh}.", "write --mesh=data,fsdp,tensor, e.g. 1,8,1.") from None
    elif config is not None and options.devices is None:
        data, fsdp, tensor = config.mesh.data, config.mesh.fsdp, config.mesh.tensor
    else:
        data, fsdp, tensor = 1, options.devices or 1, 1
    if min(data, fsdp, tensor) < 1 or (options.devices or data * fsdp * tensor) != data * fsdp * tensor:
        raise ConfigError(
            f"the mesh {data} x {fsdp} x {tensor} is not one of {options.devices} devices.",
            "leave --devices or --mesh out, or make the product of --mesh equal to --devices.",
        )
    return data, fsdp, tensor


def workload(options: argparse.Namespace) -> "Workload":
    """What the options, and the config for what they leave open, ask for. Raises ConfigError, ModelError."""
    from sdjax.train.memory import Workload

    config = _run_config(options.config) if options.config else None
    data, fsdp, tensor = _mesh(options, config)
    chosen: dict[str, Any] = {"pack_rows": data * fsdp}
    if config is not None:
        train, rollout = config.train, config.rollout
        weights = config.teacher.weights
        weights = config.method.build().teacher_weights if weights == "method" else weights
        chosen = {
            "references": (config.model.reference_memory == "device") + (weights == "ema"),
            "dtype": config.model.dtype,
            "compute_dtype": config.model.compute_dtype,
            "pack_rows": train.pack_rows,
            "pack_length": train.pack_length,
            "loss_slots": train.loss_slots,
            "remat": train.remat,
            "slots": rollout.slots if rollout.engine == "embedded" else 0,
            "context": rollout.max_length,
            "cache_dtype": rollout.cache_dtype,
        }
    names = ("pack_rows", "pack_length", "loss_slots", "slots", "context", "compute_dtype")
    chosen |= {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    attention = "cudnn" if chosen.get("compute_dtype", "bfloat16") == "bfloat16" else "xla"
    if config is not None and config.model.attention != "auto":
        attention = config.model.attention
    if chosen["pack_rows"] < 1 or chosen["pack_rows"] % (data * fsdp):
        raise ConfigError(
            f"{chosen['pack_rows']} packed rows do not divide over data x fsdp = {data} x {fsdp}.",
            f"use --pack_rows={data * fsdp} or a multiple of it.",
        )
    return Workload(model_config(options.model), data, fsdp, tensor, attention=attention, **chosen)


def _compiled(w: "Workload") -> "dict[str, Compiled]":
    from sdjax import sharding
    from sdjax.methods import registry
    from sdjax.train.memory import compile_step

    method = registry.resolve("grpo", registry.config_class("grpo")(), "alfworld").build()
    return compile_step(w, method, sharding.make_mesh(w.data, w.fsdp, w.tensor))


def verdict(total_gib: float, gpu_gib: float) -> str:
    """One sentence. total_gib: with the runtime's own memory."""
    if total_gib > gpu_gib:
        return f"does not fit: {total_gib - gpu_gib:.1f} GiB too much for {gpu_gib:g} GiB"
    text = f"fits: {gpu_gib - total_gib:.1f} of {gpu_gib:g} GiB are left"
    if total_gib - _RUNTIME_GIB > _PREALLOCATED * gpu_gib:
        text += f"; set XLA_PYTHON_CLIENT_MEM_FRACTION to at least {min(0.97, (total_gib + 1) / gpu_gib):.2f}"
    return text


def _as_json(w: "Workload", found: "Plan", compiled: "dict[str, Compiled]", gpu_gib: float) -> dict[str, Any]:
    total = found.total / _GIB + _RUNTIME_GIB
    return {
        "workload": dataclasses.asdict(w),
        "parts": [dataclasses.asdict(part) for part in found.parts],
        "total_bytes": found.total,
        "runtime_bytes": int(_RUNTIME_GIB * _GIB),
        "verdict": verdict(total, gpu_gib),
        "compiled": {name: dataclasses.asdict(program) for name, program in compiled.items()},
    }


def _print(console: Console, w: "Workload", found: "Plan", compiled: "dict[str, Compiled]", gpu_gib: float) -> None:
    from sdjax.train.memory import HEAD, LAYERS, ROLLOUT

    rows = f"{w.pack_rows} rows x {w.pack_length} tokens"
    table = Table(title=f"GiB per device, mesh {w.data} x {w.fsdp} x {w.tensor}, {rows}", show_footer=True)
    total = found.total / _GIB + _RUNTIME_GIB
    table.add_column("part", footer="total")
    table.add_column("GiB", justify="right", footer=f"{total:.2f}")
    table.add_column("of what", footer=verdict(total, gpu_gib))
    titles = {ROLLOUT: "rollout", LAYERS: "backward pass of the layers", HEAD: "vocabulary head"}
    largest = max(titles, key=found.of)
    phase = None
    for part in found.parts:
        if part.phase != phase and part.phase in titles:
            counted = "in the total" if part.phase == largest else "smaller, at another time: not in the total"
            table.add_section()
            table.add_row(f"[bold]{titles[part.phase]}[/]", f"[bold]{found.of(part.phase) / _GIB:.2f}[/]", counted)
        phase = part.phase
        table.add_row(part.name, f"{part.bytes / _GIB:.2f}", part.note)
    table.add_section()
    table.add_row("runtime", f"{_RUNTIME_GIB:.2f}", "context, NCCL, allocator: an estimate")
    console.print(table)
    if compiled:
        gradient, update = compiled["gradient"], compiled["update"]
        gib = lambda n: f"{n / _GIB:.2f}"  # noqa: E731
        console.print(
            f"XLA on virtual CPU devices: the gradient needs {gib(gradient.temporary)} GiB beside its arguments of "
            f"{gib(gradient.argument)} GiB, the formula says {gib(found.working)}; the update {gib(update.temporary)} "
            f"beside {gib(update.argument)} GiB. A CPU computes bfloat16 in float32 and has no cuDNN."
        )


def main(argv: list[str]) -> int:
    """Returns the exit code; an error is printed without a stack trace."""
    options = _arguments(argv)
    try:
        jax.config.update("jax_platforms", "cpu")  # a plan must not take memory on the devices that it is about
        w = workload(options)
        if options.compile:
            jax.config.update("jax_num_cpu_devices", w.data * w.fsdp * w.tensor)
        from sdjax.train import memory

        found, compiled = memory.plan(w), _compiled(w) if options.compile else {}
    except SdjaxError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    if options.json:
        print(json.dumps(_as_json(w, found, compiled, options.gpu_gib)))
        return 0
    _print(Console(), w, found, compiled, options.gpu_gib)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
