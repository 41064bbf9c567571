// How does a decoder add the sparse high parts of its linears? Slices of their outputs are shared out among the threads.
#include <algorithm>

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

// y += step * high part, for every part that has one.
void Decoder::add_high(Team& team, const Linear* const* parts, int count, const mlspec_acts& acts, float* y, int64_t stride) {
  const auto* const x = static_cast<const uint16_t*>(acts.kind == MLSPEC_ACTS_INT ? wide_acts(acts).data : acts.data);
  const auto slices_of = [](const Linear& part) { return (part.out_features + MLSPEC_ZIPPER_OUTPUTS - 1) / MLSPEC_ZIPPER_OUTPUTS; };
  int64_t slices = 0;
  for (int i = 0; i < count; ++i) slices += slices_of(*parts[i]);
  team.share(slices, std::max<int64_t>(1, slices / (8 * team.size())), [&](int64_t begin, int64_t end) {
    int64_t column = 0, before = 0;
    for (int i = 0; i < count; before += slices_of(*parts[i]), column += parts[i++]->out_features) {
      const int64_t lo = std::max<int64_t>(begin - before, 0), hi = std::min(end - before, slices_of(*parts[i]));
      if (lo >= hi || !adds_high(*parts[i])) continue;
      const HighCells& high = parts[i]->high;
      const mlspec_zipper_args args{x,           acts.in_features, acts.num_rows, acts.in_features, parts[i]->out_features,
                                    high.starts, high.words,       high.step,     y + column,       stride};
      cpu_kernels().zipper_lut(&args, lo, hi);
    }
  });
}

}  // namespace mlspec
