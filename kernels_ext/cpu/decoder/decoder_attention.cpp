// How do the heads of a pass attend? Normed, turned and written to the cache, then weighed with all keys before them.
#include <algorithm>
#include <cstring>

#include "decoder_workspace.h"

namespace mlspec {

// Where the heads of a token lie in its row of qkv: all queries, keys and values, or those of one key head after the other.
int64_t Decoder::queries_at(int64_t kv_head) const {
  const int64_t group = shape.heads / shape.kv_heads;
  return kv_head * (group + (shape.grouped_qkv ? 2 : 0)) * shape.head_dim;
}

int64_t Decoder::key_at(int64_t kv_head) const {
  if (shape.grouped_qkv) return queries_at(kv_head + 1) - 2 * shape.head_dim;
  return (shape.heads * (shape.gated_heads ? 2 : 1) + kv_head) * shape.head_dim;
}

int64_t Decoder::value_at(int64_t kv_head) const {
  return key_at(kv_head) + (shape.grouped_qkv ? 1 : shape.kv_heads) * shape.head_dim;
}

// Heads side by side: norm_width elements at a time, those of a head or all of them.
void Decoder::norm_heads(const Norm& norm, int64_t norm_width, int64_t width, float* heads) const {
  if (!norm) return;
  for (int64_t at = 0; at < width; at += norm_width) norm_row(norm, heads + at, norm_width, heads + at);
}

// Norms and rotation of the queries and keys of one token.
void Decoder::turn_heads(const DecoderLayer& layer, int64_t position, float* qkv) const {
  const int64_t dim = shape.head_dim, group = shape.heads / shape.kv_heads, half = shape.rotary_dim / 2;
  const auto rope = shape.rotates_pairs ? cpu_kernels().row.rope_pairs : cpu_kernels().row.rope;
  const float *const cos = ropes[layer.rope_table].cos + position * half, *const sin = ropes[layer.rope_table].sin + position * half;
  const bool over_all = layer.q_norm_width > dim;
  if (over_all) {
    norm_heads(layer.q_norm, layer.q_norm_width, shape.heads * dim, qkv);
    norm_heads(layer.k_norm, layer.k_norm_width, shape.kv_heads * dim, qkv + key_at(0));
  }
  for (int64_t head = 0; head < shape.kv_heads; ++head) {
    float *const queries = qkv + queries_at(head), *const key = qkv + key_at(head);
    for (const bool behind : {false, true}) {
      if (behind) {
        for (int64_t h = 0; h < group; ++h) rope(queries + h * dim, cos, sin, shape.rotary_dim);
        rope(key, cos, sin, shape.rotary_dim);
      }
      if (over_all || behind != shape.norms_behind_rotation) continue;
      norm_heads(layer.q_norm, dim, group * dim, queries);
      norm_heads(layer.k_norm, dim, dim, key);
    }
  }
}

// Of one token: queries, each with its gate behind it, to queries side by side, in place, and gates.
void Decoder::part_gates(const float* from, float* queries, float* gates) const {
  const int64_t dim = shape.head_dim;
  for (int64_t head = 0; head < shape.heads; ++head) {
    std::copy_n(from + (2 * head + 1) * dim, dim, gates + head * dim);
    if (head) std::copy_n(from + 2 * head * dim, dim, queries + head * dim);
  }
}

// Heads of every token; keys and values into the cache; then attention and its packing.
void Decoder::attention(Team& team, const Pass& pass, const DecoderLayer& layer) {
  const CpuKernels& kernels = cpu_kernels();
  const int64_t dim = shape.head_dim, group = shape.heads / shape.kv_heads, width = shape.heads * dim;
  const int64_t stride = (shape.gated_heads ? 2 : 1) * width + 2 * shape.kv_heads * dim, tokens = pass.tokens.size();
  const int64_t slot_bytes = mlspec_cache_row_bytes(pass.kv.dtype, dim);
  Workspace& w = *work_;
  char* const kv = static_cast<char*>(pass.kv.data);
  const auto lane = [&](int64_t which, int64_t row, int64_t head) {
    return kv + (((layer.kv_index * 2 + which) * pass.kv.batch + row) * shape.kv_heads + head) * pass.kv.slots * slot_bytes;
  };
  team.share(tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      float* const row = w.qkv.data() + n * stride;
      const int64_t position = pass.positions[n];
      if (shape.gated_heads) part_gates(row, row, w.head_gates.data() + n * width);
      turn_heads(layer, position, row);
      for (int64_t head = 0; head < shape.kv_heads; ++head) {
        const int64_t at[] = {key_at(head), value_at(head)};
        for (int which = 0; which < 2; ++which)
          kernels.row.narrow(row + at[which], pass.kv.dtype, dim, lane(which, pass.rows[n], head) + pass.slots[n] * slot_bytes);
      }
    }
  });
  const mlspec_acts acts = acts_for(layer.o, tokens);
  const int64_t share = group * dim;  // the elements of one key head's queries: packed where whole groups of a scale
  const int64_t pieces = pass.blocks.size(), items = pass.items.size();
  const bool whole = share % std::max<int64_t>(32, acts.group) == 0 && !layer.o.order && !layer.o.rotates();
  const bool packs = whole && (pieces == 1 || !rows_share_lines(acts));
  const auto attend = [&](const Segment& block, int64_t head) {
    for (int64_t t = 0; block.branch && t < block.count; ++t)
      for (int which = 0; which < 2; ++which)
        std::memcpy(lane(which, block.row, head) + (block.start + t) * slot_bytes,
                    lane(which, block.row, head) + pass.slots[block.first + t] * slot_bytes, slot_bytes);
    const float* const q = w.qkv.data() + block.first * stride + queries_at(head);
    float* const out = w.context.data() + block.first * width + head * share;
    const mlspec_attention_args args{q, stride, block.count, group, block.start, lane(0, block.row, head),
                                     lane(1, block.row, head), pass.kv.dtype, dim, layer.window,
                                     pass.draft_window, shape.attention_scale, shape.attention_softcap, out, width,
                                     layer.sinks ? layer.sinks + head * group : nullptr};
    kernels.attention(&args);
    for (int64_t t = 0; shape.gated_heads && t < block.count; ++t)
      kernels.sigmoid_mul(w.head_gates.data() + (block.first + t) * width + head * share, share, out + t * width);
    const mlspec_pack_args pack{w.context.data(), width, &acts};
    if (packs) pack_piece(layer.o, pack, block.first, block.first + block.count, head * share, (head + 1) * share);
  };
  // A tree's branches come in depth-first order: what a branch is behind lies at its positions, as in a row of its own.
  team.share(items * shape.kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t number = item / shape.kv_heads, behind = number + 1 < items ? pass.items[number + 1] : pieces;
      for (int64_t b = pass.items[number]; b < behind; ++b) attend(pass.blocks[b], item % shape.kv_heads);
    }
  });
  if (layer.o.rotates()) return rotate_and_pack(team, w.context.data(), width, tokens, layer.o);
  if (!packs) pack_rows(team, w.context.data(), width, tokens, layer.o);
}

}  // namespace mlspec
