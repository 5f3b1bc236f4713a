"""Speed and memory of Qwen3.5 with random weights on one accelerator: ceilings, attention, training, scoring, decoding.

    python -m benchmarks.qwen3_5 --out=qwen3_5.json                    # every part, 2B and 4B, about six minutes
    python -m benchmarks.qwen3_5 --parts=ceilings,decode --models=2b
    python -m benchmarks.qwen3_5 --models=tiny --parts=ceilings,attention,train,score,decode   # smoke run on a CPU

Every share is taken against ceilings of the same run: a large bfloat16 matrix product and a large copy. MFU counts the
model's own operations (three times the forward pass), none of recomputation. A run whose loss is not finite is not
timed: the same program runs faster on NaN. ``benchmarks.peer_torch`` takes the same training step in PyTorch.
"""

import argparse
import dataclasses
import json
import statistics
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from sdjax.config import TrainConfig
from sdjax.methods.grpo import Grpo
from sdjax.models.attention import packed_attention
from sdjax.models.qwen3_5 import Qwen35Model
from sdjax.models.qwen3_5_config import FULL, LINEAR, Qwen35Config
from sdjax.models.shapes import SHAPES
from sdjax.rollout import embedded_steps as steps
from sdjax.train.update import Scales, Updater

PARTS = ("ceilings", "attention", "score", "train", "decode")


def config(name: str) -> Qwen35Config:
    if name != "tiny":
        return SHAPES[f"qwen3.5-{name}"]
    return dataclasses.replace(
        SHAPES["qwen3.5-2b"], vocab_size=1024, hidden_size=64, intermediate_size=128, layers=4, heads=4, head_dim=32,
        layer_types=(LINEAR,) * 3 + (FULL,), linear_key_heads=4, linear_value_heads=4, linear_key_dim=16,
        linear_value_dim=16, mrope_section=(),
    )  # fmt: skip


def forward_flops(c: Qwen35Config, tokens: int, segments: list[int], head_tokens: int) -> float:
    """Operations of one forward pass over ``tokens`` that attend inside ``segments``; causal halves are not counted."""
    keys, values = c.linear_key_heads * c.linear_key_dim, c.linear_value_heads * c.linear_value_dim
    linear, full = len(c.numbers(LINEAR)), len(c.numbers(FULL))
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    projections = linear * (2 * keys + 3 * values + 2 * c.linear_value_heads) + full * (3 * q + 2 * kv)
    products = c.hidden_size * (projections + 3 * c.layers * c.intermediate_size)
    # Per token and head: read S^T k, write k d^T, read S^T q. The chunked form does more; that is its own affair.
    rule = linear * c.linear_value_heads * 3 * c.linear_key_dim * c.linear_value_dim
    attention = full * sum(2 * n * n for n in segments) / 2 * q * 2
    return 2.0 * tokens * (products + rule) + attention + 2.0 * head_tokens * c.hidden_size * c.vocab_size


def timed(call: Callable[[], Any], repeats: int = 5, inner: int = 1) -> float:
    """Median seconds of a call after one warm-up; ``inner`` short calls are queued before the clock is read."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(inner):
            result = call()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - begin) / inner)
    return statistics.median(times)


def gib(compiled: Any) -> float:
    return compiled.memory_analysis().temp_size_in_bytes / 2**30


class Bench:
    """Runs the parts and keeps one record for each row of the table, written to disk after each."""

    def __init__(self, arguments: argparse.Namespace):
        self.a, self.console, self.rows = arguments, Console(width=150), []
        self.accelerator = jax.default_backend() == "gpu"
        self.matmul, self.copy = float("nan"), float("nan")
        self.state: Any = None

    def row(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        try:
            record = {"name": name, **work()}
        except Exception as error:  # a variant that does not compile or fit must not end the others
            record = {"name": name, "error": f"{type(error).__name__}: {str(error)[:500]}"}
            traceback.print_exc(limit=-3)
        self.rows.append(record)
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in record.items() if k != "name"}
        self.console.print(f"[bold]{name}[/] {shown}", highlight=False)
        self.a.out.parent.mkdir(parents=True, exist_ok=True)
        facts = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        self.a.out.write_text(json.dumps({**facts, "rows": self.rows}, indent=1) + "\n")

    def model(self, name: str, delta_rule: str) -> Qwen35Model:
        attention = "cudnn" if self.accelerator else "xla"
        scan = not self.a.written_out
        return Qwen35Model(config(name), jnp.bfloat16, attention=attention, scan_layers=scan, delta_rule=delta_rule)

    def ceilings(self) -> None:
        n = 8192 if self.accelerator else 512
        a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in (1, 2))
        product, plus = jax.jit(lambda a, b: a @ b), jax.jit(lambda x: x + 1)

        def work() -> dict[str, Any]:
            self.matmul = 2 * n**3 / timed(lambda: product(a, b), 5, 20)
            rates = {}
            for dtype in (jnp.bfloat16, jnp.float32):
                x = jax.random.normal(jax.random.key(3), (2**30 if self.accelerator else 2**20,)).astype(dtype)
                rates[f"copy_{jnp.dtype(dtype).name}_tb_s"] = 2 * x.nbytes / timed(lambda x=x: plus(x), 5, 10) / 1e12
            self.copy = max(rates.values()) * 1e12
            return {"matmul_tflops": self.matmul / 1e12, **rates}

        self.row("ceilings", work)

    def attention(self) -> None:
        implementations = ("cudnn", "xla") if self.accelerator else ("xla",)
        for heads, kv_heads in ((8, 2), (16, 4)):
            for implementation in implementations:
                name = f"attention {heads}q/{kv_heads}kv packed {implementation} fwd+bwd"
                self.row(name, partial(self._attention, heads, kv_heads, implementation))

    def _attention(self, heads: int, kv_heads: int, implementation: str) -> dict[str, Any]:
        seconds, flops, _ = self._attend(heads, kv_heads, implementation, 8192 if self.accelerator else 256)
        record = {"ms": 1e3 * seconds, "share_of_matmul": flops / seconds / self.matmul}
        if implementation == "cudnn":  # against float32, on a shorter row: that takes XLA long to compile
            record["error_dq_dk_dv_out"] = self._attend(heads, kv_heads, implementation, 1024)[2]
        return record

    def _attend(self, heads: int, kv_heads: int, implementation: str, T: int) -> tuple[float, float, list[float]]:
        """Seconds of forward and backward pass, their operations, and relative errors of all results (short rows)."""
        cuts = [0, T // 8, T // 2, T // 2 + T // 5 + 1, T]
        segment = jnp.asarray(np.repeat(np.arange(1, 5), np.diff(cuts))[None].astype(np.int32))
        q, k, v, w = (
            jax.random.normal(jax.random.key(i), (1, T, h, 256), jnp.bfloat16)
            for i, h in enumerate((heads, kv_heads, kv_heads, heads))
        )

        def gradient(implementation: str):
            def loss(q, k, v):
                out = packed_attention(q, k, v, segment, implementation=implementation)
                return jnp.sum(out.astype(jnp.float32) * w), out

            return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))

        both = gradient(implementation)
        seconds = timed(lambda: both(q, k, v), 5, 10)
        flops = 3.5 * 2 * sum(n * n for n in np.diff(cuts)) * heads * 256
        if T > 2048:
            return seconds, float(flops), []
        exact, found = gradient("xla")(*(x.astype(jnp.float32) for x in (q, k, v))), both(q, k, v)
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact))
        errors = [float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())) for a, b in pairs]
        assert np.isfinite(errors).all(), errors
        return seconds, float(flops), errors

    def batch(self, c: Qwen35Config, rows: int, length: int, seed: int = 0) -> tuple[dict, dict, list[int]]:
        """Packed rows of four segments in which every token but the last of each segment is a loss token."""
        rng = np.random.default_rng(seed)
        cuts = np.linspace(0, length, 5).astype(int)
        cuts[1:-1] += 13
        lengths = np.diff(cuts)
        segment = np.repeat(np.arange(1, 5), lengths)[None].repeat(rows, 0).astype(np.int32)
        position = np.concatenate([np.arange(n) for n in lengths])[None].repeat(rows, 0).astype(np.int32)
        tokens = rng.integers(0, c.vocab_size, (rows, length)).astype(np.int32)
        batch = {
            "tokens_BT": tokens, "position_BT": position, "segment_BT": segment,
            "source_BM": np.arange(length, dtype=np.int32)[None].repeat(rows, 0),
            "target_BM": np.roll(tokens, -1, axis=1), "mask_BM": np.ones((rows, length), bool),
        }  # fmt: skip
        logp = np.full((rows, length), -np.log(c.vocab_size), np.float32)
        fields = {"old": logp, "reference": logp, "adv": rng.normal(size=(rows, length)).astype(np.float32)}
        return jax.device_put(batch), jax.device_put(fields), lengths.tolist() * rows

    def updater(self, model: Qwen35Model, remat: str) -> Updater:
        train = dataclasses.replace(TrainConfig(), remat=remat)
        return Updater(model, Grpo(Grpo.Config()), train, 1.0, np.ones(model.config.vocab_size, bool))

    def train(self, name: str) -> None:
        self.state = None
        for rows, remat, rule in self.a.train_cases:
            self.row(
                f"train {name} {rows} rows remat={remat} rule={rule}", partial(self._train, name, rows, remat, rule)
            )
        self.state = None

    def _train(self, name: str, rows: int, remat: str, rule: str) -> dict[str, Any]:
        length = 8192 if self.accelerator else 128
        model = self.model(name, rule)
        updater = self.updater(model, remat)
        if self.state is None or any(x.is_deleted() for x in jax.tree.leaves(self.state)):
            self.state = updater.init(model.init(jax.random.key(0), jnp.float32))
        batch, fields, segments = self.batch(model.config, rows, length)
        scale = jnp.float32(1 / (rows * length))
        scales = Scales(surrogate=scale, kl=0.01 * scale, entropy=0.001 * scale, auxiliary=0.0 * scale)
        zeros = jax.jit(lambda p: jax.tree.map(jnp.zeros_like, p))
        shapes = jax.eval_shape(zeros, self.state["params"])
        begin = time.perf_counter()
        gradient = updater.gradient.lower(self.state["params"], shapes, batch, fields, scales).compile()
        compile_s = time.perf_counter() - begin
        found = []

        def step():
            grads, sums = gradient(self.state["params"], zeros(self.state["params"]), batch, fields, scales)
            self.state, norm = updater.apply(self.state, grads, jnp.float32(1e-6))
            found.append((sums["loss"], norm))
            return norm

        seconds = timed(step, 3, 3)
        assert np.isfinite(np.asarray(jax.device_get(found))).all(), found
        tokens = rows * length
        mfu = 3 * forward_flops(model.config, tokens, segments, tokens) / seconds / self.matmul
        record = {"ms": 1e3 * seconds, "tokens_s": tokens / seconds, "mfu": mfu}
        return record | {"temp_gib": gib(gradient), "compile_s": compile_s}

    def score(self, name: str) -> None:
        for rule in self.a.score_rules:
            self.row(f"score {name} 4 rows rule={rule}", partial(self._score, name, rule))

    def _score(self, name: str, rule: str) -> dict[str, Any]:
        rows, length = (4, 8192) if self.accelerator else (2, 128)
        model = self.model(name, rule)
        updater = self.updater(model, "none")
        params = model.init(jax.random.key(0), jnp.bfloat16)
        batch, _, segments = self.batch(model.config, rows, length)
        score = updater.score.lower(params, batch).compile()
        assert bool(jnp.isfinite(score(params, batch)).all())
        seconds, tokens = timed(lambda: score(params, batch), 3, 3), rows * length
        mfu = forward_flops(model.config, tokens, segments, tokens) / seconds / self.matmul
        return {"ms": 1e3 * seconds, "tokens_s": tokens / seconds, "mfu": mfu, "temp_gib": gib(score)}

    def decode(self, name: str) -> None:
        for rows in (128, 256) if self.accelerator else (4,):
            for rule in self.a.decode_rules:
                self.row(f"decode {name} {rows} rows rule={rule}", partial(self._decode, name, rows, rule))

    def _decode(self, name: str, rows: int, rule: str) -> dict[str, Any]:
        model, chunk, context = self.model(name, rule), 16, 2048 if self.accelerator else 64
        params = steps.engine_params(model, model.init(jax.random.key(0), jnp.bfloat16), None)
        cache = steps.new_cache(model, rows, context + 4 * chunk, jnp.bfloat16, None)
        c = model.config
        slots = steps.Slots(
            last_S=jnp.arange(rows, dtype=jnp.int32), position_S=jnp.full(rows, context, jnp.int32),
            drawn_S=jnp.zeros(rows, jnp.int32), budget_S=jnp.full(rows, 10**6, jnp.int32),
            seed_S=jnp.arange(rows, dtype=jnp.uint32), temperature_S=jnp.ones(rows), active_S=jnp.ones(rows, bool),
        )  # fmt: skip
        stop, mask, enough = jnp.zeros(0, jnp.int32), jnp.ones(c.vocab_size, bool), jnp.int32(rows)
        kept = [cache]

        def call():
            cache, drawn = steps.decode(
                model,
                params,
                kept.pop(),
                slots,
                stop,
                mask,
                enough,
                steps=chunk,
                context=context + chunk,
                sharding=None,
            )
            kept.append(cache)
            return drawn.logps_SC

        assert bool(jnp.isfinite(call()).all())
        seconds = timed(call, 5) / chunk
        size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))  # noqa: E731
        cache = kept.pop()
        used = context / cache.k[0].shape[1]
        moved = size(params) + 2 * size(getattr(cache, "state", ())) + size((cache.k, cache.v)) * used
        floor = moved / self.copy
        record = {"ms": 1e3 * seconds, "tokens_s": rows / seconds, "gigabytes": moved / 1e9}
        return record | {"floor_ms": 1e3 * floor, "share_of_floor": floor / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--models", default="2b,4b")
    parser.add_argument("--rules", default="pallas,xla_associative")
    parser.add_argument("--remat", default="dots,full")
    parser.add_argument("--rows", default="4,1")
    parser.add_argument("--written_out", action="store_true", help="scan_layers = False")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "qwen3_5.json")
    a = parser.parse_args()
    rules, rows = a.rules.split(","), [int(n) for n in a.rows.split(",")]
    a.score_rules = a.decode_rules = rules
    # The first rule in every combination, the others with the last kind of recomputation and the fewest rows.
    a.train_cases = [(n, remat, rules[0]) for n in rows for remat in a.remat.split(",")]
    a.train_cases += [(min(rows), a.remat.split(",")[-1], rule) for rule in rules[1:]]
    bench, parts = Bench(a), a.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts {sorted(unknown)}; there are {', '.join(PARTS)}.")
    bench.ceilings()
    if "attention" in parts:
        bench.attention()
    for name in a.models.split(","):
        for part in ("decode", "score", "train"):
            if part in parts:
                getattr(bench, part)(name)


if __name__ == "__main__":
    main()
