// How do the 4-bit linears move AMX tile registers, and which of them is what?
//
// Included inside the anonymous namespaces of {int8,w4a16}_linear_amx.cpp.

constexpr int kTileRows = 16;
constexpr int kWeights = 4, kFullRows = 5, kLastRows = 6;  // tile registers; sums lie in 0..3

// GCC's intrinsics take literal register numbers only, and do not say that they read and write memory.
template <int kTile>
inline void load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
inline void store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
inline void clear() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
