// What do the kernels that keep the books of a captured round take? Plain C: every pointer is device memory, every call only
// enqueues work on `stream`. What the tensors hold: hf_mlspec/ops/round.py.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int32_t* tokens;  // [batch, slots]
  int64_t slots, stride;
} mlspec_cuda_rows;

// What a trace says of the rounds to come; entries null: nothing.
typedef struct {
  const int32_t* entries;  // (drafted, accepted) [batch, rounds, 2]
  int32_t* cursor;         // [batch]
  int64_t rounds;
} mlspec_cuda_script;

typedef struct {
  void* stream;
  int32_t overlap;  // may start before the kernel in front of it in the stream ends
} mlspec_cuda_launch;

// Each returns null, or what went wrong.
const char* mlspec_cuda_round_open(int64_t batch, const int32_t* base, const int32_t* active, const int32_t* ends, int64_t most,
                                   const mlspec_cuda_script* script, int32_t* lengths, int32_t* drafting, int32_t* room,
                                   const mlspec_cuda_launch* launch);

const char* mlspec_cuda_round_window(int64_t batch, const mlspec_cuda_rows* rows, const int32_t* base, const int32_t* lengths,
                                     const int32_t* active, int64_t lead, int64_t judged, int32_t* ids, int32_t* starts,
                                     int32_t* counts, int64_t* pick, int32_t* positions, const mlspec_cuda_launch* launch);

const char* mlspec_cuda_round_push(int64_t batch, const mlspec_cuda_rows* rows, int32_t* lengths, int32_t* active,
                                   const int32_t* ends, const int32_t* chosen, const float* confidence, float threshold,
                                   int32_t* failed, int64_t level, int32_t* ids, int32_t* starts, int32_t* counts,
                                   const mlspec_cuda_launch* launch);

const char* mlspec_cuda_round_lookup(int64_t batch, const mlspec_cuda_rows* rows, int32_t* lengths, const int32_t* active,
                                     const int32_t* ends, int64_t min_ngram, int64_t max_ngram, const mlspec_cuda_launch* launch);

// record_width: 2, or 2 + judged for the settled tokens, too.
const char* mlspec_cuda_round_settle(int64_t batch, const mlspec_cuda_rows* rows, int32_t* base, const int32_t* lengths,
                                     int32_t* active, const int32_t* ends, const int32_t* chosen, const float* confidence,
                                     int64_t judged, float threshold, const mlspec_cuda_script* script, int32_t* record,
                                     int64_t record_width, int64_t record_stride, int32_t* failed, int64_t level,
                                     const mlspec_cuda_launch* launch);

#ifdef __cplusplus
}
#endif
