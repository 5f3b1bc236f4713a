"""Speed of the embedded rollout engine: prefill, decode and requests per second, and what batching and sharing give.

    python benchmarks/rollout.py                       # a 0.4 M parameter model, a minute on two CPU cores
    python benchmarks/rollout.py --model=random-135m --dtype=bfloat16 --slots=128 --prompt=500 --new=128 --requests=256

Numbers of different runs depend on the machine and its load; compare the ratios of one run. Every case runs once to
compile and is then timed; the best of ``--repeats`` counts.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from sdjax.models import Model, Params, load_checkpoint
from sdjax.models.config import ModelConfig
from sdjax.models.dense import DenseModel
from sdjax.rollout.embedded import EmbeddedEngine
from sdjax.rollout.engine import EngineStats, Request, SamplingParams

# Random weights of these shapes run as fast as trained ones.
RANDOM = {
    "tiny": ModelConfig(
        model_type="llama", vocab_size=1024, hidden_size=96, intermediate_size=256, layers=3, heads=4, kv_heads=2,
        head_dim=24, max_positions=4096, tie_embeddings=True,
    ),
    "random-135m": ModelConfig(  # SmolLM2-135M
        model_type="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, layers=30, heads=9, kv_heads=3,
        head_dim=64, max_positions=8192, tie_embeddings=True,
    ),
}  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help=f"one of {', '.join(RANDOM)} or a checkpoint")
    parser.add_argument("--dtype", default="float32", help="of parameters, products and cache")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=200, help="prompt tokens")
    parser.add_argument("--new", type=int, default=32, help="new tokens per request")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--group", type=int, default=8, help="samples per prompt of the forked case")
    parser.add_argument("--chunk", type=int, default=8, help="decode steps per device call")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "rollout.json")
    return parser.parse_args()


def build(arguments: argparse.Namespace) -> tuple[Model, Params]:
    if arguments.model not in RANDOM:
        model, params, _ = load_checkpoint(arguments.model, dtype=arguments.dtype, compute_dtype=arguments.dtype)
        return model, params
    model = DenseModel(RANDOM[arguments.model], compute_dtype=jnp.dtype(arguments.dtype))
    return model, jax.jit(model.init, static_argnames="dtype")(jax.random.key(0), dtype=jnp.dtype(arguments.dtype))


class Bench:
    """Runs request lists through engines of one model; no stop ids, so every answer has its full length."""

    def __init__(self, model: Model, params: Params, arguments: argparse.Namespace):
        self.model, self.params, self.arguments = model, params, arguments

    def engine(self, slots: int) -> EmbeddedEngine:
        vocab = self.model.config.vocab_size
        return EmbeddedEngine(
            self.model, self.params, stop_ids=(), sampling_mask_V=np.ones(vocab, bool), slots=slots,
            max_length=self.arguments.prompt + self.arguments.new, decode_chunk=self.arguments.chunk,
        )  # fmt: skip

    def requests(self, count: int, new: int, group: int, seed: int) -> list[Request]:
        rng = np.random.default_rng(seed)
        prompts = rng.integers(0, self.model.config.vocab_size, (-(-count // group), self.arguments.prompt))
        return [Request(prompts[i // group], i, SamplingParams(1.0, new)) for i in range(count)]

    def seconds(self, *, slots: int, count: int, new: int, group: int = 1) -> tuple[float, EngineStats]:
        """Best wall time for ``count`` requests given at once, and the engine's counters over all repeats."""
        engine = self.engine(slots)

        async def run(seed: int) -> None:
            await asyncio.gather(*(engine.generate(r) for r in self.requests(count, new, group, seed)))

        asyncio.run(run(0))
        engine.stats = EngineStats(extra=dict.fromkeys(engine.stats.extra, 0))
        times = []
        for repeat in range(self.arguments.repeats):
            begin = time.perf_counter()
            asyncio.run(run(1 + repeat))
            times.append(time.perf_counter() - begin)
        return min(times), engine.stats


def measure(bench: Bench) -> dict[str, Any]:
    a = bench.arguments
    prefill_s, _ = bench.seconds(slots=a.slots, count=a.requests, new=1)
    full_s, stats = bench.seconds(slots=a.slots, count=a.requests, new=a.new)
    forked_s, forked_stats = bench.seconds(slots=a.slots, count=a.requests, new=1, group=a.group)
    few = max(1, a.requests // 16)
    single_s, _ = bench.seconds(slots=1, count=few, new=a.new)
    steps = stats.decode_steps / a.repeats
    return {
        "prefill_tokens_per_s": a.requests * a.prompt / prefill_s,
        "decode_tokens_per_s": a.requests * (a.new - 1) / (full_s - prefill_s),
        "decode_step_ms": 1e3 * (full_s - prefill_s) / steps,
        "slot_use": stats.extra["decode_slots"] / (stats.decode_steps * a.slots),
        "requests_per_s": a.requests / full_s,
        "requests_per_s_one_slot": few / single_s,
        "ratio_slots": (a.requests / full_s) / (few / single_s),
        "ratio_forked_prefill": prefill_s / forked_s,
        "forked_prefill_share": forked_stats.prefill_tokens / forked_stats.prompt_tokens,
    }


def main() -> None:
    arguments = parse_arguments()
    model, params = build(arguments)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    results = measure(Bench(model, params, arguments))
    device = jax.devices()[0].device_kind
    table = Table(title=f"embedded engine, {size / 1e6:.1f} M parameters, {arguments.slots} slots, {device}")
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in results.items():
        table.add_row(name, f"{value:,.2f}")
    Console().print(table)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    settings.pop("out")
    record = {"device": device, "jax": jax.__version__, "parameters": int(size), "settings": settings, **results}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
