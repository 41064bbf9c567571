// What is a layer of experts, and what does a pass keep while tokens visit them?
#pragma once
#include <cstdint>
#include <vector>

#include "decoder_linear.h"

namespace mlspec {

constexpr int64_t kMostGroups = 64;

// A layer whose tokens go to `chosen` of `count` gated MLPs, and to a shared one where there is one.
//   logits = router x + router_bias, in float32. The experts of the largest are chosen, of equal ones those with the lower number.
//   weights = softmax over all experts, or, renormalized, over the chosen. The shared MLP's is sigmoid(last row of router . x), or 1.
// Or of sigmoids: scores = sigmoid(logits). Of groups of experts the best are looked at, by the sum of the two largest of scores +
// choice_bias in each; of their experts those with the largest scores + choice_bias are chosen.
//   weights = scale * scores, or, renormalized, over the sum of the chosen.
//   y = sum of weight * expert(x) over the chosen, the largest first, then the shared one's.
struct Experts {
  const float* router = nullptr;  // [count, with a shared one + 1][hidden]
  const float* router_bias = nullptr;  // one a row, or null
  int64_t count = 0, chosen = 0;
  bool renormalize = false, has_shared = false, weighs_shared = false;
  bool sigmoids = false;
  const float* choice_bias = nullptr;  // [count]
  int64_t groups = 1, chosen_groups = 1;  // of equally many experts; at most kMostGroups
  float scale = 1;
  bool weighs_inputs = false;  // weights multiply what an expert reads, not what it gives
  bool in_turns = false;     // gate and up, which mlspec_row_ops::gate_pairs reads with slope and limit; none is shared
  float slope = 0, limit = 0;
  std::vector<Linear> up;    // of each expert [2 inner][hidden]: rows of gate, then of up, or both in turns
  std::vector<Linear> down;  // [hidden][inner]
  Linear shared_gate, shared_up, shared_down;

  int64_t places() const { return chosen + has_shared; }  // that every token visits
  int64_t scores() const { return count + weighs_shared; }
};

// An expert and the rows of its tokens in a pass, which lie one behind the other.
struct Visit {
  int64_t expert, first, rows, inner;  // expert: Experts::count stands for the shared one
  bool packs;                          // whether its inputs are its own to pack, not those of the visit before
  mlspec_acts in, mid;                 // what up and what down multiply
  float* gate_up;                      // [rows][2 inner]
};

// A linear over the rows of a visit. first: the tiles of all products before it.
struct Product {
  const Linear* linear;
  mlspec_linear_fn compute;
  mlspec_linear_args args;
  int64_t first, bytes;
  bool dequantized;  // first to bfloat16 in memory: Decoder::dequantize
};

// Products that a team works on together.
struct Products {
  std::vector<Product> list;
  int64_t tiles = 0, bytes = 0;

  void clear() { list.clear(), tiles = bytes = 0; }
  void add(const Linear& linear, mlspec_linear_fn compute, const mlspec_linear_args& args, int64_t bytes_per_tile, bool dequantized);
};

}  // namespace mlspec
