#!/bin/sh
# Builds the linear kernels for Hopper into a shared library for eval/bench_gpu_linear.py: build.sh [FOLDER]
set -e
cd "$(dirname "$0")"
out=${1:-../../build}
mkdir -p "$out"
for name in bf16_linear mxfp4_linear int4_linear prepack; do
  nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -Xcompiler -fPIC -c $name.cu -o "$out/$name.o" &
  jobs="$jobs $!"
done
for job in $jobs; do wait "$job"; done
nvcc -shared -gencode arch=compute_90a,code=sm_90a "$out"/bf16_linear.o "$out"/mxfp4_linear.o "$out"/int4_linear.o \
  "$out"/prepack.o -o "$out/libmlspec_cuda.so"
