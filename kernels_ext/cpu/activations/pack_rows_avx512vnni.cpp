// Packing of activations with AVX-512 (F, BW, DQ, VL); every processor with its VNNI has them.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../kernels.h"

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own _mm512_undefined_epi32 (its bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

namespace {

#include "pack_rows_vec512.h"

struct Vec : Vec512 {
  static constexpr bool kTransposes = false;
};

#include "pack_rows_order.h"

}  // namespace

extern "C" void mlspec_pack_rows_avx512vnni(const mlspec_pack_args* args, int64_t row_begin, int64_t row_end,
                                            int64_t k_begin, int64_t k_end) {
  pack_rows(*args, row_begin, row_end, k_begin, k_end);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
