"""Small problems for the tests of the vocabulary head, and the head as plain autodiff of all logits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sdjax.losses.masked import masked_sum
from sdjax.models.base import masked_logits
from sdjax.models.config import ModelConfig
from sdjax.models.qwen3_5_config import FULL, LINEAR, Qwen35Config
from sdjax.train.head import Stats

VOCAB = 51


class Problem(NamedTuple):
    """Inputs of ``Head.loss``; everything off the mask is NaN or an arbitrary id."""

    weight: Any
    allowed: Any
    hidden: Any
    pick: Any
    mask: Any
    slots: Any
    shared: Any


def problem(V: int = VOCAB, *, B: int = 8, M: int = 5, D: int = 16, K: int = 0, seed: int = 0, mask=None) -> Problem:
    """K = 0: one picked token without an axis of its own."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    mask = rng.random((B, M)) < 0.4 if mask is None else mask
    # Some ids are forbidden, others are picked more than once; a forbidden id may be picked.
    allowed = rng.random(V) < 0.9
    pick = rng.integers(0, V, (B, M, K) if K else (B, M)).astype(np.int32)
    hidden = np.where(mask[..., None], normal(B, M, D), np.nan)
    weight_BM = np.where(mask, normal(B, M), np.nan)
    return jax.tree.map(jnp.asarray, Problem(0.5 * normal(V, D), allowed, hidden, pick, mask, weight_BM, 0.3))


def weighted_loss(stats: Stats, weight, entropy_coefficient):
    """Not linear in any of its inputs, so that a derivative taken at a wrong place is found."""
    wide = stats.logp if stats.logp.ndim == 3 else stats.logp[..., None]
    # A forbidden token has a log-probability of about -1e30.
    token = jnp.tanh(jnp.sum(wide, axis=-1) / 10) * weight - entropy_coefficient * jnp.square(stats.entropy)
    return masked_sum(token, stats.mask), {"entropy": masked_sum(stats.entropy, stats.mask)}


def plain_stats(weight, allowed, hidden, pick, mask, temperature) -> Stats:
    """All logits at once."""
    hidden = jnp.where(mask[..., None], hidden, 0)
    logits = jnp.einsum("bmd,vd->bmv", hidden, weight.astype(hidden.dtype), precision="highest")
    logps = jax.nn.log_softmax(masked_logits(logits.astype(jnp.float32), allowed) / temperature)
    wide = pick if pick.ndim == 3 else pick[..., None]
    taken = jnp.take_along_axis(logps, wide, axis=-1).reshape(pick.shape)
    entropy = -jnp.sum(jnp.exp(logps) * logps, axis=-1)
    keep = mask if pick.ndim == 2 else mask[..., None]
    return Stats(jnp.where(keep, taken, 0), jnp.where(mask, entropy, 0), mask)


def dense_config(*, tied: bool) -> ModelConfig:
    return ModelConfig(
        model_type="qwen3",
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        layers=1,
        heads=4,
        kv_heads=4,
        head_dim=4,
        max_positions=128,
        initializer_range=0.3,
        tie_embeddings=tied,
        qk_norm=True,
    )


def hybrid_config(*, tied: bool) -> Qwen35Config:
    return Qwen35Config(
        model_type="qwen3_5",
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        layers=2,
        heads=4,
        kv_heads=4,
        head_dim=8,
        max_positions=128,
        partial_rotary_factor=0.5,
        rms_eps=1e-3,
        initializer_range=0.3,
        tie_embeddings=tied,
        layer_types=(LINEAR, FULL),
        linear_key_heads=4,
        linear_value_heads=4,
        linear_key_dim=8,
        linear_value_dim=8,
        conv_kernel=4,
    )
