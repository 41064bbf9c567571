// What does an operation over one row do? Written once over Vec (16 floats); the last Vec of a row may be partial.
//
// Included inside the anonymous namespace of row_ops_<isa>.cpp, after row_ops_math.h.

#include "row_ops_words.h"

#include "row_ops_each.h"

void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* y) {
  Vec sums[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) {
      const Vec v = Vec::load(x + i + j * kLanes);
      sums[j] = fma(v, v, sums[j]);
    }
  for_each_vec(n - i, [&](int64_t offset, auto lanes) {
    const Vec v = load(x + i + offset, lanes);
    sums[0] = fma(v, v, sums[0]);
  });
  const double mean = Vec::sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<double>(n);
  const Vec factor = Vec::all(static_cast<float>(1. / std::sqrt(mean + eps)));
  for_each_vec(n, [&](int64_t offset, auto lanes) {
    store(load(x + offset, lanes) * factor * load(weight + offset, lanes), y + offset, lanes);
  });
}

inline Vec sum_of_four(const Vec (&sums)[4]) { return (sums[0] + sums[1]) + (sums[2] + sums[3]); }

// The sum over a row of f(elements, what has been summed so far), the lanes behind the last element left out.
template <class F>
inline double row_sum(const float* x, int64_t n, F&& f) {
  Vec sums[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) sums[j] = f(Vec::load(x + i + j * kLanes), sums[j]);
  for_each_vec(n - i, [&](int64_t offset, auto lanes) {
    const Vec more = f(load(x + i + offset, lanes), sums[0]);
    sums[0] = select(Vec::lanes_between(0, lanes), more, sums[0]);
  });
  return Vec::sum(sum_of_four(sums));
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* y) {
  const Vec mean = Vec::all(static_cast<float>(row_sum(x, n, [](Vec v, Vec so_far) { return so_far + v; }) / static_cast<double>(n)));
  const double squares = row_sum(x, n, [&](Vec v, Vec so_far) { return fma(v - mean, v - mean, so_far); });
  const Vec factor = Vec::all(static_cast<float>(1. / std::sqrt(squares / static_cast<double>(n) + eps)));
  for_each_vec(n, [&](int64_t i, auto lanes) {
    const Vec normed = (load(x + i, lanes) - mean) * factor, w = load(weight + i, lanes);
    store(bias ? fma(normed, w, load(bias + i, lanes)) : normed * w, y + i, lanes);
  });
}

void add(const float* x, int64_t n, float* y) {
  for_each_vec(n, [&](int64_t i, auto lanes) { store(load(y + i, lanes) + load(x + i, lanes), y + i, lanes); });
}

struct Bfloat16 {
  static Vec widen(const uint16_t* p) { return Vec::load_bfloat16(p); }
  static void narrow(Vec v, uint16_t* p) { v.store_bfloat16(p); }
};

struct Float16 {
  static Vec widen(const uint16_t* p) { return Vec::load_float16(p); }
  static void narrow(Vec v, uint16_t* p) { v.store_float16(p); }
};

template <class Half>
inline Vec widen_first(const uint16_t* p, int lanes) {
  uint16_t padded[kLanes] = {};
  std::memcpy(padded, p, 2 * lanes);
  return Half::widen(padded);
}

template <class Half>
inline void widen_row(const uint16_t* x, float multiplier, int64_t n, float* y) {
  const Vec factor = Vec::all(multiplier);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) (Half::widen(x + i) * factor).store(y + i);
  if (i < n) (widen_first<Half>(x + i, n - i) * factor).store_first(y + i, n - i);
}

template <class Half>
inline void narrow_row(const float* x, int64_t n, uint16_t* y) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) Half::narrow(Vec::load(x + i), y + i);
  if (i == n) return;
  uint16_t padded[kLanes];
  Half::narrow(Vec::load_first(x + i, n - i), padded);
  std::memcpy(y + i, padded, 2 * (n - i));
}

void widen(const void* x, mlspec_dtype dtype, float multiplier, int64_t n, float* y) {
  const Vec factor = Vec::all(multiplier);
  if (dtype == MLSPEC_BFLOAT16) return widen_row<Bfloat16>(static_cast<const uint16_t*>(x), multiplier, n, y);
  if (dtype == MLSPEC_FLOAT16) return widen_row<Float16>(static_cast<const uint16_t*>(x), multiplier, n, y);
  map(static_cast<const float*>(x), n, y, [&](Vec v) { return v * factor; });
}

inline float rounded_to_bfloat16(float x) {
  uint16_t rounded[kLanes];
  Vec::all(x).store_bfloat16(rounded);
  return Vec::first(Vec::load_bfloat16(rounded));
}

// The largest magnitude of a row, rounded to bfloat16; not finite where one of its elements is not.
inline float largest_magnitude(const float* x, int64_t n) {
  Vec most = Vec::zero(), products = Vec::zero();  // of elements and zero: NaN where one is not finite
  for_each_vec(n, [&](int64_t i, auto lanes) {
    const Vec v = load(x + i, lanes);
    most = max(abs(v), most);
    products = fma(v, Vec::zero(), products);
  });
  if (bits(is_nan(products))) return NAN;
  return rounded_to_bfloat16(Vec::largest(most));
}

// hf_mlspec/formats/cache/int8.py: codes and scale of a row, the scale NaN where an element is not finite.
inline void narrow_to_codes(const float* x, int64_t n, int8_t* codes) {
  const float largest = largest_magnitude(x, n);
  const bool finite = std::isfinite(largest), coded = finite && largest >= 0x1p-100f;
  const float scale = coded ? largest / 127.f : finite ? 0.f : NAN;
  std::memcpy(codes + n, &scale, sizeof scale);
  if (!coded) {
    std::memset(codes, 0, n);
    return;
  }
  const Vec factor = Vec::all(127.f / largest);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) (Vec::load(x + i) * factor).store_int8(codes + i);
  if (i == n) return;
  int8_t padded[kLanes];
  (Vec::load_first(x + i, n - i) * factor).store_int8(padded);
  std::memcpy(codes + i, padded, n - i);
}

// hf_mlspec/formats/cache/int4.py: how far a row reaches below and above zero, as bfloat16; NaN where an element is not finite.
struct Reach {
  float below, above;

  static Reach of(const float* x, int64_t n) {
    Vec least = Vec::zero(), most = Vec::zero(), products = Vec::zero();  // products: as in largest_magnitude
    for_each_vec(n, [&](int64_t i, auto lanes) {
      const Vec v = load(x + i, lanes);
      least = min(v, least);
      most = max(v, most);
      products = fma(v, Vec::zero(), products);
    });
    if (bits(is_nan(products))) return {NAN, NAN};
    return {end(Vec::largest(Vec::zero() - least)), end(Vec::largest(most))};
  }
  static float end(float size) {
    const float rounded = rounded_to_bfloat16(size);
    return rounded < 0x1p-100f ? 0.f : rounded;
  }
};

// The same: two codes a byte and the bfloat16 values of codes 0 and 15, NaN where an element is not finite.
inline void narrow_to_nibbles(const float* x, int64_t n, uint8_t* row) {
  const Reach reach = Reach::of(x, n);
  const float range = reach.above + reach.below;
  const bool small = range < 0x1p120f;
  const float low = small ? (reach.below > 0.f ? -reach.below : 0.f) : NAN, high = small ? reach.above : NAN;
  const uint16_t ends[2] = {static_cast<uint16_t>(bits_of(low) >> 16), static_cast<uint16_t>(bits_of(high) >> 16)};
  std::memcpy(row + n / 2, ends, sizeof ends);
  if (!small || range == 0.f) {
    std::memset(row, 0, n / 2);
    return;
  }
  const Vec factor = Vec::all(15.f / range), from = Vec::all(low), to = Vec::all(high);
  for_each_vec(n, [&](int64_t i, auto lanes) {
    int8_t codes[kLanes];
    ((min(max(load(x + i, lanes), from), to) - from) * factor).store_int8(codes);
    for (int j = 0; j < lanes / 2; ++j) row[i / 2 + j] = static_cast<uint8_t>(codes[2 * j] | codes[2 * j + 1] << 4);
  });
}

void narrow(const float* x, mlspec_dtype dtype, int64_t n, void* y) {
  if (dtype == MLSPEC_INT8_ROWS) return narrow_to_codes(x, n, static_cast<int8_t*>(y));
  if (dtype == MLSPEC_INT4_ROWS) return narrow_to_nibbles(x, n, static_cast<uint8_t*>(y));
  if (dtype == MLSPEC_BFLOAT16) return narrow_row<Bfloat16>(x, n, static_cast<uint16_t*>(y));
  if (dtype == MLSPEC_FLOAT16) return narrow_row<Float16>(x, n, static_cast<uint16_t*>(y));
  std::memmove(y, x, 4 * n);
}

template <class F>
inline void map_mul(const float* gate, const float* up, int64_t n, float* y, F&& f) {
  for_each_vec(n, [&](int64_t i, auto lanes) { store(f(load(gate + i, lanes)) * load(up + i, lanes), y + i, lanes); });
}

inline Vec silu(Vec x) { return x / (Vec::all(1.f) + exp(Vec::zero() - x)); }

// 0.5 x (1 + tanh u) = x / (1 + e^(-2u)), which loses nothing where tanh u is near -1.
inline Vec gelu_tanh(Vec x) {
  constexpr float kTwoRootTwoOverPi = 1.59576912f;
  const Vec inner = fma(Vec::all(0.044715f * kTwoRootTwoOverPi), x * x, Vec::all(kTwoRootTwoOverPi)) * x;
  return x / (Vec::all(1.f) + exp(Vec::zero() - inner));
}

inline Vec gelu(Vec x) { return x * normal_cdf(x); }
inline Vec relu(Vec x) { return max(Vec::zero(), x); }  // NaN stays NaN

inline Vec relu_squared(Vec x) { return relu(x) * relu(x); }

void activate(const float* x, mlspec_activation kind, int64_t n, float* y) {
  switch (kind) {
    case MLSPEC_SILU: return map(x, n, y, [](Vec v) { return silu(v); });
    case MLSPEC_GELU_TANH: return map(x, n, y, [](Vec v) { return gelu_tanh(v); });
    case MLSPEC_GELU: return map(x, n, y, [](Vec v) { return gelu(v); });
    case MLSPEC_RELU: return map(x, n, y, [](Vec v) { return relu(v); });
    case MLSPEC_RELU_SQUARED: return map(x, n, y, [](Vec v) { return relu_squared(v); });
  }
}

void activate_mul(const float* gate, const float* up, mlspec_activation kind, int64_t n, float* y) {
  switch (kind) {
    case MLSPEC_SILU: return map_mul(gate, up, n, y, [](Vec v) { return silu(v); });
    case MLSPEC_GELU_TANH: return map_mul(gate, up, n, y, [](Vec v) { return gelu_tanh(v); });
    case MLSPEC_GELU: return map_mul(gate, up, n, y, [](Vec v) { return gelu(v); });
    case MLSPEC_RELU: return map_mul(gate, up, n, y, [](Vec v) { return relu(v); });
    case MLSPEC_RELU_SQUARED: return map_mul(gate, up, n, y, [](Vec v) { return relu_squared(v); });
  }
}

void rope(float* head, const float* cos, const float* sin, int64_t rotary_dim) {
  const int64_t half = rotary_dim / 2;
  for_each_vec(half, [&](int64_t i, auto lanes) {
    const Vec first = load(head + i, lanes), second = load(head + half + i, lanes);
    const Vec c = load(cos + i, lanes), s = load(sin + i, lanes);
    store(neg_fma(second, s, first * c), head + i, lanes);
    store(fma(first, s, second * c), head + half + i, lanes);
  });
}

// Of kLanes pairs the first and the second elements.
struct Parted {
  float first[kLanes] = {}, second[kLanes] = {};

  Parted(const float* pairs, int count) {
    for (int j = 0; j < count; ++j) first[j] = pairs[2 * j], second[j] = pairs[2 * j + 1];
  }
};

void gate_pairs(const float* pairs, float slope, float limit, int64_t n, float* y) {
  const Vec one = Vec::all(1.f), most = Vec::all(limit), least = Vec::all(-limit), steepness = Vec::all(slope);
  for_each_vec(n, [&](int64_t i, auto lanes) {
    const Parted parted(pairs + 2 * i, lanes);
    const Vec gate = min(most, Vec::load(parted.first)), up = max(least, min(most, Vec::load(parted.second)));  // hand on a NaN
    const Vec gated = gate / (one + exp(neg_fma(steepness, gate, Vec::zero())));
    store(fma(up, gated, gated), y + i, lanes);
  });
}

// Parted, rotated as halves are.
void rope_pairs(float* head, const float* cos, const float* sin, int64_t rotary_dim) {
  for_each_vec(rotary_dim / 2, [&](int64_t i, auto lanes) {
    float* const pairs = head + 2 * i;
    Parted parted(pairs, lanes);
    const Vec a = Vec::load(parted.first), b = Vec::load(parted.second), c = load(cos + i, lanes), s = load(sin + i, lanes);
    neg_fma(b, s, a * c).store(parted.first);
    fma(a, s, b * c).store(parted.second);
    for (int j = 0; j < lanes; ++j) pairs[2 * j] = parted.first[j], pairs[2 * j + 1] = parted.second[j];
  });
}

void softcap(float* x, float cap, int64_t n) {
  const Vec limit = Vec::all(cap);
  map(x, n, x, [&](Vec v) { return cap_softly(v, limit); });
}

// The largest of n >= 1 values, or NaN where one of them is.
inline float largest_of(const float* x, int64_t n) {
  const Vec lowest = Vec::all(-INFINITY);
  Vec most[4] = {lowest, lowest, lowest, lowest}, odd_one = Vec::zero();  // odd_one: a NaN, if there is any
  const auto visit = [&](Vec v, Vec& so_far) {
    so_far = max(v, so_far);
    odd_one = select(is_nan(v), v, odd_one);
  };
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) visit(Vec::load(x + i + j * kLanes), most[j]);
  for (; i < n; ++i) visit(Vec::all(x[i]), most[0]);
  if (bits(is_nan(odd_one))) return NAN;
  return Vec::largest(max(max(most[0], most[1]), max(most[2], most[3])));
}

inline int64_t first_equal(const float* x, int64_t n, float value) {
  const Vec wanted = Vec::all(value);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    if (const uint32_t found = bits(equal(Vec::load(x + i), wanted))) return i + __builtin_ctz(found);
  while (i < n && x[i] != value) ++i;
  return i;
}

inline float log_sum_exp_of(const float* x, int64_t n, float largest) {
  if (std::isinf(largest)) return largest;
  const Vec shift = Vec::all(largest);
  Vec sums[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) sums[j] = sums[j] + exp(Vec::load(x + i + j * kLanes) - shift);
  for_each_vec(n - i, [&](int64_t offset, auto lanes) {
    const Vec v = exp(load(x + i + offset, lanes) - shift);
    sums[0] = sums[0] + select(Vec::lanes_between(0, lanes), v, Vec::zero());
  });
  return largest + std::log(Vec::sum((sums[0] + sums[1]) + (sums[2] + sums[3])));
}

int64_t argmax(const float* x, int64_t n, float* largest, float* log_sum_exp) {
  const float most = largest_of(x, n);
  *largest = most;
  if (log_sum_exp) *log_sum_exp = most;
  if (std::isnan(most)) return -1;
  if (log_sum_exp) *log_sum_exp = log_sum_exp_of(x, n, most);
  return first_equal(x, n, most);
}
