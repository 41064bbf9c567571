// How does a gated delta net, or Mamba-2, of a GPU go from token to token? Columns of a state never meet: a warp has 8 or 16 of them in its
// registers and runs all tokens of a row in order (arXiv 2412.06464), so the bits of a token are the same alone and among others.
#include "delta_tokens.cuh"

namespace mlspec {
namespace {

constexpr int kKeyGroups = 8;     // lanes that share the rows of a column
constexpr int kColumnLanes = kWarp / kKeyGroups;
constexpr int kScanWarps = 2;
constexpr int kFewHeads = 128;    // of all rows, up to which warps have half the columns: else multiprocessors would be idle
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

template <int kColumns>
__device__ __forceinline__ void load_columns(const float* from, float (&to)[kColumns]) {
  if constexpr (kColumns == 4) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
  } else {
    const float2 two = *reinterpret_cast<const float2*>(from);
    to[0] = two.x, to[1] = two.y;
  }
}

template <int kColumns>
__device__ __forceinline__ void store_columns(float* to, const float (&from)[kColumns]) {
  if constexpr (kColumns == 4)
    *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
  else
    *reinterpret_cast<float2*>(to) = make_float2(from[0], from[1]);
}

// The columns [column, column + kColumns) of a head's state, rows [first, first + kRows).
template <int kRows, int kColumns>
struct StatePart {
  float s[kRows][kColumns];

  __device__ __forceinline__ void fill(float value) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) s[i][c] = value;
  }

  // Of rows that are there; the others stay.
  __device__ __forceinline__ void load(const float* from, int first, int rows, int width) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (first + i < rows) load_columns<kColumns>(from + int64_t(first + i) * width, s[i]);
  }

  __device__ __forceinline__ void store(float* to, int first, int rows, int width) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (first + i < rows) store_columns<kColumns>(to + int64_t(first + i) * width, s[i]);
  }

  // Of each column the sum of its elements times those of x, over all lanes that share it.
  __device__ __forceinline__ void times(const float (&x)[kRows], float (&sums)[kColumns]) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kRows; ++i) sum = fmaf(s[i][c], x[i], sum);
#pragma unroll
      for (int step = kKeyGroups / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step * kColumnLanes);
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

// What a lane reads of a token: rows of its key and query, values of its columns, decay and beta, and what key times query is.
template <int kRows, int kColumns>
struct ScanToken {
  float k[kRows], q[kRows], v[kColumns], product;
  float2 weights;

  __device__ __forceinline__ void load(const mlspec_cuda_delta& a, int64_t slot, int head, int key_head, int first, int column, bool asks) {
    const float* const keys = a.keys + (slot * a.key_heads + key_head) * 2 * kRows * kKeyGroups + first;
    load_rows<kRows>(keys, k);
    weights = *reinterpret_cast<const float2*>(a.weights + (slot * a.value_heads + head) * 2);
    if (column < a.value_dim) load_columns<kColumns>(a.values + (slot * a.value_heads + head) * a.value_dim + column, v);
    if (!asks) return;
    load_rows<kRows>(keys + kRows * kKeyGroups, q);
    product = a.products[slot * a.key_heads + key_head];
  }
};

// S moves by one token. What it says of q is known before: S^T q = decay S^T q + (q k) change; to: where that goes, null: nowhere.
// kAdds: Mamba-2, whose state takes values as they are, and which says skip of them beside.
template <bool kAdds, int kRows, int kColumns>
__device__ __forceinline__ void scan_token(StatePart<kRows, kColumns>& own, const ScanToken<kRows, kColumns>& token, float skip, bool asks,
                                           float* to) {
  const float decay = token.weights.x, beta = token.weights.y;
  float known[kColumns], change[kColumns];
  if constexpr (!kAdds) own.times(token.k, known);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) change[c] = (kAdds ? token.v[c] : fmaf(-decay, known[c], token.v[c])) * beta;
  if (asks) {
    float asked[kColumns];
    own.times(token.q, asked);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      asked[c] = fmaf(token.product, change[c], asked[c] * decay);
      if constexpr (kAdds) asked[c] = fmaf(skip, token.v[c], asked[c]);
    }
    if (to) store_columns<kColumns>(to, asked);
  }
  own.move(token.k, change, decay);
}

template <bool kAdds, int kRows, int kColumns>
__global__ void __launch_bounds__(kScanWarps* kWarp) delta_scan_kernel(mlspec_cuda_delta a) {
  launch_dependents();
  constexpr bool kAhead = kRows <= 16;  // the next token is read while one is run, where registers hold both
  const int row = blockIdx.z, head = blockIdx.y, lane = threadIdx.x % kWarp, group = lane / kColumnLanes;
  const int column = ((blockIdx.x * kScanWarps + threadIdx.x / kWarp) * kColumnLanes + lane % kColumnLanes) * kColumns;
  const int key_head = head / (a.value_heads / a.key_heads), first = group * kRows;
  wait_for_previous_kernel();
  const DeltaSpan span = span_of(a, row);
  const bool mine = column < a.value_dim;  // of the last warp some lanes have no columns; they take part in sums
  float* const state = a.states + (int64_t(row) * a.value_heads + head) * a.key_dim * a.value_dim + (mine ? column : 0);
  float* const mixed = a.mixed + (int64_t(row) * a.width * a.value_heads + head) * a.value_dim + column;
  const int64_t slots = int64_t(row) * (a.window + a.width) - span.begin;
  StatePart<kRows, kColumns> own;
  own.fill(span.lost ? __int_as_float(0x7FC00000) : 0.f);
  if (span.begin > 0 && !span.lost) own.load(state, first, a.key_dim, a.value_dim);
  const int settled = (a.settles == MLSPEC_STATE_AT_END ? span.end : span.start) - a.behind;
  const bool settles = a.settles != MLSPEC_STATE_KEEP && settled > span.begin && mine;
  const float skip = kAdds ? a.skip[head] : 0.f;
  ScanToken<kRows, kColumns> token{}, next{};
  if (kAhead && span.begin < span.end) next.load(a, slots + span.begin, head, key_head, first, column, span.begin >= span.start);
  for (int p = span.begin; p < span.end; ++p) {
    if (p == settled && settles) own.store(state, first, a.key_dim, a.value_dim);
    if constexpr (kAhead) {
      token = next;
      if (p + 1 < span.end) next.load(a, slots + p + 1, head, key_head, first, column, p + 1 >= span.start);
    } else {
      token.load(a, slots + p, head, key_head, first, column, p >= span.start);
    }
    float* const to = mixed + int64_t(p - span.start) * a.value_heads * a.value_dim;
    scan_token<kAdds>(own, token, skip, p >= span.start, mine && group == 0 ? to : nullptr);
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

// The same of Mamba-2: gates first, then groups of elements are normed, each by a block; the blocks behind keep what later calls read.
__global__ void __launch_bounds__(kUnits* kWarp) delta_finish_added_kernel(mlspec_cuda_delta a, int groups) {
  launch_dependents();
  __shared__ float sums[kUnits];
  const int row = blockIdx.z, t = blockIdx.y, thread = threadIdx.x, lane = thread % kWarp;
  const int channels = channels_of(a), kept = channels + a.value_heads, threads = kUnits * kWarp, values = a.value_heads * a.value_dim;
  const TokenPlaces at = places_of(a);
  wait_for_previous_kernel();
  const int count = min(a.counts[row], a.width), start = a.starts[row];
  const int64_t token = int64_t(row) * a.width + t;
  const auto* const from = static_cast<const __nv_bfloat16*>(a.qkvz) + token * at.width;
  if (int(blockIdx.x) < groups) {
    const int first = blockIdx.x * a.normed;
    __nv_bfloat16* const out = static_cast<__nv_bfloat16*>(a.out) + token * values + first;
    if (t >= count) {
      for (int i = thread; i < a.normed; i += threads) out[i] = __float2bfloat16_rn(0.f);
      return;
    }
    const float* const mixed = a.mixed + token * values + first;
    const __nv_bfloat16* const gates = from + at.gates + first;
    const auto gated = [&](int i) {
      const float gate = __bfloat162float(gates[i]);
      return mixed[i] * (gate * sigmoid(gate));
    };
    float squares = 0.f;
    for (int i = thread; i < a.normed; i += threads) {
      const float x = gated(i);
      squares = fmaf(x, x, squares);
    }
    squares = warp_sum(squares);
    if (lane == 0) sums[thread / kWarp] = squares;
    __syncthreads();
    float total = 0.f;
    for (int i = 0; i < kUnits; ++i) total += sums[i];
    const float factor = 1.f / sqrtf(total / float(a.normed) + a.eps);
    for (int i = thread; i < a.normed; i += threads) out[i] = __float2bfloat16_rn(gated(i) * factor * a.norm[first + i]);
    return;
  }
  if (t >= count || t < count - a.window) return;
  const int begin = (int(blockIdx.x) - groups) * kCopied;
  __nv_bfloat16* const to =
      static_cast<__nv_bfloat16*>(a.inputs) + (int64_t(row) * a.window + (start + t) % a.window) * (channels + 2 * a.value_heads);
  for (int i = begin + thread; i < min(begin + kCopied, kept); i += threads) to[i] = from[at.channels + i];
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

template <int kRows, int kColumns>
const char* launch_columns(const mlspec_cuda_delta& a, const mlspec_cuda_row_launch& how) {
  const unsigned batch = unsigned(a.batch), most = unsigned(a.window + a.width), columns = kScanWarps * kColumnLanes * kColumns;
  const unsigned kept = 2 * a.key_heads * a.key_dim + a.value_heads * (a.value_dim + 2);
  const unsigned tokens = most < kMostTokenBlocks ? most : kMostTokenBlocks;
  const RowGrid grids[] = {{dim3(blocks_for(a.key_heads + a.value_heads, kUnits), tokens, batch), kUnits * kWarp},
                           {dim3(blocks_for(a.value_dim, columns), unsigned(a.value_heads), batch), kScanWarps * kWarp},
                           {dim3(blocks_for(a.value_heads + blocks_for(kept, kCopied), kUnits), unsigned(a.width), batch), kUnits * kWarp}};
  const char* wrong = launch_rows(how, grids[0], delta_tokens_kernel, a, kRows * kKeyGroups);
  if (wrong) return wrong;
  wrong = a.skip ? launch_rows(how, grids[1], delta_scan_kernel<true, kRows, kColumns>, a)
                 : launch_rows(how, grids[1], delta_scan_kernel<false, kRows, kColumns>, a);
  if (wrong || !a.skip) return wrong ? wrong : launch_rows(how, grids[2], delta_finish_kernel, a);
  const int groups = a.value_heads * a.value_dim / a.normed;
  const RowGrid added{dim3(groups + blocks_for(channels_of(a) + a.value_heads, kCopied), unsigned(a.width), batch), kUnits * kWarp};
  return launch_rows(how, added, delta_finish_added_kernel, a, groups);
}

template <int kRows>
const char* launch_delta(const mlspec_cuda_delta& a, const mlspec_cuda_row_launch& how) {
  const bool few = int64_t(a.batch) * a.value_heads <= kFewHeads;
  return few ? launch_columns<kRows, 2>(a, how) : launch_columns<kRows, 4>(a, how);
}

}  // namespace
}  // namespace mlspec

using namespace mlspec;

int32_t mlspec_cuda_delta_padded(int32_t key_dim, int32_t value_dim, int32_t num_taps) {
  const auto fits = [](int32_t dim) { return dim >= 4 && dim <= 256 && dim % 4 == 0; };
  if (!fits(key_dim) || !fits(value_dim) || num_taps < 2 || num_taps > 8) return 0;
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
