// How do the kernels that move other libraries' words of 4-bit codes meet torch?
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "../operands.h"
#include "../../cpu/threads/parallel.h"

namespace {

using namespace mlspec;
using at::Tensor;

constexpr int64_t kMultiple = 16;  // of inputs

void check_words(const char* op, const Tensor& words) {
  check_dtype(op, "words", words, at::kInt);
  TORCH_CHECK_VALUE(words.dim() == 2, op, ": words has shape ", words.sizes(), ", expected two axes");
  check_contiguous(op, "words", words);
}

void check_inputs(const char* op, int64_t inputs) {
  TORCH_CHECK_VALUE(inputs % kMultiple == 0, op, ": words have ", inputs, " inputs, expected a multiple of ", kMultiple);
}

Tensor moved(mlspec_pack_words_fn move, const Tensor& words, const int64_t* order, int64_t inputs, int64_t outputs, int64_t blocks) {
  Tensor rows = at::empty({outputs, inputs / 2}, at::kByte);
  mlspec_words_args args{};
  args.words = static_cast<const uint32_t*>(words.const_data_ptr());
  args.order = order;
  args.in_features = inputs;
  args.out_features = outputs;
  args.rows = static_cast<uint32_t*>(rows.mutable_data_ptr());
  if (rows.numel() == 0) return rows;
  const int threads = threads_for(static_cast<double>(rows.numel()));
  const int64_t room = order ? inputs / 8 * MLSPEC_WORDS_ROOM : 0;
  const Tensor scratch = at::empty({threads, room}, at::kInt);
  auto* const rooms = static_cast<uint32_t*>(scratch.mutable_data_ptr());
  run(threads, [&](Team& team) {
    mlspec_words_args own = args;
    own.room = rooms + team.index() * room;
    team.share(blocks, 1, [&](int64_t begin, int64_t end) { move(&own, begin, end); });
  });
  return rows;
}

Tensor pack_gptq(const Tensor& words, const std::optional<Tensor>& order) {
  constexpr const char* op = "pack_gptq";
  check_words(op, words);
  const int64_t inputs = words.size(0) * 8, outputs = words.size(1);
  check_inputs(op, inputs);
  const int64_t* places = nullptr;
  if (order) {
    check_dtype(op, "order", *order, at::kLong);
    check_shape(op, "order", *order, {inputs});
    check_contiguous(op, "order", *order);
    check_cpu(op, "order", *order);
    places = order->const_data_ptr<int64_t>();
    const bool inside = std::all_of(places, places + inputs, [&](int64_t input) { return input >= 0 && input < inputs; });
    TORCH_CHECK_VALUE(inside, op, ": order names inputs that are none of ", inputs);
  }
  const int64_t blocks = (outputs + MLSPEC_WORDS_GPTQ_OUTPUTS - 1) / MLSPEC_WORDS_GPTQ_OUTPUTS;
  return moved(cpu_kernels().pack_gptq, words, places, inputs, outputs, blocks);
}

Tensor pack_awq(const Tensor& words) {
  constexpr const char* op = "pack_awq";
  check_words(op, words);
  check_inputs(op, words.size(0));
  const int64_t blocks = (words.size(1) + MLSPEC_WORDS_AWQ_COLUMNS - 1) / MLSPEC_WORDS_AWQ_COLUMNS;
  return moved(cpu_kernels().pack_awq, words, nullptr, words.size(0), words.size(1) * 8, blocks);
}

}  // namespace

TORCH_LIBRARY_IMPL(mlspec, CPU, m) {
  m.impl("pack_gptq", pack_gptq);
  m.impl("pack_awq", pack_awq);
}
