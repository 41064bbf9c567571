// What is fed, what was guessed, and what of it is kept, in a round that the host does not see? A few integers per row.
//
// base and lengths may be one tensor, and so may active and drafting: no pointer here is __restrict__, and a row is read before
// it is written, by the same warp.
#include "rounds.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "../ptx.cuh"

namespace mlspec {
namespace {

constexpr int kThreads = 128, kWarp = 32, kLookupThreads = 1024;

__device__ int32_t clamped(int32_t value, int32_t least, int32_t most) { return max(least, min(value, most)); }

// (drafted, accepted) that the cursor of row r stands on, none behind the last.
__device__ int2 scripted(const mlspec_cuda_script& script, int r) {
  const int32_t at = script.cursor[r];
  if (at < 0 || at >= script.rounds) return {0, 0};
  const int32_t* entry = script.entries + (int64_t(r) * script.rounds + at) * 2;
  return {max(entry[0], 0), max(entry[1], 0)};
}

__global__ void open_kernel(int batch, const int32_t* base, const int32_t* active, const int32_t* ends, int most,
                            mlspec_cuda_script script, int32_t* lengths, int32_t* drafting, int32_t* room) {
  launch_dependents();
  wait_for_previous_kernel();
  const int r = blockIdx.x * blockDim.x + threadIdx.x;
  if (r >= batch) return;
  const int count = script.entries ? min(most, scripted(script, r).x) : most;
  const int32_t from = base[r], until = min(from + count, ends[r] - 1);
  const bool on = active[r] != 0;
  lengths[r] = from;
  room[r] = until;
  drafting[r] = on && from < until;
}

__global__ void window_kernel(int batch, mlspec_cuda_rows rows, const int32_t* base, const int32_t* lengths,
                              const int32_t* active, int lead, int judged, int32_t* ids, int32_t* starts, int32_t* counts,
                              int64_t* pick, int32_t* positions) {
  launch_dependents();
  wait_for_previous_kernel();
  const int width = lead - 1 + judged, index = blockIdx.x * blockDim.x + threadIdx.x;
  const int r = index / width, t = index % width;
  if (r >= batch) return;
  const int32_t from = base[r], start = max(from - lead, 0);
  const int32_t count = active[r] ? clamped(lengths[r] - start, 0, width) : 0;
  const int64_t place = min(int64_t(start) + t, rows.slots - 1);
  ids[index] = t < count ? rows.tokens[r * rows.stride + place] : 0;
  if (t < judged) {
    const int asked = r * judged + t;
    pick[asked] = int64_t(r) * width + min(max(from - 1 - start, 0) + t, width - 1);
    positions[asked] = from + t;
  }
  if (t == 0) {
    starts[r] = active[r] ? start : 0;
    counts[r] = count;
  }
}

__global__ void push_kernel(int batch, mlspec_cuda_rows rows, int32_t* lengths, int32_t* active, const int32_t* ends,
                            const int32_t* chosen, const float* confidence, float threshold, int32_t* failed, int level,
                            int32_t* ids, int32_t* starts, int32_t* counts) {
  launch_dependents();
  wait_for_previous_kernel();
  const int r = blockIdx.x * blockDim.x + threadIdx.x;
  if (r >= batch) return;
  int32_t length = lengths[r];
  const int32_t token = chosen[r], shown = max(token, 0);
  const bool on = active[r] && length < rows.slots;
  if (on) {
    rows.tokens[r * rows.stride + length] = shown;
    lengths[r] = ++length;
    if (token < 0) failed[r] = level;
  }
  const bool goes_on = on && token >= 0 && !(confidence[r] < threshold) && length < ends[r];
  active[r] = goes_on;
  ids[r] = shown;
  starts[r] = goes_on ? length - 1 : 0;
  counts[r] = goes_on;
}

// A block per row. The place of the copy is the largest (matched tokens, end of the match).
__global__ void lookup_kernel(mlspec_cuda_rows rows, int32_t* lengths, const int32_t* active, const int32_t* ends, int min_ngram,
                              int max_ngram) {
  launch_dependents();
  wait_for_previous_kernel();
  const int r = blockIdx.x;
  if (!active[r]) return;
  int32_t* const row = rows.tokens + r * rows.stride;
  const int32_t length = lengths[r], slots = int32_t(rows.slots), last = min(length, slots);
  __shared__ unsigned long long best;
  if (threadIdx.x == 0) best = 0;
  __syncthreads();
  unsigned long long mine = 0;
  for (int end = 1 + threadIdx.x; end < last; end += blockDim.x) {
    const int most = min(max_ngram, end);
    int n = 0;
    while (n < most && row[end - 1 - n] == row[last - 1 - n]) ++n;
    if (n >= min_ngram) mine = max(mine, static_cast<unsigned long long>(n) << 32 | unsigned(end));
  }
  for (int apart = kWarp / 2; apart; apart /= 2) mine = max(mine, __shfl_xor_sync(~0u, mine, apart));
  if (threadIdx.x % kWarp == 0 && mine) atomicMax(&best, mine);
  __syncthreads();
  if (!best) return;
  const int32_t from = int32_t(unsigned(best)), count = min(last - from, min(ends[r], slots) - last);
  for (int t = threadIdx.x; t < count; t += blockDim.x) row[last + t] = row[from + t];
  if (threadIdx.x == 0 && count > 0) lengths[r] = last + count;
}

// A warp per row.
__global__ void settle_kernel(int batch, mlspec_cuda_rows rows, int32_t* base, const int32_t* lengths, int32_t* active,
                              const int32_t* ends, const int32_t* chosen, const float* confidence, int judged,
                              float threshold, mlspec_cuda_script script, int32_t* record, int record_width,
                              int64_t record_stride, int32_t* failed, int level) {
  launch_dependents();
  wait_for_previous_kernel();
  const int r = (blockIdx.x * blockDim.x + threadIdx.x) / kWarp, lane = threadIdx.x % kWarp;
  if (r >= batch) return;
  int32_t* const row = rows.tokens + r * rows.stride;
  int32_t* const line = record + r * record_stride;
  const int32_t from = base[r];
  if (!active[r] || from >= rows.slots) {
    for (int i = lane; i < record_width; i += kWarp) line[i] = -1;
    __syncwarp();
    if (lane == 0) active[r] = 0;
    return;
  }
  const int32_t drafted = clamped(lengths[r] - from, 0, judged - 1);
  const int32_t* const own = chosen + int64_t(r) * judged;
  const float* const sure = confidence + int64_t(r) * judged;
  const auto guess = [&](int j) { return row[min(int64_t(from) + j, rows.slots - 1)]; };
  int accepted = drafted;
  if (script.entries) {
    accepted = min(scripted(script, r).y, drafted);
  } else {
    for (int first = 0; first < drafted; first += kWarp) {
      const int j = first + lane;
      const unsigned wrong = __ballot_sync(~0u, j < drafted && guess(j) != own[j]);
      if (wrong) {
        accepted = first + __ffs(wrong) - 1;
        break;
      }
    }
  }
  const int32_t mine = own[accepted], end = from + accepted + 1;
  bool unsure = false;
  for (int j = lane; j <= accepted; j += kWarp) unsure |= sure[j] < threshold;
  unsure = __any_sync(~0u, unsure);
  for (int i = lane; i < record_width; i += kWarp) {
    const int j = i - 2;
    line[i] = i == 0 ? drafted : i == 1 ? accepted : j < accepted ? guess(j) : j == accepted ? max(mine, 0) : -1;
  }
  __syncwarp();
  if (lane) return;
  row[min(int64_t(end) - 1, rows.slots - 1)] = max(mine, 0);
  base[r] = end;
  active[r] = mine >= 0 && !unsure && end < ends[r];
  if (mine < 0) failed[r] = level;
  if (script.entries) ++script.cursor[r];
}

template <class... Parameters, class... Arguments>
const char* launch_blocks(const mlspec_cuda_launch& how, int64_t blocks, int threads, void (*kernel)(Parameters...),
                          Arguments... arguments) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(unsigned(threads));
  config.stream = static_cast<cudaStream_t>(how.stream);
  config.attrs = &attribute;
  config.numAttrs = how.overlap ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <class... Parameters, class... Arguments>
const char* launch(const mlspec_cuda_launch& how, int64_t threads, void (*kernel)(Parameters...), Arguments... arguments) {
  return launch_blocks(how, (threads + kThreads - 1) / kThreads, kThreads, kernel, arguments...);
}

}  // namespace
}  // namespace mlspec

using namespace mlspec;

const char* mlspec_cuda_round_open(int64_t batch, const int32_t* base, const int32_t* active, const int32_t* ends, int64_t most,
                                   const mlspec_cuda_script* script, int32_t* lengths, int32_t* drafting, int32_t* room,
                                   const mlspec_cuda_launch* how) {
  return launch(*how, batch, open_kernel, batch, base, active, ends, most, *script, lengths, drafting, room);
}

const char* mlspec_cuda_round_window(int64_t batch, const mlspec_cuda_rows* rows, const int32_t* base, const int32_t* lengths,
                                     const int32_t* active, int64_t lead, int64_t judged, int32_t* ids, int32_t* starts,
                                     int32_t* counts, int64_t* pick, int32_t* positions, const mlspec_cuda_launch* how) {
  return launch(*how, batch * (lead - 1 + judged), window_kernel, batch, *rows, base, lengths, active, lead, judged, ids, starts,
                counts, pick, positions);
}

const char* mlspec_cuda_round_push(int64_t batch, const mlspec_cuda_rows* rows, int32_t* lengths, int32_t* active,
                                   const int32_t* ends, const int32_t* chosen, const float* confidence, float threshold,
                                   int32_t* failed, int64_t level, int32_t* ids, int32_t* starts, int32_t* counts,
                                   const mlspec_cuda_launch* how) {
  return launch(*how, batch, push_kernel, batch, *rows, lengths, active, ends, chosen, confidence, threshold, failed, level, ids,
                starts, counts);
}

const char* mlspec_cuda_round_lookup(int64_t batch, const mlspec_cuda_rows* rows, int32_t* lengths, const int32_t* active,
                                     const int32_t* ends, int64_t min_ngram, int64_t max_ngram, const mlspec_cuda_launch* how) {
  return launch_blocks(*how, batch, kLookupThreads, lookup_kernel, *rows, lengths, active, ends, std::min(min_ngram, rows->slots),
                       std::min(max_ngram, rows->slots));
}

const char* mlspec_cuda_round_settle(int64_t batch, const mlspec_cuda_rows* rows, int32_t* base, const int32_t* lengths,
                                     int32_t* active, const int32_t* ends, const int32_t* chosen, const float* confidence,
                                     int64_t judged, float threshold, const mlspec_cuda_script* script, int32_t* record,
                                     int64_t record_width, int64_t record_stride, int32_t* failed, int64_t level,
                                     const mlspec_cuda_launch* how) {
  return launch(*how, batch * kWarp, settle_kernel, batch, *rows, base, lengths, active, ends, chosen, confidence, judged,
                threshold, *script, record, record_width, record_stride, failed, level);
}
