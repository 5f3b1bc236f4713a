"""The embedded engine on a model with recurrent state: states, convolution tails and keys of each slot."""

import asyncio
import functools

import jax
import jax.numpy as jnp
import numpy as np

from sdjax.models.base import masked_logits
from sdjax.models.qwen3_5 import Qwen35Model
from sdjax.models.qwen3_5_config import FULL, LINEAR, Qwen35Config
from sdjax.rollout.embedded import EmbeddedEngine
from sdjax.rollout.engine import Request, SamplingParams

VOCAB = 48
MAX_LENGTH = 96  # prompts and whole sequences reach past one chunk of the delta rule
# A wide initialisation: logits differ by nats, so that a wrong cache entry shows. About the epsilon see
# tests/models/test_qwen3_5.py.
MODEL = Qwen35Model(
    Qwen35Config(
        model_type="qwen3_5", vocab_size=VOCAB, hidden_size=32, intermediate_size=48, layers=4, heads=4, kv_heads=2,
        head_dim=8, max_positions=128, partial_rotary_factor=0.5, rms_eps=1e-2, tie_embeddings=True,
        initializer_range=0.2, layer_types=(LINEAR, LINEAR, LINEAR, FULL), linear_key_heads=2, linear_value_heads=4,
        linear_key_dim=8, linear_value_dim=6, conv_kernel=4,
    )
)  # fmt: skip
ALLOWED_V = np.arange(VOCAB) < VOCAB - 2


@functools.cache
def params():
    return jax.jit(MODEL.init)(jax.random.key(0))


def make_engine(**options):
    defaults = {"stop_ids": [], "sampling_mask_V": ALLOWED_V, "slots": 6, "max_length": MAX_LENGTH, "prefill_rows": 2,
                "prefill_buckets": (), "decode_chunk": 4}  # fmt: skip
    return EmbeddedEngine(MODEL, params(), **(defaults | options))


def make_requests(count, *, seed=0, new=None):
    rng = np.random.default_rng(seed)
    return [
        Request(
            rng.integers(0, VOCAB, rng.integers(1, 75)),
            1000 * seed + i,
            SamplingParams(1.0, int(rng.integers(1, 20)) if new is None else new),
        )
        for i in range(count)
    ]


def generate(engine, requests):
    async def all_of_them():
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    return asyncio.run(all_of_them())


@jax.jit
def _forward(tokens_BT):
    hidden_BTD = MODEL.hidden(params(), tokens_BT, jnp.arange(tokens_BT.shape[1])[None], jnp.ones_like(tokens_BT))
    return jax.nn.log_softmax(masked_logits(MODEL.logits(params(), hidden_BTD), ALLOWED_V))


def full_logps(request, completion):
    """Log-probs of the drawn tokens, by one forward pass over the whole sequence."""
    P, R = len(request.prompt), len(completion.tokens)
    tokens_1T = np.zeros((1, MAX_LENGTH), np.int32)
    tokens_1T[0, : P + R] = np.concatenate([request.prompt, completion.tokens])
    return np.asarray(_forward(tokens_1T))[0, np.arange(P - 1, P + R - 1), completion.tokens]


def same(first, second):
    return [c.tokens.tolist() for c in first] == [c.tokens.tolist() for c in second]


def test_logps_equal_the_full_forward_with_more_requests_than_slots():
    requests = make_requests(24)
    for request, done in zip(requests, generate(make_engine(), requests)):
        assert len(done.tokens) == request.sampling.max_new_tokens
        np.testing.assert_allclose(done.logps, full_logps(request, done), atol=1e-4)


def test_the_prompts_state_is_forked_for_all_samples_of_a_group():
    engine = make_engine()
    prompts = [np.arange(70) % 11, np.array([5]), np.arange(3, 12)]
    requests = [Request(prompts[i % 3], i, SamplingParams(1.0, 8)) for i in range(15)]
    completions = generate(engine, requests[:6])
    assert engine.stats.prompt_tokens == 2 * (70 + 1 + 9) and engine.stats.prefill_tokens == 70 + 1 + 9
    completions += generate(engine, requests[6:])
    for request, done in zip(requests, completions):
        np.testing.assert_allclose(done.logps, full_logps(request, done), atol=1e-4)
    assert len({tuple(c.tokens.tolist()) for c in completions[::3]}) == 5


def test_draws_depend_on_neither_slot_nor_batch_mates():
    requests = make_requests(12, seed=1)
    engine = make_engine()
    together = generate(engine, requests)
    alone = [generate(engine, [request])[0] for request in requests]
    assert same(together, alone)
    for first, second in zip(together, alone):
        np.testing.assert_allclose(first.logps, second.logps, atol=1e-5)


def test_ids_beyond_the_tokenizer_are_never_drawn():
    engine = make_engine()
    hot = [Request(r.prompt, r.seed, SamplingParams(50.0, 20)) for r in make_requests(24, new=20)]
    drawn = np.concatenate([done.tokens for done in generate(engine, hot)])
    assert len(drawn) == 480 and drawn.max() == VOCAB - 3


def test_states_stay_float32_in_a_half_precision_cache():
    engine = make_engine(cache_dtype=jnp.bfloat16)
    requests = make_requests(4, new=6)
    for request, done in zip(requests, generate(engine, requests)):
        np.testing.assert_allclose(done.logps, full_logps(request, done), atol=0.5)
    keys_and_values, states, tails = 2 * MAX_LENGTH * 2 * 8 * 2, 3 * 4 * 8 * 6 * 4, 3 * 3 * (16 + 16 + 24) * 2
    assert engine.health()["cache_bytes"] == 6 * (keys_and_values + states + tails)
    engine.sleep()
    assert engine.health()["cache_bytes"] == 0
