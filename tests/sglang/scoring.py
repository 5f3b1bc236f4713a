"""An engine on a tiny model's server, and the trainer's own log-probabilities of what it drew."""

import asyncio
import functools

import jax
import jax.numpy as jnp
import numpy as np

from sdjax.config import load, resolved
from sdjax.models import load_checkpoint, masked_logits
from sdjax.rollout.engine import Request, SamplingParams
from sdjax.rollout.engines import make_engine
from tests.train.tiny_run import tiny_config

LENGTH = 256  # one shape: one compilation


class Served:
    """A checkpoint, its server's engine and the model in this process."""

    def __init__(self, checkpoint, url, sync, logs, **sglang):
        self.config = sglang_config(checkpoint, urls=(url,), sync=sync, **sglang)
        self.model, self.params, self.tokenizer = load_checkpoint(checkpoint)
        self.engine = make_engine(
            self.config, self.model, self.params, self.tokenizer, None, checkpoint=checkpoint, logs=logs
        )

    def ask(self, prompts, *, new=24, temperature=1.0):
        async def all_of_them():
            sampling = SamplingParams(temperature, new)
            requests = [Request(np.array(p), 100 + i, sampling, f"r{i}") for i, p in enumerate(prompts)]
            return await asyncio.gather(*(self.engine.generate(r) for r in requests))

        return asyncio.run(all_of_them())

    def gap(self, params, prompts, completions):
        """|engine - trainer| of every token drawn, under ``params``."""
        tokens = np.zeros((len(prompts), LENGTH), np.int32)
        for row, prompt, done in zip(tokens, prompts, completions, strict=True):
            row[: len(prompt) + len(done.tokens)] = [*prompt, *done.tokens]
        logps = np.asarray(_logps(self.model, params, tokens, self.tokenizer.sampling_mask_V))
        gaps = []
        for row, prompt, done in zip(logps, prompts, completions):
            places = np.arange(len(done.tokens)) + len(prompt) - 1
            gaps.append(np.abs(row[places, done.tokens] - done.logps))
        return np.concatenate(gaps)


@functools.partial(jax.jit, static_argnames="model")
def _logps(model, params, tokens_BT, mask_V):
    position = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    hidden = model.hidden(params, tokens_BT, position, jnp.ones_like(tokens_BT))
    return jax.nn.log_softmax(masked_logits(model.logits(params, hidden), mask_V))


def sglang_config(checkpoint, **sglang):
    plain = {**resolved(tiny_config(checkpoint)), "method": {"name": "grpo"}}
    plain["rollout"] |= {"engine": "sglang", "stop_gap": 0.05}
    plain["rollout"]["sglang"] |= sglang
    return load(plain)


def random_prompts(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 300, rng.integers(5, 100)).tolist() for _ in range(count)]


def moved(params, seed, scale=0.03):
    """Parameters far from ``params``."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(tree, [x + scale * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves)])
