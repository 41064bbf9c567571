// How do attention and the cache it reads meet torch on a GPU? What the ops take: hf_mlspec/ops/attention.py. Activations are
// bfloat16 here.
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>

#include "row_checks.h"

namespace {

using namespace mlspec;

constexpr int64_t kHeadDimStep = 16, kMaxHeadDim = 256;
constexpr int64_t kTailBytes = 4, kChunk = 64;  // behind the codes of a key or value; slots that attention takes at a time

// Of codes: int8 and int4 (hf_mlspec/formats/cache/); 0: keys and values as they are.
int32_t code_bits(const Tensor& lanes) { return lanes.scalar_type() == at::kChar ? 8 : lanes.scalar_type() == at::kByte ? 4 : 0; }

int64_t head_dim_of(const Tensor& lanes) {
  const int64_t bits = code_bits(lanes);
  return bits ? (lanes.size(3) - kTailBytes) * 8 / bits : lanes.size(3);
}

void check_lanes(const char* op, const char* name, const Tensor& t, const char* first_name, const Tensor& first) {
  TORCH_CHECK_TYPE(code_bits(t) || t.scalar_type() == at::kBFloat16, op, ": ", name, " is ", t.scalar_type(),
                   ", the CUDA kernels take bfloat16 and rows of int8 and int4 codes: load the model in bfloat16");
  check_device(op, name, t, first_name, first);
  TORCH_CHECK_VALUE(t.dim() == 4, op, ": ", name, " has shape ", t.sizes(), ", expected [batch, kv_heads, slots, head_dim]");
  const int64_t dim = head_dim_of(t), step = kVectorBytes / t.element_size();
  TORCH_CHECK_VALUE(dim > 0 && dim <= kMaxHeadDim && dim % kHeadDimStep == 0, op, ": head_dim is ", dim,
                    ", the CUDA kernels take multiples of ", kHeadDimStep, " up to ", kMaxHeadDim);
  TORCH_CHECK_VALUE(t.numel() == 0 || (t.stride(3) == 1 && t.stride(2) == t.size(3)), op, ": ", name, " of shape ", t.sizes(),
                    " is not contiguous in its last two axes (strides ", t.strides(), ")");
  TORCH_CHECK_VALUE(t.stride(0) % step == 0 && t.stride(1) % step == 0, op, ": ", name, " has strides ", t.strides(),
                    ", those of rows and heads must be multiples of ", step);
  if (t.numel() > 0) check_aligned(op, name, t, kVectorBytes);
}

mlspec_cuda_cache cache_of(const char* op, const Tensor& keys, const Tensor& values, const char* first_name, const Tensor& first) {
  check_lanes(op, "keys", keys, first_name, first);
  check_lanes(op, "values", values, first_name, first);
  check_shape(op, "values", values, keys.sizes());
  check_dtype(op, "values", values, keys.scalar_type());
  return {const_cast<void*>(keys.const_data_ptr()), const_cast<void*>(values.const_data_ptr()),
          keys.size(0),   keys.size(1),   keys.size(2),     head_dim_of(keys),
          keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), code_bits(keys)};
}

mlspec_cuda_tokens tokens_of(const char* op, const Tensor& starts, const Tensor& counts, int64_t batch, int64_t width,
                             const char* first_name, const Tensor& first) {
  check_vector(op, "starts", starts, batch, first_name, first);
  check_vector(op, "counts", counts, batch, first_name, first);
  return {starts.const_data_ptr<int32_t>(), counts.const_data_ptr<int32_t>(), width};
}

const float* norm_of(const char* op, const char* name, const Maybe& norm, int64_t dim, const Tensor& first) {
  if (!norm) return nullptr;
  check_vector(op, name, *norm, dim, "qkv", first, at::kFloat);
  return norm->const_data_ptr<float>();
}

Tensor rope_write_rows(const Tensor& qkv, const Maybe& q_norm, const Maybe& k_norm, double eps, const Tensor& cos,
                       const Tensor& sin, const Tensor& starts, const Tensor& counts, const Tensor& keys, const Tensor& values,
                       int64_t heads) {
  constexpr const char* op = "rope_write_rows";
  check_bf16(op, "qkv", qkv);
  const mlspec_cuda_cache cache = cache_of(op, keys, values, "qkv", qkv);
  at::assert_no_internal_overlap(keys);  // rows are written by different blocks
  at::assert_no_internal_overlap(values);
  at::assert_no_overlap(keys, values);
  const int64_t width_of_all = (heads + 2 * cache.kv_heads) * cache.dim;
  TORCH_CHECK_VALUE(heads > 0 && qkv.dim() == 3 && qkv.size(0) == cache.batch && qkv.size(2) == width_of_all, op,
                    ": qkv has shape ", qkv.sizes(), ", expected [", cache.batch, ", width, (heads + 2 * ", cache.kv_heads, ") * ",
                    cache.dim, "] = [", cache.batch, ", width, ", width_of_all, "] for ", heads, " heads");
  TORCH_CHECK_VALUE(eps >= 0, op, ": eps is ", eps, ", expected 0 or a positive number");
  TORCH_CHECK_VALUE(cos.dim() == 2 && cos.size(1) * 2 <= cache.dim, op, ": cos has shape ", cos.sizes(),
                    ", expected [positions, rotary_dim / 2] with rotary_dim up to ", cache.dim);
  check_part(op, "cos", cos, at::kFloat, cos.sizes(), "qkv", qkv, 4);
  check_part(op, "sin", sin, at::kFloat, cos.sizes(), "qkv", qkv, 4);
  const mlspec_cuda_tokens tokens = tokens_of(op, starts, counts, cache.batch, qkv.size(1), "qkv", qkv);
  const float *q_weight = norm_of(op, "q_norm", q_norm, cache.dim, qkv), *k_weight = norm_of(op, "k_norm", k_norm, cache.dim, qkv);
  const CudaCall call(op, qkv);
  Tensor q = at::empty({cache.batch, tokens.width, heads, cache.dim}, qkv.options());
  if (q.numel() == 0) return q;
  const Tensor rows = dense(qkv);
  const mlspec_cuda_rotation rotation{rows.const_data_ptr(),       q_weight, k_weight, cos.const_data_ptr<float>(),
                                      sin.const_data_ptr<float>(), cos.size(0), cos.size(1), heads,
                                      static_cast<float>(eps),     q.mutable_data_ptr()};
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_rope_write_rows(&rotation, &tokens, &cache, &launch));
  return q;
}

#if MLSPEC_HOPPER
constexpr int64_t kMostWidened = int64_t(1) << 30;  // bytes; larger caches are read as they are, by the kernel of single steps

int64_t padded_slots(const mlspec_cuda_cache& cache) { return (cache.slots + kChunk - 1) / kChunk * kChunk; }

// Scales of keys and of values; four bits have zeros of both, too.
int64_t widened_planes(const mlspec_cuda_cache& cache) { return cache.code_bits == 4 ? 4 : 2; }

// Keys and values in bfloat16, and the planes of their scales in float32.
int64_t widened_bytes(const mlspec_cuda_cache& cache) {
  return cache.batch * cache.kv_heads * 4 * (cache.slots * cache.dim + widened_planes(cache) * padded_slots(cache));
}

// A prompt over codes: those of the layer are widened into memory that is given back behind the call. False without room for it.
bool attend_widened(const CudaCall& call, const Tensor& q, mlspec_cuda_attention attention, const mlspec_cuda_tokens& tokens,
                    const mlspec_cuda_cache& cache, const mlspec_cuda_row_launch& launch) {
  const int64_t heads = cache.slots * cache.dim;
  Tensor lanes, scales;
  try {
    lanes = at::empty({2, cache.batch, cache.kv_heads, cache.slots, cache.dim}, q.options());
    scales = at::empty({widened_planes(cache), cache.batch, cache.kv_heads, padded_slots(cache)}, q.options().dtype(at::kFloat));
  } catch (const c10::OutOfMemoryError&) {
    return false;
  }
  mlspec_cuda_cache wide = cache;
  wide.code_bits = 0, wide.keys = lanes.mutable_data_ptr(), wide.values = lanes.select(0, 1).mutable_data_ptr();
  wide.key_head_stride = wide.value_head_stride = heads;
  wide.key_batch_stride = wide.value_batch_stride = cache.kv_heads * heads;
  const auto plane = [&](int64_t of) { return scales.select(0, of).mutable_data_ptr<float>(); };
  attention.scales = {plane(0), plane(1), nullptr, nullptr};
  if (cache.code_bits == 4) attention.scales.key_zeros = plane(2), attention.scales.value_zeros = plane(3);
  call.check(mlspec_cuda_widen_cache(&tokens, &cache, &wide, &attention.scales, &launch));
  call.check(mlspec_cuda_ragged_attention_prefill(&attention, &tokens, &wide, &launch));
  return true;
}
#endif

Tensor ragged_attention_rows(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& starts, const Tensor& counts,
                             double scale, int64_t window, double softcap, int64_t draft_window, const Maybe& sinks) {
  constexpr const char* op = "ragged_attention_rows";
  check_bf16(op, "q", q);
  const mlspec_cuda_cache cache = cache_of(op, keys, values, "q", q);
  TORCH_CHECK_VALUE(q.dim() == 4 && q.size(0) == cache.batch && q.size(3) == cache.dim && cache.kv_heads > 0 &&
                        q.size(2) % cache.kv_heads == 0,
                    op, ": q has shape ", q.sizes(), ", the cache takes [", cache.batch, ", width, a multiple of ", cache.kv_heads,
                    " heads, ", cache.dim, "]");
  const mlspec_cuda_tokens tokens = tokens_of(op, starts, counts, cache.batch, q.size(1), "q", q);
  TORCH_CHECK_VALUE(std::isfinite(scale), op, ": scale is ", scale, ", expected a finite number");
  TORCH_CHECK_VALUE(window >= 0, op, ": window is ", window, ", expected 0 (none) or a number of slots");
  check_softcap(op, softcap);
  TORCH_CHECK_VALUE(draft_window >= 0, op, ": draft_window is ", draft_window, ", expected 0 (none) or a number of slots");
  if (sinks) check_vector(op, "sinks", *sinks, q.size(2), "q", q, at::kFloat);
  const CudaCall call(op, q);
  Tensor out = at::empty(q.sizes(), q.options());
  if (out.numel() == 0) return out;
  const Tensor rows = dense(q);
  const DeviceLimits& limits = limits_of(call, q.device().index());
  const mlspec_cuda_attention attention{rows.const_data_ptr(),     out.mutable_data_ptr(), q.size(2), window, draft_window,
                                        static_cast<float>(scale), static_cast<float>(softcap), limits.shared_bytes,
                                        limits.multiprocessors,    0,        0, {},
                                        sinks ? sinks->const_data_ptr<float>() : nullptr};
  const mlspec_cuda_row_launch launch = how(call);
#if MLSPEC_HOPPER
  if (hopper_serves(call.capability()) && mlspec_cuda_attention_prefill_serves(&attention, &tokens, &cache)) {
    if (!cache.code_bits) {
      call.check(mlspec_cuda_ragged_attention_prefill(&attention, &tokens, &cache, &launch));
      return out;
    }
    // A graph would keep the memory for as long as it lives; the kernel of single steps has the same bits.
    if (!call.capturing() && widened_bytes(cache) <= kMostWidened && attend_widened(call, q, attention, tokens, cache, launch)) return out;
  }
#endif
  call.check(mlspec_cuda_ragged_attention_rows(&attention, &tokens, &cache, &launch));
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(mlspec, CUDA, m) {
  m.impl("rope_write_rows", rope_write_rows);
  m.impl("ragged_attention_rows", ragged_attention_rows);
}
