"""The embedded engine against the full forward pass of the same model."""

import asyncio
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdjax.errors import EngineError
from sdjax.models.base import masked_logits
from sdjax.models.config import ModelConfig
from sdjax.models.dense import DenseModel
from sdjax.rollout.embedded import EmbeddedEngine
from sdjax.rollout.engine import Request, SamplingParams

VOCAB = 48
MAX_LENGTH = 64
# A wide initialisation: logits differ by several nats, so that a wrong cache entry shows.
MODEL = DenseModel(
    ModelConfig(
        model_type="llama", vocab_size=VOCAB, hidden_size=32, intermediate_size=48, layers=2, heads=4, kv_heads=2,
        head_dim=8, max_positions=128, tie_embeddings=True, initializer_range=0.4,
    )
)  # fmt: skip
ALLOWED_V = np.arange(VOCAB) < VOCAB - 2
ONE_SLOT = {
    "slots": 1,
    "decode_chunk": 3,
    "prefill_rows": 1,
    "max_length": 16,
}  # shared by tests: every shape costs a compilation


@functools.cache
def params(seed=0):
    return jax.jit(MODEL.init)(jax.random.key(seed))


def make_engine(**options):
    defaults = {"stop_ids": [], "sampling_mask_V": ALLOWED_V, "slots": 8, "max_length": MAX_LENGTH, "prefill_rows": 4,
                "prefill_buckets": (16,), "decode_chunk": 4}  # fmt: skip
    return EmbeddedEngine(MODEL, params(), **(defaults | options))


def make_requests(count, *, seed=0, new=None, temperature=1.0):
    rng = np.random.default_rng(seed)
    return [
        Request(
            rng.integers(0, VOCAB, rng.integers(1, 40)),
            1000 * seed + i,
            SamplingParams(temperature, int(rng.integers(1, 20)) if new is None else new),
            name=f"r{i}",
        )
        for i in range(count)
    ]


def generate(engine, requests):
    async def all_of_them():
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    return asyncio.run(all_of_them())


@jax.jit
def _forward(weights, tokens_BT):
    segment_BT = jnp.ones_like(tokens_BT)
    hidden_BTD = MODEL.hidden(weights, tokens_BT, jnp.arange(tokens_BT.shape[1])[None], segment_BT)
    return masked_logits(MODEL.logits(weights, hidden_BTD), ALLOWED_V)


def full_logits(request, completion, weights=None):
    """Logits [R, V] before each drawn token, by one forward pass over the whole sequence."""
    P, R = len(request.prompt), len(completion.tokens)
    tokens_1T = np.zeros((1, MAX_LENGTH), np.int32)
    tokens_1T[0, : P + R] = np.concatenate([request.prompt, completion.tokens])
    return np.asarray(_forward(params() if weights is None else weights, tokens_1T))[0, P - 1 : P + R - 1]


def full_logps(request, completion, weights=None):
    logits_RV = full_logits(request, completion, weights).astype(np.float64)
    logp_RV = log_softmax(logits_RV / (request.sampling.temperature or 1.0))
    return logp_RV[np.arange(len(completion.tokens)), completion.tokens]


def log_softmax(logits_RV):
    shifted_RV = logits_RV - logits_RV.max(axis=-1, keepdims=True)
    return shifted_RV - np.log(np.exp(shifted_RV).sum(axis=-1, keepdims=True))


def same(first, second):
    return [c.tokens.tolist() for c in first] == [c.tokens.tolist() for c in second]


def test_logps_equal_the_full_forward_with_more_requests_than_slots():
    engine = make_engine()
    requests = make_requests(40)
    completions = generate(engine, requests)
    for request, done in zip(requests, completions):
        assert len(done.tokens) == request.sampling.max_new_tokens and done.finish == "length"
        np.testing.assert_allclose(done.logps, full_logps(request, done), atol=1e-4)
    stats = engine.stats
    assert stats.prompt_tokens == stats.prefill_tokens == sum(len(r.prompt) for r in requests)
    assert stats.decode_tokens == sum(r.sampling.max_new_tokens for r in requests)
    assert stats.decode_steps > 0 and stats.seconds > 0
    assert engine.health()["active"] == engine.health()["waiting"] == 0


def test_greedy_takes_the_largest_logit_and_reports_plain_logps():
    requests = make_requests(6, temperature=0.0, new=12)
    for request, done in zip(requests, generate(make_engine(), requests)):
        assert done.tokens.tolist() == full_logits(request, done).argmax(axis=-1).tolist()
        np.testing.assert_allclose(done.logps, full_logps(request, done), atol=1e-4)


def test_draws_are_the_documented_function_of_seed_and_token_index():
    for temperature in (0.3, 1.0, 2.5):
        (request,) = make_requests(1, new=10, temperature=temperature)
        (done,) = generate(make_engine(), [request])
        np.testing.assert_allclose(done.logps, full_logps(request, done), atol=1e-4)
        for index, logits_V in enumerate(full_logits(request, done)):
            key = jax.random.wrap_key_data(np.array([request.seed, index], np.uint32), impl="threefry2x32")
            noise_V = np.asarray(jax.random.gumbel(key, (VOCAB,)))
            assert done.tokens[index] == np.argmax(logits_V.astype(np.float64) / temperature + noise_V)


def test_a_request_alone_in_a_batch_in_other_slots_and_chunks_draws_the_same():
    requests = make_requests(20, seed=1)
    together = generate(make_engine(), requests)
    alone = [generate(make_engine(), [request])[0] for request in requests]
    assert same(together, alone)
    short = [Request(np.arange(2 + i % 5), i, SamplingParams(1.0, 9)) for i in range(12)]
    one_slot = generate(make_engine(**ONE_SLOT), short[::-1])[::-1]
    assert same(generate(make_engine(), short), one_slot)
    for first, second in zip(together, alone):
        np.testing.assert_allclose(first.logps, second.logps, atol=1e-5)


def test_the_same_requests_in_the_same_order_give_identical_bytes():
    requests = make_requests(20, seed=2)
    engine = make_engine()
    first, again, fresh = generate(engine, requests), generate(engine, requests), generate(make_engine(), requests)
    for a, b, c in zip(first, again, fresh):
        assert a.tokens.tobytes() == b.tokens.tobytes() == c.tokens.tobytes()
        assert a.logps.tobytes() == b.logps.tobytes() == c.logps.tobytes()


def test_seeds_decide():
    prompt = np.arange(5)
    requests = [Request(prompt, seed, SamplingParams(1.0, 8)) for seed in (1, 2, 1, 3)]
    one, two, one_again, three = (c.tokens.tolist() for c in generate(make_engine(), requests))
    assert one == one_again and len({tuple(one), tuple(two), tuple(three)}) == 3


def test_identical_prompts_are_prefilled_once():
    engine = make_engine()
    prompts = [np.arange(9), np.arange(30) % 11]
    requests = [Request(prompts[i % 2], i, SamplingParams(1.0, 6)) for i in range(8)]
    completions = generate(engine, requests)
    assert engine.stats.prompt_tokens == 4 * (9 + 30)
    assert engine.stats.prefill_tokens == 9 + 30
    for request, done in zip(requests, completions):
        np.testing.assert_allclose(done.logps, full_logps(request, done), atol=1e-4)


def test_stop_ids_end_an_answer_and_are_included():
    free = make_requests(12, seed=3, new=16)
    unstopped = generate(make_engine(), free)
    stops = {7, 8, 9}
    finishes = set()
    for before, after in zip(unstopped, generate(make_engine(stop_ids=stops), free)):
        hits = [i for i, token in enumerate(before.tokens.tolist()) if token in stops]
        length = hits[0] + 1 if hits else 16
        assert after.tokens.tolist() == before.tokens.tolist()[:length]
        assert after.finish == ("stop" if hits else "length")
        assert len(after.logps) == length
        finishes.add(after.finish)
    assert finishes == {"stop", "length"}


def test_a_stop_id_as_first_or_last_token():
    request = Request(np.arange(6), 4, SamplingParams(1.0, 5))
    (free,) = generate(make_engine(), [request])
    (first,) = generate(make_engine(stop_ids=[int(free.tokens[0])]), [request])
    assert (first.tokens.tolist(), first.finish) == (free.tokens.tolist()[:1], "stop")
    if free.tokens[-1] not in free.tokens[:-1]:
        (last,) = generate(make_engine(stop_ids=[int(free.tokens[-1])]), [request])
        assert (last.tokens.tolist(), last.finish) == (free.tokens.tolist(), "stop")


def test_masked_ids_are_never_drawn_and_have_no_mass():
    allowed_V = np.zeros(VOCAB, bool)
    allowed_V[[3, 4, 20]] = True
    requests = make_requests(10, new=10, temperature=5.0)
    for done in generate(make_engine(sampling_mask_V=allowed_V), requests):
        assert set(done.tokens.tolist()) <= {3, 4, 20}
    only = np.zeros(VOCAB, bool)
    only[11] = True
    (done,) = generate(make_engine(sampling_mask_V=only), requests[:1])
    assert done.tokens.tolist() == [11] * 10 and np.abs(done.logps).max() == 0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    prompt = np.array([1, 2, 3])
    draws = 2000
    requests = [Request(prompt, 17 * seed, SamplingParams(temperature, 1)) for seed in range(draws)]
    completions = generate(make_engine(), requests)
    prob_V = np.exp(log_softmax(full_logits(requests[0], completions[0])[:1] / temperature))[0]
    count_V = np.bincount([int(c.tokens[0]) for c in completions], minlength=VOCAB)
    common_V = prob_V * draws >= 5
    observed = np.append(count_V[common_V], count_V[~common_V].sum())
    expected = np.append(prob_V[common_V], prob_V[~common_V].sum()) * draws
    chi2 = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(observed) - 1
    assert freedom >= 3
    assert chi2 < freedom + 4 * np.sqrt(2 * freedom)  # mean + 4 standard deviations; fixed seeds, so never flaky


def test_more_requests_keep_coming_without_a_barrier():
    engine = make_engine()
    order = []

    async def episode(name, turns, new):
        for turn in range(turns):
            request = Request(np.array([name, turn]), name, SamplingParams(1.0, new))
            await engine.generate(request)
        order.append(name)

    async def run():
        await asyncio.gather(episode(1, 1, 50), episode(2, 6, 2), episode(3, 3, 2))

    asyncio.run(run())
    assert order == [3, 2, 1]  # the long answer holds nobody up


def test_episodes_answered_together_are_prefilled_together():
    engine = make_engine()

    async def episode(name):
        for turn in range(3):
            await asyncio.sleep(0)
            await engine.generate(Request(np.array([name, turn]), name, SamplingParams(1.0, 5)))

    async def run():
        await asyncio.gather(*(asyncio.create_task(episode(name)) for name in range(4)))

    asyncio.run(run())
    assert engine.stats.extra["prefill_calls"] == 3


def test_a_cancelled_request_frees_its_slot():
    engine = make_engine(**ONE_SLOT)
    long, short = (Request(np.arange(4), seed, SamplingParams(1.0, 12)) for seed in (1, 2))

    async def run():
        task = asyncio.create_task(engine.generate(long))
        while engine.stats.decode_steps == 0:
            await asyncio.sleep(0)
        queued = asyncio.create_task(engine.generate(long))
        follower = asyncio.create_task(engine.generate(short))
        await asyncio.sleep(0)
        task.cancel()
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await follower

    done = asyncio.run(run())
    assert same([done], generate(make_engine(), [short]))
    assert engine.stats.extra["cancelled"] == 2
    assert engine.health()["active"] == 0


def test_a_bad_request_fails_alone():
    engine = make_engine()
    good = make_requests(3)
    bad = Request(np.arange(60) % VOCAB, 0, SamplingParams(1.0, 5), name="too-long")

    async def run():
        return await asyncio.gather(*(engine.generate(r) for r in [good[0], bad, *good[1:]]), return_exceptions=True)

    results = asyncio.run(run())
    assert isinstance(results[1], EngineError) and "65 exceed the engine's max_length of 64" in str(results[1])
    assert same([results[0], *results[2:]], generate(make_engine(), good))


def test_new_weights_leave_nothing_of_the_old_ones():
    engine = make_engine(version=3)
    requests = make_requests(8, seed=5)
    assert {c.weight_version for c in generate(engine, requests)} == {3}
    engine.update_weights(params(1), 4)
    assert engine.health()["cache_bytes"] == 0
    after = generate(engine, requests)
    assert {c.weight_version for c in after} == {4}
    for request, done in zip(requests, after):
        np.testing.assert_allclose(done.logps, full_logps(request, done, params(1)), atol=1e-4)
    assert engine.health()["weight_version"] == 4


def test_weights_do_not_change_under_requests_in_flight():
    engine = make_engine()

    async def run():
        task = asyncio.create_task(engine.generate(make_requests(1, new=20)[0]))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="1 requests are in flight"):
            engine.update_weights(params(1), 1)
        with pytest.raises(EngineError, match="one engine per event loop"):
            await asyncio.to_thread(lambda: generate(engine, make_requests(1)))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine.update_weights(params(1), 1)

    asyncio.run(run())


def test_weights_of_another_shape_are_refused():
    wider = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf], axis=-1), params())
    with pytest.raises(EngineError, match="differ in structure or shape"):
        make_engine().update_weights(wider, 1)


def test_donated_weights_are_named():
    engine = make_engine()
    engine.update_weights(jax.tree.map(jnp.array, params()), 1)
    jax.tree.map(lambda leaf: leaf.delete(), engine._params)
    with pytest.raises(EngineError, match="version 1 no longer exist"):
        generate(engine, make_requests(1))


def test_broken_weights_fail_every_request_and_leave_the_engine_usable():
    engine = make_engine()
    engine.update_weights(jax.tree.map(lambda leaf: leaf * jnp.nan, params()), 1)

    async def run():
        return await asyncio.gather(*(engine.generate(r) for r in make_requests(12)), return_exceptions=True)

    results = asyncio.run(run())
    assert len(results) == 12
    assert all(isinstance(r, EngineError) and "not finite" in str(r) for r in results)
    engine.update_weights(params(), 2)
    requests = make_requests(4)
    assert same(generate(engine, requests), generate(make_engine(), requests))


def test_close_fails_what_is_in_flight_and_refuses_more():
    engine = make_engine()

    async def run():
        task = asyncio.create_task(engine.generate(make_requests(1, new=20)[0]))
        await asyncio.sleep(0)
        engine.close()
        engine.close()
        with pytest.raises(EngineError, match="closed"):
            await task
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(make_requests(1)[0])

    asyncio.run(run())
    assert engine.health()["ok"] is False and engine.health()["cache_bytes"] == 0


def test_sleep_gives_the_memory_back():
    engine = make_engine()
    requests = make_requests(4)
    before = generate(engine, requests)
    assert engine.health()["cache_bytes"] == 2 * 2 * 8 * MAX_LENGTH * 2 * 8 * 4  # k+v, layers, slots, length, heads
    engine.sleep()
    assert engine.health()["cache_bytes"] == 0
    assert same(before, generate(engine, requests))


def test_a_half_precision_cache_stays_close():
    requests = [Request(np.arange(3 + i), i, SamplingParams(1.0, 6)) for i in range(4)]
    engine = make_engine(cache_dtype=jnp.bfloat16)
    for request, done in zip(requests, generate(engine, requests)):
        np.testing.assert_allclose(done.logps, full_logps(request, done), atol=0.5)
    assert engine.health()["cache_bytes"] == 2 * 2 * 8 * MAX_LENGTH * 2 * 8 * 2


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"sampling_mask_V": np.ones(5, bool)}, r"shape \(5,\)"),
        ({"sampling_mask_V": np.zeros(VOCAB, bool)}, "0 usable ids"),
        ({"stop_ids": [VOCAB]}, "outside the model's vocabulary of 48"),
        ({"max_length": 129}, "the model has 128 positions"),
        ({"slots": 0}, "slots is 0"),
        ({"decode_chunk": 0}, "decode_chunk is 0"),
        ({"prefill_rows": -1}, "prefill_rows is -1"),
    ],
)
def test_impossible_engines_are_refused(options, found):
    with pytest.raises(EngineError, match=found):
        make_engine(**options)
