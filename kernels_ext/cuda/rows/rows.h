// What do the kernels over rows, their cache and their logits take? Plain C: every pointer is device memory, every call only
// enqueues work. Tensors lie dense and start at multiples of 16 bytes unless strides are given; what they mean:
// hf_mlspec/ops/rows.py and attention.py.
#pragma once

#include <stdint.h>

#include "../linear/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  void* stream;
  int32_t overlap;   // may start before the kernel in front of it in the stream ends (sm_90 and later)
  int32_t clusters;  // blocks may share their memory (sm_90 and later); results have the same bits without
} mlspec_cuda_row_launch;

// Keys and values bfloat16 [batch, kv_heads, slots, dim], dense in the last two axes; strides in elements, multiples of 8. code_bits:
// 0, or 8 or 4: rows are codes of so many bits and four bytes behind them (hf_mlspec/formats/cache/); strides in bytes, multiples
// of 16.
typedef struct {
  void *keys, *values;
  int64_t batch, kv_heads, slots, dim;
  int64_t key_batch_stride, key_head_stride, value_batch_stride, value_head_stride;
  int32_t code_bits;
} mlspec_cuda_cache;

// Token t of row r has position and slot starts[r] + t and is real where t < counts[r].
typedef struct {
  const int32_t *starts, *counts;  // [batch]
  int64_t width;
} mlspec_cuda_tokens;

// Each returns null, or what went wrong. n, batch and width are at least 1.

// x, residual (or null) bfloat16 [n, width]; weight [width], float32 or bfloat16; total null without a residual. order: null, or
// int32 [width], of the columns of `normed`, as of mlspec_cuda_ordered_rows.
const char* mlspec_cuda_rms_norm(const void* x, const void* residual, const void* weight, int32_t weight_is_bf16, float eps,
                                 int64_t n, int64_t width, const int32_t* order, void* normed, void* total,
                                 const mlspec_cuda_row_launch* how);

// gate, up: rows of `width` bfloat16, `stride` elements from row to row -> out [n, width]; mlspec_activation of cpu/kernels.h.
// order: null, or int32 [width]: column i of out is what stands in column order[i], as of mlspec_cuda_ordered_rows.
const char* mlspec_cuda_gated(const void* gate, const void* up, int64_t stride, int64_t n, int64_t width, int32_t activation,
                              const int32_t* order, void* out, const mlspec_cuda_row_launch* how);

// gate_up bfloat16 [n, 2 * width], gate and up in turns -> out [n, width]: (up + 1) * gate * sigmoid(slope * gate) of a gate that is
// limited from above and an up from both sides.
const char* mlspec_cuda_gated_pairs(const void* gate_up, int64_t n, int64_t width, float slope, float limit, void* out,
                                    const mlspec_cuda_row_launch* how);

// x bfloat16 [n, width], order int32 [width] -> out [n, width]: its column i is column order[i] of x, the nearest one there is.
const char* mlspec_cuda_ordered_rows(const void* x, const int32_t* order, int64_t n, int64_t width, void* out,
                                     const mlspec_cuda_row_launch* how);

// Rows of x times Hadamard matrices (hf_mlspec/ops/hadamard.py): as [.. ][order][2^k][inner], size = order * 2^k.
typedef struct {
  const void* x;        // bfloat16 [n, width], or gate and up behind each other, [n, 2 * width], whose gated rows are taken
  const float* matrix;  // [order, order], or null: order is 1
  void* out;            // bfloat16 [n, width]
  int64_t n, width, order, size, inner;
  int64_t shared_bytes;  // a block may have
  float factor;          // 1 / sqrt(size)
  int32_t activation;    // mlspec_activation of gated rows, -1: x as it is
} mlspec_cuda_hadamard;

const char* mlspec_cuda_hadamard_rows(const mlspec_cuda_hadamard* hadamard, const mlspec_cuda_row_launch* how);

// Rows become integers where they are computed, with the bits of the two calls one behind the other: `codes` says how, but for x, stream
// and overlap; num_tokens rows of in_features columns. order: of the columns that are coded, null, or int32 [in_features].

// The rows of mlspec_cuda_rms_norm; whether rows of this width are served.
const char* mlspec_cuda_norm_codes(const void* x, const void* residual, const void* weight, int32_t weight_is_bf16, float eps,
                                   const int32_t* order, void* total, const mlspec_cuda_quantize* codes,
                                   const mlspec_cuda_row_launch* how);
int32_t mlspec_cuda_norm_codes_serves(int64_t width);

// The rows of mlspec_cuda_gated, x being gate; where activation is -1, x as it is.
const char* mlspec_cuda_row_codes(const void* x, const void* up, int64_t stride, int32_t activation, const int32_t* order,
                                  const mlspec_cuda_quantize* codes, const mlspec_cuda_row_launch* how);

// The rows of mlspec_cuda_hadamard_rows, whose `out` is not read; whether these sizes are served.
const char* mlspec_cuda_hadamard_codes(const mlspec_cuda_hadamard* hadamard, const mlspec_cuda_quantize* codes,
                                       const mlspec_cuda_row_launch* how);
int32_t mlspec_cuda_hadamard_codes_serves(const mlspec_cuda_hadamard* hadamard, int32_t group_size);

// between = down x in float32.
typedef struct {
  const void* x;      // bfloat16 [n, in_features], a multiple of 8
  const float* down;  // [ranks, in_features]
  float* between;     // [n, ranks], written
  int64_t n, in_features, ranks;
} mlspec_cuda_low_rank_down;

const char* mlspec_cuda_low_rank_between(const mlspec_cuda_low_rank_down* down, const mlspec_cuda_row_launch* how);

// y + up between in float32, rounded once. Output o adds up ranks first[o] to first[o] + rank, the nearest ones there are.
typedef struct {
  const void* y;         // bfloat16 [n, out_features]
  const float* between;  // [n, ranks]
  const float* up;       // [rank, out_features]
  const int32_t* first;  // [out_features]
  void* out;             // bfloat16 [n, out_features]
  int64_t n, out_features, ranks, rank;
} mlspec_cuda_low_rank_up;

const char* mlspec_cuda_low_rank_added(const mlspec_cuda_low_rank_up* up, const mlspec_cuda_row_launch* how);

// ids int32 [n]; table [vocab, width], float32 or bfloat16 -> out [n, width].
const char* mlspec_cuda_embed_rows(const int32_t* ids, const void* table, int32_t table_is_bf16, int64_t vocab, int64_t n,
                                   int64_t width, float scale, void* out, const mlspec_cuda_row_launch* how);

typedef struct {
  const void* qkv;  // bfloat16 [batch, width, (heads + 2 kv_heads) * dim]
  const float *q_norm, *k_norm;  // [dim] or null
  const float *cos, *sin;        // [positions, half]
  int64_t positions, half, heads;
  float eps;
  void* q;  // bfloat16 [batch, width, heads, dim]
} mlspec_cuda_rotation;

const char* mlspec_cuda_rope_write_rows(const mlspec_cuda_rotation* rotation, const mlspec_cuda_tokens* tokens,
                                        const mlspec_cuda_cache* cache, const mlspec_cuda_row_launch* how);

// Of keys and values [batch, kv_heads, slots up to a multiple of 64], or null; zeros: of int4 codes less 8.
typedef struct {
  float *keys, *values, *key_zeros, *value_zeros;
} mlspec_cuda_scales;

typedef struct {
  const void* q;  // bfloat16 [batch, width, heads, dim]
  void* out;      // the same
  int64_t heads, window;
  int64_t draft_window;  // 0, or: of these, token at p sees the first 64 slots and those > p - draft_window
  float scale, softcap;
  int32_t shared_bytes;     // a block may have
  int32_t multiprocessors;  // of the GPU
  // For tests; 0: chosen from the shapes. Bits are the same.
  int32_t teams;   // blocks that share a tile's keys: 1 or 8
  int32_t groups;  // of warps in a block: 1, or more than 1 for as many as there may be
  mlspec_cuda_scales scales;  // of a cache that was widened, for the kernel for prompts
  const float* sinks;  // [heads], or null: a score more of every softmax, which has no value
} mlspec_cuda_attention;

const char* mlspec_cuda_ragged_attention_rows(const mlspec_cuda_attention* attention, const mlspec_cuda_tokens* tokens,
                                              const mlspec_cuda_cache* cache, const mlspec_cuda_row_launch* how);

// The same bits for many tokens, head_dim up to 128, compute capability 9.0; whether these shapes are faster there. Of a cache of codes
// those that the tokens see are widened first, keys in the order that attention_codes.cuh gives them: `wide` is a bfloat16 cache of
// the same sizes, then given with the scales.
const char* mlspec_cuda_widen_cache(const mlspec_cuda_tokens* tokens, const mlspec_cuda_cache* cache, const mlspec_cuda_cache* wide,
                                    const mlspec_cuda_scales* scales, const mlspec_cuda_row_launch* how);
const char* mlspec_cuda_ragged_attention_prefill(const mlspec_cuda_attention* attention, const mlspec_cuda_tokens* tokens,
                                                 const mlspec_cuda_cache* cache, const mlspec_cuda_row_launch* how);
int32_t mlspec_cuda_attention_prefill_serves(const mlspec_cuda_attention* attention, const mlspec_cuda_tokens* tokens,
                                             const mlspec_cuda_cache* cache);

// logits [n, vocab], float32 or bfloat16; seed null, or int64 [seeds], 1 or n, with streams and positions int32 [n]; no noise
// for rows of a negative stream.
typedef struct {
  const void* logits;
  int32_t logits_are_bf16;
  int64_t n, vocab;
  float softcap;
  const int64_t* seed;
  int64_t seeds;
  const int32_t *streams, *positions;
  int32_t* tokens;    // [n]
  float* confidence;  // [n]
} mlspec_cuda_choice;

const char* mlspec_cuda_choose_rows(const mlspec_cuda_choice* choice, const mlspec_cuda_row_launch* how);

#ifdef __cplusplus
}
#endif
