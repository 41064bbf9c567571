// Which noise belongs to a token? Philox4x32-10 (Salmon, Moraes, Dror and Shaw, SC 2011): words that are a pure function of
// (seed, stream, position, token), as in hf_mlspec/ops/choose.py.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace mlspec {

struct Stream {
  uint32_t seed_low, seed_high, position, stream;
};

// Words of tokens 4 * block .. 4 * block + 3.
__device__ __forceinline__ uint4 philox(const Stream& at, uint32_t block) {
  uint32_t a = block, b = at.position, c = at.stream, d = 0, low_key = at.seed_low, high_key = at.seed_high;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t high_a = __umulhi(a, 0xD2511F53u), low_a = a * 0xD2511F53u;
    const uint32_t high_c = __umulhi(c, 0xCD9E8D57u), low_c = c * 0xCD9E8D57u;
    a = high_c ^ b ^ low_key;
    b = low_c;
    c = high_a ^ d ^ high_key;
    d = low_a;
    low_key += 0x9E3779B9u;
    high_key += 0xBB67AE85u;
  }
  return make_uint4(a, b, c, d);
}

// Gumbel noise, -log(-log(1 - v)) for a uniform v: near 0, where float32 is fine, lie the largest noises.
__device__ __forceinline__ float gumbel(uint32_t word) {
  const float v = fminf((__uint2float_rn(word) + 0.5f) * 0x1p-32f, 1.f - 0x1p-24f);
  return -logf(-log1pf(-v));
}

}  // namespace mlspec
