// How do processes that share a model go on from one state? What each computed of a block is added up, and their logits come together.
#include "decoder_workspace.h"

namespace mlspec {

// Of what waits in `block`. Behind a rank that is gone nothing more is asked of the others.
void Decoder::sum_over_ranks(Team& team, int64_t rows) {
  if (!ranks.sum) return;
  if (team.index() == 0 && !rank_lost) rank_lost = !ranks.sum(work_->block.data(), rows * shape.hidden);
  team.barrier();
}

// Of own_logits.
void Decoder::gather_over_ranks(Team& team, int64_t rows, float* logits) {
  if (team.index() == 0 && !rank_lost) rank_lost = !ranks.gather(work_->own_logits.data(), rows, head.out_features, logits);
  team.barrier();
}

}  // namespace mlspec
