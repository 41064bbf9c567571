// How does a gated delta net, or Mamba-2, of a GPU go from token to token: what is read of each, the scan, and what becomes of it?
#include "delta_scan.cuh"

namespace mlspec {
namespace {

constexpr int kFewHeads = 128;  // of all rows, up to which a lane has half the columns: else multiprocessors would be idle. So it has of
                                // single tokens, whose states are on their way for longer than they are computed with
constexpr int kMostTokenBlocks = 1024, kTokenBlocks = 2048;
constexpr int kCopied = 512;  // elements that a warp keeps of a token

// Heads normed and gated, then what later calls read of a token: only now, as tokens of this one may have read what was there.
__global__ void __launch_bounds__(kUnits* kWarp) delta_finish_kernel(mlspec_cuda_delta a) {
  launch_dependents();
  const int row = blockIdx.z, t = blockIdx.y, lane = threadIdx.x % kWarp, unit = blockIdx.x * kUnits + threadIdx.x / kWarp;
  const int channels = channels_of(a), kept = channels + 2 * a.value_heads;
  const bool fours = reads_fours(a);
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
    for (int i = 4 * lane; i < a.value_dim; i += 4 * kWarp) {
      const float4 x = *reinterpret_cast<const float4*>(mixed + i);
      squares = fmaf(x.w, x.w, fmaf(x.z, x.z, fmaf(x.y, x.y, fmaf(x.x, x.x, squares))));
    }
    const float factor = 1.f / sqrtf(warp_sum(squares) / float(a.value_dim) + a.eps);
    const auto gated = [&](float x, float norm, float gate) { return x * factor * norm * (gate * sigmoid(gate)); };
    for (int i = 4 * lane; i < a.value_dim; i += 4 * kWarp) {
      const float4 x = *reinterpret_cast<const float4*>(mixed + i), gate = read_four(gates + i, fours);
      const float own[4] = {gated(x.x, a.norm[i], gate.x), gated(x.y, a.norm[i + 1], gate.y), gated(x.z, a.norm[i + 2], gate.z),
                            gated(x.w, a.norm[i + 3], gate.w)};
      *reinterpret_cast<uint2*>(out + i) = make_uint2(narrowed(own[0], own[1]), narrowed(own[2], own[3]));
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

// Blocks along the tokens of a row. How many are run again no launch knows; of many rows blocks take several in turn, as one that finds no
// token costs as much as it takes to start it.
unsigned blocks_along(const mlspec_cuda_delta& a, unsigned across) {
  const unsigned most = unsigned(a.window + a.width), share = kTokenBlocks / (across * unsigned(a.batch));
  const unsigned again = share < 4 ? 4 : share, wanted = again > 2u * a.width ? again : 2u * a.width;
  const unsigned held = most < kMostTokenBlocks ? most : kMostTokenBlocks;
  return wanted < held ? wanted : held;
}

template <class Shape>
const char* launch_shape(const mlspec_cuda_delta& a, const mlspec_cuda_row_launch& how) {
  const unsigned batch = unsigned(a.batch), across = blocks_for(a.key_heads + a.value_heads, kUnits);
  const unsigned kept = 2 * a.key_heads * a.key_dim + a.value_heads * (a.value_dim + 2);
  const RowGrid grids[] = {{dim3(across, blocks_along(a, across), batch), kUnits * kWarp},
                           {dim3(blocks_for(a.value_dim, Shape::kWide), unsigned(a.value_heads), batch), Shape::kThreads},
                           {dim3(blocks_for(a.value_heads + blocks_for(kept, kCopied), kUnits), unsigned(a.width), batch), kUnits * kWarp}};
  const char* wrong = launch_rows(how, grids[0], delta_tokens_kernel, a, Shape::kPadded);
  if (wrong) return wrong;
  wrong = a.skip ? launch_rows(how, grids[1], delta_scan_kernel<Shape, true>, a)
                 : launch_rows(how, grids[1], delta_scan_kernel<Shape, false>, a);
  if (wrong || !a.skip) return wrong ? wrong : launch_rows(how, grids[2], delta_finish_kernel, a);
  const int groups = a.value_heads * a.value_dim / a.normed;
  const RowGrid added{dim3(groups + blocks_for(channels_of(a) + a.value_heads, kCopied), unsigned(a.width), batch), kUnits * kWarp};
  return launch_rows(how, added, delta_finish_added_kernel, a, groups);
}

// kRows rows of a column for each of kGroups lanes: which sums are made is a matter of the sizes of heads alone.
template <int kRows, int kGroups>
const char* launch_delta(const mlspec_cuda_delta& a, const mlspec_cuda_row_launch& how) {
  if (a.width == 1 || int64_t(a.batch) * a.value_heads <= kFewHeads) return launch_shape<ScanShape<kRows, 2, kGroups, 4>>(a, how);
  return launch_shape<ScanShape<kRows, 4, kGroups, 2>>(a, how);
}

}  // namespace
}  // namespace mlspec

using namespace mlspec;

int32_t mlspec_cuda_delta_padded(int32_t key_dim, int32_t value_dim, int32_t num_taps) {
  const auto fits = [](int32_t dim) { return dim >= 4 && dim <= 256 && dim % 4 == 0; };
  if (!fits(key_dim) || !fits(value_dim) || num_taps < 2 || num_taps > 8) return 0;
  int32_t padded = 32;
  while (padded < key_dim) padded *= 2;
  return padded;
}

const char* mlspec_cuda_delta_rows(const mlspec_cuda_delta* delta, const mlspec_cuda_row_launch* how) {
  switch (mlspec_cuda_delta_padded(delta->key_dim, delta->value_dim, delta->num_taps)) {
    case 32: return launch_delta<4, 8>(*delta, *how);
    case 64: return launch_delta<8, 8>(*delta, *how);
    case 128: return launch_delta<16, 8>(*delta, *how);
    case 256: return launch_delta<16, 16>(*delta, *how);
    default: return "heads of gated delta nets have a multiple of 4 up to 256 elements, and 2 to 8 taps";
  }
}

const char* mlspec_cuda_sigmoid_gated(const void* x, const void* gates, int64_t stride, int64_t n, int64_t width, void* out,
                                      const mlspec_cuda_row_launch* how) {
  const RowGrid grid{dim3(blocks_for(n * width, 256)), 256};
  return launch_rows(*how, grid, sigmoid_gated_kernel, static_cast<const __nv_bfloat16*>(x), static_cast<const __nv_bfloat16*>(gates),
                     stride, n, width, static_cast<__nv_bfloat16*>(out));
}
