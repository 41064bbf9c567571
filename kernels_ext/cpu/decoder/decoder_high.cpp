// How does a decoder add the sparse high parts of its linears? From tables of sums of the packed activations, made once for all parts.
#include <algorithm>

#include "../zipper/zipper_tables.h"
#include "decoder_workspace.h"

namespace mlspec {

bool Decoder::adds_high(const Linear& linear) const {
  return linear.format == WeightFormat::kZipper && linear.at(asked(linear)).weight == kZipperWhole;
}

// Whether its low part meets integers, and its high part the inputs as they are.
bool Decoder::reads_wide(const Linear& linear) const {
  return adds_high(linear) && linear.at(work_->bits).activation < 16;
}

mlspec_acts Decoder::wide_acts(const mlspec_acts& acts) const {
  return {MLSPEC_ACTS_BF16, acts.num_rows, acts.in_features, 0, 0, work_->wide_acts.data()};
}

// For the widest linear that has a high part.
void Decoder::reserve_tables() {
  int64_t widest = 0;
  const auto measure = [&](const Linear& linear) {
    if (adds_high(linear)) widest = std::max(widest, linear.in_features);
  };
  for (const DecoderLayer& l : layers) l.each_linear(measure);
  measure(head);
  work_->tables.reserve(MLSPEC_ZIPPER_LANES * zipper_table_floats(widest));
}

// y += step * high part, for every part that has one; up to eight rows at a time.
void Decoder::add_high(Team& team, const Linear* const* parts, int count, const mlspec_acts& acts, float* y, int64_t stride) {
  const int64_t in = acts.in_features;
  const auto* const x = static_cast<const uint16_t*>(acts.kind == MLSPEC_ACTS_INT ? wide_acts(acts).data : acts.data);
  float* const tables = work_->tables.data();
  int64_t outputs = 0;
  for (int i = 0; i < count; ++i) outputs += parts[i]->out_features;
  for (int64_t first = 0; first < acts.num_rows;) {
    const ZipperPass pass(acts.num_rows - first);
    team.share(pass.lanes, 1, [&](int64_t lane, int64_t end) {
      for (; lane < end; ++lane) {
        if (lane < pass.rows)
          zipper_inputs(x + (first + lane) * in, in, pass.lanes, lane, tables);
        else
          zipper_no_inputs(in, pass.lanes, lane, tables);
      }
    });
    team.share(in / MLSPEC_ZIPPER_GROUP, kGroupsAtOnce,
               [&](int64_t begin, int64_t end) { zipper_tables(in, pass.lanes, begin, end, tables); });
    team.share(outputs, std::max<int64_t>(kTileOutputs, outputs / (8 * team.size())), [&](int64_t begin, int64_t end) {
      int64_t column = 0;
      for (int i = 0; i < count; column += parts[i++]->out_features) {
        const int64_t lo = std::max<int64_t>(begin - column, 0), hi = std::min(end - column, parts[i]->out_features);
        if (lo >= hi || !adds_high(*parts[i])) continue;
        const HighRows& high = parts[i]->high;
        float* const to = y + first * stride + column;
        const mlspec_zipper_args args{tables, in / MLSPEC_ZIPPER_GROUP, pass.lanes, pass.rows, high.starts, high.terms, high.step, to, stride};
        cpu_kernels().zipper_lut(&args, lo, hi);
      }
    });
    first += pass.rows;
  }
}

}  // namespace mlspec
