"""A saved batch comes back as it was, stays small and is refused when it is something else."""

import dataclasses

import numpy as np
import pytest

from sdjax.errors import DataError
from sdjax.methods.base import RowBatch
from sdjax.train.batch_file import load_batch, save_batch

TOKENS = [["<think>", " go", "\x00"], ["é\n", ""]]


def make_batch() -> RowBatch:
    rng = np.random.default_rng(0)
    mask_NL = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]], bool)
    ints = {name: rng.integers(0, 9, 3).astype(np.int32) for name in ("group_N", "trajectory_N", "turn_N")}
    flags = {name: rng.random(3) < 0.5 for name in ("ok_N", "valid_N", "success_N")}
    floats = {name: rng.random(3, np.float32) for name in ("return_N", "outcome_N", "score_N", "adv_N")}
    logps = lambda: np.where(mask_NL, -rng.random((3, 4), np.float32), np.nan).astype(np.float32)  # noqa: E731
    return RowBatch(
        **ints,
        **flags,
        **floats,
        mask_NL=mask_NL,
        old_NL=logps(),
        reference_NL=logps(),
        views={"skills": logps()},
        context={"skills": np.array([True, False, False])},
    )


def save(path, batch, **changes):
    adv_NL = np.where(batch.mask_NL, batch.adv_N[:, None], 0)
    save_batch(path, batch, adv_NL, TOKENS, **{"step": 7, "method": "sdar", **changes})
    return adv_NL


def test_round_trip_keeps_valid_tokens_and_zeroes_the_rest(tmp_path):
    batch = make_batch()
    adv_NL = save(tmp_path / "deep" / "batch.npz", batch)
    saved = load_batch(tmp_path / "deep" / "batch.npz")
    assert (saved.step, saved.method) == (7, "sdar")
    assert saved.tokens == [*TOKENS, []]
    np.testing.assert_array_equal(saved.adv_NL, adv_NL)
    for field in dataclasses.fields(RowBatch):
        if isinstance(getattr(batch, field.name), np.ndarray):
            want, got = getattr(batch, field.name), getattr(saved.batch, field.name)
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, np.nan_to_num(want) if want.ndim == 2 else want)
    assert list(saved.batch.views) == ["skills"]
    np.testing.assert_array_equal(saved.batch.views["skills"], np.nan_to_num(batch.views["skills"]))
    assert saved.batch.context["skills"].tolist() == [True, False, False]
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["batch.npz"]


def test_padding_costs_almost_nothing(tmp_path):
    batch = make_batch()
    wide = {
        f.name: np.pad(getattr(batch, f.name), [(0, 500), (0, 500)][: getattr(batch, f.name).ndim])
        for f in dataclasses.fields(RowBatch)
        if isinstance(getattr(batch, f.name), np.ndarray)
    }
    save(tmp_path / "small.npz", batch)
    save(tmp_path / "padded.npz", RowBatch(**wide, views={}))
    assert (tmp_path / "padded.npz").stat().st_size < 3 * (tmp_path / "small.npz").stat().st_size


@pytest.mark.parametrize("damage", ["missing", "torn", "other", "pickle"])
def test_other_files_are_refused_with_their_name(tmp_path, damage):
    path = tmp_path / "batch.npz"
    save(path, make_batch())
    if damage == "missing":
        path.unlink()
    elif damage == "torn":
        path.write_bytes(path.read_bytes()[:-200])
    elif damage == "other":
        np.savez(path, step=1)
    else:
        np.savez(path, step=np.array([{"a": 1}], dtype=object))
    with pytest.raises(DataError, match=r"batch\.npz holds no saved batch"):
        load_batch(path)
