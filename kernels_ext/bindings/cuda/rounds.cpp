// How do the ops that keep the books of a captured round meet torch? What they take: hf_mlspec/ops/round.py.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "device.h"
#include "../../cuda/rounds/rounds.h"

namespace {

using namespace mlspec;
using at::Tensor;
using Maybe = std::optional<Tensor>;

// An int32 (float32) vector of `count` entries beside `first`.
void check_vector(const char* op, const char* name, const Tensor& t, int64_t count, const char* first_name, const Tensor& first,
                  at::ScalarType dtype = at::kInt) {
  check_part(op, name, t, dtype, {count}, first_name, first, 4);
}

int64_t rows_of(const char* op, const char* name, const Tensor& t) {
  TORCH_CHECK_VALUE(t.dim() == 1 && t.size(0) > 0, op, ": ", name, " has shape ", t.sizes(), ", expected a dense vector of at least one row");
  check_vector(op, name, t, t.size(0), name, t);
  return t.size(0);
}

mlspec_cuda_rows tokens_of(const char* op, const Tensor& tokens, int64_t batch, const char* first_name, const Tensor& first) {
  check_dtype(op, "tokens", tokens, at::kInt);
  check_device(op, "tokens", tokens, first_name, first);
  TORCH_CHECK_VALUE(tokens.dim() == 2 && tokens.size(0) == batch && tokens.size(1) > 0 && tokens.stride(1) == 1, op,
                    ": tokens has shape ", tokens.sizes(), " and strides ", tokens.strides(), ", expected [", batch,
                    ", slots], dense in its rows");
  return {tokens.mutable_data_ptr<int32_t>(), tokens.size(1), tokens.stride(0)};
}

mlspec_cuda_script script_of(const char* op, const Maybe& script, const Maybe& cursor, int64_t batch, const char* first_name,
                             const Tensor& first) {
  TORCH_CHECK_VALUE(script.has_value() == cursor.has_value(), op, ": ", script ? "script" : "cursor", " was given without ",
                    script ? "cursor" : "script", ": give both or none");
  if (!script) return {};
  TORCH_CHECK_VALUE(script->dim() == 3, op, ": script has shape ", script->sizes(), ", expected [", batch, ", rounds, 2]");
  check_part(op, "script", *script, at::kInt, {batch, script->size(1), 2}, first_name, first, 4);
  check_vector(op, "cursor", *cursor, batch, first_name, first);
  return {script->const_data_ptr<int32_t>(), cursor->mutable_data_ptr<int32_t>(), script->size(1)};
}

void check_least(const char* op, const char* name, int64_t value, int64_t least) {
  TORCH_CHECK_VALUE(value >= least, op, ": ", name, " is ", value, ", it must be at least ", least);
}

void check_threshold(const char* op, double threshold) {
  TORCH_CHECK_VALUE(threshold >= 0 && threshold < 1, op, ": threshold is ", threshold, ", it is a probability in [0, 1)");
}

int32_t* ints(const Tensor& t) { return t.mutable_data_ptr<int32_t>(); }

mlspec_cuda_launch launch_of(const CudaCall& call) { return {call.stream(), call.overlap()}; }

void round_open(const Tensor& base, const Tensor& active, const Tensor& ends, int64_t most, const Maybe& script,
                const Maybe& cursor, const Tensor& lengths, const Tensor& drafting, const Tensor& room) {
  constexpr const char* op = "round_open";
  const int64_t batch = rows_of(op, "base", base);
  check_vector(op, "active", active, batch, "base", base);
  check_vector(op, "ends", ends, batch, "base", base);
  check_vector(op, "lengths", lengths, batch, "base", base);
  check_vector(op, "drafting", drafting, batch, "base", base);
  check_vector(op, "room", room, batch, "base", base);
  check_least(op, "most", most, 1);
  const mlspec_cuda_script table = script_of(op, script, cursor, batch, "base", base);
  const CudaCall call(op, base);
  const mlspec_cuda_launch how = launch_of(call);
  call.check(mlspec_cuda_round_open(batch, ints(base), ints(active), ints(ends), most, &table, ints(lengths), ints(drafting),
                                    ints(room), &how));
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> round_window(const Tensor& tokens, const Tensor& base, const Tensor& lengths,
                                                                const Tensor& active, int64_t lead, int64_t judged) {
  constexpr const char* op = "round_window";
  const int64_t batch = rows_of(op, "base", base);
  const mlspec_cuda_rows rows = tokens_of(op, tokens, batch, "base", base);
  check_vector(op, "lengths", lengths, batch, "base", base);
  check_vector(op, "active", active, batch, "base", base);
  check_least(op, "lead", lead, 1);
  check_least(op, "judged", judged, 1);
  const CudaCall call(op, base);
  const auto options = base.options();
  const Tensor ids = at::empty({batch, lead - 1 + judged}, options), starts = at::empty({batch}, options);
  const Tensor counts = at::empty({batch}, options), positions = at::empty({batch * judged}, options);
  const Tensor pick = at::empty({batch * judged}, options.dtype(at::kLong));
  const mlspec_cuda_launch how = launch_of(call);
  call.check(mlspec_cuda_round_window(batch, &rows, ints(base), ints(lengths), ints(active), lead, judged, ints(ids), ints(starts),
                                      ints(counts), pick.mutable_data_ptr<int64_t>(), ints(positions), &how));
  return {ids, starts, counts, pick, positions};
}

std::tuple<Tensor, Tensor, Tensor> round_push(const Tensor& tokens, const Tensor& lengths, const Tensor& active, const Tensor& ends,
                                              const Tensor& chosen, const Tensor& confidence, double threshold,
                                              const Tensor& failed, int64_t level) {
  constexpr const char* op = "round_push";
  const int64_t batch = rows_of(op, "lengths", lengths);
  const mlspec_cuda_rows rows = tokens_of(op, tokens, batch, "lengths", lengths);
  check_vector(op, "active", active, batch, "lengths", lengths);
  check_vector(op, "ends", ends, batch, "lengths", lengths);
  check_vector(op, "chosen", chosen, batch, "lengths", lengths);
  check_vector(op, "failed", failed, batch, "lengths", lengths);
  check_vector(op, "confidence", confidence, batch, "lengths", lengths, at::kFloat);
  check_threshold(op, threshold);
  check_least(op, "level", level, 1);
  const CudaCall call(op, lengths);
  const Tensor ids = at::empty({batch, 1}, lengths.options());
  const Tensor starts = at::empty({batch}, lengths.options()), counts = at::empty({batch}, lengths.options());
  const mlspec_cuda_launch how = launch_of(call);
  call.check(mlspec_cuda_round_push(batch, &rows, ints(lengths), ints(active), ints(ends), ints(chosen),
                                    confidence.const_data_ptr<float>(), static_cast<float>(threshold), ints(failed), level,
                                    ints(ids), ints(starts), ints(counts), &how));
  return {ids, starts, counts};
}

void round_lookup(const Tensor& tokens, const Tensor& lengths, const Tensor& active, const Tensor& ends, int64_t min_ngram,
                  int64_t max_ngram) {
  constexpr const char* op = "round_lookup";
  const int64_t batch = rows_of(op, "lengths", lengths);
  const mlspec_cuda_rows rows = tokens_of(op, tokens, batch, "lengths", lengths);
  check_vector(op, "active", active, batch, "lengths", lengths);
  check_vector(op, "ends", ends, batch, "lengths", lengths);
  check_least(op, "min_ngram", min_ngram, 1);
  check_least(op, "max_ngram", max_ngram, min_ngram);
  const CudaCall call(op, lengths);
  const mlspec_cuda_launch how = launch_of(call);
  call.check(mlspec_cuda_round_lookup(batch, &rows, ints(lengths), ints(active), ints(ends), min_ngram, max_ngram, &how));
}

void round_settle(const Tensor& tokens, const Tensor& base, const Tensor& lengths, const Tensor& active, const Tensor& ends,
                  const Tensor& chosen, const Tensor& confidence, double threshold, const Maybe& script, const Maybe& cursor,
                  const Tensor& record, const Tensor& failed, int64_t level) {
  constexpr const char* op = "round_settle";
  const int64_t batch = rows_of(op, "base", base);
  const mlspec_cuda_rows rows = tokens_of(op, tokens, batch, "base", base);
  check_vector(op, "lengths", lengths, batch, "base", base);
  check_vector(op, "active", active, batch, "base", base);
  check_vector(op, "ends", ends, batch, "base", base);
  check_vector(op, "failed", failed, batch, "base", base);
  const int64_t count = rows_of(op, "chosen", chosen), judged = count / batch;
  TORCH_CHECK_VALUE(count % batch == 0, op, ": chosen has ", count, " entries for ", batch, " rows, expected as many for each");
  check_vector(op, "chosen", chosen, count, "base", base);
  check_vector(op, "confidence", confidence, count, "base", base, at::kFloat);
  check_threshold(op, threshold);
  check_dtype(op, "record", record, at::kInt);
  check_device(op, "record", record, "base", base);
  TORCH_CHECK_VALUE(record.dim() == 2 && record.size(0) == batch && (record.size(1) == 2 || record.size(1) == 2 + judged) && record.stride(1) == 1,
                    op, ": record has shape ", record.sizes(), " and strides ", record.strides(), ", expected [", batch, ", 2] or [",
                    batch, ", ", 2 + judged, "], dense in its rows");
  check_least(op, "level", level, 1);
  const mlspec_cuda_script table = script_of(op, script, cursor, batch, "base", base);
  const CudaCall call(op, base);
  const mlspec_cuda_launch how = launch_of(call);
  call.check(mlspec_cuda_round_settle(batch, &rows, ints(base), ints(lengths), ints(active), ints(ends), ints(chosen),
                                      confidence.const_data_ptr<float>(), judged, static_cast<float>(threshold), &table,
                                      ints(record), record.size(1), record.stride(0), ints(failed), level, &how));
}

}  // namespace

TORCH_LIBRARY_IMPL(mlspec, CUDA, m) {
  m.impl("round_open", round_open);
  m.impl("round_window", round_window);
  m.impl("round_push", round_push);
  m.impl("round_lookup", round_lookup);
  m.impl("round_settle", round_settle);
}
