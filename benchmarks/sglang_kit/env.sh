# Source this in the repository root on the machine that got the kit: unpacks it to $SG and sets the trainer's paths.
# The server has other packages than the trainer; benchmarks/sglang_kit/serve gives it its own.
export SG=${SG:-/tmp/sgkit}
if [ ! -e "$SG/.unpacked" ]; then
  mkdir -p "$SG" && tar -xJf .sgkit/kit.tar.xz -C "$SG" && touch "$SG/.unpacked" || return 1
fi
export PYTHONPATH=$PWD:$SG/trainer PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=2 HF_HUB_OFFLINE=1
# Two programs share the GPU: JAX must not take three quarters of it at start.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-/tmp/jaxcache} JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.5
