"""The peer of ``benchmarks.qwen3_5``: one training step of transformers' Qwen3.5 in PyTorch.

    python -m benchmarks.peer_torch 2b --length=8192

A process of its own: JAX would hold the memory of the accelerator. Prints one JSON object.
"""

import argparse
import json
import time

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from benchmarks.qwen3_5 import config as config_of
from sdjax.models.qwen3_5_config import Qwen35Config, write_config


def train_step_seconds(config: Qwen35Config, length: int, steps: int = 2) -> float:
    """Seconds of forward, backward and AdamW on one row; the fastest of ``steps`` after one warm-up.

    bfloat16, gradient checkpointing, fused AdamW, PyTorch's own attention and transformers' chunked delta rule: what
    runs without further packages. Packed segments are not part of it: that code ignores them.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    raw = write_config(config, "bfloat16")
    text = Qwen3_5TextConfig(**(raw.get("text_config") or raw))
    with torch.device(device):
        model = Qwen3_5ForCausalLM(text).to(torch.bfloat16)
    model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device == "cuda")
    tokens = torch.randint(0, config.vocab_size, (1, length), device=device)
    times = []
    for _ in range(steps + 1):
        begin = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
        assert torch.isfinite(loss)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="2b, 4b, 9b or tiny")
    parser.add_argument("--length", type=int, default=8192)
    a = parser.parse_args()
    seconds = train_step_seconds(config_of(a.model), a.length)
    print(
        json.dumps({"model": a.model, "torch": torch.__version__, "ms": 1e3 * seconds, "tokens_s": a.length / seconds})
    )


if __name__ == "__main__":
    main()
