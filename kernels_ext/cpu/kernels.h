// What can the CPU kernels do? Plain C signatures without torch: bindings and decoder check operands and share out work.
//
// Every function below computes the part of an output it is told to compute, on the calling thread, and allocates
// nothing on the heap. Law of all of them: a row's bits depend on that row and on the weights only, never on the other
// rows of the call, on num_rows, on the range of outputs of one call, or on the thread.
#pragma once
#include <cstdint>

#include "../formats.h"

extern "C" {

enum mlspec_dtype {
  MLSPEC_FLOAT32 = 0,
  MLSPEC_BFLOAT16 = 1,
  MLSPEC_FLOAT16 = 2,
  MLSPEC_INT8_ROWS = 3,
  MLSPEC_INT4_ROWS = 4
};

// Rows of a cache, whose arrays have bytes for elements (hf_mlspec/formats/cache/ defines both). INT8_ROWS: head_dim int8 codes
// and, behind them, the bytes of a float scale; value = code * scale. INT4_ROWS: head_dim / 2 bytes of two codes each and, behind
// them, the bfloat16 of code 0 and that of code 15; value = (low * (15 - code) + high * code) / 15. head_dim is even.
enum { MLSPEC_CACHE_TAIL_BYTES = 4 };
static inline int mlspec_is_rows(enum mlspec_dtype dtype) { return dtype == MLSPEC_INT8_ROWS || dtype == MLSPEC_INT4_ROWS; }
static inline int64_t mlspec_element_bytes(enum mlspec_dtype dtype) {
  return dtype == MLSPEC_FLOAT32 ? 4 : mlspec_is_rows(dtype) ? 1 : 2;
}
static inline int64_t mlspec_cache_row_bytes(enum mlspec_dtype dtype, int64_t head_dim) {
  if (!mlspec_is_rows(dtype)) return head_dim * mlspec_element_bytes(dtype);
  return (dtype == MLSPEC_INT4_ROWS ? head_dim / 2 : head_dim) + MLSPEC_CACHE_TAIL_BYTES;
}
// of rows of so many elements
static inline int64_t mlspec_cache_head_dim(enum mlspec_dtype dtype, int64_t width) {
  if (!mlspec_is_rows(dtype)) return width;
  return (width - MLSPEC_CACHE_TAIL_BYTES) * (dtype == MLSPEC_INT4_ROWS ? 2 : 1);
}

// How a linear wants its activations.
enum mlspec_acts_kind {
  MLSPEC_ACTS_F32 = 0,         // float [n][in]
  MLSPEC_ACTS_BF16 = 1,        // bfloat16 [n][in], rounded to nearest even
  MLSPEC_ACTS_BF16_TILES = 2,  // bfloat16 for AMX: [n / 16][in / 32][16 pairs][16 rows][2], zero-padded in both
  MLSPEC_ACTS_INT = 3,         // int8 codes [n][in], float scales [n][in / group], int32 sums of codes [n][in / group]
};

struct mlspec_acts {
  mlspec_acts_kind kind;
  int64_t num_rows, in_features;
  int64_t group;  // INT: elements that share a scale: 32, 64 or 128 (the last group may be short); else 0
  int64_t bits;   // INT: 8 (codes -127..127) or 4 (codes -7..7); else 0
  void* data;     // 64-byte aligned, mlspec_acts_bytes(...) long
  int64_t wide = 0;  // INT at 4 bits: so many of the last elements, whole groups, have 8 bits all the same
  float clip = 1.0f;  // INT, of 4-bit codes: what the largest code means, as a share of the group's largest magnitude
};

// The three arrays of ACTS_INT lie one behind the other, each 64-byte aligned.
static inline int64_t mlspec_align64(int64_t bytes) { return (bytes + 63) & ~int64_t(63); }
static inline int64_t mlspec_groups(const struct mlspec_acts* a) { return (a->in_features + a->group - 1) / a->group; }
static inline int8_t* mlspec_acts_codes(const struct mlspec_acts* a) { return (int8_t*)a->data; }
static inline float* mlspec_acts_scales(const struct mlspec_acts* a) {
  return (float*)((char*)a->data + mlspec_align64(a->num_rows * a->in_features));
}
static inline int32_t* mlspec_acts_sums(const struct mlspec_acts* a) {
  return (int32_t*)((char*)mlspec_acts_scales(a) + mlspec_align64(a->num_rows * mlspec_groups(a) * 4));
}
static inline int64_t mlspec_acts_bytes(const struct mlspec_acts* a) {  // data is not read
  const int64_t n = a->num_rows, in = a->in_features;
  switch (a->kind) {
    case MLSPEC_ACTS_F32: return mlspec_align64(n * in * 4);
    case MLSPEC_ACTS_BF16: return mlspec_align64(n * in * 2);
    case MLSPEC_ACTS_BF16_TILES: return ((n + 15) / 16) * ((in + 31) / 32) * 1024;
    default: return mlspec_align64(n * in) + 2 * mlspec_align64(n * mlspec_groups(a) * 4);
  }
}

// y[n][out] (+)= x[n][in] * W[out][in]^T + bias, sums in float32.
struct mlspec_linear_args {
  const void* weight;     // bf16_linear: bfloat16 [out][in]; f32_linear: float [out][in]; 4 bit: tiles, below
  const void* scale;      // mxfp4: uint8 E8M0 [ceil(out / 16)][in / 32][16]; int4: float16 [ceil(out / 16)][in / group][16]
  const uint8_t* zero;    // int4: [ceil(out / 16)][in / group][16], or null: 8 everywhere
  int64_t group;          // int4: 32, 64 or 128, divides in
  const float* bias;      // [out] or null
  const struct mlspec_acts* acts;
  float* y;               // y[n * y_stride + m]
  int64_t y_stride;
  int32_t accumulate;     // 1: y += x W^T + bias
  int64_t in_features, out_features;
  const uint8_t* low = nullptr;       // nested, exact: [ceil(out / 16)][in / 32][768], below
  const uint8_t* codebook = nullptr;  // nested, draft: [8]
  int64_t num_planes = 0, stored_planes = 0;  // bit-planes: those to read, those there are
  int64_t plane_bytes = 0;            // from one plane to the next
  int64_t zero_doubled = 0;           // twice the code that means 0
  int64_t table_columns = 0;          // lookup-table planes: values in all tables of one output
};
// Output features [out_begin, out_end) of every row; out_begin is a multiple of 16, out_end too or it is out_features.
typedef void (*mlspec_linear_fn)(const struct mlspec_linear_args* args, int64_t out_begin, int64_t out_end);

// 4-bit tiles: [ceil(out / 16)][in / 32][4][16][4] bytes. Byte (t, b, j, r, i) belongs to output 16 t + r; its low nibble is
// element 32 b + 8 j + i, its high nibble element 32 b + 8 j + 4 + i. So 64 bytes, shifted and masked, are two operands
// of vpdpbusd whose lane r is an output. Outputs beyond the last are zero bytes with zero scales.
// mxfp4: E2M1 codes; value = table[code] * 2^(scale - 127), scale byte 0 counts as zero. With ACTS_INT (group 32, 8 bits):
//   acc = fma(float(sum of 2 * table[code] * x code), 2^(scale - 128) * x scale, acc), block after block: every
//   instruction set gives the same bits.
// int4: codes 0..15, value = (code - zero) * scale. With ACTS_INT (group as the weight's, bits 8 or 4):
//   acc = fma(float(sum of (code - zero) * x code over the group), scale * x scale, acc): the same bits everywhere.
// With ACTS_BF16 both multiply exactly and sum in float32 in an order set by in_features (and the instruction set).
//
// Bit-planes: stored_planes planes, plane_bytes apart, each [ceil(out / 16)][in / 32][16] words of 32 bits: bit q of word
// (t, b, r) belongs to output 16 t + r and to element 32 b + 2 q where q < 16, else 32 b + 2 (q - 16) + 1. The first
// num_planes are read; c of their bits, the first plane's the highest, with n = 2^(stored_planes - num_planes), means
//   value = (c * n + (n - 1) / 2 - zero_doubled / 2) * scale, scales as int4's; what four planes mean is a bfloat16.
// With ACTS_INT, of a group that divides the scales' own, the same bits everywhere: all of 1 to 7 stored planes are read, c less
// 2^(planes - 1) is an integer, and group after group of the activations
//   acc = fma(float(sum of integer * x code), scale * x scale, acc).

// Lookup-table planes: planes as above, but of up to four blocks side by side, [ceil(out / 16)][in / 128][16 outputs][blocks][4]
// bytes, drawn in cpu/lut/lut_linear_tile.h; scale: float16 [ceil(out / 16)][16][table_columns], of each output the tables of
// S, S + 1 ... stored_planes bits one behind the other. The first num_planes planes are a number of the table of that width, and
// its value, rounded to bfloat16, is the weight.

// nested: BF16 in 16.25 bits, of which the draft reads 4.25. weight: tiles of nibbles sign << 3 | index; scale: exponent bytes
// S >= 31 as mxfp4's; low: [ceil(out / 16)][in / 32][4 j][3 k][16 r][2] words. Bits 0..11 of word (j, k, r, h) of a step are the
// field v of element 8 j + 2 p + h of output r where p = 0, 2, 3 at k = 0, 1, 2; bits 12..15 are nibble k of that where p = 1.
// draft: mxfp4 with the magnitudes codebook[index] in units of 2^(S - 132): the same sums in the same order, ACTS_INT or ACTS_BF16.
// exact, with ACTS_BF16 everywhere: |w| as 15 bits = v == 0 ? 0 : v + ((S - 31) << 7); y has the bits that bf16_linear of the same
// instruction set gives for the rebuilt rows. Outputs beyond the last are zero bytes in all three.

// Row `row` of a nested weight as bfloat16 [in]; of args, weight, scale, low and in_features are read.
void mlspec_nested_row(const struct mlspec_linear_args* args, int64_t row, uint16_t* to);

// Rows [out_begin, out_end) of an int4 weight as bfloat16 [out_end - out_begin][in]; of args, weight, scale, zero, group and
// in_features are read. (code - zero) * scale is exact in float32 and is rounded to nearest even, NaN to 0x7FC0.
typedef void (*mlspec_dequantize_fn)(const struct mlspec_linear_args* args, int64_t out_begin, int64_t out_end, uint16_t* dense);

// Rows [row_begin, row_end), elements [k_begin, k_end) of x into acts; k_begin is a multiple of 32 and of acts->group, k_end too
// or it is in_features. INT: scale = reach / (127 or 7); code = round to nearest even of x * ((127 or 7) / reach), at most 127 or 7
// either way, zero for an all-zero group; reach = max|x|, of 4-bit codes clip * max|x|. NaN or Inf makes a group's scale NaN.
struct mlspec_pack_args {
  const float* x;  // x[n * x_stride + k]
  int64_t x_stride;
  const struct mlspec_acts* acts;
};
typedef void (*mlspec_pack_fn)(const struct mlspec_pack_args* args, int64_t row_begin, int64_t row_end, int64_t k_begin,
                               int64_t k_end);

// A row times Hadamard matrices (hf_mlspec/ops/hadamard.py), as [blocks][order][2^k][inner] over the two in the middle.
enum { MLSPEC_HADAMARD_MAX_ORDER = 256 };
struct mlspec_hadamard {
  const float* matrix;         // [order][order] of 1 and -1; null: order is 1
  int64_t order, size, inner;  // order: 1 or a multiple of 4; size = order * 2^k; 1: nothing changes
};
// `width` floats in place, a multiple of size * inner.
typedef void (*mlspec_hadamard_fn)(const struct mlspec_hadamard* how, int64_t width, float* x);

// The sparse high part of a weight in two: slots of cells (hf_mlspec/formats/zipper/sparse.py). A slice is 32 outputs.
enum { MLSPEC_ZIPPER_OUTPUTS = 32, MLSPEC_ZIPPER_INPUTS = 64 };
struct mlspec_zipper_args {
  const uint16_t* x;      // bfloat16 [rows][x_stride]
  int64_t x_stride, rows;
  int64_t in_features;    // a multiple of 32
  int64_t out_features;
  const int32_t* starts;  // [slices * cells of a slice + 1], in slots
  const int16_t* words;   // [slots][32]: bits 0..5 input of the cell, 8..15 value
  const float* step;      // [out]
  float* y;               // [rows][y_stride]: y += step * sum
  int64_t y_stride;
};
// Slices [slice_begin, slice_end). An output adds its values times inputs one by one, cell by cell and slot by slot. Products of
// 8-bit values and bfloat16 are exact, and so is 0 times an input where there is no value: every instruction set, and any number of
// rows, gives the same bits.
typedef void (*mlspec_zipper_lut_fn)(const struct mlspec_zipper_args* args, int64_t slice_begin, int64_t slice_end);

// 4-bit codes of other libraries (hf_mlspec/ops/words.py), moved into rows of their outputs: nibble i of word e of a row is input
// 8 e + i, or in GPTQ's case with an order, input order[8 e + i].
struct mlspec_words_args {
  const uint32_t* words;  // GPTQ: [in / 8][out], nibble i of word e: input 8 e + i. AWQ: [in][out / 8], nibble i of word c: output
                          // 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]. At any multiple of four bytes
  const int64_t* order;   // GPTQ: [in], a permutation, or null. AWQ: null
  int64_t in_features, out_features;  // multiples of 8; GPTQ: any number of outputs
  uint32_t* rows;         // [out][in / 8]
  uint32_t* room;         // with an order: [in / 8][MLSPEC_WORDS_ROOM] of the calling thread's own, 64-byte aligned
};
// Blocks [begin, end) of so many outputs, or of so many words of AWQ's rows; the last block may be short.
enum { MLSPEC_WORDS_GPTQ_OUTPUTS = 64, MLSPEC_WORDS_AWQ_COLUMNS = 32, MLSPEC_WORDS_ROOM = 32 };
typedef void (*mlspec_pack_words_fn)(const struct mlspec_words_args* args, int64_t begin, int64_t end);

// RELU_SQUARED: max(x, 0)^2
enum mlspec_activation { MLSPEC_SILU = 0, MLSPEC_GELU_TANH = 1, MLSPEC_GELU = 2, MLSPEC_RELU = 3, MLSPEC_RELU_SQUARED = 4 };

// Causal attention of the queries that share one key head, of one row of the batch. Keys are visited in chunks of 64
// absolute slots in ascending order with an online softmax, so a query's bits depend on its position and on the cache only.
// Over a cache of bfloat16 or rows of codes, instruction sets that multiply bfloat16 round queries, weights, and values of codes
// to it; all sums are float32.
struct mlspec_attention_args {
  const float* q;           // query of token t and head h: q + t * q_token_stride + h * head_dim, already rotated
  int64_t q_token_stride;
  int64_t num_tokens, num_heads;  // heads that share this key head
  int64_t first_position;   // token t sits in slot first_position + t and sees slots up to its own
  const void* keys;         // [slots] rows of mlspec_cache_row_bytes(kv_dtype, head_dim)
  const void* values;       // the same
  mlspec_dtype kv_dtype;    // FLOAT32, BFLOAT16, INT8_ROWS or INT4_ROWS
  int64_t head_dim;         // any; even over INT4_ROWS
  int64_t window;           // 0, or: token at p sees slots > p - window only
  int64_t draft_window;     // 0, or: of these, token at p sees the first 64 slots and those > p - draft_window
  float scale;              // multiplies the scores
  float softcap;            // 0, or: score = softcap * tanh(score / softcap)
  float* out;               // out + t * out_token_stride + h * head_dim
  int64_t out_token_stride;
  const float* sinks = nullptr;  // [num_heads], or null: of each head a score more in its softmax, which has no value
};
typedef void (*mlspec_attention_fn)(const struct mlspec_attention_args* args);

// One value head of a gated delta net (Gated Delta Networks, arXiv 2412.06464, equation 10) over consecutive tokens of a row:
//   q, k, v = silu(causal convolution of the head's channels); q and k get length 1, q / sqrt(key_dim) beyond that
//   S = decay S + k (beta (v - decay S^T k))^T;  out = S^T q
// A token after another, each with the same operations: how many tokens a call has changes no bit. All is float32.
enum { MLSPEC_DELTA_MAX_TAPS = 8, MLSPEC_DELTA_MAX_DIM = 256 };
struct mlspec_delta_args {
  int64_t num_tokens;
  const float* x;              // channels of token t: x + t * x_stride
  int64_t x_stride;
  const float* before[MLSPEC_DELTA_MAX_TAPS - 1];  // of the num_taps - 1 tokens before the first, the oldest first; null: there is none
  const float* taps;           // [num_taps][channels], of the oldest token first
  const float* bias;           // [channels], of the convolution; null: none
  int64_t num_taps, channels;
  int64_t q_at, k_at, v_at;    // the first of the head's channels
  bool additive;               // S = decay S + k (beta v)^T;  out = S^T q + skip v, with keys and queries as they are: Mamba-2
  float skip;
  int64_t key_dim, value_dim;
  const float *decay, *beta;   // of token t: [t * x_stride]
  const float* from;           // S before the first token, [key_dim][value_dim]; null: zeros
  float* to;                   // S behind the last; may be `from`
  float* out;                  // out + t * out_stride; null: S alone is wanted
  int64_t out_stride;
};
typedef void (*mlspec_delta_fn)(const struct mlspec_delta_args* args);
typedef void (*mlspec_gate_fn)(const float* gate, int64_t n, float* y);  // y *= sigmoid(gate)

// A place in the noise of a call: Philox4x32-10 with the seed for a key and (token / 4, position, stream, 0) for a counter.
struct mlspec_noise {
  uint64_t seed;
  uint32_t position, stream;
};

// Functions over one row; n: its elements.
struct mlspec_row_ops {
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* y);  // y may be x
  // Less its mean; bias null: none. y may be x
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* y);
  void (*add)(const float* x, int64_t n, float* y);                                        // y += x
  void (*widen)(const void* x, mlspec_dtype dtype, float multiplier, int64_t n, float* y);
  // Rounds to nearest even; y of INT8_ROWS and INT4_ROWS is one row of codes.
  void (*narrow)(const float* x, mlspec_dtype dtype, int64_t n, void* y);
  void (*activate)(const float* x, mlspec_activation kind, int64_t n, float* y);  // y may be x
  void (*activate_mul)(const float* gate, const float* up, mlspec_activation kind, int64_t n, float* y);
  // y = (up + 1) * gate * sigmoid(slope * gate), of gates up to limit and ups within limit, which come in turns: pairs[2 n]
  void (*gate_pairs)(const float* pairs, float slope, float limit, int64_t n, float* y);
  // Rotates the first rotary_dim elements of a head in place, halves against each other; cos, sin: [rotary_dim / 2]
  void (*rope)(float* head, const float* cos, const float* sin, int64_t rotary_dim);
  void (*rope_pairs)(float* head, const float* cos, const float* sin, int64_t rotary_dim);  // neighbours against each other
  void (*softcap)(float* x, float cap, int64_t n);
  // Index of the largest value, the first of equals; NaN anywhere gives -1. log_sum_exp may be null.
  int64_t (*argmax)(const float* x, int64_t n, float* largest, float* log_sum_exp);
  // Index of the largest score + Gumbel noise, the first of equals; scores hold no NaN.
  int64_t (*draw)(const struct mlspec_noise* at, const float* scores, int64_t n);
};

}  // extern "C"

namespace mlspec {

// Everything one instruction set serves. A set without a variant of its own names the next lower one's.
struct CpuKernels {
  const char* isa;  // "generic", "avx2", "avxvnni", "avxvnniint8", "avx512vnni", "avx512bf16" or "amx"
  mlspec_pack_fn pack_rows;           // all four kinds
  mlspec_acts_kind bf16_linear_acts;  // ACTS_BF16 or ACTS_BF16_TILES
  mlspec_linear_fn bf16_linear;
  mlspec_linear_fn f32_linear;        // ACTS_F32
  mlspec_linear_fn mxfp4_linear_int8, mxfp4_linear_bf16;
  mlspec_linear_fn int4_linear_int8, int4_linear_bf16;  // _int8 takes both widths of ACTS_INT
  mlspec_linear_fn nested_linear_int8, nested_linear_bf16, nested_linear_exact;
  mlspec_linear_fn bitplane_linear, lut_linear;  // ACTS_BF16
  mlspec_zipper_lut_fn zipper_lut;
  mlspec_dequantize_fn int4_dequantize;
  mlspec_attention_fn attention;
  mlspec_row_ops row;
  mlspec_hadamard_fn hadamard;
  mlspec_pack_words_fn pack_gptq, pack_awq;
  mlspec_delta_fn delta_rule;
  mlspec_gate_fn sigmoid_mul;
  mlspec_linear_fn bitplane_linear_int8;  // both widths of ACTS_INT
};

// The best set that the processor and the operating system support, or the one MLSPEC_CPU_ISA names; chosen once.
// Throws std::runtime_error when that name is unknown or not supported here.
const CpuKernels& cpu_kernels();

}  // namespace mlspec
