"""The vocabulary head with its loss, forward and backward: time, memory and error of each way to compute it.

    python -m benchmarks.head --out=head.json                                           # on an accelerator
    python -m benchmarks.head --rows=2 --slots=64 --hidden=32 --vocab=512 --repeats=2   # smoke run on a CPU

Operations are counted as three products of N x D x V (one for scoring), whatever a variant computes again, so the share
of the ceiling compares variants directly. The ceiling is a large bfloat16 matrix product of the same run. Gradients are
compared with those of the variant that keeps all logits.
"""

import argparse
import functools
import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from rich.console import Console
from rich.table import Table

from sdjax import losses
from sdjax.losses.masked import masked_sum
from sdjax.models.base import masked_logits
from sdjax.train.head import Head, Stats

ENTROPY = 1e-3


class Inputs(NamedTuple):
    """As in ``Head.loss``; slots: log-probabilities before the update, advantages."""

    allowed: jax.Array
    target: jax.Array
    mask: jax.Array
    slots: tuple[jax.Array, jax.Array]


def surrogate(stats: Stats, slots: Any, scale: jax.Array) -> tuple[jax.Array, Any]:
    loss = losses.clipped_surrogate(stats.logp, *slots, stats.mask).total
    return scale * (loss - ENTROPY * masked_sum(stats.entropy, stats.mask)), None


def statistics_of(weight_VD, hidden_XD, x: Inputs) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and entropies from logits that are kept."""
    logits = jnp.einsum("...d,vd->...v", hidden_XD, weight_VD, preferred_element_type=jnp.float32)
    logps = jax.nn.log_softmax(masked_logits(logits, x.allowed))
    taken = jnp.take_along_axis(logps, x.target[..., None], axis=-1)[..., 0]
    return taken, -jnp.sum(jnp.exp(logps) * logps, axis=-1)


def all_logits(weight, hidden, x: Inputs, scale) -> jax.Array:
    return surrogate(Stats(*statistics_of(weight, hidden, x), x.mask), x.slots, scale)[0]


def checkpointed_scan(weight, hidden, x: Inputs, scale, *, chunk: int) -> jax.Array:
    """Chunks of slots of every row, whose logits the backward pass computes again; unused chunks are skipped."""
    B, M = x.mask.shape

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def head(_, inputs):
        hidden_BCD, target, mask = inputs
        run = lambda h, t: statistics_of(weight, h, x._replace(target=t))  # noqa: E731
        nothing = lambda h, t: (jnp.zeros(t.shape, jnp.float32),) * 2  # noqa: E731
        return None, lax.cond(mask.any(), run, nothing, hidden_BCD, target)

    split = lambda y: jnp.moveaxis(y.reshape(B, M // chunk, chunk, *y.shape[2:]), 1, 0)  # noqa: E731
    found = lax.scan(head, None, tuple(map(split, (hidden, x.target, x.mask))))[1]
    logp, entropy = (jnp.moveaxis(y, 0, 1).reshape(B, M) for y in found)
    return surrogate(Stats(logp, entropy, x.mask), x.slots, scale)[0]


def one_pass(weight, hidden, x: Inputs, scale, *, tokens: int) -> jax.Array:
    return Head(tokens=tokens).loss(surrogate, weight, x.allowed, hidden, x.target, x.mask, x.slots, scale)[0]


def score(weight, hidden, x: Inputs, scale, *, tokens: int) -> jax.Array:
    return Head(tokens=tokens).score(weight, x.allowed, hidden, x.target, x.mask)


def make_inputs(rows: int, slots: int, hidden: int, vocab: int) -> tuple[jax.Array, jax.Array, Inputs]:
    keys = jax.random.split(jax.random.key(0), 5)
    weight = (jax.random.normal(keys[0], (vocab, hidden)) * hidden**-0.5).astype(jnp.bfloat16)
    states = jax.random.normal(keys[1], (rows, slots, hidden)).astype(jnp.bfloat16)
    target = jax.random.randint(keys[2], (rows, slots), 0, vocab - vocab // 50)
    # As near to the student's own log-probabilities as a ratio has to be that is not clipped everywhere.
    old = -jnp.log(vocab) - 0.5 + jax.random.normal(keys[3], (rows, slots))
    advantage = jax.random.normal(keys[4], (rows, slots))
    mask = jnp.ones((rows, slots), bool)
    return weight, states, Inputs(jnp.arange(vocab) < vocab - vocab // 50, target, mask, (old, advantage))


def timed(function: Callable[..., Any], arguments: tuple[Any, ...], repeats: int) -> tuple[float, float, Any]:
    """Median seconds of a call, GiB of temporary memory, the result."""
    compiled = jax.jit(function).lower(*arguments).compile()
    analysis = compiled.memory_analysis()
    result = jax.block_until_ready(compiled(*arguments))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), analysis.temp_size_in_bytes / 2**30 if analysis else float("nan"), result


def relative(x: jax.Array, y: jax.Array) -> float:
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y))


class Rows:
    """Rows as they are measured; a row that fails says so, and the others go on."""

    def __init__(self, ceiling: float, repeats: int, console: Console):
        self.ceiling, self.repeats, self.console = ceiling, repeats, console
        self.rows: dict[str, dict[str, Any]] = {}

    def add(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...], flops: float, like: Any = None):
        """``like``: what the result, (loss, (weight gradient, state gradient)), is compared with."""
        result = None
        try:
            seconds, gib, result = timed(function, arguments, self.repeats)
            row: dict[str, Any] = {"ms": seconds * 1e3, "temp_gib": gib, "of_ceiling": flops / seconds / self.ceiling}
            if not bool(jnp.isfinite(jax.tree.leaves(result)[0]).all()):
                row["error"] = "not finite: its time does not count"
            if like is not None:
                row["dweight_error"], row["dhidden_error"] = map(relative, result[1], like[1])
        except Exception as error:
            traceback.print_exc()
            row = {"error": f"{type(error).__name__}: {error}"[:500]}
        self.rows[name] = row
        self.console.print(f"{name}: " + ", ".join(f"{k} {v}" for k, v in row.items()))
        return result


def matmul_ceiling(size: int, repeats: int) -> float:
    """Operations per second of a square bfloat16 product."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in (1, 2))
    return 2 * size**3 / timed(jnp.matmul, (a, b), 3 * repeats)[0]


def measure(rows: int, slots: int, hidden: int, vocab: int, repeats: int, console: Console) -> dict[str, Any]:
    on_cpu = jax.default_backend() == "cpu"
    ceiling = matmul_ceiling(512 if on_cpu else 8192, repeats)
    table = Rows(ceiling, repeats, console)
    weight, states, x = make_inputs(rows, slots, hidden, vocab)
    n = rows * slots
    product = 2.0 * n * hidden * vocab
    arguments = (weight, states, x, jnp.float32(1 / n))
    both = lambda function, **keys: jax.value_and_grad(functools.partial(function, **keys), (0, 1))  # noqa: E731

    naive = table.add("all logits", both(all_logits), arguments, 3 * product)
    chunk = max(1, min(2048, n) // rows)
    scan = both(checkpointed_scan, chunk=chunk)
    table.add(f"checkpointed scan, {chunk * rows}", scan, arguments, 3 * product, naive)
    for tokens in (1024, 2048, 4096):
        table.add(f"one pass, {tokens}", both(one_pass, tokens=tokens), arguments, 3 * product, naive)
    master = (weight.astype(jnp.float32), *arguments[1:])
    table.add("one pass, 2048, float32 weight", both(one_pass, tokens=2048), master, 3 * product, naive)
    del naive, master
    # A third of the slots, spread evenly: only they should cost anything.
    third = x._replace(mask=jnp.broadcast_to(jnp.arange(slots) % 3 == 0, (rows, slots)))
    part = (weight, states, third, arguments[3])
    table.add("one pass, 2048, a third in use", both(one_pass, tokens=2048), part, product)
    table.add("scoring, 2048", functools.partial(score, tokens=2048), arguments, product)
    return {"ceiling_tflops": ceiling / 1e12, "floor_ms": 3e3 * product / ceiling, "rows": table.rows}


def show(results: dict[str, Any], title: str, console: Console) -> None:
    table = Table(title=title)
    columns = {"ms": ".1f", "temp_gib": ".2f", "of_ceiling": ".0%", "dweight_error": ".1e", "dhidden_error": ".1e"}
    table.add_column("variant")
    for column in (*columns, "error"):
        table.add_column(column, justify="right")
    for name, row in results["rows"].items():
        table.add_row(name, *(f"{row[k]:{f}}" if k in row else "" for k, f in columns.items()), row.get("error", ""))
    console.print(table)
    console.print(
        f"ceiling {results['ceiling_tflops']:.1f} TFLOP/s; floor of three products {results['floor_ms']:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    integer = functools.partial(parser.add_argument, type=int)
    integer("--rows", default=4, help="packed rows")
    integer("--slots", default=2048, help="loss slots of each")
    integer("--hidden", default=2048)
    integer("--vocab", default=248320)
    integer("--repeats", default=5, help="the median counts")
    results_dir = Path(__file__).parent / "results"
    parser.add_argument("--out", type=Path, default=results_dir / f"head_{jax.default_backend()}.json")
    arguments = parser.parse_args()

    console = Console(width=150)
    settings = {k: getattr(arguments, k) for k in ("rows", "slots", "hidden", "vocab", "repeats")}
    results = measure(**settings, console=console)
    device = jax.devices()[0].device_kind
    show(results, f"head, {arguments.rows * arguments.slots:,} tokens x {arguments.vocab:,}, {device}", console)
    record = {"device": device, "jax": jax.__version__, "settings": settings, **results}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
