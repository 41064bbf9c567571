#!/bin/sh
# Builds the linear kernels for Hopper into a shared library for eval/bench_gpu_linear: build.sh [FOLDER]
set -e
sources=$(dirname "$0")
out=${1:-$sources/../../build}
mkdir -p "$out"
names="linear/bf16_linear linear/bf16_linear_prefill linear/mxfp4_linear linear/int4_linear linear/int4_linear_g32 linear/int4_linear_g64
  linear/int4_linear_g128 nested/nested_linear nested/nested_linear_exact rows/quantize_rows linear/prepack"
objects=
for name in $names; do
  object=$out/$(basename "$name").o
  nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fPIC -c "$sources/$name.cu" -o "$object" &
  jobs="$jobs $!"
  objects="$objects $object"
done
for job in $jobs; do wait "$job"; done
nvcc -shared -gencode arch=compute_90a,code=sm_90a $objects -o "$out/libmlspec_cuda.so"
