// How do the kernels over a ragged cache meet torch: rotary and write, attention?
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../operands.h"
#include "../../cpu/attention/attention_limits.h"
#include "../../cpu/threads/parallel.h"

namespace {

using namespace mlspec;
using at::Tensor;

// Keys or values [batch, kv_heads, slots, head_dim], or rows of codes [.., mlspec_cache_row_bytes], whose lanes (the last two axes)
// are dense; batch and heads may have gaps.
struct Lanes {
  char* data;
  mlspec_dtype dtype;
  int64_t kv_heads, slots, width, head_dim, batch_stride, head_stride;

  char* at(int64_t row, int64_t head, int64_t slot) const {
    return bytes_at(data, dtype, row * batch_stride + head * head_stride + slot * width);
  }
};

Lanes check_lanes(const char* op, const char* name, const Tensor& t) {
  const std::optional<mlspec_dtype> codes = rows_of_codes(t.scalar_type());
  TORCH_CHECK_TYPE(t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16 || codes, op, ": ", name, " is ",
                   t.scalar_type(), ", a cache is float32, bfloat16, int8 or uint8");
  const mlspec_dtype dtype = codes.value_or(t.scalar_type() == at::kFloat ? MLSPEC_FLOAT32 : MLSPEC_BFLOAT16);
  TORCH_CHECK_VALUE(t.dim() == 4, op, ": ", name, " has shape ", t.sizes(), ", expected [batch, kv_heads, slots, head_dim]");
  TORCH_CHECK_VALUE(t.numel() == 0 || (t.stride(3) == 1 && t.stride(2) == t.size(3)), op, ": ", name, " of shape ", t.sizes(),
                    " is not contiguous in its last two axes (strides ", t.strides(), ")");
  check_cpu(op, name, t);
  check_aligned(op, name, t, static_cast<int64_t>(t.element_size()));
  TORCH_CHECK_VALUE(!codes || t.size(3) > MLSPEC_CACHE_TAIL_BYTES, op, ": ", name, " has shape ", t.sizes(), ", rows of ",
                    t.scalar_type(), " are codes and ", int64_t(MLSPEC_CACHE_TAIL_BYTES), " bytes behind them");
  return {static_cast<char*>(const_cast<void*>(t.const_data_ptr())),
          dtype,
          t.size(1),
          t.size(2),
          t.size(3),
          mlspec_cache_head_dim(dtype, t.size(3)),
          t.stride(0),
          t.stride(1)};
}

// q [batch, tokens, heads, head_dim] and where its rows start in a cache of `slots` slots.
void check_queries(const char* op, const Tensor& q, const Lanes& lanes, int64_t batch, at::IntArrayRef starts) {
  TORCH_CHECK_VALUE(q.dim() == 4 && q.size(0) == batch && q.size(3) == lanes.head_dim && lanes.kv_heads > 0 &&
                        q.size(2) % lanes.kv_heads == 0,
                    op, ": q has shape ", q.sizes(), ", the cache takes [", batch, ", tokens, a multiple of ", lanes.kv_heads,
                    " heads, ", lanes.head_dim, "]");
  TORCH_CHECK_VALUE(static_cast<int64_t>(starts.size()) == batch, op, ": ", starts.size(), " starts for ", batch, " rows");
  for (int64_t r = 0; r < batch; ++r)
    TORCH_CHECK_VALUE(starts[r] >= 0 && starts[r] <= lanes.slots - q.size(1), op, ": row ", r, " starts at ", starts[r],
                      " and has ", q.size(1), " tokens, the cache has slots 0 to ", lanes.slots - 1);
}

// -> rotary_dim / 2
int64_t check_rotation(const char* op, const Tensor& cos, const Tensor& sin, int64_t head_dim, at::IntArrayRef starts,
                       int64_t tokens) {
  check_dtype(op, "cos", cos, at::kFloat);
  TORCH_CHECK_VALUE(cos.dim() == 2 && cos.size(1) * 2 <= head_dim, op, ": cos has shape ", cos.sizes(),
                    ", expected [positions, rotary_dim / 2] with rotary_dim up to ", head_dim);
  check_same(op, "sin", sin, "cos", cos);
  check_cpu(op, "cos", cos);
  for (size_t r = 0; r < starts.size(); ++r)
    TORCH_CHECK_VALUE(starts[r] + tokens <= cos.size(0), op, ": row ", r, " reaches position ", starts[r] + tokens - 1,
                      ", cos has positions 0 to ", cos.size(0) - 1);
  return cos.size(1);
}

// Heads of one dtype, one behind the other, on their way through float32.
struct Heads {
  const void* data;
  mlspec_dtype dtype;
  int64_t dim;
  const mlspec_row_ops* ops;

  // Head `index`, rotated by cos and sin of `half` elements (none: 0), to out[dim] in out_dtype; room: [dim].
  void rotate(int64_t index, const float* cos, const float* sin, int64_t half, float* room, mlspec_dtype out_dtype,
              void* out) const {
    ops->widen(bytes_at(data, dtype, index * dim), dtype, 1.0f, dim, room);
    if (half) ops->rope(room, cos, sin, 2 * half);
    ops->narrow(room, out_dtype, dim, out);
  }
};

// Rotates q and k, writes k and v to slots starts[r] + t of every row; -> rotated q.
Tensor rope_write(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                  at::IntArrayRef starts, const Tensor& keys, const Tensor& values) {
  constexpr const char* op = "rope_write";
  const mlspec_dtype dtype = float_dtype(op, "q", q);
  const Lanes key_lanes = check_lanes(op, "keys", keys), value_lanes = check_lanes(op, "values", values);
  check_same(op, "values", values, "keys", keys);
  at::assert_no_internal_overlap(keys);  // rows are written by different threads
  at::assert_no_internal_overlap(values);
  at::assert_no_overlap(keys, values);
  const int64_t batch = keys.size(0), dim = key_lanes.head_dim, kv_heads = key_lanes.kv_heads;
  check_queries(op, q, key_lanes, batch, starts);
  const int64_t tokens = q.size(1), heads = q.size(2), half = check_rotation(op, cos, sin, dim, starts, tokens);
  check_dtype(op, "k", k, q.scalar_type());
  check_shape(op, "k", k, {batch, tokens, kv_heads, dim});
  check_cpu(op, "k", k);
  check_same(op, "v", v, "k", k);
  Tensor rotated = at::empty(q.sizes(), q.options());
  const Tensor flat_q = q.contiguous(), flat_k = k.contiguous(), flat_v = v.contiguous();
  const Tensor flat_cos = cos.contiguous(), flat_sin = sin.contiguous();
  const int threads = threads_for(4.0 * static_cast<double>(q.numel() + 2 * k.numel()));
  const Tensor scratch = at::empty({threads, dim}, at::kFloat);
  const mlspec_row_ops& ops = cpu_kernels().row;
  const Heads q_heads{flat_q.const_data_ptr(), dtype, dim, &ops}, k_heads{flat_k.const_data_ptr(), dtype, dim, &ops};
  const Heads v_heads{flat_v.const_data_ptr(), dtype, dim, &ops};
  void* const out = rotated.mutable_data_ptr();
  const float *cosines = flat_cos.const_data_ptr<float>(), *sines = flat_sin.const_data_ptr<float>();
  float* const rooms = scratch.mutable_data_ptr<float>();
  run(threads, [&](Team& team) {
    float* const room = rooms + team.index() * dim;
    team.share(batch * tokens, rows_per_piece((heads + 2 * kv_heads) * dim), [&](int64_t i, int64_t end) {
      for (; i < end; ++i) {
        const int64_t row = i / tokens, slot = starts[row] + i % tokens;
        const float *c = cosines + slot * half, *s = sines + slot * half;
        for (int64_t h = i * heads; h < (i + 1) * heads; ++h)
          q_heads.rotate(h, c, s, half, room, dtype, bytes_at(out, dtype, h * dim));
        for (int64_t h = 0; h < kv_heads; ++h) {
          k_heads.rotate(i * kv_heads + h, c, s, half, room, key_lanes.dtype, key_lanes.at(row, h, slot));
          v_heads.rotate(i * kv_heads + h, c, s, 0, room, value_lanes.dtype, value_lanes.at(row, h, slot));
        }
      }
    });
  });
  return rotated;
}

// Token t of row r sits in slot starts[r] + t and sees the slots up to its own.
Tensor ragged_attention(const Tensor& q, const Tensor& keys, const Tensor& values, at::IntArrayRef starts, double scale,
                        int64_t window, double softcap, int64_t draft_window) {
  constexpr const char* op = "ragged_attention";
  const mlspec_dtype dtype = float_dtype(op, "q", q);
  const Lanes key_lanes = check_lanes(op, "keys", keys), value_lanes = check_lanes(op, "values", values);
  check_same(op, "values", values, "keys", keys);
  const int64_t batch = keys.size(0), dim = key_lanes.head_dim, kv_heads = key_lanes.kv_heads;
  check_queries(op, q, key_lanes, batch, starts);
  TORCH_CHECK_VALUE(dim <= kMaxHeadDim, op, ": head_dim is ", dim, ", the kernel takes up to ", kMaxHeadDim);
  TORCH_CHECK_VALUE(window >= 0 && softcap >= 0, op, ": window is ", window, " and softcap ", softcap,
                    ", both are 0 (none) or positive");
  TORCH_CHECK_VALUE(draft_window >= 0, op, ": draft_window is ", draft_window, ", expected 0 (none) or a number of slots");
  Tensor y = at::empty(q.sizes(), q.options());
  if (y.numel() == 0) return y;
  const int64_t tokens = q.size(1), heads = q.size(2), group = heads / kv_heads, items = q.numel();
  const Tensor flat = q.contiguous(), wide = at::empty({2, items}, at::kFloat);
  const void* const in = flat.const_data_ptr();
  void* const out = y.mutable_data_ptr();
  float *const wide_q = wide.mutable_data_ptr<float>(), *const wide_y = wide_q + items;
  const int64_t blocks = (tokens + kAttentionTokens - 1) / kAttentionTokens, width = heads * dim;
  const mlspec_row_ops& ops = cpu_kernels().row;
  const int64_t longest = *std::max_element(starts.begin(), starts.end()) + tokens;
  run(threads_for(2.0 * static_cast<double>(items) * static_cast<double>(longest)), [&](Team& team) {
    team.share(batch * tokens, rows_per_piece(width), [&](int64_t i, int64_t end) {
      ops.widen(bytes_at(in, dtype, i * width), dtype, 1.0f, (end - i) * width, wide_q + i * width);
    });
    team.share(batch * kv_heads * blocks, 1, [&](int64_t item, int64_t end) {
      for (; item < end; ++item) {
        const int64_t row = item / (kv_heads * blocks), head = item / blocks % kv_heads;
        const int64_t token = item % blocks * kAttentionTokens, at = ((row * tokens + token) * heads + head * group) * dim;
        const mlspec_attention_args args{wide_q + at, width, std::min(kAttentionTokens, tokens - token), group,
                                         starts[row] + token, key_lanes.at(row, head, 0), value_lanes.at(row, head, 0),
                                         key_lanes.dtype, dim, window, draft_window, static_cast<float>(scale),
                                         static_cast<float>(softcap), wide_y + at, width};
        cpu_kernels().attention(&args);
      }
    });
    team.share(batch * tokens, rows_per_piece(width), [&](int64_t i, int64_t end) {
      ops.narrow(wide_y + i * width, dtype, (end - i) * width, bytes_at(out, dtype, i * width));
    });
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(mlspec, CPU, m) {
  m.impl("rope_write", rope_write);
  m.impl("ragged_attention", ragged_attention);
}
