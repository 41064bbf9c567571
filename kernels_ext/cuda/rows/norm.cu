// How are rows normed, put in order, and coded as integers? One block a row; elements of 16 bytes at a time.
#include "codes_of_rows.cuh"
#include "row_launch.cuh"

namespace mlspec {
namespace {

constexpr int kNormThreads = 512, kNormVectors = 4;  // of a row in registers: up to 16384 elements

struct NormRows {
  const __nv_bfloat16 *x, *residual;
  __nv_bfloat16 *normed, *total;
  float eps;
  int width;
  const int32_t* order;  // of the normed columns, or null
};

// What becomes of normed rows: they are written, in order, or as integers.
enum Ending { kAsTheyLie, kInOrder, kCodes, kCodesInOrder };

// Elements that a thread has behind the norm, side by side.
template <int kEnding>
constexpr int kEach = kEnding < kCodes ? kVector : kCoded;

// kEach columns of the normed row in `line`, or those that `column` names.
template <int kEnding>
__device__ __forceinline__ void read_line(const __nv_bfloat16* line, int at, const int (&column)[kEach<kEnding>],
                                          float (&v)[kEach<kEnding>]) {
  if constexpr (kEnding == kInOrder || kEnding == kCodesInOrder) {
#pragma unroll
    for (int e = 0; e < kEach<kEnding>; ++e) v[e] = load_one(line + column[e]);
  } else {
#pragma unroll
    for (int half = 0; half < kEach<kEnding>; half += kVector) {
      float part[kVector];
      load_vector(line + at + half, part);
#pragma unroll
      for (int e = 0; e < kVector; ++e) v[half + e] = part[e];
    }
  }
}

// kVectors: a thread's share of a row. But for kAsTheyLie, normed columns are exchanged in shared memory.
template <class Weight, int kVectors, int kEnding>
__global__ void __launch_bounds__(kNormThreads) rms_norm_kernel(NormRows rows, const Weight* weight, CodedRows codes) {
  constexpr bool kOrdered = kEnding == kInOrder || kEnding == kCodesInOrder, kExchanged = kEnding != kAsTheyLie;
  constexpr int kOwn = kEach<kEnding>, kParts = (kVectors * kVector + kOwn - 1) / kOwn;
  __shared__ float sums[kWarp];
  __shared__ __align__(16) __nv_bfloat16 line[kExchanged ? kNormThreads * kVectors * kVector : kVector];
  int column[kParts][kOwn];
  launch_dependents();
  const int64_t first = int64_t(blockIdx.x) * rows.width;
  float scale[kVectors][kVector], row[kVectors][kVector], sum = 0.f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = (threadIdx.x + i * blockDim.x) * kVector;
    if (at < rows.width) load_vector(weight + at, scale[i]);
  }
  if constexpr (kOrdered)
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int at = (threadIdx.x + i * blockDim.x) * kOwn;
#pragma unroll
      for (int e = 0; e < kOwn; ++e)
        if (at < rows.width) column[i][e] = column_of(rows.order, at + e, rows.width);
    }
  wait_for_previous_kernel();
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = (threadIdx.x + i * blockDim.x) * kVector;
    if (at >= rows.width) continue;
    load_vector(rows.x + first + at, row[i]);
    if (rows.residual) {
      float other[kVector];
      load_vector(rows.residual + first + at, other);
#pragma unroll
      for (int e = 0; e < kVector; ++e) row[i][e] = rounded(row[i][e] + other[e]);
      store_vector(rows.total + first + at, row[i]);
    }
#pragma unroll
    for (int e = 0; e < kVector; ++e) sum = fmaf(row[i][e], row[i][e], sum);
  }
  const float inverse = rsqrtf(block_sum(sum, sums) / float(rows.width) + rows.eps);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = (threadIdx.x + i * blockDim.x) * kVector;
    if (at >= rows.width) continue;
#pragma unroll
    for (int e = 0; e < kVector; ++e) row[i][e] = row[i][e] * inverse * scale[i][e];
    store_vector(kExchanged ? line + at : rows.normed + first + at, row[i]);
  }
  if constexpr (!kExchanged) return;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const int at = (threadIdx.x + i * blockDim.x) * kOwn;
    float v[kOwn] = {};
    if (at < rows.width) read_line<kEnding>(line, at, column[i], v);
    if constexpr (kEnding == kInOrder) {
      if (at < rows.width) store_vector(rows.normed + first + at, v);
    } else if constexpr (kExchanged) {
      code_values(codes, blockIdx.x, at, v, at < scaled_columns(rows.width));
    }
  }
}

// Of any width: rows are read twice.
template <class Weight>
__global__ void __launch_bounds__(kNormThreads) rms_norm_any_kernel(NormRows rows, const Weight* weight) {
  __shared__ float sums[kWarp];
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t first = int64_t(blockIdx.x) * rows.width;
  const auto element = [&](int e) {
    const float x = load_one(rows.x + first + e);
    return rows.residual ? rounded(x + load_one(rows.residual + first + e)) : x;
  };
  float sum = 0.f;
  for (int e = threadIdx.x; e < rows.width; e += blockDim.x) {
    const float value = element(e);
    if (rows.residual) store_one(rows.total + first + e, value);
    sum = fmaf(value, value, sum);
  }
  const float inverse = rsqrtf(block_sum(sum, sums) / float(rows.width) + rows.eps);
  for (int e = threadIdx.x; e < rows.width; e += blockDim.x) {
    const int from = rows.order ? column_of(rows.order, e, rows.width) : e;
    store_one(rows.normed + first + e, element(from) * inverse * load_one(weight + from));
  }
}

template <class Weight, int kEnding>
const char* rms_norm_of_vectors(const NormRows& rows, const Weight* weight, const CodedRows& codes, int share, const RowGrid& grid,
                                const mlspec_cuda_row_launch& how) {
  if (share == 1) return launch_rows(how, grid, rms_norm_kernel<Weight, 1, kEnding>, rows, weight, codes);
  if (share == 2) return launch_rows(how, grid, rms_norm_kernel<Weight, 2, kEnding>, rows, weight, codes);
  return launch_rows(how, grid, rms_norm_kernel<Weight, kNormVectors, kEnding>, rows, weight, codes);
}

bool fits_registers(int64_t width) { return width % kVector == 0 && width <= kNormThreads * kNormVectors * kVector; }

// codes: null where rows are written as they are.
template <class Weight>
const char* rms_norm(const NormRows& rows, const Weight* weight, const mlspec_cuda_quantize* codes, int64_t n,
                     const mlspec_cuda_row_launch& how) {
  if (!fits_registers(rows.width)) return launch_rows(how, {dim3(unsigned(n)), kNormThreads}, rms_norm_any_kernel<Weight>, rows, weight);
  const int vectors = rows.width / kVector;
  const unsigned whole = unsigned((vectors + kWarp - 1) / kWarp * kWarp);
  const RowGrid grid{dim3(unsigned(n)), whole < kNormThreads ? whole : kNormThreads};
  const int share = (vectors + grid.threads - 1) / grid.threads;
  const CodedRows coded = codes ? coded_rows(*codes) : CodedRows{};
  if (codes)
    return rows.order ? rms_norm_of_vectors<Weight, kCodesInOrder>(rows, weight, coded, share, grid, how)
                      : rms_norm_of_vectors<Weight, kCodes>(rows, weight, coded, share, grid, how);
  return rows.order ? rms_norm_of_vectors<Weight, kInOrder>(rows, weight, coded, share, grid, how)
                    : rms_norm_of_vectors<Weight, kAsTheyLie>(rows, weight, coded, share, grid, how);
}

const char* norm_rows(const NormRows& rows, const void* weight, int32_t weight_is_bf16, const mlspec_cuda_quantize* codes, int64_t n,
                      const mlspec_cuda_row_launch& how) {
  return weight_is_bf16 ? rms_norm(rows, static_cast<const __nv_bfloat16*>(weight), codes, n, how)
                        : rms_norm(rows, static_cast<const float*>(weight), codes, n, how);
}

NormRows norm_rows_of(const void* x, const void* residual, float eps, int64_t width, const int32_t* order, void* normed, void* total) {
  return {static_cast<const __nv_bfloat16*>(x), static_cast<const __nv_bfloat16*>(residual), static_cast<__nv_bfloat16*>(normed),
          static_cast<__nv_bfloat16*>(total), eps, int(width), order};
}

}  // namespace
}  // namespace mlspec

using namespace mlspec;

const char* mlspec_cuda_rms_norm(const void* x, const void* residual, const void* weight, int32_t weight_is_bf16, float eps,
                                 int64_t n, int64_t width, const int32_t* order, void* normed, void* total,
                                 const mlspec_cuda_row_launch* how) {
  if (width > INT32_MAX || n > INT32_MAX) return "rms_norm takes up to 2^31 - 1 rows and elements of a row";
  return norm_rows(norm_rows_of(x, residual, eps, width, order, normed, total), weight, weight_is_bf16, nullptr, n, *how);
}

int32_t mlspec_cuda_norm_codes_serves(int64_t width) { return fits_registers(width); }

const char* mlspec_cuda_norm_codes(const void* x, const void* residual, const void* weight, int32_t weight_is_bf16, float eps,
                                   const int32_t* order, void* total, const mlspec_cuda_quantize* codes,
                                   const mlspec_cuda_row_launch* how) {
  if (const char* problem = problem_of_codes(*codes)) return problem;
  if (!fits_registers(codes->in_features)) return "the row is too long for the norm that codes it";
  return norm_rows(norm_rows_of(x, residual, eps, codes->in_features, order, nullptr, total), weight, weight_is_bf16, codes,
                   codes->num_tokens, *how);
}
