// 4-bit weights times int8 activations with AVX-512 VNNI and VBMI.
// Every processor with AVX512-BF16 and VNNI but Cooper Lake has VBMI too (Zen 4, Sapphire Rapids).
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own _mm512_undefined_epi32 (its bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,fma,f16c")
#endif

namespace {

#define MLSPEC_INT8_VBMI
#include "int8_linear_zmm.h"
#include "int8_linear_tile.h"

}  // namespace

extern "C" void mlspec_mxfp4_linear_int8_avx512bf16(const mlspec_linear_args* args, int64_t begin, int64_t end) {
  linear<Mxfp4>(*args, begin, end);
}

extern "C" void mlspec_nested_linear_int8_avx512bf16(const mlspec_linear_args* args, int64_t begin, int64_t end) {
  linear<Nested>(*args, begin, end);
}

extern "C" void mlspec_int4_linear_int8_avx512bf16(const mlspec_linear_args* args, int64_t begin, int64_t end) {
  linear<Int4>(*args, begin, end);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
