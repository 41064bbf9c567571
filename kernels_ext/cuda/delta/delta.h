// Which kernels run gated delta nets and Mamba-2 on a GPU? Plain C signatures; 0 is success, else what went wrong.
#pragma once
#include <stdint.h>

#include "../rows/rows.h"

#ifdef __cplusplus
extern "C" {
#endif

// What becomes of the state that is kept of a row.
typedef enum { MLSPEC_STATE_KEEP = 0, MLSPEC_STATE_AT_START = 1, MLSPEC_STATE_AT_END = 2 } mlspec_state_rule;

// Channels are queries, keys, values; most = window + width tokens of a row. Token t of row r is the row's token starts[r] + t.
// Where there is skip it is Mamba-2: qkvz has gates, then channels, which are values, keys, queries, then a time step a head; no ba.
typedef struct {
  const void *qkvz;                          // bfloat16 [batch, width, channels + value_heads * value_dim]
  const void* ba;                            // bfloat16 [batch, width, 2 value_heads]
  const float *taps, *rate, *shift, *norm;   // [num_taps, channels], [value_heads] twice, [value_dim]; of Mamba-2 norm is [value_heads * value_dim]
  const float *bias, *skip;                  // of Mamba-2: [channels] of the convolution, or null; [value_heads]
  const int32_t *starts, *counts, *marks;    // [batch]; marks: of how many tokens a row's state is
  float* states;                             // [batch, value_heads, key_dim, value_dim]
  void* inputs;                              // bfloat16 [batch, window, channels + 2 value_heads], of token p in place p % window
  float *keys, *values, *weights, *products; // scratch: [batch, most, key_heads, 2, padded], [batch, most, value_heads, value_dim],
                                             // [batch, most, value_heads, 2], [batch, most, key_heads]
  float* mixed;                              // scratch: [batch, width, value_heads, value_dim]
  void* out;                                 // bfloat16 [batch, width, value_heads * value_dim], zeros for padding
  int32_t batch, width, window, key_heads, value_heads, key_dim, value_dim, num_taps;
  int32_t settles;  // mlspec_state_rule
  int32_t behind;   // tokens by which the state stays behind there, as far as it was
  int32_t normed;   // of Mamba-2: elements of what comes out that are normed together
  float eps;
} mlspec_cuda_delta;

// key_dim with the zeros that the scan reads behind it; 0 where it does not take these sizes.
int32_t mlspec_cuda_delta_padded(int32_t key_dim, int32_t value_dim, int32_t num_taps);
const char* mlspec_cuda_delta_rows(const mlspec_cuda_delta* delta, const mlspec_cuda_row_launch* how);

// x times the sigmoid of gates, rows [n, width]; those of gates are `stride` elements apart.
const char* mlspec_cuda_sigmoid_gated(const void* x, const void* gates, int64_t stride, int64_t n, int64_t width, void* out,
                                      const mlspec_cuda_row_launch* how);

#ifdef __cplusplus
}
#endif
