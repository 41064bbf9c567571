// How does a head of a gated delta net, or of Mamba-2, go from token to token? Written once over Vec; columns of S never meet.
//
// Included inside the anonymous namespace of delta_rule_<isa>.cpp, after row_ops_math.h and row_ops_each.h.

inline Vec sigmoid(Vec x) { return Vec::all(1.f) / (Vec::all(1.f) + exp(Vec::zero() - x)); }

void sigmoid_mul(const float* gate, int64_t n, float* y) {
  for_each_vec(n, [&](int64_t i, auto lanes) { store(load(y + i, lanes) * sigmoid(load(gate + i, lanes)), y + i, lanes); });
}

// q, k and v of one token.
struct DeltaToken {
  alignas(64) float q[MLSPEC_DELTA_MAX_DIM], k[MLSPEC_DELTA_MAX_DIM], v[MLSPEC_DELTA_MAX_DIM];
  float product;  // of q and k
};

// silu of the convolution of n channels from `at` on. rows: of every tap the channels of its token, null: there is none.
inline void convolve(const mlspec_delta_args& a, const float* const* rows, int64_t at, int64_t n, float* to) {
  for_each_vec(n, [&](int64_t i, auto lanes) {
    Vec sum = a.bias ? load(a.bias + at + i, lanes) : Vec::zero();
    for (int64_t tap = 0; tap < a.num_taps; ++tap)
      if (rows[tap]) sum = fma(load(rows[tap] + at + i, lanes), load(a.taps + tap * a.channels + at + i, lanes), sum);
    store(sum / (Vec::all(1.f) + exp(Vec::zero() - sum)), to + i, lanes);
  });
}

inline float dot(const float* x, const float* y, int64_t n) {
  Vec sum = Vec::zero();
  for_each_vec(n, [&](int64_t i, auto lanes) { sum = fma(load(x + i, lanes), load(y + i, lanes), sum); });
  return Vec::sum(sum);
}

inline void to_length(float* x, int64_t n, double length) {
  const Vec factor = Vec::all(static_cast<float>(length / std::sqrt(static_cast<double>(dot(x, x, n)) + 1e-6)));
  for_each_vec(n, [&](int64_t i, auto lanes) { store(load(x + i, lanes) * factor, x + i, lanes); });
}

inline void read_token(const mlspec_delta_args& a, int64_t t, DeltaToken& token) {
  const float* rows[MLSPEC_DELTA_MAX_TAPS];
  for (int64_t tap = 0; tap < a.num_taps; ++tap) {
    const int64_t at = t + tap - (a.num_taps - 1);
    rows[tap] = at >= 0 ? a.x + at * a.x_stride : a.before[a.num_taps - 1 + at];
  }
  convolve(a, rows, a.k_at, a.key_dim, token.k);
  if (!a.additive) to_length(token.k, a.key_dim, 1.);
  convolve(a, rows, a.v_at, a.value_dim, token.v);
  if (!a.out) return;
  convolve(a, rows, a.q_at, a.key_dim, token.q);
  if (!a.additive) to_length(token.q, a.key_dim, 1. / std::sqrt(static_cast<double>(a.key_dim)));
  token.product = dot(token.q, token.k, a.key_dim);
}

// Columns [j, j + kVecs Vecs) of S and of what comes out. What S says of q is known before S is: S^T q = decay S^T q + (q k) change.
template <int kVecs, bool kAdds, bool kAsks, class Lanes>
inline void step_columns(const mlspec_delta_args& a, const DeltaToken& token, int64_t t, const float* from, int64_t j, Lanes lanes) {
  const Vec decay = Vec::all(a.decay[t * a.x_stride]), beta = Vec::all(a.beta[t * a.x_stride]);
  const int64_t width = a.value_dim;
  Vec known[kVecs], asked[kVecs], change[kVecs];
  for (int c = 0; c < kVecs; ++c) known[c] = asked[c] = Vec::zero();
  if (from && (kAsks || !kAdds)) {
    for (int64_t i = 0; i < a.key_dim; ++i) {
      const Vec k = Vec::all(token.k[i]), q = kAsks ? Vec::all(token.q[i]) : k;
      for (int c = 0; c < kVecs; ++c) {
        const Vec s = load(from + i * width + j + c * kLanes, lanes);
        if (!kAdds) known[c] = fma(s, k, known[c]);
        if (kAsks) asked[c] = fma(s, q, asked[c]);
      }
    }
  }
  for (int c = 0; c < kVecs; ++c) {
    const Vec v = load(token.v + j + c * kLanes, lanes);
    change[c] = (kAdds ? v : neg_fma(decay, known[c], v)) * beta;
    if (!kAsks) continue;
    const Vec said = fma(Vec::all(token.product), change[c], asked[c] * decay);
    store(kAdds ? fma(Vec::all(a.skip), v, said) : said, a.out + t * a.out_stride + j + c * kLanes, lanes);
  }
  for (int64_t i = 0; i < a.key_dim; ++i) {
    const Vec k = Vec::all(token.k[i]);
    for (int c = 0; c < kVecs; ++c) {
      const int64_t at = i * width + j + c * kLanes;
      const Vec s = from ? load(from + at, lanes) : Vec::zero();
      store(fma(k, change[c], s * decay), a.to + at, lanes);
    }
  }
}

template <bool kAdds, bool kAsks>
inline void step_token(const mlspec_delta_args& a, const DeltaToken& token, int64_t t, const float* from) {
  constexpr int64_t kTogether = Vec::kTile * kLanes;
  int64_t j = 0;
  for (; j + kTogether <= a.value_dim; j += kTogether)
    step_columns<Vec::kTile, kAdds, kAsks>(a, token, t, from, j, std::integral_constant<int, kLanes>());
  for_each_vec(a.value_dim - j, [&](int64_t i, auto lanes) { step_columns<1, kAdds, kAsks>(a, token, t, from, j + i, lanes); });
}

template <bool kAdds>
inline void all_tokens(const mlspec_delta_args* args) {
  DeltaToken token;
  for (int64_t t = 0; t < args->num_tokens; ++t) {
    const float* const from = t ? args->to : args->from;
    read_token(*args, t, token);
    args->out ? step_token<kAdds, true>(*args, token, t, from) : step_token<kAdds, false>(*args, token, t, from);
  }
}

void delta_rule(const mlspec_delta_args* args) { args->additive ? all_tokens<true>(args) : all_tokens<false>(args); }
