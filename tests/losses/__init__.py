"""Tests of the loss kernels against a plain numpy reference, stored values and the invariants of each method."""
