// How are rows gated, ordered and looked up? Elements of 16 bytes at a time.
#include "activation.cuh"

namespace mlspec {
namespace {

constexpr int kElementThreads = 128;                 // of kernels without sums: small blocks spread over the chip
constexpr int kMaxGridRows = 65535;
constexpr int kStagedThreads = 512, kStagedRows = 4, kStagedBytes = 96 * 1024;  // of ordered rows through shared memory

// Which columns of a row the kVector places from `at` on take; the nearest ones there are, and 0 beyond the row.
__device__ __forceinline__ void columns_of(const int32_t* order, int64_t at, int64_t width, int64_t (&column)[kVector]) {
#pragma unroll
  for (int e = 0; e < kVector; ++e) column[e] = at + e < width ? column_of(order, at + e, width) : 0;
}

template <int kActivation>
__global__ void __launch_bounds__(kElementThreads)
    gated_kernel(const __nv_bfloat16* gate, const __nv_bfloat16* up, int64_t stride, int64_t n, int64_t width,
                 const int32_t* order, __nv_bfloat16* out) {
  launch_dependents();
  const int64_t at = (int64_t(blockIdx.x) * kElementThreads + threadIdx.x) * kVector;
  if (at >= width) return;
  int64_t column[kVector] = {};
  if (order) columns_of(order, at, width, column);
  wait_for_previous_kernel();
  for (int64_t row = blockIdx.y; row < n; row += gridDim.y) {
    const __nv_bfloat16 *from = gate + row * stride + at, *other = up + row * stride + at;
    __nv_bfloat16* to = out + row * width + at;
    if (order) {
      float a[kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e)
        a[e] = activate<kActivation>(load_one(from - at + column[e])) * load_one(other - at + column[e]);
      if (width % kVector == 0) {
        store_vector(to, a);
      } else {
        for (int e = 0; e < kVector && at + e < width; ++e) store_one(to + e, a[e]);
      }
    } else if (width % kVector == 0) {
      float a[kVector], b[kVector];
      load_vector(from, a);
      load_vector(other, b);
#pragma unroll
      for (int e = 0; e < kVector; ++e) a[e] = activate<kActivation>(a[e]) * b[e];
      store_vector(to, a);
    } else {
      for (int e = 0; e < kVector && at + e < width; ++e)
        store_one(to + e, activate<kActivation>(load_one(from + e)) * load_one(other + e));
    }
  }
}

// count: of outputs. A thread has kVector of them, one behind the other, of whichever rows.
__global__ void __launch_bounds__(kElementThreads)
    gated_pairs_kernel(const __nv_bfloat16* gate_up, int64_t count, float slope, float limit, __nv_bfloat16* out) {
  launch_dependents();
  const int64_t at = (int64_t(blockIdx.x) * kElementThreads + threadIdx.x) * kVector;
  if (at >= count) return;
  wait_for_previous_kernel();
  const __nv_bfloat16* from = gate_up + 2 * at;
  if (at + kVector <= count) {
    float pairs[2][kVector], y[kVector];
    load_vector(from, pairs[0]);
    load_vector(from + kVector, pairs[1]);
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      const float(&half)[kVector] = pairs[e / (kVector / 2)];
      y[e] = gated_pair(half[e * 2 % kVector], half[e * 2 % kVector + 1], slope, limit);
    }
    store_vector(out + at, y);
  } else {
    for (int e = 0; at + e < count; ++e)
      store_one(out + at + e, gated_pair(load_one(from + 2 * e), load_one(from + 2 * e + 1), slope, limit));
  }
}

// A thread gathers kVector columns of every row of its part, which lie in the cache after the first reads of a row.
__global__ void __launch_bounds__(kElementThreads)
    ordered_kernel(const uint16_t* x, const int32_t* order, int64_t n, int64_t width, uint16_t* out) {
  launch_dependents();
  const int64_t at = (int64_t(blockIdx.x) * kElementThreads + threadIdx.x) * kVector;
  if (at >= width) return;
  int64_t from[kVector];
  columns_of(order, at, width, from);
  wait_for_previous_kernel();
  for (int64_t row = blockIdx.y; row < n; row += gridDim.y) {
    const uint16_t* line = x + row * width;
    uint16_t* to = out + row * width + at;
    uint32_t column[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) column[e] = line[from[e]];
    if (width % kVector == 0) {
      *reinterpret_cast<uint4*>(to) = make_uint4(column[0] | column[1] << 16, column[2] | column[3] << 16,
                                                 column[4] | column[5] << 16, column[6] | column[7] << 16);
    } else {
      for (int e = 0; e < kVector && at + e < width; ++e) to[e] = static_cast<uint16_t>(column[e]);
    }
  }
}

// The kVector columns that places from `at` on take, of a row in shared memory, to `to`.
__device__ __forceinline__ void gather(const uint16_t* row, const int32_t* order, int64_t at, int64_t width, __nv_bfloat16* to) {
  int64_t from[kVector];
  columns_of(order, at, width, from);
  uint32_t column[kVector];
#pragma unroll
  for (int e = 0; e < kVector; ++e) column[e] = row[from[e]];
  *reinterpret_cast<uint4*>(to) = make_uint4(column[0] | column[1] << 16, column[2] | column[3] << 16,
                                             column[4] | column[5] << 16, column[6] | column[7] << 16);
}

// Several rows: a block brings a whole one to shared memory and writes blockIdx.x's share of it in order. kActivation: of gated
// rows; kPlain: rows as they are. The same bits as one by one.
template <int kActivation>
__global__ void __launch_bounds__(kStagedThreads)
    staged_kernel(const __nv_bfloat16* x, const __nv_bfloat16* up, int64_t stride, int64_t width, int64_t share, const int32_t* order,
                  __nv_bfloat16* out) {
  extern __shared__ __align__(16) __nv_bfloat16 staged[];
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t row = blockIdx.y, begin = blockIdx.x * share, end = min(width, begin + share);
  for (int64_t at = threadIdx.x * kVector; at < width; at += kStagedThreads * kVector) {
    if constexpr (kActivation == kPlain) {
      *reinterpret_cast<uint4*>(staged + at) = *reinterpret_cast<const uint4*>(x + row * stride + at);
    } else {
      float a[kVector], b[kVector];
      load_vector(x + row * stride + at, a);
      load_vector(up + row * stride + at, b);
#pragma unroll
      for (int e = 0; e < kVector; ++e) a[e] = activate<kActivation>(a[e]) * b[e];
      store_vector(staged + at, a);
    }
  }
  __syncthreads();
  for (int64_t at = begin + threadIdx.x * kVector; at < end; at += kStagedThreads * kVector)
    gather(reinterpret_cast<const uint16_t*>(staged), order, at, width, out + row * width + at);
}

// Whether rows go through shared memory, in how many blocks each.
struct Staging {
  bool fits;
  int64_t splits, share;
};

Staging staging_of(int64_t n, int64_t width) {
  const int64_t splits = n <= 32 ? 4 : n <= 64 ? 2 : 1, vectors = width / kVector;
  return {n >= kStagedRows && n <= kMaxGridRows && width % kVector == 0 && width * 2 <= kStagedBytes, splits,
          (vectors + splits - 1) / splits * kVector};
}

template <int kActivation>
const char* launch_staged(const Staging& how, const void* x, const void* up, int64_t stride, int64_t n, int64_t width,
                          const int32_t* order, void* out, const mlspec_cuda_row_launch& launch) {
  return launch_rows(launch, {dim3(unsigned(how.splits), unsigned(n)), kStagedThreads, unsigned(width * 2)},
                     staged_kernel<kActivation>, static_cast<const __nv_bfloat16*>(x), static_cast<const __nv_bfloat16*>(up), stride,
                     width, how.share, order, static_cast<__nv_bfloat16*>(out));
}

template <class T>
__global__ void __launch_bounds__(kElementThreads)
    embed_kernel(const int32_t* ids, const T* table, int64_t vocab, int64_t width, float scale, T* out) {
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t id = ids[blockIdx.x], row = id < 0 ? 0 : id < vocab ? id : vocab - 1;
  const T* from = table + row * width;
  T* to = out + int64_t(blockIdx.x) * width;
  for (int64_t at = (int64_t(blockIdx.y) * kElementThreads + threadIdx.x) * kVector; at < width;
       at += int64_t(gridDim.y) * kElementThreads * kVector) {
    if (width % kVector == 0) {
      float v[kVector];
      load_vector(from + at, v);
#pragma unroll
      for (int e = 0; e < kVector; ++e) v[e] *= scale;  // by 1: as they are
      store_vector(to + at, v);
    } else {
      for (int e = 0; e < kVector && at + e < width; ++e) store_one(to + at + e, load_one(from + at + e) * scale);
    }
  }
}

template <class T>
const char* embed_rows(const int32_t* ids, const void* table, int64_t vocab, int64_t n, int64_t width, float scale, void* out,
                       const mlspec_cuda_row_launch& how) {
  const unsigned pieces = blocks_for(width, kElementThreads * kVector);
  const RowGrid grid{dim3(unsigned(n), pieces < kMaxGridRows ? pieces : kMaxGridRows), kElementThreads};
  return launch_rows(how, grid, embed_kernel<T>, ids, static_cast<const T*>(table), vocab, width, scale, static_cast<T*>(out));
}

}  // namespace
}  // namespace mlspec

using namespace mlspec;

const char* mlspec_cuda_gated(const void* gate, const void* up, int64_t stride, int64_t n, int64_t width, int32_t activation,
                              const int32_t* order, void* out, const mlspec_cuda_row_launch* how) {
  const Staging staging = staging_of(n, width);
  return with_activation(activation, [&](auto number) {
    constexpr int kActivation = decltype(number)::value;
    if (order && staging.fits) return launch_staged<kActivation>(staging, gate, up, stride, n, width, order, out, *how);
    const int64_t rows = n < kMaxGridRows ? n : kMaxGridRows;
    return launch_rows(*how, {dim3(blocks_for(width, kElementThreads * kVector), unsigned(rows)), kElementThreads},
                       gated_kernel<kActivation>, static_cast<const __nv_bfloat16*>(gate), static_cast<const __nv_bfloat16*>(up),
                       stride, n, width, order, static_cast<__nv_bfloat16*>(out));
  });
}

const char* mlspec_cuda_gated_pairs(const void* gate_up, int64_t n, int64_t width, float slope, float limit, void* out,
                                    const mlspec_cuda_row_launch* how) {
  const int64_t blocks = (n * width + kElementThreads * kVector - 1) / (kElementThreads * kVector);
  if (blocks > INT32_MAX) return "too many tokens for one launch: call it for fewer tokens";
  return launch_rows(*how, {dim3(unsigned(blocks)), kElementThreads}, gated_pairs_kernel, static_cast<const __nv_bfloat16*>(gate_up),
                     n * width, slope, limit, static_cast<__nv_bfloat16*>(out));
}

const char* mlspec_cuda_ordered_rows(const void* x, const int32_t* order, int64_t n, int64_t width, void* out,
                                     const mlspec_cuda_row_launch* how) {
  if (const Staging staging = staging_of(n, width); staging.fits)
    return launch_staged<kPlain>(staging, x, nullptr, width, n, width, order, out, *how);
  const int64_t rows = n < kMaxGridRows ? n : kMaxGridRows;
  return launch_rows(*how, {dim3(blocks_for(width, kElementThreads * kVector), unsigned(rows)), kElementThreads}, ordered_kernel,
                     static_cast<const uint16_t*>(x), order, n, width, static_cast<uint16_t*>(out));
}

const char* mlspec_cuda_embed_rows(const int32_t* ids, const void* table, int32_t table_is_bf16, int64_t vocab, int64_t n,
                                   int64_t width, float scale, void* out, const mlspec_cuda_row_launch* how) {
  return table_is_bf16 ? embed_rows<__nv_bfloat16>(ids, table, vocab, n, width, scale, out, *how)
                       : embed_rows<float>(ids, table, vocab, n, width, scale, out, *how);
}
