// How do the AVX-512 forms of the exact nested product keep sums? One register of 16 outputs for each lane of bf16_linear's.
//
// Included inside the anonymous namespaces of nested_linear_{avx512vnni,avx512bf16}.cpp after nested_rebuild_zmm.h and
// nested_total.h.

struct SumsZmm {
  using Sum = __m512;
  static constexpr int kVectors = 1, kSums = 16, kMaxTokens = 12;
  // vdpbf16ps starts once a cycle and takes 6 or more: 12 to 24 sums in flight, of 32 registers.
  static constexpr int sums_for(int tokens) { return tokens == 1 ? 16 : tokens <= 3 ? 8 : tokens <= 6 ? 4 : 2; }

  static void rebuild(const uint8_t* nibbles, const uint8_t* exponents, const uint8_t* low, uint32_t (*pairs)[16]) {
    Rebuild()(nibbles, exponents, low, pairs);
  }
  static Sum load(const float* p) { return _mm512_load_ps(p); }
  static void store(float* p, Sum sum) { _mm512_store_ps(p, sum); }
  static void store_total(const Sum* sums, float* to) { _mm512_store_ps(to, total_of_16(sums)); }
};
