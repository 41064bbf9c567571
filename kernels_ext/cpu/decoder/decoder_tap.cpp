// How does the residual stream in front of a layer get to those who read it? A copy of every token's row, what waits added.
#include <algorithm>
#include <cstring>

#include "decoder_workspace.h"

namespace mlspec {

// The stream itself is left as it is: what waits is added to it where the next norm reads it.
void Decoder::tap(Team& team, const Pass& pass, const Pending& pending, int64_t layer) {
  const Tap& tap = pass.tap;
  const auto found = std::find(tap.layers.begin(), tap.layers.end(), layer);
  if (found == tap.layers.end()) return;
  const int64_t place = found - tap.layers.begin(), width = tap.layers.size();
  const int64_t element = shape.kv_dtype == MLSPEC_FLOAT32 ? 4 : 2;
  Workspace& w = *work_;
  float* const own = w.rows.data() + team.index() * w.row_stride;  // a row, and room for what settles
  team.share(pass.tokens.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const float* from = w.hidden.data() + n * shape.hidden;
      if (pending.waits) {
        std::memcpy(own, from, shape.hidden * sizeof(float));
        settle(pending, w.block.data() + n * shape.hidden, own, own + shape.hidden);
        from = own;
      }
      const int64_t row = ((pass.rows[n] * tap.slots + pass.slots[n]) * width + place) * shape.hidden;
      char* const to = static_cast<char*>(tap.states) + row * element;
      cpu_kernels().row.narrow(from, shape.kv_dtype, shape.hidden, to);
    }
  });
}

}  // namespace mlspec
