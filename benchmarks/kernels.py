"""Every loss kernel, forward and gradient, against the bytes that it must move.

    python -m benchmarks.kernels                             # 6,400 rows x 512 tokens, as in a step on ALFWorld
    python -m benchmarks.kernels --rows=256 --tokens=64 --repeats=3

A kernel must read each input once and write each result once; those bytes over the measured time, as a share of the
copy bandwidth of the same run, say how much it wastes. Token losses are timed with their gradient to the student's
log-probabilities; advantages have no gradient. Several independent calls share one compiled program (``--sets``), so
that neither launch latency nor a cache that holds the inputs of the last call changes the picture.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from sdjax import losses

Arrays = dict[str, Any]
Kind = Literal["elementwise", "coupled"]
_BATCH_SECONDS = 0.05  # calls are queued until they last about this long, then waited for
_TOP_K = 16


@dataclass(frozen=True)
class Case:
    """One kernel. inputs: the arrays that it reads. wrt: the input its loss is differentiated by, "" for advantages.

    kind: "elementwise" kernels treat tokens alone and should run at copy bandwidth; "coupled" ones sort, scan or keep
    statistics of rows, groups or the whole batch.
    """

    kernel: str
    inputs: tuple[str, ...]
    call: Callable[[Arrays], Any]
    kind: Kind
    wrt: str = ""

    def function(self) -> Callable[[Arrays], Any]:
        if not self.wrt:
            return self.call

        def value_and_gradient(arrays: Arrays) -> Any:
            rest = {k: v for k, v in arrays.items() if k != self.wrt}
            total = lambda x: self.call(rest | {self.wrt: x}).total  # noqa: E731
            return jax.value_and_grad(total)(arrays[self.wrt])

        return value_and_gradient


def _loss(kernel: str, inputs: str, call, kind: Kind = "elementwise", wrt="lS") -> Case:
    return Case(kernel, tuple(inputs.split()), call, kind, wrt)


def _advantage(kernel: str, inputs: str, call, kind: Kind = "coupled") -> Case:
    return Case(kernel, tuple(inputs.split()), call, kind)


def _agent(granularity: Literal["turn", "token"]) -> Callable[[Arrays], Any]:
    return lambda b: losses.agent_opsd_advantages(
        b["adv"], b["lT"], b["lO"], b["mask"], b["trajectory"], b["turn"], b["prior"], granularity=granularity
    )


CASES = {
    "clipped_surrogate": _loss(
        "clipped_surrogate",
        "lS lO adv_NL mask",
        lambda b: losses.clipped_surrogate(b["lS"], b["lO"], b["adv_NL"], b["mask"]),
    ),
    "reference_kl": _loss("reference_kl", "lS lR mask", lambda b: losses.reference_kl(b["lS"], b["lR"], b["mask"])),
    "token_entropy": _loss(
        "token_entropy", "logits few_mask", lambda b: losses.token_entropy(b["logits"], b["few_mask"]), wrt="logits"
    ),
    "sdar": _loss("sdar", "lS lT mask", lambda b: losses.sdar(b["lS"], b["lT"], b["mask"])),
    "reverse_kl_opsd": _loss(
        "reverse_kl_opsd", "lS lT mask", lambda b: losses.reverse_kl_opsd(b["lS"], b["lT"], b["mask"])
    ),
    "skill_sd": _loss("skill_sd", "lS lT lO mask", lambda b: losses.skill_sd(b["lS"], b["lT"], b["lO"], b["mask"])),
    "fa_sd": _loss("fa_sd", "lS lT mask flag", lambda b: losses.fa_sd(b["lS"], b["lT"], b["mask"], b["flag"])),
    "icsd": _loss(
        "icsd", "lS lT lO adv mask", lambda b: losses.icsd(b["lS"], b["lT"], b["lO"], b["adv"], b["mask"]), "coupled"
    ),
    "pcsd": _loss("pcsd", "lS lT mask", lambda b: losses.pcsd(b["lS"], b["lT"], b["mask"]), "coupled"),
    "suffix_forward_kl": _loss(
        "suffix_forward_kl",
        "student_topk teacher_topk few_weight",
        lambda b: losses.suffix_forward_kl(b["teacher_topk"], b["student_topk"], b["few_weight"]),
        wrt="student_topk",
    ),
    "group_advantages": _advantage(
        "group_advantages", "score group ok", lambda b: losses.group_advantages(b["score"], b["group"], ok_N=b["ok"])
    ),
    "rlsd_advantages": _advantage(
        "rlsd_advantages",
        "adv lT lO mask",
        lambda b: losses.rlsd_advantages(b["adv"], b["lT"], b["lO"], b["mask"], lam=0.3),
        "elementwise",
    ),
    "ocsd_advantages": _advantage(
        "ocsd_advantages",
        "adv lT lA lO mask trajectory turn flag",
        lambda b: losses.ocsd_advantages(
            b["adv"], b["lT"], b["lA"], b["lO"], b["mask"], b["trajectory"], b["turn"], b["flag"]
        ),
    ),
    "agent_opsd (turn)": _advantage("agent_opsd_advantages", "adv lT lO mask trajectory turn prior", _agent("turn")),
    "agent_opsd (token)": _advantage("agent_opsd_advantages", "adv lT lO mask trajectory turn prior", _agent("token")),
    "adrs_advantages": _advantage(
        "adrs_advantages",
        "adv score lT mask group",
        lambda b: losses.adrs_advantages(b["adv"], b["score"], b["lT"], b["mask"], b["group"], eta_t=0.02),
    ),
    "grsd_advantages": _advantage(
        "grsd_advantages",
        "adv lT lO mask group flag",
        lambda b: losses.grsd_advantages(b["adv"], b["lT"], b["lO"], b["mask"], b["group"], b["flag"]),
    ),
    "ovcsd_contrast": _advantage(
        "ovcsd_contrast",
        "adv_NL site flag mask triggered",
        lambda b: losses.ovcsd_contrast(b["adv_NL"], b["site"], b["flag"], b["mask"], b["triggered"]),
        "coupled",
    ),
}


def make_inputs(rows: int, tokens: int, vocab: int, seed: int = 0) -> Arrays:
    """A step's shape: groups of 8 trajectories of 50 turns, answers of an eighth of the limit up to the limit.

    The arrays with a third axis have fewer rows, so that they are about as large as the others.
    """
    rng = np.random.default_rng(seed)
    floats = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    mask = np.arange(tokens) < rng.integers(max(1, tokens // 8), tokens + 1, rows)[:, None]
    base = -np.abs(floats(rows, tokens))
    arrays: Arrays = {name: base + 0.3 * floats(rows, tokens) for name in ("lS", "lO", "lT", "lR", "lA")}
    arrays |= {"mask": mask, "adv": floats(rows), "adv_NL": floats(rows, tokens), "score": floats(rows)}
    turns = 50
    index = np.arange(rows, dtype=np.int32)
    arrays |= {"trajectory": index // turns, "turn": index % turns, "group": index // (8 * turns)}
    arrays |= {"ok": np.ones(rows, bool), "flag": rng.random(rows) < 0.5, "triggered": rng.random(rows) < 0.1}
    arrays |= {"prior": rng.random(rows, np.float32), "site": np.where(arrays["triggered"], index // 4, -1)}
    few = max(1, rows // vocab)
    arrays |= {"logits": floats(few, tokens, vocab), "few_mask": mask[:few]}
    few = max(1, rows // _TOP_K)
    topk = np.asarray(jax.nn.log_softmax(floats(2, few, tokens, _TOP_K + 1)))[..., :_TOP_K]
    arrays |= {"teacher_topk": topk[0], "student_topk": topk[1], "few_weight": mask[:few].astype(np.float32)}
    return arrays


def bytes_moved(function: Callable[[Arrays], Any], arrays: Arrays) -> int:
    """Inputs read once plus results written once."""
    size = lambda x: x.size * x.dtype.itemsize  # noqa: E731
    return sum(size(x) for x in arrays.values()) + sum(map(size, jax.tree.leaves(jax.eval_shape(function, arrays))))


def seconds_per_call(function: Callable[[Arrays], Any], arrays: Arrays, sets: int, repeats: int) -> float:
    """Median time of one call; ``sets`` calls on buffers of their own run in each dispatch."""
    copies = [jax.tree.map(jnp.array, arrays) for _ in range(sets)]
    program = jax.jit(lambda copies: [function(arrays) for arrays in copies])

    def batch(calls: int) -> float:
        begin = time.perf_counter()
        results = None
        for _ in range(calls):
            results = program(copies)
        jax.block_until_ready(results)
        return (time.perf_counter() - begin) / calls

    batch(1)  # compiles
    calls = min(200, max(1, round(_BATCH_SECONDS / batch(1))))
    return statistics.median(batch(calls) for _ in range(repeats)) / sets


def copy_bandwidth(arrays: Arrays, sets: int, repeats: int) -> float:
    """Bytes per second of ``x + 1`` on four log-probability arrays: what an elementwise kernel can reach."""
    large = {"x": np.concatenate([arrays["lS"]] * 4)}
    function = lambda b: b["x"] + 1  # noqa: E731
    return bytes_moved(function, large) / seconds_per_call(function, large, sets, repeats)


def measure(rows: int, tokens: int, vocab: int, sets: int, repeats: int, console: Console) -> dict[str, Any]:
    arrays = make_inputs(rows, tokens, vocab)
    bandwidth = copy_bandwidth(arrays, sets, repeats)
    results = {}
    for name, case in CASES.items():
        with console.status(name):
            inputs = {key: arrays[key] for key in case.inputs}
            function = case.function()
            moved = bytes_moved(function, inputs)
            seconds = seconds_per_call(function, inputs, sets, repeats)
        results[name] = {
            "kind": case.kind,
            "gradient": bool(case.wrt),
            "ms": seconds * 1e3,
            "mbytes": moved / 1e6,
            "gb_per_s": moved / seconds / 1e9,
            "share_of_copy": moved / seconds / bandwidth,
        }
    return {"copy_gb_per_s": bandwidth / 1e9, "all_ms": sum(r["ms"] for r in results.values()), "kernels": results}


def show(results: dict[str, Any], title: str, console: Console) -> None:
    table = Table(title=title)
    for column in ("kernel", "kind", "gradient"):
        table.add_column(column)
    for column in ("ms", "MB moved", "GB/s", "share of copy"):
        table.add_column(column, justify="right")
    for name, r in results["kernels"].items():
        numbers = (f"{r['ms']:.3f}", f"{r['mbytes']:.1f}", f"{r['gb_per_s']:.1f}", f"{r['share_of_copy']:.0%}")
        table.add_row(name, r["kind"], "yes" if r["gradient"] else "none", *numbers)
    console.print(table)
    console.print(f"copy: {results['copy_gb_per_s']:.1f} GB/s; all kernels together: {results['all_ms']:.2f} ms")


def main() -> None:
    on_cpu = jax.default_backend() == "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    integer = functools.partial(parser.add_argument, type=int)
    integer("--rows", default=6400)
    integer("--tokens", default=512)
    integer("--vocab", default=1024, help="of token_entropy, on rows / vocab rows")
    integer("--repeats", default=9, help="the median counts")
    integer("--sets", default=1 if on_cpu else 4, help="calls in one compiled program")
    results_dir = Path(__file__).parent / "results"
    parser.add_argument("--out", type=Path, default=results_dir / f"kernels_{jax.default_backend()}.json")
    arguments = parser.parse_args()

    console = Console()
    settings = {k: getattr(arguments, k) for k in ("rows", "tokens", "vocab", "sets", "repeats")}
    results = measure(**settings, console=console)
    device = jax.devices()[0].device_kind
    show(results, f"loss kernels, {arguments.rows:,} rows x {arguments.tokens} tokens, {device}", console)
    record = {
        "device": device,
        "platform": jax.default_backend(),
        "jax": jax.__version__,
        "settings": settings,
        **results,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
