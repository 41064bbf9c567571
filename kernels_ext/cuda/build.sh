#!/bin/sh
# Builds the linear kernels for Hopper into a shared library for eval/bench_gpu_linear.py: build.sh [FOLDER]
set -e
sources=$(dirname "$0")
out=${1:-$sources/../../build}
mkdir -p "$out"
names="bf16_linear mxfp4_linear int4_linear int4_linear_g32 int4_linear_g64 int4_linear_g128 nested_linear nested_linear_exact
  quantize_rows prepack"
objects=
for name in $names; do
  nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fPIC -c "$sources/$name.cu" -o "$out/$name.o" &
  jobs="$jobs $!"
  objects="$objects $out/$name.o"
done
for job in $jobs; do wait "$job"; done
nvcc -shared -gencode arch=compute_90a,code=sm_90a $objects -o "$out/libmlspec_cuda.so"
