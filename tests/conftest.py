"""Settings of all tests. They must be made before JAX is imported."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Tests spend their time in compilation, not in compiled code.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "xla_tests"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
