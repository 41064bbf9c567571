// How is a row of bfloat16, or of a gated MLP, multiplied by Hadamard matrices? In registers, between lanes and in shared memory, with the additions of
// hf_mlspec/ops/hadamard.py in their order, so that the bits are those of the CPU. What comes of it is written, or coded as integers in
// the same kernel.
#include "activation.cuh"
#include "codes_of_rows.cuh"

namespace mlspec {
namespace {

constexpr int kMostThreads = 1024, kColumnThreads = 64;
constexpr int kOfLane = 16, kOfWarp = kWarp * kOfLane;  // neighbours that a warp adds up without shared memory
constexpr int kMostLevels = 6;          // of columns, in registers
constexpr int64_t kChunk = 4096;        // elements of a block, where matrices are smaller
constexpr int64_t kBlocksWanted = 256;  // of a launch, where outputs can be shared out
constexpr int kRows = 4;                // of the matrix of the order, which a thread multiplies together

struct HadamardParams {
  const __nv_bfloat16* x;
  const __nv_bfloat16* up;  // where rows are activation(x) * up, rounded
  int64_t stride;           // of rows of x, and of up
  const float* matrix;  // [order][order], null: order is 1
  __nv_bfloat16* out;
  int64_t width, chunks;  // chunks of a row
  int unit, per_chunk;    // elements of a matrix; matrices of a chunk
  int order, powers, inner, items_per_split;
  float factor;
};

// 2^kLevels values: the sums and differences of those 1, 2, 4 apart.
template <int kLevels>
__device__ __forceinline__ void levels(float (&v)[1 << kLevels]) {
#pragma unroll
  for (int apart = 1; apart < 1 << kLevels; apart *= 2)
#pragma unroll
    for (int t = 0; t < 1 << kLevels; ++t)
      if (!(t & apart)) {
        const float low = v[t], high = v[t + apart];
        v[t] = low + high;
        v[t + apart] = low - high;
      }
}

// row as [.. ][2^kLevels][step]; every thread of the block takes part.
template <int kLevels>
__device__ __forceinline__ void pass(float* row, int count, int step) {
  constexpr int kParts = 1 << kLevels;
  for (int item = threadIdx.x; item < count / kParts; item += blockDim.x) {
    float* const group = row + item / step * (kParts * step) + item % step;
    float v[kParts];
#pragma unroll
    for (int t = 0; t < kParts; ++t) v[t] = group[t * step];
    levels<kLevels>(v);
#pragma unroll
    for (int t = 0; t < kParts; ++t) group[t * step] = v[t];
  }
  __syncthreads();
}

// Elements of a chunk, which begins `at` elements into x.
template <int kActivation>
struct Inputs {
  const HadamardParams& p;
  int64_t at;

  __device__ __forceinline__ float one(int i) const {
    const float x = load_one(p.x + at + i);
    if constexpr (kActivation == kPlain) return x;
    else return rounded(activate<kActivation>(x) * load_one(p.up + at + i));
  }

  __device__ __forceinline__ void vector(int i, float (&v)[kVector]) const {
    load_vector(p.x + at + i, v);
    if constexpr (kActivation != kPlain) {
      float up[kVector];
      load_vector(p.up + at + i, up);
#pragma unroll
      for (int e = 0; e < kVector; ++e) v[e] = rounded(activate<kActivation>(v[e]) * up[e]);
    }
  }
};

// To shared memory; -> the levels that are done.
template <class X>
__device__ __forceinline__ int load_chunk(const HadamardParams& p, const X& x, float* row, int count) {
  if (count % kVector || p.width % kVector || p.unit % kVector) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) row[i] = x.one(i);
    return 0;
  }
  const bool first_levels = p.inner == 1 && p.powers >= kVector;
  for (int i = threadIdx.x * kVector; i < count; i += blockDim.x * kVector) {
    float v[kVector];
    x.vector(i, v);
    if (first_levels) levels<3>(v);
    store_vector(row + i, v);
  }
  return first_levels ? 3 : 0;
}

// The same where powers of two of neighbours are added up: those of a lane, then lane by lane. count: whole lanes.
template <class X>
__device__ __forceinline__ int load_neighbours(const HadamardParams& p, const X& x, float* row, int count) {
  const int most = min(p.powers, kOfWarp), lane = threadIdx.x % kWarp;
  for (int at = threadIdx.x * kOfLane; at < (count + kOfWarp - 1) / kOfWarp * kOfWarp; at += blockDim.x * kOfLane) {
    float v[kOfLane] = {};
    if (at < count) {
#pragma unroll
      for (int half = 0; half < kOfLane; half += kVector) {
        float part[kVector];
        x.vector(at + half, part);
#pragma unroll
        for (int e = 0; e < kVector; ++e) v[half + e] = part[e];
      }
    }
    levels<4>(v);
    for (int apart = kOfLane; apart < most; apart *= 2) {
      const int mask = apart / kOfLane;
      const bool upper = lane & mask;
#pragma unroll
      for (int t = 0; t < kOfLane; ++t) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, v[t], mask);
        v[t] = upper ? other - v[t] : v[t] + other;
      }
    }
    if (at >= count) continue;
#pragma unroll
    for (int four = 0; four < kOfLane; four += 4)
      *reinterpret_cast<float4*>(row + at + four) = make_float4(v[four], v[four + 1], v[four + 2], v[four + 3]);
  }
  return __ffs(most) - 1;
}

// Elements times the factor, where there is no matrix of an order.
__device__ __forceinline__ void store_chunk(const HadamardParams& p, const float* row, __nv_bfloat16* out, int count) {
  if (count % kVector || p.width % kVector || p.unit % kVector) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) store_one(out + i, __fmul_rn(row[i], p.factor));
    return;
  }
  for (int i = threadIdx.x * kVector; i < count; i += blockDim.x * kVector) {
    float v[kVector];
    load_vector(row + i, v);
#pragma unroll
    for (int e = 0; e < kVector; ++e) v[e] = __fmul_rn(v[e], p.factor);
    store_vector(out + i, v);
  }
}

// What this split of the block computes, from item `begin` to `end`: outputs of kRows rows of the matrix at one of `part` places, of
// which the first is written to out.
__device__ __forceinline__ void multiply_order(const HadamardParams& p, const float* row, __nv_bfloat16* out, int begin, int end,
                                               int first_output) {
  const int part = p.powers * p.inner;
  for (int item = begin + threadIdx.x; item < end; item += blockDim.x) {
    const int first = item / part * kRows, place = item % part;
    const float* const matrix = p.matrix + first * p.order;
    float sums[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] = -0.0f;  // adds nothing, not even to a zero's sign
    for (int j = 0; j < p.order; j += 4) {
      float z[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) z[t] = row[(j + t) * part + place];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 signs = *reinterpret_cast<const float4*>(matrix + r * p.order + j);
        sums[r] = __fmaf_rn(signs.x, z[0], sums[r]);  // products are exact
        sums[r] = __fmaf_rn(signs.y, z[1], sums[r]);
        sums[r] = __fmaf_rn(signs.z, z[2], sums[r]);
        sums[r] = __fmaf_rn(signs.w, z[3], sums[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) store_one(out + (first + r) * part + place - first_output, __fmul_rn(sums[r], p.factor));
  }
}

// Integers of `count` elements from column `from` of a token on, whole groups; value(i, v): eight of them. Every thread takes part.
template <class Value>
__device__ __forceinline__ void code_chunk(const CodedRows& codes, int token, int from, int count, const Value& value) {
  const int whole = from + count == codes.in_features ? scaled_columns(codes.in_features) - from : count;
  for (int base = 0; base < whole; base += blockDim.x * kCoded) {
    const int i = base + threadIdx.x * kCoded;
    float v[kCoded] = {};
    if (i < count)
#pragma unroll
      for (int half = 0; half < kCoded; half += kVector) {
        float part[kVector];
        value(i + half, part);
#pragma unroll
        for (int e = 0; e < kVector; ++e) v[half + e] = part[e];
      }
    code_values(codes, token, from + i, v, i < whole);
  }
}

// One chunk of a row; blockIdx.y: which of its outputs, where there is a matrix. kActivation: of gated rows, or kPlain. kCodes: outputs
// become integers, those of a matrix in shared memory behind the row.
template <int kActivation, bool kCodes>
__global__ void __launch_bounds__(kMostThreads, 1) hadamard_kernel(const HadamardParams p, const CodedRows codes) {
  extern __shared__ __align__(16) float row[];
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t n = blockIdx.x / p.chunks, chunk = blockIdx.x % p.chunks;
  const int64_t first = chunk * p.per_chunk * p.unit, at = n * p.width + first, left = p.width - first;
  const int whole = p.per_chunk * p.unit, count = left < whole ? int(left) : whole;
  const bool neighbours = p.inner == 1 && p.powers >= kOfLane;
  const Inputs<kActivation> x{p, n * p.stride + first};
  int done = neighbours ? load_neighbours(p, x, row, count) : load_chunk(p, x, row, count);
  __syncthreads();
  for (; p.powers >> done >= 8; done += 3) pass<3>(row, count, p.inner << done);
  if (p.powers >> done == 4) pass<2>(row, count, p.inner << done);
  if (p.powers >> done == 2) pass<1>(row, count, p.inner << done);
  const int items = p.order / kRows * p.powers * p.inner, begin = blockIdx.y * p.items_per_split;
  const int end = min(items, begin + p.items_per_split);
  if constexpr (!kCodes) {
    if (p.matrix) multiply_order(p, row, p.out + at, begin, end, 0);
    else store_chunk(p, row, p.out + at, count);
  } else if (p.matrix) {
    auto* const own = reinterpret_cast<__nv_bfloat16*>(row + whole);
    multiply_order(p, row, own, begin, end, begin * kRows);
    __syncthreads();
    code_chunk(codes, int(n), int(first) + begin * kRows, (end - begin) * kRows,
               [&](int i, float(&v)[kVector]) { load_vector(own + i, v); });
  } else {
    code_chunk(codes, int(n), int(first), count, [&](int i, float(&v)[kVector]) {
      load_vector(row + i, v);
#pragma unroll
      for (int e = 0; e < kVector; ++e) v[e] = rounded(__fmul_rn(v[e], p.factor));
    });
  }
}

// Of matrices of a power of two alone whose elements stand apart: a thread has all of them, of two columns.
template <int kLevels>
__global__ void __launch_bounds__(kColumnThreads) columns_kernel(const HadamardParams p, int64_t pairs) {
  constexpr int kParts = 1 << kLevels;
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t item = int64_t(blockIdx.x) * kColumnThreads + threadIdx.x;
  if (item >= pairs) return;
  const int half = p.inner / 2;  // pairs of a matrix; rows are whole matrices
  const int64_t first = item / half * p.unit + item % half * 2;
  float low[kParts], high[kParts];
#pragma unroll
  for (int t = 0; t < kParts; ++t) {
    const float2 pair = widened(*reinterpret_cast<const uint32_t*>(p.x + first + t * p.inner));
    low[t] = pair.x, high[t] = pair.y;
  }
  levels<kLevels>(low);
  levels<kLevels>(high);
#pragma unroll
  for (int t = 0; t < kParts; ++t)
    *reinterpret_cast<uint32_t*>(p.out + first + t * p.inner) =
        narrowed(__fmul_rn(low[t], p.factor), __fmul_rn(high[t], p.factor));
}

// The one of these many levels.
template <int kLevels = 1>
const char* launch_columns(int levels, const HadamardParams& params, int64_t pairs, const mlspec_cuda_row_launch& how) {
  if constexpr (kLevels < kMostLevels)
    if (levels > kLevels) return launch_columns<kLevels + 1>(levels, params, pairs, how);
  return launch_rows(how, {dim3(blocks_for(pairs, kColumnThreads)), kColumnThreads}, columns_kernel<kLevels>, params, pairs);
}

// How rows are cut: matrices of a chunk, chunks of a row, threads of a block.
struct Cut {
  int64_t unit, per_chunk, chunks, blocks, threads;
  int64_t whole() const { return per_chunk * unit; }
};

Cut cut_of(const mlspec_cuda_hadamard& h) {
  const int64_t unit = h.size * h.inner, matrices = h.width / unit;
  const int64_t per_chunk = h.matrix || unit >= kChunk ? 1 : kChunk / unit < matrices ? kChunk / unit : matrices;
  const int64_t chunks = (matrices + per_chunk - 1) / per_chunk, lanes = (per_chunk * unit + kOfWarp - 1) / kOfWarp * kWarp;
  return {unit, per_chunk, chunks, h.n * chunks, lanes < kMostThreads ? lanes : kMostThreads};
}

HadamardParams params_of(const mlspec_cuda_hadamard& h, const Cut& cut, int64_t items_per_split) {
  const auto* const x = static_cast<const __nv_bfloat16*>(h.x);
  const bool gated = h.activation >= 0;
  return {x, gated ? x + h.width : nullptr, gated ? 2 * h.width : h.width, h.matrix, static_cast<__nv_bfloat16*>(h.out), h.width,
          cut.chunks, int(cut.unit), int(cut.per_chunk), int(h.order), int(h.size / h.order), int(h.inner), int(items_per_split),
          h.factor};
}

// Splits where outputs of a matrix can be shared out, up to `most`.
int64_t splits_of(const Cut& cut, int64_t most) {
  const int64_t wanted = cut.blocks < kBlocksWanted ? kBlocksWanted / cut.blocks : 1;
  return wanted < most ? wanted : most > 1 ? most : 1;
}

// Where outputs become integers: how many rows of the matrix, by kRows, a split has; 0: there is no such kernel for these sizes.
struct CodedCut {
  int64_t rows_of_split, splits, bytes;
};

CodedCut coded_cut(const mlspec_cuda_hadamard& h, const Cut& cut, int64_t group) {
  const int64_t bytes = cut.whole() * int64_t(sizeof(float));
  if (!h.matrix) return {cut.whole() % group || bytes > h.shared_bytes ? 0 : 1, 1, bytes};
  const int64_t outputs = kRows * (cut.unit / h.order), rows = h.order / kRows;
  if (outputs % group) return {0, 0, 0};
  const int64_t splits = splits_of(cut, (rows * outputs / kRows + cut.threads - 1) / cut.threads);
  int64_t own = (rows + splits - 1) / splits;
  const auto needed = [&] { return bytes + own * outputs * int64_t(sizeof(__nv_bfloat16)); };
  while (own > 0 && needed() > h.shared_bytes) --own;
  return {own, own ? (rows + own - 1) / own : 0, needed()};
}

}  // namespace
}  // namespace mlspec

using namespace mlspec;

const char* mlspec_cuda_hadamard_rows(const mlspec_cuda_hadamard* hadamard, const mlspec_cuda_row_launch* how) {
  const mlspec_cuda_hadamard& h = *hadamard;
  const Cut cut = cut_of(h);
  const int64_t bytes = cut.whole() * int64_t(sizeof(float)), items = h.order / kRows * (cut.unit / h.order);
  if (bytes > h.shared_bytes) return "the matrix is too large for the shared memory of this GPU: rotate in smaller blocks";
  const int64_t splits = h.matrix ? splits_of(cut, items / cut.threads) : 1;
  const HadamardParams params = params_of(h, cut, (items + splits - 1) / splits);
  const RowGrid grid{dim3(unsigned(cut.blocks), unsigned(splits)), unsigned(cut.threads), unsigned(bytes)};
  if (h.activation >= 0)
    return with_activation(h.activation, [&](auto number) {
      return launch_rows(*how, grid, hadamard_kernel<decltype(number)::value, false>, params, CodedRows{});
    });
  if (!h.matrix && h.inner > 1 && h.inner % 2 == 0 && h.size > 1 && h.size <= 1 << kMostLevels)
    return launch_columns(__builtin_ctzll(h.size), params, h.n * h.width / h.size / 2, *how);
  return launch_rows(*how, grid, hadamard_kernel<kPlain, false>, params, CodedRows{});
}

int32_t mlspec_cuda_hadamard_codes_serves(const mlspec_cuda_hadamard* hadamard, int32_t group_size) {
  return coded_cut(*hadamard, cut_of(*hadamard), group_size).rows_of_split > 0;
}

const char* mlspec_cuda_hadamard_codes(const mlspec_cuda_hadamard* hadamard, const mlspec_cuda_quantize* codes,
                                       const mlspec_cuda_row_launch* how) {
  if (const char* problem = problem_of_codes(*codes)) return problem;
  const mlspec_cuda_hadamard& h = *hadamard;
  Cut cut = cut_of(h);
  const CodedCut coded = coded_cut(h, cut, codes->group_size);
  if (coded.rows_of_split < 1) return "no kernel rotates rows of these sizes and codes them: rotate first";
  if (!h.matrix && h.inner > 1) {  // passes of eight elements a thread alone
    const int64_t lanes = (cut.whole() / kVector + kWarp - 1) / kWarp * kWarp;
    cut.threads = lanes < kMostThreads ? lanes : kMostThreads;
  }
  const HadamardParams params = params_of(h, cut, coded.rows_of_split * (cut.unit / h.order));
  const RowGrid grid{dim3(unsigned(cut.blocks), unsigned(coded.splits)), unsigned(cut.threads), unsigned(coded.bytes)};
  const CodedRows rows = coded_rows(*codes);
  if (h.activation < 0) return launch_rows(*how, grid, hadamard_kernel<kPlain, true>, params, rows);
  return with_activation(h.activation, [&](auto number) {
    return launch_rows(*how, grid, hadamard_kernel<decltype(number)::value, true>, params, rows);
  });
}
