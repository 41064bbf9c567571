// What is a recurrent layer of the decoder, a gated delta net or one of Mamba-2, and which numbers do all of them share?
#pragma once
#include <cstdint>

#include "decoder_linear.h"

namespace mlspec {

struct DeltaShape {
  int64_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0, num_taps = 0;
  // Outputs of qkv hold of every key head its query, key, values and gates, those of b its b and a: z and a are not there (Qwen3-Next).
  bool grouped = false;
  // Mamba-2: outputs of qkv are gates, then values, keys (B) and queries (C), then one number a head; z, b and a are not there.
  bool additive = false;
  int64_t normed = 0;  // elements of what comes out that are normed together: of a head, before its gate; of Mamba-2 behind gates

  int64_t keys() const { return key_heads * key_dim; }
  int64_t values() const { return value_heads * value_dim; }
  int64_t channels() const { return 2 * keys() + values(); }          // of the convolution: queries, keys, values
  int64_t kept_width() const { return channels() + 2 * value_heads; }  // and what a state decays by, and beta
  int64_t width() const { return kept_width() + values(); }            // of a token in the workspace: channels, gates, decay, beta
  int64_t gates_at() const { return additive ? 0 : channels(); }  // in a token of the workspace
  int64_t channels_at() const { return additive ? values() : 0; }
  int64_t weights_at() const { return channels() + values(); }  // of decay, then beta, of every head
  int64_t keys_at() const { return additive ? values() : keys(); }  // among the channels
  int64_t queries_at() const { return additive ? values() + keys() : 0; }
  int64_t values_at() const { return additive ? 0 : 2 * keys(); }
  int64_t state_size() const { return value_heads * key_dim * value_dim; }
};

// A layer in place of attention: Gated Delta Networks (arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have it, or Mamba-2 (arXiv 2405.21060).
struct DeltaNet {
  Linear qkv, z, b, a, out;
  int64_t index = 0;             // of the layer's states
  const float* taps = nullptr;   // [num_taps][channels]
  const float* bias = nullptr;   // [channels], or null
  const float* rate = nullptr;   // [value_heads], -exp(A_log): log decay = rate * softplus(a + shift)
  const float* shift = nullptr;  // [value_heads]
  const float* skip = nullptr;   // [value_heads], of Mamba-2: how much of its values a head gives
  const float* norm = nullptr;   // [value_dim]; of Mamba-2 [values]
  float eps = 0.f;               // of that norm
};

}  // namespace mlspec
