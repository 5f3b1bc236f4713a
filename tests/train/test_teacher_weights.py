"""The teacher's moving average: its recursion, its limits, and its way through a checkpoint."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdjax import jsonl
from sdjax.train.checkpoints import Checkpoints
from sdjax.train.teacher_weights import Reference, TeacherWeights
from tests.train.test_trainer import comparable
from tests.train.tiny_run import run, tiny_config


def params(value, dtype=jnp.float32):
    return {"w": jnp.full(3, value, dtype)}


@settings(deadline=None, max_examples=20)
@given(decay=st.floats(0, 1, width=32), values=st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=4))
def test_the_average_follows_its_recursion(decay, values):
    weights = TeacherWeights("ema", decay)
    weights.start(params(1.0))
    expected = 1.0
    for value in values:
        weights.update(params(value))
        expected = decay * expected + (1 - decay) * value
    np.testing.assert_allclose(weights.current(params(9.0), Reference(params(8.0), "device"))["w"], expected, atol=1e-5)


@pytest.mark.parametrize(("decay", "expected"), [(1.0, 1.0), (0.0, 7.0)])
def test_the_average_stands_still_at_one_and_follows_at_zero(decay, expected):
    weights = TeacherWeights("ema", decay)
    weights.start(params(1.0))
    weights.update(params(7.0))
    np.testing.assert_array_equal(weights.average["w"], np.full(3, expected, np.float32))


def test_small_steps_survive_half_precision():
    weights = TeacherWeights("ema", 0.95)
    weights.start(params(1.0, jnp.bfloat16))
    for _ in range(10):
        weights.update(params(1.0078125, jnp.bfloat16))
    assert weights.average["w"].dtype == jnp.float32 and float(weights.average["w"][0]) > 1.003


def test_the_other_kinds_keep_no_average():
    for kind, expected in (("theta_old", 9.0), ("init", 8.0)):
        weights = TeacherWeights(kind, 0.95)
        weights.start(params(1.0))
        weights.update(params(2.0))
        current = weights.current(params(9.0), Reference(params(8.0), "device"))
        assert weights.average is None and float(current["w"][0]) == expected
        assert weights.join({"params": 1}) == {"params": 1}


def test_a_resumed_run_goes_on_with_its_average(tiny_model, tmp_path):
    """Two steps in one go, and one step, a new process's worth of state, and the second step."""
    config = tiny_config(tiny_model, "sdar", steps=2)
    config = dataclasses.replace(config, teacher=dataclasses.replace(config.teacher, weights="ema", ema_decay=0.5))
    run(config, tmp_path / "whole")
    from sdjax.train import trainer

    class Stop(Exception):
        pass

    with pytest.MonkeyPatch.context() as patch:
        step = trainer.Trainer._step

        def first_only(self, number, progress):
            if number == 2:
                self.checkpoints.wait()
                raise Stop
            step(self, number, progress)

        patch.setattr(trainer.Trainer, "_step", first_only)
        with pytest.raises(Stop):
            run(config, tmp_path / "cut")
    run(config, tmp_path / "cut")
    assert comparable(tmp_path / "cut") == comparable(tmp_path / "whole")
    states = []
    for name in ("whole", "cut"):
        checkpoints = Checkpoints(tmp_path / name / "checkpoints", keep=2, asynchronous=False)
        states.append(checkpoints._manager.restore(2)["state"])
        checkpoints.close()
    assert "ema" in states[0]
    pairs = zip(*(sorted(_leaves(s["ema"])) for s in states), strict=True)
    assert all(a[0] == b[0] and np.array_equal(a[1], b[1]) for a, b in pairs)
    lines = jsonl.read(tmp_path / "whole" / "metrics.jsonl")
    assert lines[2]["teacher/gap_abs_mean"] > 0


def _leaves(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}/")
        else:
            yield prefix + key, np.asarray(value)
