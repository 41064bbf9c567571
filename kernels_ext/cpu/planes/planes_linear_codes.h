// What do the bits of a few planes mean, and how do planes become codes side by side?
//
// Included inside the anonymous namespaces of bitplane_linear_*.cpp. The layout of a plane's 64 bytes is drawn in
// hf_mlspec/ops/planes/tiles.py: bit q of an output's 32-bit word is element 2 q where q < 16, else 2 (q - 16) + 1.

using mlspec::kBlock, mlspec::kMaxPlanes, mlspec::cpu_tiles::kPlaneBytes;

constexpr int kNibblePlanes = 4;

constexpr int element_of(int bit) { return bit < 16 ? 2 * bit : 2 * bit - 31; }

// More than four planes are two parts, the first four and the others: a code's number is the sum of theirs.
inline int planes_of_part(const mlspec_linear_args& a, int part) {
  const int planes = static_cast<int>(a.num_planes), first = std::min(planes, kNibblePlanes);
  return part == 0 ? first : planes - first;
}

// What the first `planes` of all bits mean: the middle of the numbers that share them, in halves.
inline int64_t doubled_value(const mlspec_linear_args& a, int planes, int64_t code) {
  const int64_t numbers = int64_t{1} << (a.stored_planes - planes);
  return 2 * numbers * code + numbers - 1 - a.zero_doubled;
}

// What code `code` of a part means. The second part's is the distance from the middle that the first part stands for.
inline float part_value(const mlspec_linear_args& a, int part, int64_t code) {
  const int first = planes_of_part(a, 0), planes = static_cast<int>(a.num_planes);
  if (part == 0) return 0.5f * static_cast<float>(doubled_value(a, first, code));
  return 0.5f * static_cast<float>(doubled_value(a, planes, code) - doubled_value(a, first, 0));
}

// Bytes between a plane's block in use and the one to fetch: near where many streams of planes share the L1 cache.
inline int64_t prefetch_distance(const mlspec_linear_args& a) {
  return std::max<int64_t>(512, 4096 / a.num_planes / kPlaneBytes * kPlaneBytes);
}

// Always inline: GCC drops the call of a function that does nothing but prefetch.
__attribute__((always_inline)) inline void prefetch_planes(const mlspec_linear_args& a, const uint8_t* block) {
  for (int64_t plane = 0; plane < a.num_planes; ++plane) __builtin_prefetch(block + plane * a.plane_bytes);
}
