// Attention with AMX: over a bfloat16 cache a tile of queries times 16 slots, and of weights times 16 elements.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../kernels.h"
#include "../target.h"
#include "attention_limits.h"

MLSPEC_TARGET_AVX512("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,amx-tile,amx-bf16")

namespace {
using mlspec::kMaxHeadDim;

#include "../rows/vec_zmm.h"
#include "../rows/row_ops_math.h"
#include "../amx_registers.h"
#include "attention_cache.h"
#include "attention_blocks.h"
#include "transpose_zmm.h"
#include "attention_pairs_zmm.h"

constexpr int kA = 4, kB = 5;  // tile registers; sums lie in 0..3

thread_local int configured = 0;  // rows of a, and of sums

void configure(int rows) {
  if (rows == configured) return;
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
  } config;
  std::fill_n(config.rows, kB, static_cast<uint8_t>(rows));
  config.rows[kB] = kTileRows;
  asm volatile("ldtilecfg %0" ::"m"(config));
  configured = rows;
}

template <int kSum>
inline void multiply_add() {
  asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(kB), "i"(kA), "i"(kSum));
}

// kCount tiles of 16 columns, from `column` on; the functions with kSum are for it and those behind it.
template <int kCount>
struct Columns {
  const Factors<uint16_t>& f;
  const int64_t column;

  void multiply() const {
    start<0>();
    for (int64_t k = 0; k < f.depth; k += kStep) {
      load<kA>(f.a + k, f.a_stride * 2);
      step<0>(f.b + k * f.b_stride + column * 2);
    }
    finish<0>();
  }

  template <int kSum>
  void start() const {
    if (f.rescale)
      load<kSum>(f.c + column + kSum * kLanes, f.c_stride * 4);
    else
      clear<kSum>();
    if constexpr (kSum + 1 < kCount) start<kSum + 1>();
  }

  template <int kSum>
  void step(const uint16_t* b) const {
    load<kB>(b, f.b_stride * 4);
    multiply_add<kSum>();
    if constexpr (kSum + 1 < kCount) step<kSum + 1>(b + kLanes * 2);
  }

  template <int kSum>
  void finish() const {
    store<kSum>(f.c + column + kSum * kLanes, f.c_stride * 4);
    if constexpr (kSum + 1 < kCount) finish<kSum + 1>();
  }
};

struct TileTerms : PairLayout {
  static constexpr int kFewQueries = 0;
  static void multiply(const Factors<uint16_t>& f, int rows) {
    configure(rows);
    for (int i = 0; f.rescale && i < rows; ++i) {
      float* const c = f.c + i * f.c_stride;
      const Vec factor = Vec::all(f.rescale[i]);
      for (int64_t j = 0; j < f.columns; j += kLanes) (Vec::load(c + j) * factor).store(c + j);
    }
    int64_t column = 0;
    for (; column + 4 * kLanes <= f.columns; column += 4 * kLanes) Columns<4>{f, column}.multiply();
    if (column < f.columns) Columns<2>{f, column}.multiply();
  }
};

}  // namespace

extern "C" {
void mlspec_attention_avx512bf16(const mlspec_attention_args*);

void mlspec_attention_amx(const mlspec_attention_args* args) {
  if (args->kv_dtype == MLSPEC_FLOAT32) return mlspec_attention_avx512bf16(args);
  configured = 0;
  attend<TileTerms>(*args);
  asm volatile("tilerelease");
}
}

MLSPEC_TARGET_END
