"""Added time is a paired difference of the phases that a method can change."""

import pytest

from benchmarks.overhead import ADDED, PHASES, compare


def line(**seconds) -> dict[str, float]:
    return {f"time/{phase}_s": seconds.get(phase, 0.0) for phase in PHASES}


def test_added_time_is_paired_and_leaves_the_rollout_out():
    base = [
        line(rollout=10, score=1, update=4),
        line(rollout=10, score=1, update=8),
        line(rollout=10, score=1, update=4),
    ]
    method = [
        line(rollout=30, teacher=1, score=1, update=4),
        line(rollout=10, teacher=2, score=1, update=8),
        line(rollout=10, teacher=1.5, score=1, update=4.5),
    ]
    out = compare({"grpo": base, "sdar": method})
    assert out["grpo"]["added_s"] == 0 and out["grpo"]["added_share"] == 0
    assert out["sdar"]["added_s"] == pytest.approx(2.0)  # of 1, 2, 2
    assert out["sdar"]["added_share"] == pytest.approx(2.0 / 15)
    assert out["sdar"]["rollout_s"] == 10 and out["sdar"]["teacher_s"] == 1.5


def test_runs_of_different_length_are_not_compared():
    with pytest.raises(ValueError, match="zip"):
        compare({"grpo": [line(update=1)], "sdar": [line(), line()]})


def test_added_phases_are_part_of_the_step():
    assert set(ADDED) < set(PHASES) and "rollout" not in ADDED
