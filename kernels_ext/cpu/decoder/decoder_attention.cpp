// How do the heads of a pass attend? Normed, turned and written to the cache, then weighed with all keys before them.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "decoder_workspace.h"

namespace mlspec {

// Of a token's queries, keys and values, as far as the layer computes them.
int64_t Decoder::qkv_width(const DecoderLayer& layer) const {
  const int64_t keys = layer.reuses_keys ? 0 : 2 * layer.kv_heads;
  return ((shape.gated_heads ? 2 : 1) * shape.heads + keys) * layer.head_dim;
}

// Where the heads of a token lie in its row of qkv: all queries, keys and values, or those of one key head after the other.
int64_t Decoder::queries_at(const DecoderLayer& layer, int64_t kv_head) const {
  const int64_t group = shape.heads / layer.kv_heads;
  return kv_head * (group + (shape.grouped_qkv ? 2 : 0)) * layer.head_dim;
}

int64_t Decoder::key_at(const DecoderLayer& layer, int64_t kv_head) const {
  if (shape.grouped_qkv) return queries_at(layer, kv_head + 1) - 2 * layer.head_dim;
  return (shape.heads * (shape.gated_heads ? 2 : 1) + kv_head) * layer.head_dim;
}

int64_t Decoder::value_at(const DecoderLayer& layer, int64_t kv_head) const {
  return key_at(layer, kv_head) + (shape.grouped_qkv ? 1 : layer.kv_heads) * layer.head_dim;
}

// Heads side by side: norm_width elements at a time, those of a head or all of them.
void Decoder::norm_heads(const Norm& norm, int64_t norm_width, int64_t width, float* heads) const {
  if (!norm) return;
  for (int64_t at = 0; at < width; at += norm_width) norm_row(norm, heads + at, norm_width, heads + at);
}

// Norms and rotation of the queries and keys of one token.
void Decoder::turn_heads(const DecoderLayer& layer, int64_t position, float* qkv) const {
  const RopeTable& table = ropes[layer.rope_table];
  const mlspec_row_ops& row = cpu_kernels().row;
  const int64_t dim = layer.head_dim, group = shape.heads / layer.kv_heads, rotated = 2 * table.half;
  const auto rope = shape.rotates_pairs ? row.rope_pairs : row.rope;
  const float *const cos = table.cos + position * table.half, *const sin = table.sin + position * table.half;
  const bool over_all = layer.q_norm_width > dim, has_keys = !layer.reuses_keys;
  if (over_all) {
    norm_heads(layer.q_norm, layer.q_norm_width, shape.heads * dim, qkv);
    norm_heads(layer.k_norm, layer.k_norm_width, layer.kv_heads * dim, qkv + key_at(layer, 0));
  }
  for (int64_t head = 0; head < layer.kv_heads; ++head) {
    float *const queries = qkv + queries_at(layer, head), *const key = qkv + key_at(layer, head);
    for (const bool behind : {false, true}) {
      if (behind) {
        for (int64_t h = 0; h < group; ++h) rope(queries + h * dim, cos, sin, rotated);
        if (has_keys) rope(key, cos, sin, rotated);
      }
      if (over_all || behind != shape.norms_behind_rotation) continue;
      norm_heads(layer.q_norm, dim, group * dim, queries);
      if (has_keys) norm_heads(layer.k_norm, dim, dim, key);
    }
    if (layer.query_scale) {
      const float stretch = std::floor((static_cast<float>(position) + 1) / layer.query_scale.stretch);
      row.widen(queries, MLSPEC_FLOAT32, 1 + layer.query_scale.scale * std::log1p(stretch), group * dim, queries);
    }
  }
}

// Of one token: queries, each with its gate behind it, to queries side by side, in place, and gates.
void Decoder::part_gates(const DecoderLayer& layer, const float* from, float* queries, float* gates) const {
  const int64_t dim = layer.head_dim;
  for (int64_t head = 0; head < shape.heads; ++head) {
    std::copy_n(from + (2 * head + 1) * dim, dim, gates + head * dim);
    if (head) std::copy_n(from + 2 * head * dim, dim, queries + head * dim);
  }
}

// Keys (which: 0) or values of a head of a row, its first slot.
char* Decoder::lane(const RaggedKv& kv, const DecoderLayer& layer, int64_t which, int64_t row, int64_t head) const {
  const int64_t lanes = ((layer.kv_index * 2 + which) * kv.batch + row) * kv.heads + head;
  return static_cast<char*>(kv.data) + lanes * kv.slots * kv.row_bytes;
}

// Keys and values of a token, as its row of qkv has them, into its slot.
void Decoder::write_keys(const Pass& pass, const DecoderLayer& layer, int64_t token, float* qkv) {
  const int64_t dim = layer.head_dim;
  for (int64_t head = 0; head < layer.kv_heads; ++head) {
    float *const key = qkv + key_at(layer, head), *const value = qkv + value_at(layer, head);
    norm_heads(layer.v_norm, dim, dim, value);
    const float* const parts[] = {key, value};
    for (int which = 0; which < 2; ++which)
      cpu_kernels().row.narrow(parts[which], pass.kv.dtype, dim,
                               lane(pass.kv, layer, which, pass.rows[token], head) + pass.slots[token] * pass.kv.row_bytes);
  }
}

// Heads of every token; keys and values into the cache; then attention and its packing.
void Decoder::attention(Team& team, const Pass& pass, const DecoderLayer& layer) {
  const CpuKernels& kernels = cpu_kernels();
  const int64_t dim = layer.head_dim, group = shape.heads / layer.kv_heads, width = shape.heads * dim;
  const int64_t stride = qkv_width(layer), tokens = pass.tokens.size(), slot_bytes = pass.kv.row_bytes;
  const int64_t row_bytes = mlspec_cache_row_bytes(pass.kv.dtype, dim);
  Workspace& w = *work_;
  team.share(tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      float* const row = w.qkv.data() + n * stride;
      if (shape.gated_heads) part_gates(layer, row, row, w.head_gates.data() + n * width);
      if (layer.values_are_keys) std::copy_n(row + key_at(layer, 0), layer.kv_heads * dim, row + value_at(layer, 0));
      turn_heads(layer, pass.positions[n], row);
      if (!layer.reuses_keys) write_keys(pass, layer, n, row);
    }
  });
  const mlspec_acts acts = acts_for(layer.o, tokens);
  const int64_t share = group * dim;  // the elements of one key head's queries: packed where whole groups of a scale
  const int64_t pieces = pass.blocks.size(), items = pass.items.size();
  const bool whole = share % std::max<int64_t>(32, acts.group) == 0 && !layer.o.order && !layer.o.rotates();
  const bool packs = whole && (pieces == 1 || !rows_share_lines(acts));
  const auto attend = [&](const Segment& block, int64_t head) {
    char* const lanes[] = {lane(pass.kv, layer, 0, block.row, head), lane(pass.kv, layer, 1, block.row, head)};
    for (int64_t t = 0; block.branch && t < block.count; ++t)
      for (char* const own : lanes)
        std::memcpy(own + (block.start + t) * slot_bytes, own + pass.slots[block.first + t] * slot_bytes, row_bytes);
    const float* const q = w.qkv.data() + block.first * stride + queries_at(layer, head);
    float* const out = w.context.data() + block.first * width + head * share;
    const mlspec_attention_args args{q, stride, block.count, group, block.start, lanes[0], lanes[1], pass.kv.dtype, dim, layer.window,
                                     pass.draft_window, shape.attention_scale, shape.attention_softcap, out, width,
                                     layer.sinks ? layer.sinks + head * group : nullptr, layer.span, slot_bytes};
    kernels.attention(&args);
    for (int64_t t = 0; shape.gated_heads && t < block.count; ++t)
      kernels.sigmoid_mul(w.head_gates.data() + (block.first + t) * width + head * share, share, out + t * width);
    const mlspec_pack_args pack{w.context.data(), width, &acts};
    if (packs) pack_piece(layer.o, pack, block.first, block.first + block.count, head * share, (head + 1) * share);
  };
  // A tree's branches come in depth-first order: what a branch is behind lies at its positions, as in a row of its own.
  team.share(items * layer.kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t number = item / layer.kv_heads, behind = number + 1 < items ? pass.items[number + 1] : pieces;
      for (int64_t b = pass.items[number]; b < behind; ++b) attend(pass.blocks[b], item % layer.kv_heads);
    }
  });
  if (layer.o.rotates()) return rotate_and_pack(team, w.context.data(), width, tokens, layer.o);
  if (!packs) pack_rows(team, w.context.data(), width, tokens, layer.o);
}

}  // namespace mlspec
