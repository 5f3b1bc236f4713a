"""The gated delta rule: its implementations, the launches of its kernels, their errors and the decoding step.

    python -m benchmarks.delta_rule --out=delta.json     # a GPU; on a CPU tiny sizes, kernels interpreted

Sections, in the order of their worth; what does not fit into ``--seconds`` is left out and says so:

* errors: output, last state and every gradient against the rule token by token in float32, on 1,024 tokens.
* core: the whole rule over packed rows of 8,192 tokens, forward, and forward with all gradients.
* recurrence: the walk over chunks alone.
* step: one token of 128 and 256 rows, in place, against reading and writing the states once.
* launches: each kernel of the rule alone, over value columns, warps and stages.

A row that fails (a kernel that does not compile, memory) says why and does not end the run. Times are medians of
batches of calls; programs are compiled side by side before anything is timed.
"""

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from sdjax.models import delta_pallas_chunks as chunks
from sdjax.models.delta_kernels import DeltaKernels, delta_kernels, pallas_kernels
from sdjax.models.delta_pallas_launch import CHUNK, Launch, Tuning
from sdjax.models.delta_pallas_recurrence import pallas_recurrence, run_backward, run_forward
from sdjax.models.delta_rule import associative_recurrence, delta_step, scan_recurrence

_BATCH_SECONDS = 0.02
_REPEATS = 5
_WORKERS = 8  # programs compiled at once
_RESULTS = ("out", "last", "dq", "dk", "dv", "dg", "dbeta", "dstate")


@dataclass(frozen=True)
class Sizes:
    """tokens of a row; (rows, value heads) of each shape; key heads at most; channels of a head; rows of a step."""

    tokens: int = 8192
    shapes: tuple[tuple[int, int], ...] = ((1, 16), (4, 16), (1, 32))
    key_heads: int = 16
    channels: int = 128
    error_tokens: int = 1024
    step_rows: tuple[int, ...] = (128, 256)
    columns: tuple[int, ...] = (32, 64, 128)
    warps: tuple[int, ...] = (4, 8)
    stages: tuple[int, ...] = (2, 3)
    dtype: str = "bfloat16"
    interpret: bool = False


SMALL = Sizes(128, ((1, 2),), 1, 16, 100, (4,), (16,), (4,), (2,), "float32", interpret=True)


@dataclass(frozen=True)
class Case:
    """One row of the results. make: returns a function and its arguments; donate: arguments that it overwrites and
    returns last."""

    section: str
    name: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    donate: int | None = None


@functools.cache
def make_inputs(rows: int, tokens: int, heads: int, sizes: Sizes, seed: int = 0) -> tuple[jax.Array, ...]:
    """Rows of six segments, one of a single token: q, k, v, g, beta, segments, with a slow decay."""
    random = np.random.default_rng(seed)
    keys = min(sizes.key_heads, heads)
    normal = lambda *shape: random.standard_normal((rows, tokens, *shape), np.float32)  # noqa: E731
    q, k, v = (jnp.asarray(normal(n, sizes.channels), sizes.dtype) for n in (keys, keys, heads))
    g = -0.05 * np.exp(normal(heads))
    segment = np.sort(random.integers(1, 5, (rows, tokens)), axis=1)
    segment = np.where(np.arange(tokens) < tokens // 8, 0, segment)
    segment[:, tokens // 8 - 1] = 5
    beta = 1 / (1 + np.exp(-normal(heads)))
    return q, k, v, jnp.asarray(g), jnp.asarray(beta), jnp.asarray(segment, jnp.int32)


def with_gradients(rule: Callable[..., Any]) -> Callable[..., Any]:
    """(q, k, v, g, beta, segment, state, cotangents) -> results and the gradients of all float arguments."""

    def run(q, k, v, g, beta, segment, state, cotangents):
        results, pull = jax.vjp(lambda *x: rule(*x[:5], segment, x[5]), q, k, v, g, beta, state)
        return results, pull(cotangents)

    return run


def token_by_token(q, k, v, g, beta, segment, state) -> tuple[jax.Array, jax.Array]:
    """The definition in float32, with a fresh state at the begin of each segment but the first."""
    same = jnp.pad(segment[:, 1:] == segment[:, :-1], ((0, 0), (1, 0)), constant_values=True)

    def step(state, token):
        q, k, v, g, beta, same = token
        o, state = delta_step(q, k, v, g, beta, jnp.where(same[:, None, None, None], state, 0.0))
        return state, o

    last, out = jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, g, beta, same)))
    return jnp.moveaxis(out, 0, 1), last


def implementations(sizes: Sizes) -> dict[str, DeltaKernels]:
    suffix = "_interpret" if sizes.interpret else ""
    names = {"xla": "xla", "xla_associative": "xla_associative"}
    names |= {name: name + suffix for name in ("pallas_recurrence", "pallas")}
    return {name: delta_kernels(kernels) for name, kernels in names.items()}


def core_cases(sizes: Sizes) -> Iterator[Case]:
    for (rows, heads), (name, kernels) in itertools.product(sizes.shapes, implementations(sizes).items()):

        def make(gradients: bool, rows=rows, heads=heads, rule=kernels.rule):
            inputs = make_inputs(rows, sizes.tokens, heads, sizes)
            if not gradients:
                return rule, inputs
            state = jnp.zeros((rows, heads, sizes.channels, sizes.channels), jnp.float32)
            out = jnp.ones((rows, sizes.tokens, heads, sizes.channels), jnp.float32)
            return with_gradients(rule), (*inputs, state, (out, state))

        for gradients in (False, True):
            what = "fwd+bwd" if gradients else "fwd"
            yield Case("core", f"{name} B{rows} Hv{heads} {what}", functools.partial(make, gradients))


@functools.cache
def _chunk_arrays(sizes: Sizes, heads: int) -> dict[str, jax.Array]:
    """Everything that some kernel reads, small enough to stay finite, for one row."""
    q, k, v, g, beta, segment = make_inputs(1, sizes.tokens, heads, sizes)
    N, D, random = sizes.tokens // CHUNK, sizes.channels, np.random.default_rng(1)
    tokens = lambda x: x.reshape(1, N, CHUNK, *x.shape[2:])  # noqa: E731
    made = lambda *s: jnp.asarray(0.05 * random.standard_normal((1, heads, N, *s), np.float32), sizes.dtype)  # noqa: E731
    arrays = {name: tokens(x) for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta))}
    arrays |= {name: made(CHUNK, D) for name in ("w", "u", "keys", "x", "dx", "du", "dk")}
    arrays |= {name: made(D, D) for name in ("before", "after", "dbefore")}
    arrays |= {"inverse": made(CHUNK, CHUNK), "dtotal": made(CHUNK).astype(jnp.float32), "segment": segment}
    arrays |= {"decay": jnp.full((1, heads, N), 0.9), "state": jnp.zeros((1, heads, D, D), jnp.float32)}
    return arrays | {"dout": jnp.ones((1, N, CHUNK, heads, D), jnp.float32)}


def recurrence_cases(sizes: Sizes) -> Iterator[Case]:
    heads = sizes.shapes[0][1]
    tuning = Tuning(interpret=sizes.interpret)
    functions = {"xla": scan_recurrence, "xla_associative": associative_recurrence}
    functions["pallas"] = functools.partial(pallas_recurrence, tuning=tuning)

    def gradients(function, *inputs):
        results, pull = jax.vjp(function, *inputs)
        return results, pull(results)

    for name, function in functions.items():

        def make(function):
            arrays = _chunk_arrays(sizes, heads)
            return function, tuple(arrays[x] for x in ("w", "u", "keys", "decay", "state"))

        yield Case("recurrence", f"{name} fwd", functools.partial(make, function))
        yield Case("recurrence", f"{name} fwd+bwd", functools.partial(make, functools.partial(gradients, function)))


# Kernel: its function, the arrays that it reads.
_KERNELS: dict[str, tuple[Callable[..., Any], str]] = {
    "recurrence": (run_forward, "w u keys decay state"),
    "recurrence_backward": (run_backward, "w keys decay dx dbefore state"),
    "prepare": (chunks.prepare, "k v g beta segment"),
    "output": (chunks.output, "q k g segment before x"),
    "output_backward": (chunks.output_backward, "q k g segment before x dout"),
    "prepare_backward": (chunks.prepare_backward, "k v g beta segment inverse w before x after du dk dtotal"),
}


def launch_cases(sizes: Sizes) -> Iterator[Case]:
    heads = sizes.shapes[0][1]
    for name, (function, inputs) in _KERNELS.items():
        keys = {sizes.channels // 2, sizes.channels} if name == "prepare_backward" else {Launch(0).keys}
        options = itertools.product(sizes.columns, sizes.warps, sizes.stages, sorted(keys))
        for launch in itertools.starmap(Launch, options):
            tuning = replace(Tuning(interpret=sizes.interpret), **{name: launch})

            def make(function=function, inputs=inputs, tuning=tuning):
                arrays = _chunk_arrays(sizes, heads)
                run = lambda *x: function(*x, tuning)  # noqa: E731
                return run, tuple(arrays[x] for x in inputs.split())

            row = f"{name} columns {launch.columns} warps {launch.warps} stages {launch.stages}"
            row += f" keys {launch.keys}" if len(keys) > 1 else ""
            yield Case("launches", row + (" (default)" if tuning == Tuning(interpret=sizes.interpret) else ""), make)


def step_cases(sizes: Sizes) -> Iterator[Case]:
    heads = sizes.shapes[0][1]
    functions = {"xla": delta_step, "read and write": lambda *x: (x[0], 0.999 * x[-1])}
    launches = [Launch(*x, 1) for x in itertools.product(sizes.columns, sizes.warps)]
    for launch in launches:
        kernels = pallas_kernels(Tuning(step=launch, interpret=sizes.interpret))
        functions[f"pallas columns {launch.columns} warps {launch.warps}"] = kernels.step
    for rows, (name, function) in itertools.product(sizes.step_rows, functions.items()):

        def make(rows=rows, function=function):
            q, k, v, g, beta, _ = (x[:, 0] for x in make_inputs(rows, 1, heads, sizes))
            return function, (q, k, v, g, beta, jnp.ones((rows, heads, sizes.channels, sizes.channels), jnp.float32))

        yield Case("step", f"{name} rows {rows}", make, donate=5)


def milliseconds(program: Callable[..., Any], arguments: tuple[Any, ...], donate: int | None) -> float:
    """Median time of one call. Raises FloatingPointError where a result is not finite: such calls are faster."""

    def batch(calls: int) -> float:
        nonlocal arguments
        results = None
        begin = time.perf_counter()
        for _ in range(calls):
            results = program(*arguments)
            if donate is not None:
                arguments = (*arguments[:donate], results[-1], *arguments[donate + 1 :])
        jax.block_until_ready(results)
        seconds = (time.perf_counter() - begin) / calls
        if not all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in _floats(results)):
            raise FloatingPointError("a result is not finite")
        return seconds

    batch(1)
    calls = min(200, max(1, round(_BATCH_SECONDS / batch(1))))
    return 1e3 * statistics.median(batch(calls) for _ in range(_REPEATS))


def _floats(tree: Any) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"


def measure(cases: list[Case], deadline: float, show: Callable[[dict], None]) -> list[dict[str, Any]]:
    """Rows {section, name, ms or error}; compiles the cases of a section side by side, then times one after another."""

    def compiled(case: Case):
        function, arguments = case.make()
        donated = () if case.donate is None else (case.donate,)
        return jax.jit(function, donate_argnums=donated).lower(*arguments).compile()

    rows = []
    with ThreadPoolExecutor(_WORKERS) as pool:
        programs = [pool.submit(compiled, case) for case in cases]
        for case, program in zip(cases, programs, strict=True):
            row: dict[str, Any] = {"section": case.section, "name": case.name}
            if time.monotonic() > deadline:
                program.cancel()
                row["error"] = "left out: no time"
            else:
                try:
                    row["ms"] = milliseconds(program.result(), case.make()[1], case.donate)
                except Exception as error:  # a row that fails must not end the run
                    row["error"] = _said(error)
            show(row)
            rows.append(row)
    return rows


def errors(sizes: Sizes, show: Callable[[dict], None]) -> list[dict[str, Any]]:
    """Rows {section, name, relative errors by result}."""
    heads, channels = sizes.shapes[-1][1], sizes.channels
    inputs = make_inputs(1, sizes.error_tokens, heads, sizes)
    random = np.random.default_rng(2)
    normal = lambda *shape: jnp.asarray(random.standard_normal(shape, np.float32))  # noqa: E731
    state = normal(1, heads, channels, channels)
    cotangents = normal(1, sizes.error_tokens, heads, channels), normal(1, heads, channels, channels)
    wide = [x.astype(jnp.float32) for x in inputs[:3]]
    run = lambda rule, q, k, v: jax.jit(with_gradients(rule))(q, k, v, *inputs[3:], state, cotangents)  # noqa: E731
    wanted = jax.tree.leaves(run(token_by_token, *wide))
    rows = []
    for name, kernels in implementations(sizes).items():
        row: dict[str, Any] = {"section": "errors", "name": name}
        try:
            found = jax.tree.leaves(run(kernels.rule, *inputs[:3]))
            for key, a, b in zip(_RESULTS, found, wanted, strict=True):
                row[key] = float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))
        except Exception as error:  # a row that fails must not end the run
            row["error"] = _said(error)
        show(row)
        rows.append(row)
    return rows


def run(sizes: Sizes, seconds: float, console: Console) -> list[dict[str, Any]]:
    deadline = time.monotonic() + seconds

    def show(row: dict[str, Any]) -> None:
        rest = {k: v for k, v in row.items() if k not in ("section", "name")}
        text = "  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k}: {v}" for k, v in rest.items())
        console.print(f"{row['section']:11}{row['name']:56}{text}", markup=False, highlight=False, soft_wrap=True)

    rows = errors(sizes, show)
    for cases in (core_cases, recurrence_cases, step_cases, launch_cases):
        rows += measure(list(cases(sizes)), deadline, show)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    platform = jax.default_backend()
    default = Path(__file__).parent / "results" / f"delta_rule_{platform}.json"
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--seconds", type=float, default=120.0, help="nothing new is timed after that")
    arguments = parser.parse_args()

    rows = run(Sizes() if platform == "gpu" else SMALL, arguments.seconds, Console())
    record = {
        "device": jax.devices()[0].device_kind,
        "platform": platform,
        "jax": jax.__version__,
        "defaults": {k: vars(v) for k, v in vars(Tuning()).items() if isinstance(v, Launch)},
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
