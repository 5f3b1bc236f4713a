"""What the kernels of the gated delta rule share: how they are launched, and the product of two blocks.

The kernels are Pallas on Triton. A block's sides are powers of two, those of a product at least 16. On a CPU they run
with ``interpret=True``: slowly, and in the arithmetic of the CPU, where float32 products are not rounded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from sdjax.errors import ModelError

CHUNK = 64  # tokens of a chunk: a side of every product on tensor cores


@dataclass(frozen=True)
class Launch:
    """columns: value columns that a program (or one turn of its loop) handles. warps: of 32 threads, of a program.
    stages: depth of the pipeline that loads blocks of a loop ahead. keys: key channels at a time, for the one kernel
    that cannot hold all of them in registers (``prepare_backward``)."""

    columns: int
    warps: int = 4
    stages: int = 2
    keys: int = 64


@dataclass(frozen=True)
class Tuning:
    """The launch of each kernel; columns are channels in ``conv``. interpret: run them on the CPU."""

    recurrence: Launch = Launch(32, 4, 3)
    recurrence_backward: Launch = Launch(32, 4, 3)
    prepare: Launch = Launch(128, 4, 2)
    prepare_backward: Launch = Launch(64, 8, 3, 128)
    output: Launch = Launch(128, 4, 2)
    output_backward: Launch = Launch(64, 8, 3)
    step: Launch = Launch(64, 4, 1)
    conv: Launch = Launch(64, 4, 1)
    interpret: bool = False

    @property
    def dot(self) -> Callable[..., jax.Array]:
        """The product of two blocks that the kernels use."""
        return interpreted_dot if self.interpret else dot


DEFAULT = Tuning()


def check_sizes(key_dim: int, value_dim: int, interpret: bool) -> None:
    """Raises ModelError where a head does not fit a block of the accelerator."""
    for what, size in (("key", key_dim), ("value", value_dim)):
        if not interpret and (size < 16 or size & (size - 1)):
            raise ModelError(
                f"the kernels of the delta rule take heads of 16, 32, 64, ... channels, not {what} heads of {size}.",
                'use model.delta_rule = "xla".',
            )


def block(wanted: int, size: int) -> int:
    """Channels of a head of ``size`` at a time: those that are wanted where they divide the head, else all."""
    return wanted if size % wanted == 0 else size


def call(
    kernel: Callable[..., None],
    name: str,
    launch: Launch,
    interpret: bool,
    *,
    grid: tuple[int, ...],
    inputs: Sequence[tuple[jax.Array, pl.BlockSpec]],
    outputs: Sequence[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    aliases: dict[int, int] | None = None,
) -> list[jax.Array]:
    """Runs ``kernel(*input refs, *output refs)`` over the grid. aliases: input number -> output that overwrites it."""
    function: Any = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[spec for _, spec in inputs],
        out_specs=[spec for _, spec in outputs],
        out_shape=[shape for shape, _ in outputs],
        input_output_aliases=aliases or {},
        interpret=interpret,
        name=name,
        compiler_params=None if interpret else triton.CompilerParams(launch.warps, launch.stages),
    )
    return function(*(array for array, _ in inputs))


def dot(a: jax.Array, b: jax.Array, *, tf32: bool = False) -> jax.Array:
    """Product of two blocks of one dtype, summed in float32; float32 blocks are rounded only if TF32 is asked for."""
    exact = a.dtype == jnp.float32 and not tf32
    return triton.dot(a, b, precision=jax.lax.Precision.HIGHEST if exact else None)


def interpreted_dot(a: jax.Array, b: jax.Array, *, tf32: bool = False) -> jax.Array:
    """``dot`` where kernels are interpreted: the CPU lacks some bfloat16 products, which float32 holds exactly."""
    return dot(a.astype(jnp.float32), b.astype(jnp.float32), tf32=tf32)
