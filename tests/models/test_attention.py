"""Packed attention behind a prefix, and the parts of the cuDNN path that need no GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdjax.errors import ConfigError
from sdjax.models import cudnn
from sdjax.models.attention import packed_attention, prefixed_attention

B, T, H, J, K, P = 2, 24, 4, 2, 8, 6


def arrays(seed, *shapes):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes)]


@st.composite
def segments(draw):
    """Ids of packed rows: runs of 1, 2, ... and then padding."""
    rows = []
    for _ in range(B):
        row = np.zeros(T, np.int32)
        ends = sorted(draw(st.sets(st.integers(1, T), min_size=1, max_size=5)))
        for number, (begin, end) in enumerate(zip([0, *ends], ends), start=1):
            row[begin:end] = number
        rows.append(row)
    return jnp.asarray(np.stack(rows))


@given(segments(), st.lists(st.integers(1, P), min_size=B, max_size=B))
@settings(max_examples=20, deadline=None)
def test_a_prefix_is_what_a_longer_segment_would_see(segment_BT, lengths):
    q, k, v = arrays(0, (B, T, H, K), (B, T, J, K), (B, T, J, K))
    k_before, v_before = arrays(1, (B, P, J, K), (B, P, J, K))
    found = prefixed_attention(q, k, v, segment_BT, k_before, v_before, jnp.asarray(lengths))
    for b in range(B):
        for number in sorted({int(i) for i in segment_BT[b]}):
            own = np.flatnonzero(np.asarray(segment_BT[b]) == number)
            n = lengths[b]
            one = [
                jnp.concatenate([x_before[b, :n], x[b, own]])[None] for x_before, x in ((k_before, k), (v_before, v))
            ]
            queries = jnp.concatenate([jnp.zeros((n, H, K)), q[b, own]])[None]
            wanted = packed_attention(queries, *one, jnp.ones((1, n + len(own)), jnp.int32))[0, n:]
            np.testing.assert_allclose(found[b, own], wanted, atol=1e-5)


def plain(q, k, v, mask_BTS):
    """Outputs and log-normalisers in one expression, float32."""
    k, v = (jnp.repeat(x, H // J, axis=2) for x in (k, v))
    score = jnp.einsum("bthk,bshk->bths", q * K**-0.5, k)
    score = jnp.where(mask_BTS[:, :, None], score, -jnp.inf)
    return jnp.einsum("bths,bshk->bthk", jax.nn.softmax(score, axis=-1), v), jax.nn.logsumexp(score, axis=-1)


@given(segments(), st.lists(st.integers(1, P), min_size=B, max_size=B))
@settings(max_examples=20, deadline=None)
def test_two_sets_of_keys_merge_by_their_normalisers(segment_BT, lengths):
    q, k, v = arrays(2, (B, T, H, K), (B, T, J, K), (B, T, J, K))
    k_before, v_before = arrays(3, (B, P, J, K), (B, P, J, K))
    own = (segment_BT[:, :, None] == segment_BT[:, None]) & (jnp.arange(T)[None] <= jnp.arange(T)[:, None])
    before = jnp.broadcast_to(jnp.arange(P) < jnp.asarray(lengths)[:, None, None], (B, T, P))
    merged = cudnn.merge(*plain(q, k, v, own), *plain(q, k_before, v_before, before))
    wanted = prefixed_attention(q, k, v, segment_BT, k_before, v_before, jnp.asarray(lengths))
    np.testing.assert_allclose(merged, wanted, atol=1e-5)


@given(segments())
@settings(max_examples=30, deadline=None)
def test_statistics_come_back_from_the_segment_layout(segment_BT):
    start, length = (np.asarray(x) for x in cudnn.segment_layout(segment_BT, limit=8))
    by_token = np.random.default_rng(0).normal(size=(B, T, H)).astype(np.float32)
    by_segment, number = np.full((B * 8, H, T), np.nan, np.float32), 0
    for b in range(B):
        assert (start[b][length[b].argmin() if (length[b] < 0).any() else 8 :] == -1).all()
        for begin, size in zip(start[b], length[b]):
            if size >= 0:
                assert len(set(np.asarray(segment_BT[b, begin : begin + size]).tolist())) == 1
                by_segment[number, :, :size] = by_token[b, begin : begin + size].T
                number += 1
        assert length[b][length[b] >= 0].sum() == T
    found = cudnn.packed_statistics(jnp.asarray(by_segment), jnp.asarray(start), jnp.asarray(length), T)
    np.testing.assert_array_equal(found, by_token)


def test_cudnn_is_refused_where_it_cannot_run():
    assert cudnn.resolve("xla", "float32") == "xla"
    assert cudnn.resolve("auto", "float32") == "xla"
    with pytest.raises(ConfigError, match="not bfloat16"):
        cudnn.resolve("cudnn", "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(9, 3, 64), (16, 8, 128)])
def test_cudnn_equals_xla(heads):
    if cudnn.resolve("auto", "bfloat16") != "cudnn":
        pytest.skip("needs a Hopper GPU")
    errors = compare_on_gpu(*heads)
    assert max(errors.values()) < 1e-2, errors


def compare_on_gpu(H, J, K, B=3, T=512, P=160) -> dict[str, float]:
    """Relative error of cuDNN (bfloat16) against XLA in float32, forward, behind a prefix, and in the gradients."""
    rng = np.random.default_rng(0)
    segment = np.zeros((B, T), np.int32)
    for b, ends in enumerate([(100, 101, 300, 500), (512,), (64, 256)]):
        for number, (begin, end) in enumerate(zip((0, *ends), ends), start=1):
            segment[b, begin:end] = number
    shapes = [(B, T, H, K), (B, T, J, K), (B, T, J, K), (B, P, J, K), (B, P, J, K)]
    exact = [jnp.asarray(rng.normal(size=s), jnp.bfloat16).astype(jnp.float32) for s in shapes]
    half = [x.astype(jnp.bfloat16) for x in exact]
    real = jnp.asarray(segment != 0)[..., None, None]
    lengths = jnp.asarray([P, 1, 77])

    def relative(found, wanted):
        found, wanted = (jnp.where(real, x.astype(jnp.float32), 0) for x in (found, wanted))
        return float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))

    def forward(x, implementation):
        return packed_attention(*x[:3], jnp.asarray(segment), implementation=implementation)

    def behind(x, implementation):
        return prefixed_attention(*x[:3], jnp.asarray(segment), *x[3:], lengths, implementation=implementation)

    def gradient(x, implementation):
        weight = jnp.asarray(np.random.default_rng(1).normal(size=(B, T, H, K)), x[0].dtype)
        total = lambda q, k, v: jnp.where(real, forward((q, k, v), implementation) * weight, 0).sum()  # noqa: E731
        return jax.grad(total, argnums=(0, 1, 2))(*x[:3])

    errors = {
        name: relative(jax.jit(f, static_argnums=1)(half, "cudnn"), jax.jit(f, static_argnums=1)(exact, "xla"))
        for name, f in (("forward", forward), ("behind a prefix", behind))
    }
    pairs = zip("qkv", *(jax.jit(gradient, static_argnums=1)(x, name) for x, name in ((half, "cudnn"), (exact, "xla"))))
    return errors | {f"d{name}": relative(found, wanted) for name, found, wanted in pairs}
