// How does a gated delta net of a GPU go from token to token? Columns of a state never meet: a warp has 16 of them in its registers
// and runs all tokens of a row in order (arXiv 2412.06464), so the bits of a token are the same alone and among others.
#include "delta_tokens.cuh"

namespace mlspec {
namespace {

constexpr int kKeyGroups = 8;     // lanes that share the rows of a column
constexpr int kColumns = 4;       // of a lane
constexpr int kWarpColumns = kWarp / kKeyGroups * kColumns;
constexpr int kScanWarps = 2;
constexpr int kMostTokenBlocks = 1024;
constexpr int kCopied = 512;      // elements that a warp keeps of a token

template <int kRows>
__device__ __forceinline__ void load_rows(const float* from, float (&to)[kRows]) {
#pragma unroll
  for (int i = 0; i < kRows; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
  }
}

// The columns [column, column + 4) of a head's state, rows [first, first + kRows).
template <int kRows>
struct StatePart {
  float s[kRows][kColumns];

  __device__ __forceinline__ void fill(float value) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) s[i][c] = value;
  }

  __device__ __forceinline__ void load(const float* from, int first, int rows, int width) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float4 four = make_float4(0.f, 0.f, 0.f, 0.f);
      if (first + i < rows) four = *reinterpret_cast<const float4*>(from + int64_t(first + i) * width);
      s[i][0] = four.x, s[i][1] = four.y, s[i][2] = four.z, s[i][3] = four.w;
    }
  }

  __device__ __forceinline__ void store(float* to, int first, int rows, int width) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (first + i < rows)
        *reinterpret_cast<float4*>(to + int64_t(first + i) * width) = make_float4(s[i][0], s[i][1], s[i][2], s[i][3]);
  }

  // Of each column the sum of its elements times those of x, over all lanes that share it.
  __device__ __forceinline__ void times(const float (&x)[kRows], float (&sums)[kColumns]) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kRows; ++i) sum = fmaf(s[i][c], x[i], sum);
#pragma unroll
      for (int step = kKeyGroups / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step * (kWarp / kKeyGroups));
      sums[c] = sum;
    }
  }

  __device__ __forceinline__ void move(const float (&k)[kRows], const float (&change)[kColumns], float decay) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) s[i][c] = fmaf(k[i], change[c], s[i][c] * decay);
  }
};

// What S says of q is known before S moves: S^T q = decay S^T q + (q k) change.
template <int kRows>
__global__ void __launch_bounds__(kScanWarps* kWarp) delta_scan_kernel(mlspec_cuda_delta a) {
  launch_dependents();
  const int row = blockIdx.z, head = blockIdx.y, lane = threadIdx.x % kWarp, group = lane / (kWarp / kKeyGroups);
  const int column = (blockIdx.x * kScanWarps + threadIdx.x / kWarp) * kWarpColumns + lane % (kWarp / kKeyGroups) * kColumns;
  const int key_head = head / (a.value_heads / a.key_heads), first = group * kRows;
  constexpr int kPadded = kRows * kKeyGroups;
  wait_for_previous_kernel();
  const DeltaSpan span = span_of(a, row);
  const bool mine = column < a.value_dim;  // of the last warp some lanes have no columns; they take part in sums
  float* const state = a.states + (int64_t(row) * a.value_heads + head) * a.key_dim * a.value_dim + (mine ? column : 0);
  StatePart<kRows> own;
  own.fill(span.lost ? __int_as_float(0x7FC00000) : 0.f);
  if (span.begin > 0 && !span.lost) own.load(state, first, a.key_dim, a.value_dim);
  const int settled = (a.settles == MLSPEC_STATE_AT_END ? span.end : span.start) - a.behind;
  const bool settles = a.settles != MLSPEC_STATE_KEEP && settled > span.begin && mine;
  for (int p = span.begin; p < span.end; ++p) {
    if (p == settled && settles) own.store(state, first, a.key_dim, a.value_dim);
    const int64_t slot = int64_t(row) * (a.window + a.width) + p - span.begin;
    const float* const keys = a.keys + (slot * a.key_heads + key_head) * 2 * kPadded + first;
    const float2 weights = *reinterpret_cast<const float2*>(a.weights + (slot * a.value_heads + head) * 2);
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    if (mine) v = *reinterpret_cast<const float4*>(a.values + (slot * a.value_heads + head) * a.value_dim + column);
    float k[kRows], known[kColumns], change[kColumns];
    load_rows<kRows>(keys, k);
    own.times(k, known);
    change[0] = fmaf(-weights.x, known[0], v.x) * weights.y, change[1] = fmaf(-weights.x, known[1], v.y) * weights.y;
    change[2] = fmaf(-weights.x, known[2], v.z) * weights.y, change[3] = fmaf(-weights.x, known[3], v.w) * weights.y;
    if (p >= span.start) {
      float q[kRows], asked[kColumns];
      load_rows<kRows>(keys + kPadded, q);
      own.times(q, asked);
      const float product = a.products[slot * a.key_heads + key_head];
      if (mine && group == 0) {
        float* const to = a.mixed + ((int64_t(row) * a.width + p - span.start) * a.value_heads + head) * a.value_dim + column;
        *reinterpret_cast<float4*>(to) =
            make_float4(fmaf(product, change[0], asked[0] * weights.x), fmaf(product, change[1], asked[1] * weights.x),
                        fmaf(product, change[2], asked[2] * weights.x), fmaf(product, change[3], asked[3] * weights.x));
      }
    }
    own.move(k, change, weights.x);
  }
  if (span.end == settled && settles) own.store(state, first, a.key_dim, a.value_dim);
}

// Heads normed and gated, then what later calls read of a token: only now, as tokens of this one may have read what was there.
__global__ void __launch_bounds__(kUnits* kWarp) delta_finish_kernel(mlspec_cuda_delta a) {
  launch_dependents();
  const int row = blockIdx.z, t = blockIdx.y, lane = threadIdx.x % kWarp, unit = blockIdx.x * kUnits + threadIdx.x / kWarp;
  const int channels = channels_of(a), kept = channels + 2 * a.value_heads;
  wait_for_previous_kernel();
  const int count = min(a.counts[row], a.width), start = a.starts[row];
  const int64_t token = int64_t(row) * a.width + t;
  const auto* const from = static_cast<const __nv_bfloat16*>(a.qkvz) + token * (channels + a.value_heads * a.value_dim);
  if (unit < a.value_heads) {
    __nv_bfloat16* const out = static_cast<__nv_bfloat16*>(a.out) + (token * a.value_heads + unit) * a.value_dim;
    if (t >= count) {
      for (int i = lane; i < a.value_dim; i += kWarp) out[i] = __float2bfloat16_rn(0.f);
      return;
    }
    const float* const mixed = a.mixed + (token * a.value_heads + unit) * a.value_dim;
    const __nv_bfloat16* const gates = from + channels + unit * a.value_dim;
    float squares = 0.f;
    for (int i = lane; i < a.value_dim; i += kWarp) squares = fmaf(mixed[i], mixed[i], squares);
    const float factor = 1.f / sqrtf(warp_sum(squares) / float(a.value_dim) + a.eps);
    for (int i = lane; i < a.value_dim; i += kWarp) {
      const float gate = __bfloat162float(gates[i]);
      out[i] = __float2bfloat16_rn(mixed[i] * factor * a.norm[i] * (gate * sigmoid(gate)));
    }
    return;
  }
  const int begin = (unit - a.value_heads) * kCopied;
  if (t >= count || t < count - a.window) return;
  const auto* const ba = static_cast<const __nv_bfloat16*>(a.ba) + token * 2 * a.value_heads;
  __nv_bfloat16* const to = static_cast<__nv_bfloat16*>(a.inputs) + (int64_t(row) * a.window + (start + t) % a.window) * kept;
  for (int i = begin + lane; i < min(begin + kCopied, kept); i += kWarp) to[i] = i < channels ? from[i] : ba[i - channels];
}

__global__ void __launch_bounds__(256) sigmoid_gated_kernel(const __nv_bfloat16* x, const __nv_bfloat16* gates, int64_t stride, int64_t n,
                                                            int64_t width, __nv_bfloat16* out) {
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t at = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (at >= n * width) return;
  const float gate = __bfloat162float(gates[at / width * stride + at % width]);
  out[at] = __float2bfloat16_rn(__bfloat162float(x[at]) * sigmoid(gate));
}

template <int kRows>
const char* launch_delta(const mlspec_cuda_delta& a, const mlspec_cuda_row_launch& how) {
  const unsigned batch = unsigned(a.batch), most = unsigned(a.window + a.width), columns = kScanWarps * kWarpColumns;
  const unsigned kept = 2 * a.key_heads * a.key_dim + a.value_heads * (a.value_dim + 2);
  const unsigned tokens = most < kMostTokenBlocks ? most : kMostTokenBlocks;
  const RowGrid grids[] = {{dim3(blocks_for(a.key_heads + a.value_heads, kUnits), tokens, batch), kUnits * kWarp},
                           {dim3(blocks_for(a.value_dim, columns), unsigned(a.value_heads), batch), kScanWarps * kWarp},
                           {dim3(blocks_for(a.value_heads + blocks_for(kept, kCopied), kUnits), unsigned(a.width), batch), kUnits * kWarp}};
  const char* wrong = launch_rows(how, grids[0], delta_tokens_kernel, a, kRows * kKeyGroups);
  if (!wrong) wrong = launch_rows(how, grids[1], delta_scan_kernel<kRows>, a);
  return wrong ? wrong : launch_rows(how, grids[2], delta_finish_kernel, a);
}

}  // namespace
}  // namespace mlspec

using namespace mlspec;

int32_t mlspec_cuda_delta_padded(int32_t key_dim, int32_t value_dim, int32_t num_taps) {
  if (key_dim < 4 || key_dim > 256 || key_dim % 4 || value_dim < 4 || value_dim > 256 || value_dim % 4 || num_taps < 2 || num_taps > 8) return 0;
  int32_t rows = 4;
  while (rows * kKeyGroups < key_dim) rows *= 2;
  return rows * kKeyGroups;
}

const char* mlspec_cuda_delta_rows(const mlspec_cuda_delta* delta, const mlspec_cuda_row_launch* how) {
  switch (mlspec_cuda_delta_padded(delta->key_dim, delta->value_dim, delta->num_taps)) {
    case 32: return launch_delta<4>(*delta, *how);
    case 64: return launch_delta<8>(*delta, *how);
    case 128: return launch_delta<16>(*delta, *how);
    case 256: return launch_delta<32>(*delta, *how);
    default: return "heads of gated delta nets have a multiple of 4 up to 256 elements, and 2 to 8 taps";
  }
}

const char* mlspec_cuda_sigmoid_gated(const void* x, const void* gates, int64_t stride, int64_t n, int64_t width, void* out,
                                      const mlspec_cuda_row_launch* how) {
  const RowGrid grid{dim3(blocks_for(n * width, 256)), 256};
  return launch_rows(*how, grid, sigmoid_gated_kernel, static_cast<const __nv_bfloat16*>(x), static_cast<const __nv_bfloat16*>(gates),
                     stride, n, width, static_cast<__nv_bfloat16*>(out));
}
