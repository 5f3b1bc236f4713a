#!/bin/bash
# Makes OUT/kit.tar.xz: SGLang 0.5.17, trimmed to what serves text models on one Hopper GPU, from PyPI's wheels.
#
#     benchmarks/sglang_kit/build.sh [OUT]        # default .sgkit; needs pip, unzip, xz; some minutes, mostly xz
#
# For machines that have PyTorch 2.11 (CUDA 13), nvcc and Python 3.12 and reach no package index. The full set of wheels
# is 3 GB, the kit 33 MB: of the kernels only the one file that Hopper loads (no FlashAttention 3: use triton), none of
# the image generation, and stubs in place of flashinfer and xgrammar (stubs.py).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-.sgkit}
python=${PYTHON:-python3}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

platforms=()
for glibc in 17 24 26 27 28 31 34 35 39; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
fetch() {  # FOLDER PIP_ARGUMENTS...
  "$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
    --python-version 3.12 "${platforms[@]}" -d "$work/$1" "${@:2}"
}
unpack() {  # WHEELS_FOLDER INTO
  mkdir -p "$work/kit/$2"
  for wheel in "$work/$1"/*.whl; do unzip -q -o "$wheel" -d "$work/kit/$2"; done
}

fetch sglang sglang==0.5.17
fetch kernel sglang-kernel==0.4.5
fetch extra -r "$here/requirements.txt"
fetch trainer -r "$here/requirements-trainer.txt"

mkdir -p "$work/kit/site" "$work/kit/stubs"
unzip -q -o "$work"/sglang/*.whl -d "$work/kit/site" -x 'sglang/multimodal_gen/*' 'sglang/test/*' '*/_core.cpython-*.so'
unzip -q -o "$work"/kernel/*.whl -d "$work/kit/site" \
  -x 'sgl_kernel/flash_ops*' 'sgl_kernel/infllm_ops*' 'sgl_kernel/flashmla_ops*' 'sgl_kernel/sm100/*'
unpack extra extra
unpack trainer trainer
cp "$here/stubs.py" "$here/sitecustomize.py" "$work/kit/stubs/"

# Stable names and owners: the same wheels give the same archive.
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -C "$work/kit" -cf - . | xz -9e -T1 >"$out/kit.tar.xz"
sha256sum "$out/kit.tar.xz" >"$out/kit.sha256"
ls -l "$out/kit.tar.xz"
