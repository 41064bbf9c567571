// How does a decoder compute the outputs of a nested weight that its fields do not hold? From their whole rows, afterwards.
#include <algorithm>
#include <cstring>

#include "decoder_workspace.h"

namespace mlspec {
namespace {

// bfloat16 [n][in] as the tiles of ACTS_BF16_TILES (kernels.h): rows of a tile, its first to its last block.
void tile_rows(const mlspec_acts& from, int64_t tile, const mlspec_acts& to) {
  const int64_t in = from.in_features, blocks = in / 32, first = tile * 16;
  const int64_t rows = std::min<int64_t>(from.num_rows - first, 16);
  const auto* const x = static_cast<const uint16_t*>(from.data) + first * in;
  auto* const tiles = static_cast<uint16_t*>(to.data) + tile * blocks * 512;
  std::memset(tiles, 0, blocks * 1024);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t pair = 0; pair < in / 2; ++pair) std::memcpy(tiles + pair * 32 + r * 2, x + r * in + pair * 2, 4);
}

}  // namespace

bool Decoder::has_escapes(const Linear& linear) const {
  return linear.escaped.count > 0 && linear.at(asked(linear)).weight == 16;
}

// For each thread the outputs of one linear's escaped rows, twice.
void Decoder::reserve_escaped(const Linear& linear, int threads, int64_t rows) {
  if (!has_escapes(linear)) return;
  Workspace& w = *work_;
  const mlspec_acts acts{cpu_kernels().bf16_linear_acts, rows, linear.in_features, 0, 0, nullptr};
  w.dense_acts.reserve(mlspec_acts_bytes(&acts));
  w.escaped_stride = std::max(w.escaped_stride, 2 * linear.escaped.count * rows);
  w.escaped.reserve(threads * w.escaped_stride);
}

// The packed activations in the form of bf16_linear; a whole team's work where that is another one.
mlspec_acts Decoder::acts_for_escaped(Team& team, const mlspec_acts& acts) {
  mlspec_acts dense = acts;
  dense.kind = cpu_kernels().bf16_linear_acts;
  if (dense.kind == acts.kind) return acts;
  dense.data = work_->dense_acts.data();
  team.share((acts.num_rows + 15) / 16, 1, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) tile_rows(acts, tile, dense);
  });
  return dense;
}

// For each thread the inputs of an expert as bf16_linear wants them.
void Decoder::reserve_escaped_acts(const Linear& linear, int threads, int64_t rows) {
  if (!has_escapes(linear)) return;
  Workspace& w = *work_;
  const mlspec_acts acts{cpu_kernels().bf16_linear_acts, rows, linear.in_features, 0, 0, nullptr};
  w.visit_acts_stride = std::max(w.visit_acts_stride, mlspec_align64(mlspec_acts_bytes(&acts)));
  w.visit_acts.reserve(threads * w.visit_acts_stride);
}

// Outputs [begin, end) of an expert whose visit is this thread's own work. Rows that are kept whole are few: their inputs are put in
// another form only where there is one among these outputs.
void Decoder::multiply_escaped_visit(const Team& team, const Linear& linear, const mlspec_linear_args& args, int64_t begin, int64_t end) {
  const EscapedRows& escaped = linear.escaped;
  const int64_t* const last = escaped.rows + escaped.count;
  const int64_t* const first = std::lower_bound(escaped.rows, last, begin);
  if (first == last || *first >= end) {
    kernel_for(linear)(&args, begin, end);
    return;
  }
  mlspec_acts dense = *args.acts;
  dense.kind = cpu_kernels().bf16_linear_acts;
  if (dense.kind != args.acts->kind) {
    dense.data = work_->visit_acts.data() + team.index() * work_->visit_acts_stride;
    for (int64_t tile = 0; tile < (dense.num_rows + 15) / 16; ++tile) tile_rows(*args.acts, tile, dense);
  }
  multiply_escaped(team, linear, args, dense, begin, end);
}

// Outputs [begin, end), those of the escaped rows among them from the rows themselves. What y held there is kept aside: the
// first product adds to it, too.
void Decoder::multiply_escaped(const Team& team, const Linear& linear, const mlspec_linear_args& args,
                               const mlspec_acts& dense_acts, int64_t begin, int64_t end) {
  const EscapedRows& escaped = linear.escaped;
  const int64_t first = std::lower_bound(escaped.rows, escaped.rows + escaped.count, begin) - escaped.rows;
  const int64_t last = std::lower_bound(escaped.rows + first, escaped.rows + escaped.count, end) - escaped.rows;
  const int64_t count = last - first, n = args.acts->num_rows;
  float* const before = work_->escaped.data() + team.index() * work_->escaped_stride;
  float* const products = before + count * n;
  const auto each = [&](auto&& f) {
    for (int64_t t = 0; t < n; ++t)
      for (int64_t e = 0; e < count; ++e) f(args.y[t * args.y_stride + escaped.rows[first + e]], t * count + e, first + e);
  };
  if (args.accumulate) each([&](float& y, int64_t at, int64_t) { before[at] = y; });
  kernel_for(linear)(&args, begin, end);
  if (count == 0) return;
  mlspec_linear_args rows{};
  rows.weight = escaped.weight + first * linear.in_features;
  rows.acts = &dense_acts;
  rows.y = products;
  rows.y_stride = rows.out_features = count;
  rows.in_features = linear.in_features;
  cpu_kernels().bf16_linear(&rows, 0, count);
  each([&](float& y, int64_t at, int64_t e) {
    const float value = args.bias ? products[at] + args.bias[escaped.rows[e]] : products[at];
    y = args.accumulate ? before[at] + value : value;
  });
}

}  // namespace mlspec
