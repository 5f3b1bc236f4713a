"""The kernel benchmark covers every kernel and counts bytes as it says."""

import io

import jax
import pytest
from rich.console import Console

from benchmarks import kernels
from sdjax import losses

# Advantage functions and token losses; the rest of the public names are weights, terms, schedules and flags.
KERNELS = {name for name in losses.__all__ if name.endswith("_advantages")} | losses.SEPARABLE | losses.COUPLED
SHAPES = {"group_advantages": "adv"}  # advantages that have another shape than the mask
ROWS, TOKENS, VOCAB = 100, 6, 20


@pytest.fixture(scope="module")
def arrays():
    return kernels.make_inputs(ROWS, TOKENS, VOCAB)


def test_every_public_kernel_is_measured():
    assert {case.kernel for case in kernels.CASES.values()} == KERNELS | {"ovcsd_contrast"}


@pytest.mark.parametrize("name", sorted(kernels.CASES))
def test_cases_read_exactly_their_inputs(name, arrays):
    case = kernels.CASES[name]
    inputs = {key: arrays[key] for key in case.inputs}
    results = jax.tree.leaves(jax.eval_shape(case.function(), inputs))
    assert results[-1].shape == (inputs[case.wrt].shape if case.wrt else arrays[SHAPES.get(name, "mask")].shape)
    for key in case.inputs:
        with pytest.raises(KeyError):
            case.call({k: v for k, v in inputs.items() if k != key})


def test_bytes_are_inputs_once_and_results_once(arrays):
    case = kernels.CASES["sdar"]
    inputs = {key: arrays[key] for key in case.inputs}
    # Two log-probabilities and a mask in; the loss and its gradient out.
    assert kernels.bytes_moved(case.function(), inputs) == ROWS * TOKENS * (4 + 4 + 1) + 4 + ROWS * TOKENS * 4


def test_share_is_relative_to_the_copy_of_the_same_run(monkeypatch):
    monkeypatch.setattr(kernels, "seconds_per_call", lambda *_: 0.5)
    out = kernels.measure(ROWS, TOKENS, VOCAB, sets=1, repeats=1, console=Console(file=io.StringIO()))
    copied = 4 * ROWS * TOKENS * 4 * 2
    assert out["copy_gb_per_s"] == pytest.approx(copied / 0.5 / 1e9)
    assert out["all_ms"] == pytest.approx(500 * len(kernels.CASES))
    sdar = out["kernels"]["sdar"]
    assert sdar["share_of_copy"] == pytest.approx(sdar["mbytes"] * 1e6 / copied)
