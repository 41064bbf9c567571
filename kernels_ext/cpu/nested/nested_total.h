// In which order does bf16_linear add the lanes of a row's sum? dense_linear_*'s trees, for sums that lie in vectors of their own.
//
// Included inside the anonymous namespaces of nested_linear_{avx2,avx512vnni,avx512bf16}.cpp.

template <class Sum>
inline Sum total_of_4(const Sum* s) {
  return (s[0] + s[1]) + (s[2] + s[3]);
}

template <class Sum>
inline Sum total_of_16(const Sum* s) {
  return (total_of_4(s) + total_of_4(s + 8)) + (total_of_4(s + 4) + total_of_4(s + 12));
}
