import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def double_precision():
    """The kernels follow the dtype of their input; float64 makes identities testable to rounding."""
    with jax.enable_x64(True), jax.disable_most_optimizations(True):
        yield
