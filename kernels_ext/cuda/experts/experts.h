// What do the kernels of experts take? As in rows.h: plain C, device pointers, work on a stream, nothing is read back.
#pragma once

#include "../linear/linear.h"
#include "../rows/rows.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MLSPEC_CUDA_MOST_EXPERTS 1024  // of a layer: a warp keeps 32 logits a lane
#define MLSPEC_CUDA_MOST_GROUPS 64     // of its experts: a bit each

// Rows of a product are pairs of a token and one of its experts: pair = token * chosen + rank. A plan, int32, says which pairs go to
// an expert: [pairs] the pairs in order of their experts, [most_items][3] an expert, its first place among these and how many, 0 for
// an item that is not used. An expert with many pairs has several items.
static inline int64_t mlspec_cuda_rows_of_item(int64_t pairs, int64_t experts) {
  return pairs <= 4 * experts ? 8 : pairs <= 12 * experts ? 16 : 64;
}

static inline int64_t mlspec_cuda_most_items(int64_t pairs, int64_t experts) {
  const int64_t visited = pairs < experts ? pairs : experts, whole = visited + pairs / mlspec_cuda_rows_of_item(pairs, experts);
  return whole < pairs ? whole : pairs;
}

typedef struct {
  const void* x;       // bfloat16 [tokens, hidden], hidden a multiple of 8
  const void* router;  // [experts, with a shared one + 1][hidden], bfloat16 or float32
  const float* bias;   // [experts (+ 1)] of the logits, or null
  float* logits;       // [tokens, experts (+ 1)]
  int32_t* experts;    // [tokens, chosen]: of the largest logits, of equal ones the lower number; NaN is less than all
  float* weights;      // [tokens, chosen (+ 1)]: softmax over all, or renormalized over the chosen; the sigmoid of the last row
  int32_t* plan;
  int64_t num_tokens, hidden;
  int32_t num_experts, chosen, renormalize, has_shared, router_is_float32;
  // Of sigmoids, [experts], else null: of the chosen_groups best of groups, by the sum of the two largest sigmoids + choice_bias in
  // each, the experts of the largest such sums; weights: scale * the sigmoids, or, renormalized, over the sum of the chosen.
  const float* choice_bias;
  int32_t groups, chosen_groups;
  float scale;
} mlspec_cuda_routing;

// Three kernels, two for a few tokens, one for one token where blocks form clusters.
const char* mlspec_cuda_route_rows(const mlspec_cuda_routing* routing, const mlspec_cuda_row_launch* how);

#define MLSPEC_CUDA_MOST_ROUTED 8192  // columns of a row that one cluster norms and routes

typedef struct {
  const void *residual, *weight;  // bfloat16 [1, hidden]; [hidden], float32 or bfloat16
  void *normed, *total;           // bfloat16 [1, hidden]: mlspec_cuda_rms_norm of x and residual, with the same bits
  int32_t weight_is_bf16;
  float eps;
} mlspec_cuda_route_norm;

// One token, whose x is normed first, in the same kernel; hidden up to MLSPEC_CUDA_MOST_ROUTED, up to 256 experts, where blocks form
// clusters.
const char* mlspec_cuda_route_normed_row(const mlspec_cuda_routing* routing, const mlspec_cuda_route_norm* norm,
                                         const mlspec_cuda_row_launch* how);

// Only the plan, of experts that are given. Numbers that no expert has are in no item.
const char* mlspec_cuda_plan_rows(const mlspec_cuda_routing* routing, const mlspec_cuda_row_launch* how);

typedef struct {
  mlspec_cuda_linear linear;  // of one expert: x [num_tokens, in], out bfloat16 [pairs, out]; tiles and biases of all experts
  const int32_t* plan;
  int64_t num_pairs;         // a multiple of linear.num_tokens: a token has num_pairs / num_tokens of them
  int64_t num_experts;
  int64_t bytes_of_expert;   // in tiles
  int64_t more_of_expert;    // in linear.more, bytes: low tiles of nested weights
  int64_t shifts_of_expert;  // in exponent_shift
  float slope, limit;        // limit above 0: gate and up come in turns, and out [pairs, out / 2] is what gated_pairs makes of them
  int32_t activation;        // 0 or above (mlspec_activation): gate comes before up, each a multiple of 32, and out [pairs, out / 2] is
                             // what gated makes of them; -1: none
} mlspec_cuda_expert_linear;

// Every GPU since sm_80. A pair's bits depend neither on the other pairs nor on how many there are.
const char* mlspec_cuda_bf16_experts(const mlspec_cuda_expert_linear* args);
const char* mlspec_cuda_mxfp4_experts(const mlspec_cuda_expert_linear* args);
const char* mlspec_cuda_int4_experts(const mlspec_cuda_expert_linear* args);
const char* mlspec_cuda_nested_experts(const mlspec_cuda_expert_linear* args);  // codebook [experts, 8]
const char* mlspec_cuda_plane_experts(const mlspec_cuda_expert_linear* args);   // as mlspec_cuda_bitplane_linear, without planes apart

typedef struct {
  const void* rows;      // bfloat16 [tokens, chosen, width], width a multiple of 8
  const float* weights;  // [tokens, weights_of_token]
  const void* shared;    // bfloat16 [tokens, width], or null
  void* y;               // bfloat16 [tokens, width]: a sum in float32 in the order of the rows, then the shared one
  int64_t num_tokens, width;
  int32_t chosen, weights_of_token;  // chosen, or one more, of the shared one, which weighs 1 where there is none
} mlspec_cuda_weighted;

const char* mlspec_cuda_weighted_rows(const mlspec_cuda_weighted* args, const mlspec_cuda_row_launch* how);

typedef struct {
  const void *residual, *weight;  // bfloat16 [tokens, width]; [width], float32 or bfloat16
  void *normed, *total;           // bfloat16 [tokens, width]: mlspec_cuda_rms_norm of y and residual, with the same bits
  int32_t weight_is_bf16;
  float eps;
} mlspec_cuda_weighted_norm;

// In place of y, which is not written. Width up to 16384.
const char* mlspec_cuda_weighted_norm_rows(const mlspec_cuda_weighted* args, const mlspec_cuda_weighted_norm* norm,
                                           const mlspec_cuda_row_launch* how);

#ifdef __cplusplus
}
#endif
