// How is something done to every Vec (16 floats) of a row? The last one may be partial.
//
// Included inside the anonymous namespaces of row_ops_<isa>.cpp and delta_rule_<isa>.cpp, after Vec.
#pragma once

// f(offset, lanes) for every Vec of n elements; lanes is kLanes but in the last.
template <class F>
inline void for_each_vec(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, std::integral_constant<int, kLanes>());
  if (i < n) f(i, static_cast<int>(n - i));
}

inline Vec load(const float* p, std::integral_constant<int, kLanes>) { return Vec::load(p); }
inline Vec load(const float* p, int lanes) { return Vec::load_first(p, lanes); }
inline void store(Vec v, float* p, std::integral_constant<int, kLanes>) { v.store(p); }
inline void store(Vec v, float* p, int lanes) { v.store_first(p, lanes); }

template <class F>
inline void map(const float* x, int64_t n, float* y, F&& f) {
  for_each_vec(n, [&](int64_t i, auto lanes) { store(f(load(x + i, lanes)), y + i, lanes); });
}
