// How does a decoder add what adapters add to its linears? Two thin float32 products, of the inputs as they were before any rounding.
#include <algorithm>
#include <initializer_list>

#include "decoder_workspace.h"

namespace mlspec {

// Outputs of a thin product that one thread takes at a time. Whatever they are, a sum has the same bits.
constexpr int64_t kOutputsAtOnce = 4;

// For the widest linears that share their inputs.
void Decoder::reserve_adapters(int64_t n) {
  int64_t widest = 0;
  bool any_down = false;
  const auto measure = [&](std::initializer_list<const Linear*> parts) {
    int64_t own = 0;
    for (const Linear* part : parts) own += part->adapter.rank;
    widest = std::max(widest, own);
  };
  for (const DecoderLayer& l : layers) {
    measure({&l.q, &l.k, &l.v});
    measure({&l.o});
    measure({&l.gate, &l.up});
    measure({&l.down});
    any_down |= static_cast<bool>(l.down.adapter);
  }
  work_->low_rank.reserve(n * widest);
  if (any_down) work_->inner.reserve(n * shape.intermediate);
}

// y += up (down x) of every part that has an adapter; x [rows][in], as the parts' outputs lie side by side in y.
void Decoder::add_adapters(Team& team, const Linear* const* parts, int count, const float* x, float* y, int64_t stride,
                           int64_t rows) {
  mlspec_acts acts[3], inner[3];
  mlspec_linear_args down[3], up[3];
  int64_t first[4] = {0}, first_up[4] = {0}, column = 0, ranks = 0;
  int found = 0;
  for (int i = 0; i < count; column += parts[i++]->out_features) {
    const Linear& part = *parts[i];
    const LowRank& own = part.adapter;
    if (!own) continue;
    float* const between = work_->low_rank.data() + rows * ranks;
    ranks += own.rank;
    acts[found] = {MLSPEC_ACTS_F32, rows, part.in_features, 0, 0, const_cast<float*>(x)};
    inner[found] = {MLSPEC_ACTS_F32, rows, own.rank, 0, 0, between};
    down[found] = {own.down, nullptr, nullptr, 0, nullptr, &acts[found], between, own.rank, false, part.in_features, own.rank};
    up[found] = {own.up, nullptr, nullptr, 0, nullptr, &inner[found], y + column, stride, true, own.rank, part.out_features};
    first[found + 1] = first[found] + (own.rank + kOutputsAtOnce - 1) / kOutputsAtOnce;
    first_up[found + 1] = first_up[found] + (part.out_features + kTileOutputs - 1) / kTileOutputs;
    ++found;
  }
  if (!found) return;
  const auto shared = [&](const mlspec_linear_args* args, const int64_t* pieces, int64_t height, int64_t grain) {
    team.share(pieces[found], grain, [&](int64_t begin, int64_t end) {
      for (int i = 0; i < found; ++i) {
        const int64_t lo = (std::max(begin, pieces[i]) - pieces[i]) * height;
        const int64_t hi = std::min((std::min(end, pieces[i + 1]) - pieces[i]) * height, args[i].out_features);
        if (lo < hi) cpu_kernels().f32_linear(&args[i], lo, hi);
      }
    });
  };
  shared(down, first, kOutputsAtOnce, 1);
  shared(up, first_up, kTileOutputs, std::max<int64_t>(1, first_up[found] / (4 * team.size())));
}

// As `activate`, for a down that has an adapter: the products stay, in `inner`, for that.
void Decoder::activate_whole(Team& team, int64_t rows, const DecoderLayer& layer) {
  Workspace& w = *work_;
  const int64_t width = layer.intermediate;
  team.share(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      activate_piece(w.gate_up.data() + n * 2 * width, width, width, w.inner.data() + n * width);
  });
  pack_rows(team, w.inner.data(), width, rows, layer.down);
}

}  // namespace mlspec
