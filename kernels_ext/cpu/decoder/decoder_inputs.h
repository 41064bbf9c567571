// What do layers read beside the residual stream? Inputs that every token brings for each of them, and its position.
#pragma once
#include <cstdint>

#include "decoder_linear.h"

namespace mlspec {

// Inputs of all layers, side by side, of a token: those of layer i are
//   norm(projection of its embedding) * norm_weight + table[token] * scale
// elements [i * width, (i + 1) * width) of both, each layer's normed for itself.
struct TokenInputs {
  Linear projection;                  // [layers * width][hidden]
  const float* norm_weight = nullptr; // [width], times what the sum is multiplied by
  float norm_eps = 0, scale = 1;      // scale: of the table, likewise
  const void* table = nullptr;        // [embeddings] rows of the embedding's dtype, `stride` elements apart
  int64_t stride = 0, width = 0;
  explicit operator bool() const { return table; }
};

// Queries at position p are multiplied by 1 + scale * log(1 + floor((p + 1) / stretch)), where scale is not 0.
struct QueryScale {
  float scale = 0, stretch = 1;
  explicit operator bool() const { return scale != 0; }
};

}  // namespace mlspec
