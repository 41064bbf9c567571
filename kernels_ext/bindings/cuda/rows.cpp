// How do the kernels over rows, their cache and their logits meet torch on a GPU? What the ops take: hf_mlspec/ops/rows.py and
// attention.py. Activations are bfloat16 here.
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <tuple>

#include "device.h"
#include "../../cuda/rows/rows.h"

namespace {

using namespace mlspec;
using at::Tensor;
using Maybe = std::optional<Tensor>;

constexpr int64_t kHeadDimStep = 16, kMaxHeadDim = 256, kVectorBytes = 16;
constexpr int64_t kTailBytes = 4, kChunk = 64;  // behind the codes of a key or value; slots that attention takes at a time
const char* const kActivationNames = "{'silu': 0, 'gelu_pytorch_tanh': 1, 'gelu_new': 1, 'gelu': 2, 'relu': 3}";

mlspec_cuda_row_launch how(const CudaCall& call) { return {call.stream(), call.overlap(), call.capability() >= 90}; }

void check_bf16(const char* op, const char* name, const Tensor& t) {
  TORCH_CHECK_TYPE(t.scalar_type() == at::kBFloat16, op, ": ", name, " is ", t.scalar_type(),
                   ", the CUDA kernels take bfloat16: load the model in it");
}

bool is_aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kVectorBytes == 0; }

// Rows one behind the other, as kernels read them; what lies so already is not copied.
Tensor dense(const Tensor& t) {
  const Tensor rows = t.contiguous();
  return is_aligned(rows) ? rows : rows.clone();
}

// A dense vector of int32 (or `dtype`) beside `first`.
void check_vector(const char* op, const char* name, const Tensor& t, int64_t count, const char* first_name, const Tensor& first,
                  at::ScalarType dtype = at::kInt) {
  check_part(op, name, t, dtype, {count}, first_name, first, t.element_size());
}

void check_softcap(const char* op, double softcap) {
  TORCH_CHECK_VALUE(softcap >= 0 && std::isfinite(softcap), op, ": softcap is ", softcap, ", expected 0 (none) or a positive number");
}

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

std::tuple<Tensor, Tensor> norm_by(const char* op, const Tensor& x, const Tensor& weight, double eps, const Maybe& residual,
                                   const Tensor* order) {
  check_bf16(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() > 0, op, ": x is a scalar, it must have at least one axis");
  const int64_t width = x.size(-1);
  float_dtype(op, "weight", weight);
  check_shape(op, "weight", weight, {width});
  check_device(op, "weight", weight, "x", x);
  if (residual) {
    check_bf16(op, "residual", *residual);
    check_shape(op, "residual", *residual, x.sizes());
    check_device(op, "residual", *residual, "x", x);
  }
  if (order) {
    TORCH_CHECK_VALUE(x.dim() == 2, op, ": x has shape ", x.sizes(), ", expected [n, width]");
    check_vector(op, "order", *order, width, "x", x);
  }
  const CudaCall call(op, x);
  Tensor normed = at::empty(x.sizes(), x.options()), total = at::empty(residual ? x.sizes() : at::IntArrayRef{0}, x.options());
  if (x.numel() == 0) return {normed, total};
  const Tensor flat = dense(x), other = residual ? dense(*residual) : Tensor();
  const Tensor scales = dense(weight.scalar_type() == at::kHalf ? weight.to(at::kFloat) : weight);
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_rms_norm(flat.const_data_ptr(), residual ? other.const_data_ptr() : nullptr, scales.const_data_ptr(),
                                  scales.scalar_type() == at::kBFloat16, static_cast<float>(eps), flat.numel() / width, width,
                                  order ? order->const_data_ptr<int32_t>() : nullptr, normed.mutable_data_ptr(), residual ? total.mutable_data_ptr() : nullptr, &launch));
  return {normed, total};
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps, const Maybe& residual) {
  return norm_by("rms_norm", x, weight, eps, residual, nullptr);
}

std::tuple<Tensor, Tensor> rms_norm_in_order(const Tensor& x, const Tensor& weight, double eps, const Maybe& residual,
                                             const Tensor& order) {
  return norm_by("rms_norm_in_order", x, weight, eps, residual, &order);
}

Tensor silu_mul(const Tensor& gate, const Tensor& up) {
  constexpr const char* op = "silu_mul";
  check_bf16(op, "gate", gate);
  check_bf16(op, "up", up);
  check_shape(op, "up", up, gate.sizes());
  check_device(op, "up", up, "gate", gate);
  const CudaCall call(op, gate);
  Tensor out = at::empty(gate.sizes(), gate.options());
  if (out.numel() == 0) return out;
  const Tensor flat_gate = dense(gate), flat_up = dense(up);
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_gated(flat_gate.const_data_ptr(), flat_up.const_data_ptr(), out.numel(), 1, out.numel(), 0, nullptr,
                               out.mutable_data_ptr(), &launch));
  return out;
}

Tensor gated_by(const char* op, const Tensor& gate_up, int64_t activation, const Tensor* order) {
  check_bf16(op, "gate_up", gate_up);
  TORCH_CHECK_VALUE(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, op, ": gate_up has shape ", gate_up.sizes(),
                    ", expected [n, 2 * intermediate]");
  TORCH_CHECK_VALUE(activation >= 0 && activation <= 3, op, ": activation is ", activation, ", choose one of ", kActivationNames);
  const int64_t n = gate_up.size(0), width = gate_up.size(1) / 2;
  if (order) check_vector(op, "order", *order, width, "gate_up", gate_up);
  const CudaCall call(op, gate_up);
  Tensor out = at::empty({n, width}, gate_up.options());
  if (out.numel() == 0) return out;
  const Tensor rows = dense(gate_up);
  const auto* gate = static_cast<const char*>(rows.const_data_ptr());
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_gated(gate, gate + width * 2, 2 * width, n, width, static_cast<int32_t>(activation),
                               order ? order->const_data_ptr<int32_t>() : nullptr, out.mutable_data_ptr(), &launch));
  return out;
}

Tensor gated(const Tensor& gate_up, int64_t activation) { return gated_by("gated", gate_up, activation, nullptr); }

Tensor gated_in_order(const Tensor& gate_up, int64_t activation, const Tensor& order) {
  return gated_by("gated_in_order", gate_up, activation, &order);
}

Tensor ordered_rows(const Tensor& x, const Tensor& order) {
  constexpr const char* op = "ordered_rows";
  check_bf16(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() == 2, op, ": x has shape ", x.sizes(), ", expected [n, width]");
  check_vector(op, "order", order, x.size(1), "x", x);
  const CudaCall call(op, x);
  Tensor out = at::empty(x.sizes(), x.options());
  if (out.numel() == 0) return out;
  const Tensor rows = dense(x);
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_ordered_rows(rows.const_data_ptr(), order.const_data_ptr<int32_t>(), x.size(0), x.size(1),
                                      out.mutable_data_ptr(), &launch));
  return out;
}

Tensor embed_rows(const Tensor& ids, const Tensor& table, double scale) {
  constexpr const char* op = "embed_rows";
  check_dtype(op, "ids", ids, at::kInt);
  TORCH_CHECK_VALUE(ids.dim() == 1, op, ": ids has shape ", ids.sizes(), ", expected [n]");
  check_contiguous(op, "ids", ids);
  TORCH_CHECK_TYPE(table.scalar_type() == at::kFloat || table.scalar_type() == at::kBFloat16, op, ": table is ",
                   table.scalar_type(), ", expected float32 or bfloat16");
  TORCH_CHECK_VALUE(table.dim() == 2 && table.size(0) > 0, op, ": table has shape ", table.sizes(),
                    ", expected [vocab, hidden] with a vocab of 1 or more");
  check_device(op, "table", table, "ids", ids);
  check_contiguous(op, "table", table);
  if (table.numel() > 0) check_aligned(op, "table", table, kVectorBytes);
  TORCH_CHECK_VALUE(std::isfinite(scale), op, ": scale is ", scale, ", expected a finite number (1.0: the table's rows as they are)");
  const CudaCall call(op, ids);
  Tensor out = at::empty({ids.size(0), table.size(1)}, table.options());
  if (out.numel() == 0) return out;
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_embed_rows(ids.const_data_ptr<int32_t>(), table.const_data_ptr(), table.scalar_type() == at::kBFloat16,
                                    table.size(0), ids.size(0), table.size(1), static_cast<float>(scale), out.mutable_data_ptr(),
                                    &launch));
  return out;
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

struct DeviceLimits {
  std::atomic<int> shared_bytes{0}, multiprocessors{0};
};

// Of a block, and of the GPU; asked once per device.
const DeviceLimits& limits_of(const CudaCall& call, c10::DeviceIndex device) {
  static std::array<DeviceLimits, C10_COMPILE_TIME_MAX_GPUS> known;
  DeviceLimits& limits = known[device];
  if (limits.multiprocessors.load()) return limits;
  int shared = 0, multiprocessors = 0;
  cudaError_t error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  call.check(error == cudaSuccess ? nullptr : cudaGetErrorString(error));
  limits.shared_bytes.store(shared);
  limits.multiprocessors.store(multiprocessors);
  return limits;
}

#if MLSPEC_HOPPER
constexpr int64_t kMostWidened = int64_t(1) << 30;  // bytes; larger caches are read as they are, by the kernel of single steps
int64_t widened_bytes(const mlspec_cuda_cache& cache) { return 4 * cache.batch * cache.kv_heads * cache.slots * cache.dim; }

// A prompt over codes: those of the layer are widened into memory that is given back behind the call. False without room for it.
bool attend_widened(const CudaCall& call, const Tensor& q, mlspec_cuda_attention attention, const mlspec_cuda_tokens& tokens,
                    const mlspec_cuda_cache& cache, const mlspec_cuda_row_launch& launch) {
  const int64_t padded = (cache.slots + kChunk - 1) / kChunk * kChunk, heads = cache.slots * cache.dim;
  Tensor lanes, scales;
  try {
    lanes = at::empty({2, cache.batch, cache.kv_heads, cache.slots, cache.dim}, q.options());
    scales = at::empty({4, cache.batch, cache.kv_heads, padded}, q.options().dtype(at::kFloat));
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

Tensor hadamard_rows(const Tensor& x, const Maybe& matrix, int64_t size, int64_t inner) {
  constexpr const char* op = "hadamard_rows";
  check_bf16(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() > 0, op, ": x is a scalar, it must have at least one axis");
  const int64_t order = matrix ? matrix->dim() ? matrix->size(0) : 0 : 1, width = x.size(-1);
  if (matrix) check_part(op, "matrix", *matrix, at::kFloat, {order, order}, "x", x, kVectorBytes);
  TORCH_CHECK_VALUE(!matrix || (order > 0 && order % 4 == 0 && order <= MLSPEC_HADAMARD_MAX_ORDER), op, ": matrix has ", order,
                    " rows, expected a multiple of 4 up to ", int64_t(MLSPEC_HADAMARD_MAX_ORDER));
  const int64_t powers = size / order;
  TORCH_CHECK_VALUE(size > 0 && size % order == 0 && (powers & (powers - 1)) == 0, op, ": size is ", size, ", expected ", order,
                    " times a power of two");
  TORCH_CHECK_VALUE(inner > 0 && width % (size * inner) == 0, op, ": x has ", width, " columns, size ", size, " times inner ", inner,
                    " does not divide them");
  const CudaCall call(op, x);
  Tensor out = at::empty(x.sizes(), x.options());
  if (out.numel() == 0) return out;
  const Tensor rows = dense(x);
  const mlspec_cuda_hadamard hadamard{rows.const_data_ptr(), matrix ? matrix->const_data_ptr<float>() : nullptr,
                                      out.mutable_data_ptr(), rows.numel() / width, width, order, size, inner,
                                      limits_of(call, x.device().index()).shared_bytes,
                                      static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)))};
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_hadamard_rows(&hadamard, &launch));
  return out;
}

Tensor ragged_attention_rows(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& starts, const Tensor& counts,
                             double scale, int64_t window, double softcap, int64_t draft_window) {
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
  const CudaCall call(op, q);
  Tensor out = at::empty(q.sizes(), q.options());
  if (out.numel() == 0) return out;
  const Tensor rows = dense(q);
  const DeviceLimits& limits = limits_of(call, q.device().index());
  const mlspec_cuda_attention attention{rows.const_data_ptr(),     out.mutable_data_ptr(), q.size(2), window, draft_window,
                                        static_cast<float>(scale), static_cast<float>(softcap), limits.shared_bytes,
                                        limits.multiprocessors,    0,        0};
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

std::tuple<Tensor, Tensor> choose_rows(const Tensor& logits, double softcap, const Maybe& seed, const Maybe& streams,
                                       const Maybe& positions) {
  constexpr const char* op = "choose_rows";
  TORCH_CHECK_TYPE(logits.scalar_type() == at::kFloat || logits.scalar_type() == at::kBFloat16, op, ": logits is ",
                   logits.scalar_type(), ", expected float32 or bfloat16");
  TORCH_CHECK_VALUE(logits.dim() == 2 && logits.size(1) > 0, op, ": logits has shape ", logits.sizes(),
                    ", expected [n, vocab] with a vocab of 1 or more");
  check_softcap(op, softcap);
  TORCH_CHECK_VALUE(seed.has_value() == streams.has_value() && seed.has_value() == positions.has_value(), op, ": ",
                    positions ? "positions " : "", seed ? "seed " : "", streams ? "streams " : "",
                    "given alone; noise needs seed, streams and positions");
  const int64_t n = logits.size(0);
  if (seed) {
    check_vector(op, "seed", *seed, 1, "logits", logits, at::kLong);
    check_vector(op, "streams", *streams, n, "logits", logits);
    check_vector(op, "positions", *positions, n, "logits", logits);
  }
  const CudaCall call(op, logits);
  Tensor tokens = at::empty({n}, logits.options().dtype(at::kInt)), confidence = at::empty({n}, logits.options().dtype(at::kFloat));
  if (n == 0) return {tokens, confidence};
  const Tensor rows = dense(logits);
  const mlspec_cuda_choice choice{rows.const_data_ptr(),
                                  logits.scalar_type() == at::kBFloat16,
                                  n,
                                  logits.size(1),
                                  static_cast<float>(softcap),
                                  seed ? seed->const_data_ptr<int64_t>() : nullptr,
                                  seed ? streams->const_data_ptr<int32_t>() : nullptr,
                                  seed ? positions->const_data_ptr<int32_t>() : nullptr,
                                  tokens.mutable_data_ptr<int32_t>(),
                                  confidence.mutable_data_ptr<float>()};
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_choose_rows(&choice, &launch));
  return {tokens, confidence};
}

}  // namespace

TORCH_LIBRARY_IMPL(mlspec, CUDA, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("rms_norm_in_order", rms_norm_in_order);
  m.impl("silu_mul", silu_mul);
  m.impl("gated", gated);
  m.impl("gated_in_order", gated_in_order);
  m.impl("ordered_rows", ordered_rows);
  m.impl("hadamard_rows", hadamard_rows);
  m.impl("embed_rows", embed_rows);
  m.impl("rope_write_rows", rope_write_rows);
  m.impl("ragged_attention_rows", ragged_attention_rows);
  m.impl("choose_rows", choose_rows);
}
