// How does a pass go through the decoder? Phases shared out over a team, each sum in the order its kernel fixes.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "decoder_workspace.h"

namespace mlspec {
namespace {

constexpr int64_t kScoredTogether = 64;  // rows of logits at a time: a vocabulary of 152k takes 39 MB
constexpr int64_t kChunk = 128;  // elements of one piece of packing: a multiple of every group

// AMX tiles hold 16 rows of activations in every cache line: two threads packing rows of one tile would fight for it.
bool rows_share_lines(const mlspec_acts& acts) { return acts.kind == MLSPEC_ACTS_BF16_TILES && acts.num_rows > 1; }

// to[i] = x[order[i]]; four at a time, as compilers leave alone what they cannot make vectors of.
void gather(const float* x, const int32_t* order, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const float a = x[order[i]], b = x[order[i + 1]], c = x[order[i + 2]], d = x[order[i + 3]];
    to[i] = a, to[i + 1] = b, to[i + 2] = c, to[i + 3] = d;
  }
  for (; i < count; ++i) to[i] = x[order[i]];
}

// A whole row in the order that `next` wants: x itself, or gathered in `room`.
const float* in_order(const Linear& next, const float* x, float* room) {
  if (!next.order) return x;
  gather(x, next.order, next.columns(), room);
  return room;
}

// f(row, row_end, k, k_end) for pieces of 16 rows by kChunk elements. Where inputs are gathered a piece has one row, which stays
// in the first cache for the pieces behind it, unless rows share lines of what is written.
template <class F>
void share_pieces(Team& team, const Linear& next, const mlspec_acts& acts, F&& f) {
  const int64_t rows = acts.num_rows, width = acts.in_features;
  const int64_t height = next.order && !rows_share_lines(acts) ? 1 : kTileOutputs;
  const int64_t across = (width + kChunk - 1) / kChunk, pieces = across * ((rows + height - 1) / height);
  team.share(pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t row = piece / across * height, k = piece % across * kChunk;
      f(row, std::min(row + height, rows), k, std::min(k + kChunk, width));
    }
  });
}

}  // namespace

void Decoder::prepare(Pass& pass, int threads) {
  if (!work_) work_ = std::make_shared<Workspace>();
  Workspace& w = *work_;
  const int64_t n = pass.tokens.size(), kept = pass.kept.size(), context = shape.heads * shape.head_dim;
  w.bits = pass.bits;
  w.hidden.reserve(n * shape.hidden);
  w.block.reserve(n * shape.hidden);
  w.qkv.reserve(n * (context + 2 * shape.kv_heads * shape.head_dim));
  w.context.reserve(n * context);
  w.gate_up.reserve(n * 2 * shape.intermediate);
  w.scored.reserve(std::min(kept, kScoredTogether) * shape.hidden);
  w.normed.reserve(n * shape.hidden);
  w.row_stride = std::max(2 * shape.hidden + kOutliers, kTileOutputs * kChunk) + kTileOutputs;
  w.rows.reserve(threads * w.row_stride);
  int64_t bytes = 0;
  const auto measure = [&](const Linear& next, int64_t rows) {
    const mlspec_acts acts = acts_for(next, rows);
    bytes = std::max(bytes, mlspec_acts_bytes(&acts));
    reserve_escaped(next, threads, rows);
  };
  for (const DecoderLayer& l : layers)
    for (const Linear* next : {&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down}) measure(*next, n);
  measure(head, std::min(kept, kScoredTogether));
  w.acts.reserve(bytes);
  reserve_dense(threads);
  reserve_tables();
  reserve_experts(n);
  pass.best.resize(kept);
  pass.confidence.resize(pass.want_confidence ? kept : 0);
  if (!pass.logits) w.logits.reserve(std::min(kept, kScoredTogether) * shape.vocab);
}

// hidden += norm(block) where the layer before asks for it; then the acts of `next` = norm(hidden), or, without one, `normed`.
void Decoder::normalize(Team& team, int64_t rows, const float* out_norm, const float* norm, const Linear* next) {
  const CpuKernels& kernels = cpu_kernels();
  const mlspec_acts acts = next ? acts_for(*next, rows) : mlspec_acts{};
  Workspace& w = *work_;
  const bool together = !next || rows_share_lines(acts);
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
      if (together) continue;
      const mlspec_pack_args pack{in_order(*next, normed, own + shape.hidden), 0, &acts};
      kernels.pack_rows(&pack, n, n + 1, 0, acts.in_features);
    }
  });
  if (next && together) pack_rows(team, w.normed.data(), shape.hidden, rows, *next);
}

// Heads side by side: norm_width elements at a time, those of a head or all of them.
void Decoder::norm_heads(const float* norm, int64_t norm_width, int64_t width, float* heads) const {
  if (!norm) return;
  for (int64_t at = 0; at < width; at += norm_width)
    cpu_kernels().row.rms_norm(heads + at, norm, shape.norm_eps, norm_width, heads + at);
}

// Heads of every token: per-head norms, rotation, keys and values into the cache; then attention and its packing.
void Decoder::attention(Team& team, const Pass& pass, int64_t index) {
  const CpuKernels& kernels = cpu_kernels();
  const DecoderLayer& layer = layers[index];
  const int64_t dim = shape.head_dim, group = shape.heads / shape.kv_heads, width = shape.heads * dim;
  const int64_t stride = width + 2 * shape.kv_heads * dim, tokens = pass.tokens.size();
  const int64_t slot_bytes = mlspec_cache_row_bytes(pass.kv.dtype, dim);
  Workspace& w = *work_;
  char* const kv = static_cast<char*>(pass.kv.data);
  const auto lane = [&](int64_t which, int64_t row, int64_t head) {
    return kv + (((index * 2 + which) * pass.kv.batch + row) * shape.kv_heads + head) * pass.kv.slots * slot_bytes;
  };
  const RopeTable& rope = ropes[layer.rope_table];
  const int64_t half = shape.rotary_dim / 2;
  team.share(tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      float* const row = w.qkv.data() + n * stride;
      const int64_t position = pass.positions[n];
      norm_heads(layer.q_norm, layer.q_norm_width, width, row);
      norm_heads(layer.k_norm, layer.k_norm_width, shape.kv_heads * dim, row + width);
      for (int64_t h = 0; h < shape.heads + shape.kv_heads; ++h) {
        kernels.row.rope(row + h * dim, rope.cos + position * half, rope.sin + position * half, shape.rotary_dim);
      }
      for (int64_t h = 0; h < 2 * shape.kv_heads; ++h) {
        char* const slot = lane(h / shape.kv_heads, pass.rows[n], h % shape.kv_heads) + position * slot_bytes;
        kernels.row.narrow(row + width + h * dim, pass.kv.dtype, dim, slot);
      }
    }
  });
  const mlspec_acts acts = acts_for(layer.o, tokens);
  const int64_t share = group * dim;  // the elements of one key head's queries: packed where whole groups of a scale
  const int64_t pieces = pass.blocks.size();
  const bool whole = share % std::max<int64_t>(32, acts.group) == 0 && !layer.o.order && !layer.o.rotates();
  const bool packs = whole && (pieces == 1 || !rows_share_lines(acts));
  team.share(pieces * shape.kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const Segment& block = pass.blocks[item / shape.kv_heads];
      const int64_t head = item % shape.kv_heads;
      const float* const q = w.qkv.data() + block.first * stride + head * share;
      float* const out = w.context.data() + block.first * width + head * share;
      const mlspec_attention_args args{q, stride, block.count, group, block.start, lane(0, block.row, head),
                                       lane(1, block.row, head), pass.kv.dtype, dim, layer.window,
                                       pass.draft_window, shape.attention_scale, shape.attention_softcap, out, width};
      kernels.attention(&args);
      const mlspec_pack_args pack{w.context.data(), width, &acts};
      if (packs) kernels.pack_rows(&pack, block.first, block.first + block.count, head * share, (head + 1) * share);
    }
  });
  if (layer.o.rotates()) return rotate_and_pack(team, w.context.data(), width, tokens, layer.o);
  if (!packs) pack_rows(team, w.context.data(), width, tokens, layer.o);
}

void Decoder::pack_rows(Team& team, const float* x, int64_t stride, int64_t rows, const Linear& next) {
  const mlspec_acts acts = acts_for(next, rows);
  float* const own = work_->rows.data() + team.index() * work_->row_stride;
  share_pieces(team, next, acts, [&](int64_t row, int64_t row_end, int64_t k, int64_t k_end) {
    mlspec_pack_args pack{x, stride, &acts};
    if (next.order) {
      for (int64_t n = row; n < row_end; ++n) gather(x + n * stride, next.order + k, k_end - k, own + (n - row) * kChunk);
      pack = {own - row * kChunk - k, kChunk, &acts};
    }
    cpu_kernels().pack_rows(&pack, row, row_end, k, k_end);
  });
}

// Rows of x times the Hadamard matrix of `next`, in place, and its acts. A row is one thread's: it is short beside a linear.
void Decoder::rotate_and_pack(Team& team, float* x, int64_t stride, int64_t rows, const Linear& next) {
  const CpuKernels& kernels = cpu_kernels();
  const mlspec_acts acts = acts_for(next, rows);
  const bool together = rows_share_lines(acts);
  const mlspec_pack_args pack{x, stride, &acts};
  team.share(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      kernels.hadamard(&next.hadamard, next.in_features, x + n * stride);
      if (!together) kernels.pack_rows(&pack, n, n + 1, 0, next.in_features);
    }
  });
  if (together) pack_rows(team, x, stride, rows, next);
}

// acts of down = activation(gate) * up, which takes the place of gate where it is rotated.
void Decoder::activate(Team& team, int64_t rows, const Linear& down) {
  const CpuKernels& kernels = cpu_kernels();
  const mlspec_acts acts = acts_for(down, rows);
  Workspace& w = *work_;
  const int64_t width = shape.intermediate;
  if (down.rotates()) {
    share_pieces(team, down, acts, [&](int64_t row, int64_t row_end, int64_t k, int64_t k_end) {
      for (int64_t n = row; n < row_end; ++n) {
        float* const gate = w.gate_up.data() + n * 2 * width + k;
        kernels.row.activate_mul(gate, gate + width, shape.activation, k_end - k, gate);
      }
    });
    return rotate_and_pack(team, w.gate_up.data(), 2 * width, rows, down);
  }
  float* const product = w.rows.data() + team.index() * w.row_stride;
  share_pieces(team, down, acts, [&](int64_t row, int64_t row_end, int64_t k, int64_t k_end) {
    alignas(64) float ordered[2][kChunk];
    for (int64_t n = row; n < row_end; ++n) {
      const float *gate = w.gate_up.data() + n * 2 * width, *up = gate + width;
      if (down.order) {
        gather(gate, down.order + k, k_end - k, ordered[0]);
        gather(up, down.order + k, k_end - k, ordered[1]);
        gate = ordered[0], up = ordered[1];
      } else {
        gate += k, up += k;
      }
      kernels.row.activate_mul(gate, up, shape.activation, k_end - k, product + (n - row) * kChunk);
    }
    const mlspec_pack_args pack{product - row * kChunk - k, kChunk, &acts};
    kernels.pack_rows(&pack, row, row_end, k, k_end);
  });
}

// The row of a nested table: exactly, from what escaped where it is there.
void Decoder::nested_row(int64_t id, uint16_t* row) const {
  const Linear& table = nested_embedding;
  const int64_t* const end = table.escaped.rows + table.escaped.count;
  const int64_t* const found = std::lower_bound(table.escaped.rows, end, id);
  if (found != end && *found == id) {
    std::memcpy(row, table.escaped.weight + (found - table.escaped.rows) * shape.hidden, shape.hidden * sizeof *row);
    return;
  }
  mlspec_linear_args args{};
  args.weight = table.weight, args.scale = table.scale, args.low = table.low, args.in_features = shape.hidden;
  mlspec_nested_row(&args, id, row);
}

// hidden = rows of the table, times embedding_scale.
void Decoder::embed(Team& team, const Pass& pass) {
  const int64_t element = shape.embedding_dtype == MLSPEC_FLOAT32 ? 4 : 2;
  Workspace& w = *work_;
  auto* const own = reinterpret_cast<uint16_t*>(w.rows.data() + team.index() * w.row_stride);
  team.share(pass.tokens.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (!embedding) nested_row(pass.tokens[i], own);
      const char* const row = static_cast<const char*>(embedding) + (embedding ? pass.tokens[i] * shape.hidden * element : 0);
      const void* const from = embedding ? static_cast<const void*>(row) : own;
      cpu_kernels().row.widen(from, shape.embedding_dtype, shape.embedding_scale, shape.hidden, w.hidden.data() + i * shape.hidden);
    }
  });
}

void Decoder::forward(Team& team, Pass& pass) {
  Workspace& w = *work_;
  // All that is asked of the pass is asked before the last barrier: behind it the deciding thread fills the next pass.
  const int64_t n = pass.tokens.size(), kept = pass.kept.size(), context = shape.heads * shape.head_dim;
  embed(team, pass);
  const float* pending = nullptr;  // the norm that the last block's output still waits for
  for (size_t i = 0; i < layers.size(); ++i) {
    const DecoderLayer& layer = layers[i];
    normalize(team, n, pending, layer.attention_norm, &layer.q);
    const Linear* const qkv[] = {&layer.q, &layer.k, &layer.v};
    multiply(team, qkv, 3, w.qkv.data(), context + 2 * shape.kv_heads * shape.head_dim, false, n);
    attention(team, pass, i);
    const Linear* const o[] = {&layer.o};
    pending = layer.attention_out_norm;
    multiply(team, o, 1, pending ? w.block.data() : w.hidden.data(), shape.hidden, !pending, n);
    normalize(team, n, pending, layer.mlp_norm, layer.experts ? nullptr : &layer.gate);
    pending = layer.mlp_out_norm;
    if (layer.experts) {
      visit_experts(team, *layer.experts, n, pending);
      continue;
    }
    const Linear* const gate_up[] = {&layer.gate, &layer.up};
    multiply(team, gate_up, 2, w.gate_up.data(), 2 * shape.intermediate, false, n);
    activate(team, n, layer.down);
    const Linear* const down[] = {&layer.down};
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
      if (together) continue;
      const mlspec_pack_args pack{in_order(head, normed, own + shape.hidden), 0, &acts};
      kernels.pack_rows(&pack, i, i + 1, 0, acts.in_features);
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
