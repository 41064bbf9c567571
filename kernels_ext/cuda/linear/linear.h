// What do the linear kernels take? Plain C: every pointer is device memory, every call only enqueues work on `stream`.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { MLSPEC_CUDA_ADAPTED_TOKENS = 32 };

typedef struct {
  const void* tiles;      // bf16: the weight itself, bfloat16 [out, in], aligned to 16 bytes; else from prepack
  const void* more;       // nested: the tiles of low bits, or null
  const void* codebook;   // nested, 4 bits of a weight: uint8 [8], aligned to 4 bytes
  const void* tables;     // lookup-table planes: float16 [out rounded up to 128, table_columns]
  const void* x;          // bfloat16 [tokens, in]; 8 and 4 bits: codes int8 [tokens, in] of mlspec_cuda_quantize_rows
  const float* x_scales;  // 8 and 4 bits: the scales of mlspec_cuda_quantize_rows
  const void* bias;       // [out] float32 or bfloat16, or null
  void* out;              // [tokens, out], bfloat16 or float32
  const int32_t* exponent_shift;  // MXFP4: what prepack wrote; the result is multiplied by 2^exponent_shift
  int64_t num_tokens, in_features, out_features;  // in_features: a multiple of 8 (bf16), 32 (MXFP4), group_size (int4)
  int64_t x_scale_stride;         // tokens, a multiple of 4
  int64_t outputs_of_weight;      // where out_features are but some outputs of a weight: all of it, for its order of sums; or 0
  int32_t group_size, has_zeros;  // int4, bit-planes
  int32_t outliers;               // int4 in groups of 128: 128, the last group meets the inputs of the one before it; or 0
  int32_t tile_stride, zero_doubled, num_planes;  // planes: bytes of a tile as stored; planes that are multiplied
  int32_t absent_planes;          // bit-planes: of the weight, that its tiles do not store, behind those that they do
  int32_t num_apart;              // bit-planes that are multiplied, behind those of the tiles, each in an array of its own:
  const void* apart[7];           // [output tile pair, chunk, tile of the pair] of 1024 bytes, aligned to 16 bytes
  const int32_t* widths;          // bit-planes: how many are multiplied, on the device, each 1 to the stored ones;
  int64_t num_widths;             // 1: of all tokens; as many as tokens: of each
  int32_t table_columns;          // lookup-table planes: 2^(stored + 1) - 2^S values of S, S + 1 ... stored bits
  int32_t weight_bits;            // nested: 16 or 4
  int32_t activation_bits;        // 16, 8 or 4; bf16: 16
  float activation_clip;          // of 4 bits: that of mlspec_cuda_quantize
  int32_t bias_is_float32;
  int32_t out_is_float32;         // sums as they are, of planes and int4
  void* partial;                  // bf16: room for sums, mlspec_cuda_bf16_partial_bytes()
  const float* between;           // bf16, up to MLSPEC_CUDA_ADAPTED_TOKENS: what adapters add to rounded outputs, with the bits of
  const float* up;                // mlspec_cuda_low_rank_added (rows.h); null: none
  const int32_t* first;
  int64_t low_ranks, low_rank;    // its ranks and rank
  int32_t overlap;  // programmatic dependent launch: may start before the kernel in front ends; only weights are read then
  // For tests and timing; 0: chosen from the shapes. Bits depend on `ranks` alone.
  int32_t variant;       // see linear_launch.cuh, bf16_linear.cu and bf16_linear_prefill.h
  int32_t ranks;         // blocks that share a tile's inputs: 1 to 8
  int32_t ring_bytes;    // of stages in shared memory
  int32_t stages_ahead;  // of weights in flight before the first tokens
  void* stream;
} mlspec_cuda_linear;

// Null, or what is wrong with the outliers of an int4 weight.
static inline const char* mlspec_cuda_problem_of_outliers(const mlspec_cuda_linear* a) {
  const int32_t fits = a->group_size == 128 && a->outliers == 128 && a->in_features >= 384;
  return !a->outliers || fits ? 0 : "int4 has 128 outliers, in groups of 128, behind one group at least";
}

// Each returns null, or what went wrong. Compute capability 9.0.
const char* mlspec_cuda_bf16_linear(const mlspec_cuda_linear* args);
int64_t mlspec_cuda_bf16_partial_bytes(const mlspec_cuda_linear* args);  // of `partial`, 0: none is needed
const char* mlspec_cuda_int4_linear(const mlspec_cuda_linear* args);
const char* mlspec_cuda_mxfp4_linear(const mlspec_cuda_linear* args);
const char* mlspec_cuda_nested_linear(const mlspec_cuda_linear* args);

// Rows as integers: exactly the numbers of hf_mlspec/formats/activations.py.
typedef struct {
  const void* x;  // bfloat16 [tokens, in]
  void* codes;    // int8 [tokens, in]
  float* scales;  // for_linear: [ceil(in / 128) * 128 / group, scale_stride], zeros beyond `in` and `tokens`;
                  // else [tokens, ceil(in / group)]
  int64_t num_tokens, in_features, scale_stride;  // for_linear: scale_stride a multiple of 4, at least num_tokens
  int32_t group_size, bits;                       // 32, 64 or 128; 8 or 4
  int32_t outliers;                               // the last so many inputs, whole groups, have 8 bits
  float clip;  // of 4-bit codes: what the largest means, as a share of the group's largest magnitude, above 0 and at most 1
  int32_t for_linear;  // codes of every 16 inputs in the order 0 8 1 9 .. 7 15; in_features a multiple of 32
  int32_t overlap;
  void* stream;
} mlspec_cuda_quantize;

const char* mlspec_cuda_quantize_rows(const mlspec_cuda_quantize* args);

typedef struct {
  void* weight;  // packed codes as saved, uint8 [out, in / 2]
  void* scale;   // int4 float16 [out, in / group], MXFP4 uint8 [out, in / 32], no byte 255 (the caller refuses NaN)
  void* zero;    // int4: uint8 as scale, or null
  void* tiles;
  int32_t* exponent_shift;  // MXFP4: one number, max(0, largest scale byte - 128); prepack writes it, unprepack reads it
  int64_t in_features, out_features;
  int32_t group_size;  // MXFP4: 32
  int32_t mxfp4;
  void* stream;
} mlspec_cuda_prepack;

int64_t mlspec_cuda_tile_bytes(const mlspec_cuda_prepack* args);  // of all tiles
const char* mlspec_cuda_prepack_tiles(const mlspec_cuda_prepack* args);
const char* mlspec_cuda_unprepack_tiles(const mlspec_cuda_prepack* args);

#ifdef __cplusplus
}
#endif
