// For which instruction set is the rest of a file compiled, and under which names do its kernels leave it? MLSPEC_TARGET stands
// behind every header of the standard library and of intrinsics, MLSPEC_TARGET_END at the end of the file.
#pragma once

#define MLSPEC_PRAGMA(text) _Pragma(#text)

#if defined(__clang__)
#define MLSPEC_TARGET(set) MLSPEC_PRAGMA(clang attribute push(__attribute__((target(set))), apply_to = function))
#define MLSPEC_TARGET_END MLSPEC_PRAGMA(clang attribute pop)
#define MLSPEC_TARGET_AVX512(set) MLSPEC_TARGET(set)
#else
#define MLSPEC_TARGET(set) MLSPEC_PRAGMA(GCC target(set))
#define MLSPEC_TARGET_END
// GCC 12 warns of its own _mm512_undefined_epi32 and _mm512_undefined_ps (its bug 105593).
#define MLSPEC_TARGET_AVX512(set)                       \
  MLSPEC_PRAGMA(GCC diagnostic ignored "-Wuninitialized") \
  MLSPEC_PRAGMA(GCC diagnostic ignored "-Wmaybe-uninitialized") \
  MLSPEC_TARGET(set)
#endif

// A linear of kernels.h by its name and what computes it.
#define MLSPEC_LINEAR(name, compute)                                                                        \
  extern "C" void mlspec_##name(const mlspec_linear_args* args, int64_t out_begin, int64_t out_end) { \
    compute(*args, out_begin, out_end);                                                               \
  }
