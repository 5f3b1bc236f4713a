"""Seeds depend on what is drawn and on nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from sdjax.seeds import derive_seed

KEYS = st.fixed_dictionaries(
    {"step": st.integers(0, 999), "task": st.text(max_size=8), "sample": st.integers(0, 64), "turn": st.integers(0, 50)}
)


def test_a_known_value_never_changes():
    # Changing the derivation would silently change every result of every run.
    assert derive_seed(7, "train", step=3, task="valid_seen/x", sample=2, turn=5) == 195143005


@given(st.integers(0, 5), KEYS, KEYS)
def test_different_draws_get_different_seeds(run, a, b):
    x, y = derive_seed(run, "train", **a), derive_seed(run, "train", **b)
    assert 0 <= x < 2**31
    assert (x == y) == (a == b)
    assert x != derive_seed(run + 1, "train", **a)
