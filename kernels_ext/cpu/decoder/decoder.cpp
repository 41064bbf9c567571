// How does a pass go through the decoder? Phases shared out over a team, each sum in the order its kernel fixes.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "decoder_workspace.h"

namespace mlspec {
namespace {

constexpr int64_t kScoredTogether = 64;  // rows of logits at a time: a vocabulary of 152k takes 39 MB
constexpr int64_t kChunk = 128;  // elements of one piece of packing: a multiple of every group

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
  const int64_t n = pass.tokens.size(), kept = pass.kept.size(), heads = shape.heads * shape.head_dim;
  const int64_t context = std::max(heads, delta.values());
  w.bits = pass.bits;
  if (pass.choose) pass.widths.assign(2 * layers.size(), 1);
  w.widths = pass.widths.empty() ? nullptr : &pass.widths;
  planes_missing = rank_lost = false;
  w.mixed_block = -1, w.width_now = 0, w.distinct.clear();
  w.token_widths.reserve(pass.choose ? n : 0), w.distinct.reserve(pass.choose ? n : 0);  // no member of a team may throw
  const int64_t widest = (shape.gated_heads ? 2 : 1) * heads + 2 * shape.kv_heads * shape.head_dim;
  w.mixed.reserve(pass.mixes ? n * std::max({widest, 2 * shape.intermediate, shape.hidden}) : 0);
  w.hidden.reserve(n * shape.hidden);
  w.block.reserve(n * shape.hidden);
  w.qkv.reserve(n * std::max((shape.gated_heads ? 2 : 1) * heads + 2 * shape.kv_heads * shape.head_dim, delta.width()));
  w.head_gates.reserve(shape.gated_heads ? n * heads : 0);
  w.context.reserve(n * context);
  w.gate_up.reserve(n * std::max(2 * shape.intermediate, token_inputs.width));
  w.scored.reserve(std::min(kept, kScoredTogether) * shape.hidden);
  w.normed.reserve(n * shape.hidden);
  reserve_inputs(n);
  w.row_stride = std::max({2 * shape.hidden + kOutliers, kTileOutputs * kChunk, delta.width(), token_inputs.width}) + kTileOutputs;
  w.rows.reserve(threads * w.row_stride);
  int64_t bytes = 0;
  const auto measure = [&](const Linear& next, int64_t rows) {
    const mlspec_acts acts = acts_for(next, rows);
    bytes = std::max(bytes, mlspec_acts_bytes(&acts));
    if (reads_wide(next)) w.wide_acts.reserve(rows * next.in_features);
    reserve_escaped(next, threads, rows);
  };
  for (const DecoderLayer& l : layers) l.each_linear([&](const Linear& next) { measure(next, n); });
  if (token_inputs) measure(token_inputs.projection, n);
  measure(head, std::min(kept, kScoredTogether));
  w.acts.reserve(bytes);
  reserve_dense(threads);
  reserve_adapters(n);
  reserve_experts(threads, n);
  pass.best.resize(kept);
  pass.confidence.resize(pass.want_confidence ? kept : 0);
  w.own_logits.reserve(ranks.sum ? std::min(kept, kScoredTogether) * head.out_features : 0);
  if (!pass.logits) w.logits.reserve(std::min(kept, kScoredTogether) * shape.vocab);
}

void Decoder::norm_row(const Norm& norm, const float* x, int64_t width, float* y) const {
  const mlspec_row_ops& row = cpu_kernels().row;
  if (shape.norms_have_mean) return row.layer_norm(x, norm.weight, norm.bias, shape.norm_eps, width, y);
  row.rms_norm(x, norm.weight, shape.norm_eps, width, y);
}

// hidden += norm(block), or the block itself, where the layer before left that; times its scale.
void Decoder::settle(const Pending& pending, const float* block, float* hidden, float* room) const {
  if (!pending.waits) return;
  if (pending.norm) norm_row(pending.norm, block, shape.hidden, room);
  cpu_kernels().row.add(pending.norm ? room : block, shape.hidden, hidden);
  if (pending.scale != 1) cpu_kernels().row.widen(hidden, MLSPEC_FLOAT32, pending.scale, shape.hidden, hidden);
}

// What waits is added; then the acts of `next` = norm(hidden), or, without one, `normed`; keep: both.
void Decoder::normalize(Team& team, int64_t rows, const Pending& pending, const Norm& norm, const Linear* next, bool keep) {
  const mlspec_acts acts = next ? acts_for(*next, rows) : mlspec_acts{};
  Workspace& w = *work_;
  const bool together = !next || keep || rows_share_lines(acts);
  float* const own = w.rows.data() + team.index() * w.row_stride;
  team.share(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      float* const hidden = w.hidden.data() + n * shape.hidden;
      float* const normed = together ? w.normed.data() + n * shape.hidden : own;
      settle(pending, w.block.data() + n * shape.hidden, hidden, normed);
      if (norm) norm_row(norm, hidden, shape.hidden, normed);
      if (!norm && together) std::memcpy(normed, hidden, shape.hidden * sizeof(float));
      if (together) continue;
      const mlspec_pack_args pack{in_order(*next, norm ? normed : hidden, own + shape.hidden), 0, &acts};
      pack_piece(*next, pack, n, n + 1, 0, acts.in_features);
    }
  });
  if (next && together) pack_rows(team, w.normed.data(), shape.hidden, rows, *next);
}

// A piece of the acts of `next`, as `pack` has them; and of its inputs in bfloat16, where it reads these, too.
void Decoder::pack_piece(const Linear& next, const mlspec_pack_args& pack, int64_t row, int64_t row_end, int64_t k, int64_t k_end) const {
  cpu_kernels().pack_rows(&pack, row, row_end, k, k_end);
  if (!reads_wide(next)) return;
  const mlspec_acts wide = wide_acts(*pack.acts);
  const mlspec_pack_args other{pack.x, pack.x_stride, &wide};
  cpu_kernels().pack_rows(&other, row, row_end, k, k_end);
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
    pack_piece(next, pack, row, row_end, k, k_end);
  });
}

// Rows of x times the Hadamard matrix of `next`, in place, and its acts. A row is one thread's: it is short beside a linear.
void Decoder::rotate_and_pack(Team& team, float* x, int64_t stride, int64_t rows, const Linear& next) {
  const CpuKernels& kernels = cpu_kernels();
  const mlspec_acts acts = acts_for(next, rows);
  const bool together = rows_share_lines(acts) || next.order;  // outliers come twice
  const mlspec_pack_args pack{x, stride, &acts};
  team.share(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      kernels.hadamard(&next.hadamard, next.in_features, x + n * stride);
      if (!together) pack_piece(next, pack, n, n + 1, 0, next.in_features);
    }
  });
  if (together) pack_rows(team, x, stride, rows, next);
}

// activation(gate) * up, where up lies behind all of gate; or, of an MLP without gates, activation(up) alone.
void Decoder::activate_piece(const float* gate, int64_t inner, int64_t count, float* to) const {
  const mlspec_row_ops& row = cpu_kernels().row;
  if (shape.plain_mlp) return row.activate(gate, shape.activation, count, to);
  row.activate_mul(gate, gate + inner, shape.activation, count, to);
}

// acts of down, made of what activate_piece gives, which takes the place of gate where it is rotated.
void Decoder::activate(Team& team, int64_t rows, const DecoderLayer& layer) {
  const Linear& down = layer.down;
  const CpuKernels& kernels = cpu_kernels();
  const mlspec_acts acts = acts_for(down, rows);
  Workspace& w = *work_;
  const int64_t width = layer.intermediate;
  if (down.rotates()) {
    share_pieces(team, down, acts, [&](int64_t row, int64_t row_end, int64_t k, int64_t k_end) {
      for (int64_t n = row; n < row_end && k < width; ++n) {
        float* const gate = w.gate_up.data() + n * 2 * width + k;
        activate_piece(gate, width, std::min(k_end, width) - k, gate);
      }
    });
    return rotate_and_pack(team, w.gate_up.data(), 2 * width, rows, down);
  }
  if (down.adapter) return activate_whole(team, rows, layer);
  float* const product = w.rows.data() + team.index() * w.row_stride;
  share_pieces(team, down, acts, [&](int64_t row, int64_t row_end, int64_t k, int64_t k_end) {
    alignas(64) float ordered[2][kChunk];
    for (int64_t n = row; n < row_end; ++n) {
      const float* const gate = w.gate_up.data() + n * 2 * width;
      float* const to = product + (n - row) * kChunk;
      if (!down.order) {
        activate_piece(gate + k, width, k_end - k, to);
        continue;
      }
      gather(gate, down.order + k, k_end - k, ordered[0]);
      if (shape.plain_mlp) {
        kernels.row.activate(ordered[0], shape.activation, k_end - k, to);
        continue;
      }
      gather(gate + width, down.order + k, k_end - k, ordered[1]);
      kernels.row.activate_mul(ordered[0], ordered[1], shape.activation, k_end - k, to);
    }
    const mlspec_pack_args pack{product - row * kChunk - k, kChunk, &acts};
    pack_piece(down, pack, row, row_end, k, k_end);
  });
}

// to (+)= MLP of the packed activations.
void Decoder::mlp(Team& team, int64_t rows, const DecoderLayer& layer, float* to, bool accumulate) {
  const Linear* const gate_up[] = {&layer.gate, &layer.up};
  const int parts = shape.plain_mlp ? 1 : 2;
  Workspace& w = *work_;
  multiply(team, gate_up + 2 - parts, parts, w.gate_up.data(), 2 * layer.intermediate, false, rows);
  add_adapters(team, gate_up + 2 - parts, parts, w.normed.data(), w.gate_up.data(), 2 * layer.intermediate, rows);
  activate(team, rows, layer);
  const Linear* const down[] = {&layer.down};
  multiply(team, down, 1, to, shape.hidden, accumulate, rows);
  add_adapters(team, down, 1, w.inner.data(), to, shape.hidden, rows);
}

void Decoder::forward(Team& team, Pass& pass) {
  Workspace& w = *work_;
  // All that is asked of the pass is asked before the last barrier: behind it the deciding thread fills the next pass.
  const int64_t n = pass.tokens.size(), kept = pass.kept.size();
  if (pass.states) restore_states(team, pass);
  embed(team, pass);
  embed_inputs(team, pass);
  Pending pending;
  for (size_t i = 0; i < layers.size(); ++i) {
    const DecoderLayer& layer = layers[i];
    const Linear* const inner = layer.experts ? nullptr : shape.plain_mlp ? &layer.up : &layer.gate;
    tap(team, pass, pending, i);
    const bool keeps = layer.gate.adapter || layer.up.adapter || pass.choose;
    const Linear* const o[] = {layer.delta ? &layer.delta->out : &layer.o};
    if (layer.delta) {
      normalize(team, n, pending, layer.attention_norm, shares_inputs(*layer.delta) ? &layer.delta->qkv : nullptr);
      delta_net(team, pass, *layer.delta);
    } else {
      const Linear* const qkv[] = {&layer.q, &layer.k, &layer.v};
      const int64_t parts = shape.grouped_qkv || layer.reuses_keys ? 1 : layer.values_are_keys ? 2 : 3, width = qkv_width(layer);
      const bool adapted = layer.q.adapter || layer.k.adapter || layer.v.adapter;
      normalize(team, n, pending, layer.attention_norm, &layer.q, adapted || pass.choose);
      choose_width(team, pass, 2 * i, n);
      multiply(team, qkv, parts, w.qkv.data(), width, false, n);
      add_adapters(team, qkv, parts, w.normed.data(), w.qkv.data(), width, n);
      attention(team, pass, layer);
    }
    pending = {layer.attention_out_norm || shape.parallel || ranks.sum, layer.attention_out_norm};
    float* const out = pending.waits ? w.block.data() : w.hidden.data();
    multiply(team, o, 1, out, shape.hidden, !pending.waits, n);
    add_adapters(team, o, 1, w.context.data(), out, shape.hidden, n);
    if (!shape.parallel || shape.no_mlp) sum_over_ranks(team, n);
    if (shape.no_mlp) continue;
    if (shape.parallel) {  // both wait in `block` until the next norm
      normalize(team, n, {}, layer.mlp_norm, inner, keeps);
      choose_width(team, pass, 2 * i + 1, n);
      mlp(team, n, layer, w.block.data(), true);
      sum_over_ranks(team, n);
      continue;
    }
    normalize(team, n, pending, layer.mlp_norm, inner, keeps);
    choose_width(team, pass, 2 * i + 1, n);
    const float scale = layer.inputs ? 1.0f : layer.scale;
    pending = {layer.mlp_out_norm || ranks.sum || scale != 1, layer.mlp_out_norm, scale};
    if (layer.experts) {
      visit_experts(team, *layer.experts, n, pending.waits);
    } else {
      mlp(team, n, layer, pending.waits ? w.block.data() : w.hidden.data(), !pending.waits);
    }
    sum_over_ranks(team, n);
    if (layer.inputs) pending = add_inputs(team, n, pending, i);
  }
  tap(team, pass, pending, layers.size());
  for (int64_t first = 0; first < kept; first += kScoredTogether) {
    float* const logits = pass.logits ? pass.logits + first * shape.vocab : w.logits.data();
    score(team, pass, pending, first, std::min(kScoredTogether, kept - first), logits);
  }
}

// Final norm, head, soft cap and argmax of kept tokens [first, first + count) into `logits`.
void Decoder::score(Team& team, Pass& pass, const Pending& pending, int64_t first, int64_t count, float* logits) {
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
      settle(pending, w.block.data() + token, hidden, normed);
      norm_row(final_norm, hidden, shape.hidden, normed);
      if (together) continue;
      const mlspec_pack_args pack{in_order(head, normed, own + shape.hidden), 0, &acts};
      pack_piece(head, pack, i, i + 1, 0, acts.in_features);
    }
  });
  if (together) pack_rows(team, w.normed.data(), shape.hidden, count, head);
  const Linear* const parts[] = {&head};
  const bool shared = head.out_features != shape.vocab;
  multiply(team, parts, 1, shared ? w.own_logits.data() : logits, head.out_features, false, count);
  if (shared) gather_over_ranks(team, count, logits);
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
