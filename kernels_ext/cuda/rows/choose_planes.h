// What does the kernel take that lets a router choose how many planes a block reads? Plain C: every pointer is device memory, every
// call only enqueues. What it computes: hf_mlspec/ops/planes/choosing.py.
#pragma once

#include "rows.h"

#ifdef __cplusplus
extern "C" {
#endif

// starts null: x is a prompt, whose mean chooses one width, and is written to means [width]. Else the rows of x are the tokens of
// `batch` rows, n / batch each, of which token t has position starts[r] + t: in front of lengths[r] it gets known[r], from there on
// what the row's mean, means [batch, width], moved by `share` towards the token's own x, chooses.
typedef struct {
  const void* x;  // bfloat16 [n, width]
  const int32_t *starts, *lengths, *known;
  float* means;
  const float *inner, *inner_bias, *outer, *outer_bias;  // [hidden, width], [hidden], [candidates, hidden], [candidates]
  const int32_t* candidates;                             // rising
  int32_t* widths;   // [1], or [n]
  int32_t* failed;   // [1]: 1 where a score is NaN or infinite; the widest is then chosen
  float* partial;    // mlspec_cuda_choose_planes_room() floats
  int32_t* arrived;  // zeros, left zeros: mlspec_cuda_choose_planes_groups() + 1 for a prompt, n for steps
  int64_t n, width, batch;
  int32_t hidden, num_candidates;
  float share;
} mlspec_cuda_choose_planes;

int64_t mlspec_cuda_choose_planes_groups(const mlspec_cuda_choose_planes* args);
int64_t mlspec_cuda_choose_planes_room(const mlspec_cuda_choose_planes* args);
const char* mlspec_cuda_choose_widths(const mlspec_cuda_choose_planes* args, const mlspec_cuda_row_launch* how);

#ifdef __cplusplus
}
#endif
