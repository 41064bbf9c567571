// How do the tokens of a row go through the states of its heads, one after the other, as fast as their order allows?
//
// Columns of a state never meet: a warp has a few of them in its registers and runs all tokens in order (arXiv 2412.06464), so the bits of
// a token are the same alone and among others. Tokens come into shared memory a few stages ahead, or each would wait for memory.
#pragma once
#include "delta_tokens.cuh"

namespace mlspec {

// kRows of kColumns columns are a lane's, kGroups lanes share a column. Only kRows and kGroups say in which order sums are made.
template <int kRowsOf, int kColumnsOf, int kGroupsOf, int kWarpsOf>
struct ScanShape {
  static constexpr int kRows = kRowsOf, kColumns = kColumnsOf, kGroups = kGroupsOf, kWarps = kWarpsOf;
  static constexpr int kColumnLanes = kWarp / kGroups, kPadded = kRows * kGroups, kWide = kWarps * kColumnLanes * kColumns;
  static constexpr int kTokens = kPadded <= 128 ? 8 : 4, kStages = 3, kThreads = kWarps * kWarp;
};

// Tokens in shared memory: key and query, values of the block's columns, decay and beta, what key times query is.
template <class Shape>
struct alignas(16) ScanStage {
  float keys[Shape::kTokens][2 * Shape::kPadded];
  float values[Shape::kTokens][Shape::kWide];
  float weights[Shape::kTokens][2], products[Shape::kTokens];
};

// Asks for tokens [p, p + kTokens) of a row, as far as there are any; of those run again nobody reads the query.
template <class Shape>
__device__ __forceinline__ void fetch_tokens(const mlspec_cuda_delta& a, const DeltaSpan& span, int64_t slots, int head, int key_head,
                                             int p, ScanStage<Shape>& to) {
  constexpr int kKeyPieces = Shape::kPadded / 2, kValuePieces = Shape::kWide / 4;  // of 16 bytes, of a token
  constexpr int kStep = Shape::kThreads > kKeyPieces ? Shape::kThreads / kKeyPieces : 1;
  const int count = min(Shape::kTokens, span.end - p), thread = threadIdx.x, column = blockIdx.x * Shape::kWide;
  for (int piece = thread % kKeyPieces; piece < kKeyPieces; piece += Shape::kThreads) {
    const float* const keys = a.keys + ((slots + p) * a.key_heads + key_head) * 2 * Shape::kPadded + 4 * piece;
    const int unread = piece < kKeyPieces / 2 ? 0 : span.start - p;
#pragma unroll 1
    for (int token = thread / kKeyPieces; token < count; token += kStep)
      if (token >= unread)
        copy_16(shared_address(to.keys[token] + 4 * piece), keys + int64_t(token) * a.key_heads * 2 * Shape::kPadded);
  }
#pragma unroll 1
  for (int i = thread; i < count * kValuePieces; i += Shape::kThreads) {
    const int token = i / kValuePieces, at = i % kValuePieces * 4;
    if (column + at >= a.value_dim) continue;
    copy_16(shared_address(to.values[token] + at), a.values + ((slots + p + token) * a.value_heads + head) * a.value_dim + column + at);
  }
#pragma unroll 1
  for (int i = thread; i < 2 * count; i += Shape::kThreads)
    copy_4(shared_address(to.weights[i / 2] + i % 2), a.weights + ((slots + p + i / 2) * a.value_heads + head) * 2 + i % 2);
#pragma unroll 1
  for (int i = thread; i < count; i += Shape::kThreads)
    if (p + i >= span.start) copy_4(shared_address(to.products + i), a.products + (slots + p + i) * a.key_heads + key_head);
}

template <int kColumns>
__device__ __forceinline__ void load_columns(const float* from, float (&to)[kColumns]) {
  if constexpr (kColumns % 4 == 0) {
#pragma unroll
    for (int c = 0; c < kColumns; c += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + c);
      to[c] = four.x, to[c + 1] = four.y, to[c + 2] = four.z, to[c + 3] = four.w;
    }
  } else {
    static_assert(kColumns == 2);
    const float2 two = *reinterpret_cast<const float2*>(from);
    to[0] = two.x, to[1] = two.y;
  }
}

template <int kColumns>
__device__ __forceinline__ void store_columns(float* to, const float (&from)[kColumns]) {
  if constexpr (kColumns % 4 == 0) {
#pragma unroll
    for (int c = 0; c < kColumns; c += 4) *reinterpret_cast<float4*>(to + c) = make_float4(from[c], from[c + 1], from[c + 2], from[c + 3]);
  } else {
    static_assert(kColumns == 2);
    *reinterpret_cast<float2*>(to) = make_float2(from[0], from[1]);
  }
}

// A lane's part of a state: rows 4 (kGroups i + group) + 0 .. 3, so that the lanes of a warp read 16 bytes each of a key side by side.
template <class Shape>
struct StatePart {
  float s[Shape::kRows][Shape::kColumns];

  static __device__ __forceinline__ int row_of(int i, int group) { return (i / 4 * Shape::kGroups + group) * 4 + i % 4; }

  __device__ __forceinline__ void fill(float value) {
#pragma unroll
    for (int i = 0; i < Shape::kRows; ++i)
#pragma unroll
      for (int c = 0; c < Shape::kColumns; ++c) s[i][c] = value;
  }

  // Of rows that are there; the others stay.
  __device__ __forceinline__ void load(const float* from, int group, int rows, int width) {
#pragma unroll
    for (int i = 0; i < Shape::kRows; ++i)
      if (row_of(i, group) < rows) load_columns(from + int64_t(row_of(i, group)) * width, s[i]);
  }

  __device__ __forceinline__ void store(float* to, int group, int rows, int width) const {
#pragma unroll
    for (int i = 0; i < Shape::kRows; ++i)
      if (row_of(i, group) < rows) store_columns(to + int64_t(row_of(i, group)) * width, s[i]);
  }
};

// What a lane reads of a token.
template <class Shape>
struct ScanToken {
  float k[Shape::kRows], q[Shape::kRows], v[Shape::kColumns], decay, beta, product;

  // apart: 0, which the compiler does not know. One number for all lanes would be waited for at once, to become a uniform register.
  __device__ __forceinline__ void load(const ScanStage<Shape>& from, int token, int group, int column, int apart) {
#pragma unroll
    for (int i = 0; i < Shape::kRows; i += 4) {
      const float4 keys = *reinterpret_cast<const float4*>(from.keys[token] + (i / 4 * Shape::kGroups + group) * 4);
      const float4 queries = *reinterpret_cast<const float4*>(from.keys[token] + Shape::kPadded + (i / 4 * Shape::kGroups + group) * 4);
      k[i] = keys.x, k[i + 1] = keys.y, k[i + 2] = keys.z, k[i + 3] = keys.w;
      q[i] = queries.x, q[i + 1] = queries.y, q[i + 2] = queries.z, q[i + 3] = queries.w;
    }
    load_columns(from.values[token] + column, v);
    decay = from.weights[token + apart][0], beta = from.weights[token + apart][1], product = from.products[token + apart];
  }
};

// S moves by one token. What it says of q is known before: S^T q = decay S^T q + (q k) change; said: that, where kAsks.
// kAdds: Mamba-2, whose state takes values as they are, and which says skip of them beside.
template <class Shape, bool kAdds, bool kAsks>
__device__ __forceinline__ void scan_token(StatePart<Shape>& own, const ScanToken<Shape>& token, float skip, float (&said)[Shape::kColumns]) {
  constexpr int kColumns = Shape::kColumns;
  float known[kColumns] = {}, asked[kColumns] = {};
#pragma unroll
  for (int i = 0; i < Shape::kRows; ++i)
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if constexpr (!kAdds) known[c] = fmaf(own.s[i][c], token.k[i], known[c]);
      if constexpr (kAsks) asked[c] = fmaf(own.s[i][c], token.q[i], asked[c]);
    }
#pragma unroll
  for (int step = Shape::kGroups / 2; step > 0; step /= 2)
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if constexpr (!kAdds) known[c] += __shfl_xor_sync(0xFFFFFFFFu, known[c], step * Shape::kColumnLanes);
      if constexpr (kAsks) asked[c] += __shfl_xor_sync(0xFFFFFFFFu, asked[c], step * Shape::kColumnLanes);
    }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const float change = (kAdds ? token.v[c] : fmaf(-token.decay, known[c], token.v[c])) * token.beta;
#pragma unroll
    for (int i = 0; i < Shape::kRows; ++i) own.s[i][c] = fmaf(token.k[i], change, own.s[i][c] * token.decay);
    if constexpr (kAsks) said[c] = fmaf(token.product, change, asked[c] * token.decay);
    if constexpr (kAsks && kAdds) said[c] = fmaf(skip, token.v[c], said[c]);
  }
}

// Tokens [first, end) of a stage; to: where goes what the first says of its query, null: nowhere.
template <class Shape, bool kAdds, bool kAsks>
__device__ __forceinline__ void scan_tokens(StatePart<Shape>& own, const ScanStage<Shape>& stage, int first, int end, int group, int column,
                                            float skip, int apart, float* to, int64_t stride) {
  ScanToken<Shape> token, next;
  token.load(stage, first, group, column, apart);
#pragma unroll 2
  for (int t = first; t < end; ++t) {
    next.load(stage, (t + 1) & (Shape::kTokens - 1), group, column, apart);  // behind the last one nobody reads it
    float said[Shape::kColumns] = {};
    scan_token<Shape, kAdds, kAsks>(own, token, skip, said);
    if (kAsks && to) store_columns(to, said), to += stride;
    token = next;
  }
}

template <class Shape, bool kAdds>
__global__ void __launch_bounds__(Shape::kThreads) delta_scan_kernel(mlspec_cuda_delta a) {
  launch_dependents();
  __shared__ ScanStage<Shape> stages[Shape::kStages];
  constexpr int kTokens = Shape::kTokens;
  const int row = blockIdx.z, head = blockIdx.y, lane = threadIdx.x % kWarp, group = lane / Shape::kColumnLanes;
  const int inside = (threadIdx.x / kWarp * Shape::kColumnLanes + lane % Shape::kColumnLanes) * Shape::kColumns;
  const int column = blockIdx.x * Shape::kWide + inside, key_head = head / (a.value_heads / a.key_heads);
  const int apart = a.batch > 0 ? 0 : lane;
  wait_for_previous_kernel();
  const DeltaSpan span = span_of(a, row);
  if (span.end <= span.begin) return;
  const bool mine = column < a.value_dim;  // of the last warps some lanes have no columns; they take part in sums
  float* const state = a.states + (int64_t(row) * a.value_heads + head) * a.key_dim * a.value_dim + (mine ? column : 0);
  const int64_t slots = int64_t(row) * (a.window + a.width) - span.begin, stride = int64_t(a.value_heads) * a.value_dim;
  float* const mixed = a.mixed + (int64_t(row) * a.width * a.value_heads + head) * a.value_dim + column;
  const auto ask = [&](int chunk) {
    const int p = span.begin + chunk * kTokens;
    if (p < span.end) fetch_tokens(a, span, slots, head, key_head, p, stages[chunk % Shape::kStages]);
    commit_copies();
  };
#pragma unroll
  for (int chunk = 0; chunk < Shape::kStages - 1; ++chunk) ask(chunk);
  StatePart<Shape> own;
  own.fill(span.lost ? __int_as_float(0x7FC00000) : 0.f);
  if (span.begin > 0 && !span.lost) own.load(state, group, a.key_dim, a.value_dim);
  const int settled = (a.settles == MLSPEC_STATE_AT_END ? span.end : span.start) - a.behind;
  const bool settles = a.settles != MLSPEC_STATE_KEEP && settled > span.begin;
  const float skip = kAdds ? a.skip[head] : 0.f;
  for (int chunk = 0, p = span.begin; p < span.end; ++chunk) {
    wait_for_copies<Shape::kStages - 2>();
    __syncthreads();
    ask(chunk + Shape::kStages - 1);  // into the stage that all warps have left
    const ScanStage<Shape>& stage = stages[chunk % Shape::kStages];
    const int first = p, stop = min(p + kTokens, span.end);
    while (p < stop) {
      const bool asks = p >= span.start;
      int end = asks ? stop : min(stop, span.start);
      if (settles && p < settled) end = min(end, settled);
      float* const to = asks && mine && group == 0 ? mixed + (p - span.start) * stride : nullptr;
      if (asks)
        scan_tokens<Shape, kAdds, true>(own, stage, p - first, end - first, group, inside, skip, apart, to, stride);
      else
        scan_tokens<Shape, kAdds, false>(own, stage, p - first, end - first, group, inside, skip, apart, to, stride);
      p = end;
      if (settles && mine && p == settled) own.store(state, group, a.key_dim, a.value_dim);
    }
  }
}

}  // namespace mlspec
