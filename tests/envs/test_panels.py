"""Panels: fixed, ordered, each task once; subsets depend on nothing but the ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdjax.envs.panels import make_panel, parse_name, subset, verify
from sdjax.errors import DataError

IDS = [f"task {n}" for n in range(50)]


def test_hash_depends_on_order_ids_and_data_only():
    panel = make_panel("a", IDS, "data")
    assert panel.task_ids == tuple(IDS)
    assert make_panel("other name", IDS, "data").sha256 == panel.sha256
    different = {
        make_panel("a", IDS[::-1], "data").sha256,
        make_panel("a", IDS[:-1], "data").sha256,
        make_panel("a", IDS, "data 2").sha256,
        panel.sha256,
    }
    assert len(different) == 4


def test_hash_is_the_same_on_every_machine():
    assert make_panel("a", ["x", "y"], "d").sha256[:16] == "61b705972ee78e03"


def test_duplicates_and_empty_panels_are_errors():
    with pytest.raises(DataError, match="task 3"):
        make_panel("a", [*IDS, "task 3"], "data")
    with pytest.raises(DataError, match="empty"):
        make_panel("a", [], "data")


def test_verify_names_both_hashes():
    panel = make_panel("a", IDS, "data")
    verify(panel, panel.sha256)
    with pytest.raises(DataError, match=panel.sha256[:16]):
        verify(panel, "0" * 64)


@given(st.permutations(IDS), st.integers(1, 50), st.integers(1, 50))
def test_subsets_are_nested_and_ignore_the_given_order(order, small, large):
    small, large = sorted((small, large))
    chosen = subset(order, large)
    assert chosen == subset(IDS, large) and len(set(chosen)) == large
    assert subset(order, small) == chosen[:small]


def test_subset_is_spread_and_bounded():
    assert set(subset(IDS, 10)) != set(IDS[:10])
    with pytest.raises(DataError, match="50"):
        subset(IDS, 51)


def test_names():
    assert parse_name("valid_seen") == ("valid_seen", None)
    assert parse_name("valid_seen:64") == ("valid_seen", 64)
    for wrong in ("valid:", "valid:0", "valid:-1", "valid:x", "valid:1:2"):
        with pytest.raises(DataError):
            parse_name(wrong)
