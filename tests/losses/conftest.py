import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def double_precision():
    """The kernels follow the dtype of their input; float64 makes identities testable to rounding.

    Most of the time goes into compiling many small functions once, so the compiler is told to try less hard.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_disable_most_optimizations", before)
