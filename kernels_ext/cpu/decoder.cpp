// How does a pass go through the decoder? Phases shared out over a team, each sum in the order its kernel fixes.
#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

namespace mlspec {
namespace {

// Memory that grows and is never read before it is written, aligned for the kernels.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { release(); }
  void reserve(int64_t count) {
    if (count <= count_) return;
    release();
    data_ = static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64)));
    count_ = count;
  }
  T* data() const { return data_; }

 private:
  void release() { ::operator delete(data_, std::align_val_t(64)); }
  T* data_ = nullptr;
  int64_t count_ = 0;
};

constexpr int64_t kTile = 16;    // outputs of one weight tile
constexpr int64_t kScoredTogether = 64;  // rows of logits at a time: a vocabulary of 152k takes 39 MB
constexpr int64_t kChunk = 128;  // elements of one piece of packing: a multiple of every group

int64_t bytes_per_tile(const Linear& linear) {
  const int64_t bits = linear.format == WeightFormat::kBf16 ? 16 : linear.format == WeightFormat::kF32 ? 32 : 4;
  return kTile * linear.in_features * bits / 8;
}

// AMX tiles hold 16 rows of activations in every cache line: two threads packing rows of one tile would fight for it.
bool rows_share_lines(const mlspec_acts& acts) { return acts.kind == MLSPEC_ACTS_BF16_TILES && acts.num_rows > 1; }

// f(row, row_end, k, k_end) for pieces of 16 rows by kChunk elements.
template <class F>
void share_pieces(Team& team, int64_t rows, int64_t width, F&& f) {
  const int64_t across = (width + kChunk - 1) / kChunk, down = (rows + kTile - 1) / kTile;
  team.share(across * down, 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t row = piece / across * kTile, k = piece % across * kChunk;
      f(row, std::min(row + kTile, rows), k, std::min(k + kChunk, width));
    }
  });
}

}  // namespace

struct Decoder::Workspace {
  Buffer<float> hidden;    // [n][hidden], the residual stream
  Buffer<float> qkv;       // [n][(heads + 2 kv_heads) * head_dim]
  Buffer<float> context;   // [n][heads * head_dim]
  Buffer<float> gate_up;   // [n][2 * intermediate]
  Buffer<float> block;     // [n][hidden], a block's output where a norm follows it
  Buffer<float> scored;    // [kScoredTogether][hidden]
  Buffer<float> logits;    // [kScoredTogether][vocab], where nobody asked for them
  Buffer<float> normed;    // [n][hidden], where rows share the lines of packed activations
  Buffer<float> rows;      // [threads][longest row]
  Buffer<char> acts;       // activations as the next linear wants them
  Buffer<uint16_t> dense;  // [threads][dense_stride]: bfloat16 weights of a thread's outputs
  int64_t row_stride = 0, dense_stride = 0;
  int64_t activation_bits = 0;  // of the running pass
};

bool Decoder::dequantizes(const Linear& linear) const {
  return dequantize && linear.format == WeightFormat::kInt4 && linear.bits_at(work_->activation_bits) == 16;
}

mlspec_acts Decoder::acts_for(const Linear& next, int64_t rows) const {
  mlspec_acts acts{MLSPEC_ACTS_BF16, rows, next.in_features, 0, 0, work_->acts.data()};
  if (next.format == WeightFormat::kF32) {
    acts.kind = MLSPEC_ACTS_F32;
  } else if (next.format == WeightFormat::kBf16 || dequantizes(next)) {
    acts.kind = cpu_kernels().bf16_linear_acts;
  } else if (const int64_t bits = next.bits_at(work_->activation_bits); bits < 16) {
    acts.kind = MLSPEC_ACTS_INT;
    acts.group = next.format == WeightFormat::kMxfp4 ? 32 : next.group;
    acts.bits = bits;
  }
  return acts;
}

void Decoder::prepare(Pass& pass, int threads) {
  if (!work_) work_ = std::make_shared<Workspace>();
  Workspace& w = *work_;
  const int64_t n = pass.tokens.size(), kept = pass.kept.size(), context = shape.heads * shape.head_dim;
  w.activation_bits = pass.activation_bits;
  w.hidden.reserve(n * shape.hidden);
  w.block.reserve(n * shape.hidden);
  w.qkv.reserve(n * (context + 2 * shape.kv_heads * shape.head_dim));
  w.context.reserve(n * context);
  w.gate_up.reserve(n * 2 * shape.intermediate);
  w.scored.reserve(std::min(kept, kScoredTogether) * shape.hidden);
  w.normed.reserve(n * shape.hidden);
  w.row_stride = std::max(shape.hidden, kTile * kChunk) + kTile;
  w.rows.reserve(threads * w.row_stride);
  int64_t bytes = 0;
  const auto measure = [&](const Linear& next, int64_t rows) {
    const mlspec_acts acts = acts_for(next, rows);
    bytes = std::max(bytes, mlspec_acts_bytes(&acts));
  };
  for (const DecoderLayer& layer : layers)
    for (const Linear* next : {&layer.q, &layer.o, &layer.gate, &layer.down}) measure(*next, n);
  measure(head, std::min(kept, kScoredTogether));
  w.acts.reserve(bytes);
  reserve_dense(threads);
  pass.best.resize(kept);
  pass.confidence.resize(pass.want_confidence ? kept : 0);
  if (!pass.logits) w.logits.reserve(std::min(kept, kScoredTogether) * shape.vocab);
}

// For each thread the outputs of one part that share() can hand it at once.
void Decoder::reserve_dense(int threads) {
  int64_t elements = 0;
  const auto measure = [&](std::initializer_list<const Linear*> parts) {
    int64_t tiles = 0, most = 0;
    for (const Linear* part : parts) {
      const int64_t own = (part->out_features + kTile - 1) / kTile;
      tiles += own, most = std::max(most, own);
    }
    const Linear& any = **parts.begin();
    if (dequantizes(any)) elements = std::max(elements, std::min(most, (tiles + threads - 1) / threads) * kTile * any.in_features);
  };
  for (const DecoderLayer& l : layers) {
    measure({&l.q, &l.k, &l.v});
    measure({&l.o});
    measure({&l.gate, &l.up});
    measure({&l.down});
  }
  measure({&head});
  work_->dense_stride = (elements + 31) / 32 * 32;
  work_->dense.reserve(threads * work_->dense_stride);
}

// Outputs [begin, end) of an int4 linear: to bfloat16 in this thread's memory, which is used again and again and so
// stays in its cache where it fits, then a dense product.
void Decoder::multiply_dequantized(const Team& team, mlspec_linear_args args, int64_t begin, int64_t end) {
  uint16_t* const dense = work_->dense.data() + team.index() * work_->dense_stride;
  cpu_kernels().int4_dequantize(&args, begin, end, dense);
  args.weight = dense;
  args.bias = args.bias ? args.bias + begin : nullptr;
  args.y += begin;
  args.out_features = end - begin;
  cpu_kernels().bf16_linear(&args, 0, end - begin);
}

// y (+)= rows of packed activations times every part; the parts' outputs lie side by side in y.
void Decoder::multiply(Team& team, const Linear* const* parts, int count, float* y, int64_t stride, bool accumulate,
                       int64_t rows) {
  const CpuKernels& kernels = cpu_kernels();
  const mlspec_acts acts = acts_for(*parts[0], rows);
  const bool dequantized = dequantizes(*parts[0]);
  mlspec_linear_args args[3];
  mlspec_linear_fn compute[3];
  int64_t first[4] = {0}, bytes = 0, column = 0;
  for (int i = 0; i < count; ++i) {
    const Linear& part = *parts[i];
    args[i] = {part.weight, part.scale, part.zero, part.group, part.bias, &acts, y + column, stride, accumulate,
               part.in_features, part.out_features};
    const bool integer = acts.kind == MLSPEC_ACTS_INT;
    switch (part.format) {
      case WeightFormat::kBf16: compute[i] = kernels.bf16_linear; break;
      case WeightFormat::kF32: compute[i] = kernels.f32_linear; break;
      case WeightFormat::kMxfp4: compute[i] = integer ? kernels.mxfp4_linear_int8 : kernels.mxfp4_linear_bf16; break;
      case WeightFormat::kInt4: compute[i] = integer ? kernels.int4_linear_int8 : kernels.int4_linear_bf16; break;
    }
    const int64_t tiles = (part.out_features + kTile - 1) / kTile;
    first[i + 1] = first[i] + tiles;
    bytes += tiles * bytes_per_tile(part);
    column += part.out_features;
  }
  // The smallest piece: threads of unlike speed finish within the time of one, and a kernel's first rows start cold.
  const int64_t piece = std::clamp<int64_t>(bytes / (team.size() * 16), 1 << 14, 1 << 17);
  const int64_t own = (first[count] + team.size() - 1) / team.size();
  const int64_t grain = dequantized ? own : std::max<int64_t>(1, piece * first[count] / std::max<int64_t>(bytes, 1));
  team.share(first[count], grain, [&](int64_t begin, int64_t end) {
    for (int i = 0; i < count; ++i) {
      const int64_t lo = std::max(begin, first[i]) - first[i], hi = std::min(end, first[i + 1]) - first[i];
      const int64_t out_end = std::min(hi * kTile, args[i].out_features);
      if (lo < hi && dequantized) multiply_dequantized(team, args[i], lo * kTile, out_end);
      if (lo < hi && !dequantized) compute[i](&args[i], lo * kTile, out_end);
    }
  });
}

// hidden += norm(block) where the layer before asks for it; then the acts of `next` = norm(hidden).
void Decoder::normalize(Team& team, int64_t rows, const float* out_norm, const float* norm, const Linear& next) {
  const CpuKernels& kernels = cpu_kernels();
  const mlspec_acts acts = acts_for(next, rows);
  Workspace& w = *work_;
  const bool together = rows_share_lines(acts);
  float* const own = w.rows.data() + team.index() * w.row_stride;
  team.share(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      float* const hidden = w.hidden.data() + n * shape.hidden;
      float* const normed = together ? w.normed.data() + n * shape.hidden : own;
      if (out_norm) {
        kernels.row.rms_norm(w.block.data() + n * shape.hidden, out_norm, shape.norm_eps, shape.hidden, normed);
        kernels.row.add(normed, shape.hidden, hidden);
      }
      kernels.row.rms_norm(hidden, norm, shape.norm_eps, shape.hidden, normed);
      const mlspec_pack_args pack{normed, 0, &acts};
      if (!together) kernels.pack_rows(&pack, n, n + 1, 0, shape.hidden);
    }
  });
  if (together) pack_rows(team, w.normed.data(), shape.hidden, rows, next);
}

// Heads of every token: per-head norms, rotation, keys and values into the cache; then attention and its packing.
void Decoder::attention(Team& team, const Pass& pass, int64_t index) {
  const CpuKernels& kernels = cpu_kernels();
  const DecoderLayer& layer = layers[index];
  const int64_t dim = shape.head_dim, group = shape.heads / shape.kv_heads, width = shape.heads * dim;
  const int64_t stride = width + 2 * shape.kv_heads * dim, tokens = pass.tokens.size();
  const int64_t element = shape.kv_dtype == MLSPEC_FLOAT32 ? 4 : 2;
  Workspace& w = *work_;
  char* const kv = static_cast<char*>(pass.kv.data);
  const auto lane = [&](int64_t which, int64_t row, int64_t head) {
    return kv + (((index * 2 + which) * pass.kv.batch + row) * shape.kv_heads + head) * pass.kv.slots * dim * element;
  };
  const RopeTable& rope = ropes[layer.rope_table];
  const int64_t half = shape.rotary_dim / 2;
  team.share(tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      float* const row = w.qkv.data() + n * stride;
      const int64_t position = pass.positions[n];
      for (int64_t h = 0; h < shape.heads + shape.kv_heads; ++h) {
        const float* const norm = h < shape.heads ? layer.q_norm : layer.k_norm;
        if (norm) kernels.row.rms_norm(row + h * dim, norm, shape.norm_eps, dim, row + h * dim);
        kernels.row.rope(row + h * dim, rope.cos + position * half, rope.sin + position * half, shape.rotary_dim);
      }
      for (int64_t h = 0; h < 2 * shape.kv_heads; ++h) {
        char* const slot = lane(h / shape.kv_heads, pass.rows[n], h % shape.kv_heads) + position * dim * element;
        kernels.row.narrow(row + width + h * dim, shape.kv_dtype, dim, slot);
      }
    }
  });
  const mlspec_acts acts = acts_for(layer.o, tokens);
  const int64_t share = group * dim;  // the elements of one key head's queries: packed where whole groups of a scale
  const int64_t pieces = pass.blocks.size();
  const bool packs = share % std::max<int64_t>(32, acts.group) == 0 && (pieces == 1 || !rows_share_lines(acts));
  team.share(pieces * shape.kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const Segment& block = pass.blocks[item / shape.kv_heads];
      const int64_t head = item % shape.kv_heads;
      const float* const q = w.qkv.data() + block.first * stride + head * share;
      float* const out = w.context.data() + block.first * width + head * share;
      const mlspec_attention_args args{q, stride, block.count, group, block.start, lane(0, block.row, head),
                                       lane(1, block.row, head), shape.kv_dtype, dim, layer.window,
                                       shape.attention_scale, shape.attention_softcap, out, width};
      kernels.row.attention(&args);
      const mlspec_pack_args pack{w.context.data(), width, &acts};
      if (packs) kernels.pack_rows(&pack, block.first, block.first + block.count, head * share, (head + 1) * share);
    }
  });
  if (!packs) pack_rows(team, w.context.data(), width, tokens, layer.o);
}

void Decoder::pack_rows(Team& team, const float* x, int64_t stride, int64_t rows, const Linear& next) {
  const mlspec_acts acts = acts_for(next, rows);
  const mlspec_pack_args pack{x, stride, &acts};
  share_pieces(team, rows, next.in_features, [&](int64_t row, int64_t row_end, int64_t k, int64_t k_end) {
    cpu_kernels().pack_rows(&pack, row, row_end, k, k_end);
  });
}

// acts of down = activation(gate) * up.
void Decoder::activate(Team& team, int64_t rows, const Linear& down) {
  const CpuKernels& kernels = cpu_kernels();
  const mlspec_acts acts = acts_for(down, rows);
  Workspace& w = *work_;
  const int64_t width = shape.intermediate;
  float* const product = w.rows.data() + team.index() * w.row_stride;
  share_pieces(team, rows, width, [&](int64_t row, int64_t row_end, int64_t k, int64_t k_end) {
    for (int64_t n = row; n < row_end; ++n) {
      const float* const gate = w.gate_up.data() + n * 2 * width;
      kernels.row.activate_mul(gate + k, gate + width + k, shape.activation, k_end - k, product + (n - row) * kChunk);
    }
    const mlspec_pack_args pack{product - row * kChunk - k, kChunk, &acts};
    kernels.pack_rows(&pack, row, row_end, k, k_end);
  });
}

void Decoder::forward(Team& team, Pass& pass) {
  const CpuKernels& kernels = cpu_kernels();
  Workspace& w = *work_;
  // All that is asked of the pass is asked before the last barrier: behind it the deciding thread fills the next pass.
  const int64_t n = pass.tokens.size(), kept = pass.kept.size(), context = shape.heads * shape.head_dim;
  const int64_t element = shape.embedding_dtype == MLSPEC_FLOAT32 ? 4 : 2;
  const char* const table = static_cast<const char*>(embedding);
  team.share(n, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      kernels.row.widen(table + pass.tokens[i] * shape.hidden * element, shape.embedding_dtype, shape.embedding_scale,
                        shape.hidden, w.hidden.data() + i * shape.hidden);
  });
  const float* pending = nullptr;  // the norm that the last block's output still waits for
  for (size_t i = 0; i < layers.size(); ++i) {
    const DecoderLayer& layer = layers[i];
    normalize(team, n, pending, layer.attention_norm, layer.q);
    const Linear* const qkv[] = {&layer.q, &layer.k, &layer.v};
    multiply(team, qkv, 3, w.qkv.data(), context + 2 * shape.kv_heads * shape.head_dim, false, n);
    attention(team, pass, i);
    const Linear* const o[] = {&layer.o};
    pending = layer.attention_out_norm;
    multiply(team, o, 1, pending ? w.block.data() : w.hidden.data(), shape.hidden, !pending, n);
    normalize(team, n, pending, layer.mlp_norm, layer.gate);
    const Linear* const gate_up[] = {&layer.gate, &layer.up};
    multiply(team, gate_up, 2, w.gate_up.data(), 2 * shape.intermediate, false, n);
    activate(team, n, layer.down);
    const Linear* const down[] = {&layer.down};
    pending = layer.mlp_out_norm;
    multiply(team, down, 1, pending ? w.block.data() : w.hidden.data(), shape.hidden, !pending, n);
  }
  for (int64_t first = 0; first < kept; first += kScoredTogether) {
    float* const logits = pass.logits ? pass.logits + first * shape.vocab : w.logits.data();
    score(team, pass, pending, first, std::min(kScoredTogether, kept - first), logits);
  }
}

// Final norm, head, soft cap and argmax of kept tokens [first, first + count) into `logits`.
void Decoder::score(Team& team, Pass& pass, const float* pending, int64_t first, int64_t count, float* logits) {
  const CpuKernels& kernels = cpu_kernels();
  Workspace& w = *work_;
  const mlspec_acts acts = acts_for(head, count);
  const bool together = rows_share_lines(acts);
  float* const own = w.rows.data() + team.index() * w.row_stride;
  team.share(count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t token = pass.kept[first + i] * shape.hidden;
      float* const hidden = w.scored.data() + i * shape.hidden;
      float* const normed = together ? w.normed.data() + i * shape.hidden : own;
      std::memcpy(hidden, w.hidden.data() + token, shape.hidden * sizeof(float));
      if (pending) {
        kernels.row.rms_norm(w.block.data() + token, pending, shape.norm_eps, shape.hidden, normed);
        kernels.row.add(normed, shape.hidden, hidden);
      }
      kernels.row.rms_norm(hidden, final_norm, shape.norm_eps, shape.hidden, normed);
      const mlspec_pack_args pack{normed, 0, &acts};
      if (!together) kernels.pack_rows(&pack, i, i + 1, 0, shape.hidden);
    }
  });
  if (together) pack_rows(team, w.normed.data(), shape.hidden, count, head);
  const Linear* const parts[] = {&head};
  multiply(team, parts, 1, logits, shape.vocab, false, count);
  team.share(count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* const row = logits + i * shape.vocab;
      float largest = 0, total = 0;
      if (shape.logit_softcap > 0) kernels.row.softcap(row, shape.logit_softcap, shape.vocab);
      pass.best[first + i] = kernels.row.argmax(row, shape.vocab, &largest, pass.want_confidence ? &total : nullptr);
      if (pass.want_confidence) pass.confidence[first + i] = std::exp(largest - total);
    }
  });
}

}  // namespace mlspec
