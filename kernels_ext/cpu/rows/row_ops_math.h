// What are exp, tanh and the normal distribution of 16 floats? Written over Vec, so every instruction set sums alike.
//
// Included inside the anonymous namespaces of {row_ops,attention}_<isa>.cpp, after Vec. Coefficients: weighted minimax fits, rounded to
// float32. No inexact product ever feeds a plain + or -: a compiler may fuse the two, in one place and not in another.

// e^x to 1 ulp (2 where the result is subnormal); NaN stays NaN, large x gives Inf, very small x gives 0.
inline Vec exp(Vec x) {
  constexpr float kShift = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  x = min(Vec::all(90.f), max(Vec::all(-105.f), x));  // min and max hand on a NaN in their second operand
  const Vec shifted = fma(x, Vec::all(1.44269504f), Vec::all(kShift));
  const Vec n = shifted - Vec::all(kShift);
  Vec r = neg_fma(n, Vec::all(0.693145752f), x);  // ln 2 in two parts, the first with 15 bits: n * it is exact
  r = neg_fma(n, Vec::all(1.42860677e-6f), r);
  Vec p = fma(Vec::all(0.00138142193f), r, Vec::all(0.00836889911f));
  p = fma(p, r, Vec::all(0.0416684076f));
  p = fma(p, r, Vec::all(0.166665196f));
  p = fma(p, r, Vec::all(0.49999994f));
  p = fma(p * r, r, r);
  return times_power_of_two(Vec::all(1.f) + p, shifted, n);
}

inline Vec tanh(Vec x) {
  const Vec one = Vec::all(1.f), size = abs(x), square = x * x;
  Vec p = fma(Vec::all(-0.000341109320f), square, Vec::all(0.00224438123f));
  p = fma(p, square, Vec::all(-0.00787327159f));
  p = fma(p, square, Vec::all(0.0214411337f));
  p = fma(p, square, Vec::all(-0.0538655184f));
  p = fma(p, square, Vec::all(0.133321404f));
  p = fma(p, square, Vec::all(-0.333332866f));
  const Vec small = fma(p * square, x, x);
  const Vec large = one - Vec::all(2.f) / (exp(size + size) + one);
  return select(less(size, one), small, copy_sign(large, x));
}

inline Vec cap_softly(Vec x, Vec cap) { return cap * tanh(x / cap); }

// P(X <= x) of the standard normal distribution, accurate in both tails: erfc(z) = e^(-z^2) t P(t), t = 1 / (1 + 0.45 z).
inline Vec normal_cdf(Vec x) {
  const Vec one = Vec::all(1.f), half = Vec::all(0.5f);
  const Vec t = one / fma(abs(x), Vec::all(0.318198052f), one);  // 0.45 / sqrt(2)
  Vec p = fma(Vec::all(-0.0340319835f), t, Vec::all(0.151507929f));
  p = fma(p, t, Vec::all(-0.210914478f));
  p = fma(p, t, Vec::all(0.0270139556f));
  p = fma(p, t, Vec::all(0.0693053454f));
  p = fma(p, t, Vec::all(0.0735177994f));
  p = fma(p, t, Vec::all(0.19019033f));
  p = fma(p, t, Vec::all(0.225339293f));
  p = fma(p, t, Vec::all(0.254200965f));
  p = fma(p, t, Vec::all(0.253870845f));
  const Vec square = min(Vec::all(1e30f), x * x);
  const Vec rest = exp(Vec::all(-0.5f) * square) * half * t;
  return select(less(x, Vec::zero()), rest * p, neg_fma(rest, p, one));
}
