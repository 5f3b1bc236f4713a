"""The benchmark of the delta rule runs every case, and a case that fails does not end it."""

import dataclasses

import jax
import pytest

from benchmarks import delta_rule


def test_every_case_takes_its_arguments():
    sizes, names = delta_rule.SMALL, set()
    for cases in (delta_rule.core_cases, delta_rule.recurrence_cases, delta_rule.step_cases, delta_rule.launch_cases):
        for case in cases(sizes):
            function, arguments = case.make()
            results = jax.eval_shape(function, *arguments)
            if case.donate is not None:
                assert results[-1].shape == arguments[case.donate].shape
            names.add((case.section, case.name))
    # Four implementations, two directions; three recurrences; six kernels, one of them twice; three steps.
    assert len(names) == 4 * 2 + 3 * 2 + 7 + 3


def test_times_and_errors_are_measured():
    shown = []
    sizes = dataclasses.replace(delta_rule.SMALL, error_tokens=16)
    rows = delta_rule.errors(sizes, shown.append)
    assert len(rows) == 4 and all(0 < row[result] < 1e-5 for row in rows for result in ("out", "dk", "dg", "dstate"))
    rows = delta_rule.measure(list(delta_rule.step_cases(sizes)), float("inf"), shown.append)
    assert len(rows) == 3 and all(row["ms"] > 0 for row in rows)


def test_a_failing_case_and_a_late_case_are_rows():
    def broken():
        raise ValueError("does not compile\nand more")

    shown = []
    rows = delta_rule.measure([delta_rule.Case("core", "broken", broken)], float("inf"), shown.append)
    assert rows == shown == [{"section": "core", "name": "broken", "error": "ValueError: does not compile"}]
    late = delta_rule.measure([delta_rule.Case("core", "broken", broken)], 0.0, shown.append)
    assert late[0]["error"] == "left out: no time"


def test_a_result_that_is_not_finite_is_no_measurement():
    with pytest.raises(FloatingPointError):
        delta_rule.milliseconds(lambda x: x / 0, (delta_rule.jnp.ones(()),), None)
