// Which rows may a call of the compiled decoder feed? Tokens cut into rows, and room for all that a row may gain.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "../../cpu/decoder/decoder_rounds.h"

namespace mlspec {

// counts[r] tokens of row r, from its token number bases[r] on.
inline std::vector<TokenRow> split_rows(const std::vector<int64_t>& tokens, const std::vector<int64_t>& counts,
                                        const std::vector<int64_t>& bases) {
  std::vector<TokenRow> rows(counts.size());
  int64_t at = 0;
  TORCH_CHECK_VALUE(counts.size() == bases.size(), counts.size(), " rows and ", bases.size(), " starts");
  for (size_t r = 0; r < rows.size(); ++r) {
    const int64_t left = static_cast<int64_t>(tokens.size()) - at;
    TORCH_CHECK_VALUE(counts[r] >= 0 && counts[r] <= left && bases[r] >= 0, "row ", r, " has ", counts[r],
                      " tokens from slot ", bases[r], " on, ", left, " are left");
    rows[r] = {bases[r], std::vector<int64_t>(tokens.begin() + at, tokens.begin() + at + counts[r])};
    at += counts[r];
  }
  TORCH_CHECK_VALUE(std::all_of(tokens.begin(), tokens.end(), [](int64_t id) { return id >= 0; }), "a token id is negative");
  TORCH_CHECK_VALUE(at == static_cast<int64_t>(tokens.size()), tokens.size(), " tokens for ", at, " places");
  return rows;
}

// Nothing may be written beyond the cache or rotated beyond the tables; every row is asked for with all it may gain.
// The rows of a call are the first of the cache's; it may have room for more.
inline void check_room(const Level& level, const std::vector<TokenRow>& rows, const std::vector<int64_t>& kept,
                       const std::vector<int64_t>& limits) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(rows.size()) <= level.kv.batch && kept.size() == rows.size() &&
                        limits.size() == rows.size() && level.lengths.size() == rows.size(),
                    "the cache has ", level.kv.batch, " rows; got ", rows.size(), " rows, ", kept.size(), " counts, ",
                    limits.size(), " limits, ", level.lengths.size(), " lengths");
  const int64_t positions = level.decoder->shape.positions, room = std::min(level.kv.slots, positions);
  for (size_t r = 0; r < rows.size(); ++r) {
    const int64_t more = std::max<int64_t>(limits[r], 0);  // compared so that no sum can overflow
    TORCH_CHECK_INDEX(rows[r].base <= room && rows[r].end() <= room && more <= room - rows[r].end(), "row ", r, " grows to ",
                      static_cast<uint64_t>(rows[r].base) + rows[r].tokens.size() + more, " tokens, the cache has ",
                      level.kv.slots, " slots and the rotary tables ", positions, " positions");
    const bool busy = kept[r] > 0 && (limits[r] > 0 || limits == std::vector<int64_t>(rows.size(), 0));
    TORCH_CHECK_VALUE(!busy || (!rows[r].tokens.empty() && level.lengths[r] >= rows[r].base), "row ", r, " has ",
                      rows[r].tokens.size(), " tokens from ", rows[r].base, " on, the cache holds ", level.lengths[r]);
  }
}

// counts[r] nodes behind row r, of these tokens and depths, in its slots and positions: TokenRow says which.
inline void put_trees(const Level& level, const std::vector<int64_t>& tokens, const std::vector<int64_t>& depths,
                      const std::vector<int64_t>& counts, std::vector<TokenRow>& rows) {
  TORCH_CHECK_VALUE(counts.size() == rows.size() && tokens.size() == depths.size(), "there are trees of ", counts.size(), " rows, of ",
                    tokens.size(), " nodes and ", depths.size(), " depths; got ", rows.size(), " rows");
  int64_t at = 0;
  const int64_t given = tokens.size();
  for (size_t r = 0; r < rows.size(); ++r) {
    TORCH_CHECK_VALUE(counts[r] >= 0 && counts[r] <= given - at, "row ", r, " has a tree of ", counts[r], " nodes, ", given - at, " are left");
    for (int64_t before = 0, j = at; j < at + counts[r]; before = depths[j++])
      TORCH_CHECK_VALUE(depths[j] >= 1 && depths[j] <= before + 1 && tokens[j] >= 0, "node ", j - at, " of row ", r, " is token ", tokens[j],
                        " at depth ", depths[j], ", behind one at depth ", before, ": trees come depth first");
    rows[r].nodes.assign(tokens.begin() + at, tokens.begin() + at + counts[r]);
    rows[r].depths.assign(depths.begin() + at, depths.begin() + at + counts[r]);
    at += counts[r];
    const int64_t end = rows[r].end(), deepest = rows[r].deepest();
    TORCH_CHECK_INDEX(end + deepest + counts[r] <= level.kv.slots && end + deepest <= level.decoder->shape.positions, "row ", r,
                      " has a tree of ", counts[r], " nodes, ", deepest, " deep, behind ", end, " tokens; the cache has ", level.kv.slots,
                      " slots and the rotary tables ", level.decoder->shape.positions, " positions");
  }
  TORCH_CHECK_VALUE(at == given, given, " nodes for ", at, " places");
}

// Where a call writes the residual stream in front of these layers; one without layers writes nothing.
inline Tap checked_tap(const Decoder& decoder, const std::vector<TokenRow>& rows, const std::vector<int64_t>& layers,
                       const std::optional<at::Tensor>& states) {
  if (layers.empty()) return {};
  const int64_t most = decoder.layers.size(), count = layers.size();
  for (int64_t i = 0; i < count; ++i)
    TORCH_CHECK_INDEX(layers[i] >= 0 && layers[i] <= most && (i == 0 || layers[i] > layers[i - 1]),
                      "tap_layers are ", at::IntArrayRef(layers), ", ascending numbers of 0 to ", most, " are meant");
  TORCH_CHECK_VALUE(states.has_value(), "tap_states is None, and tap_layers are ", at::IntArrayRef(layers));
  const auto dtype = decoder.shape.kv_dtype == MLSPEC_FLOAT32 ? at::kFloat : at::kBFloat16;
  TORCH_CHECK_VALUE(states->dim() == 4 && states->size(0) >= static_cast<int64_t>(rows.size()) && states->size(2) == count &&
                        states->size(3) == decoder.shape.hidden && states->is_contiguous() && states->is_cpu(),
                    "tap_states has shape ", states->sizes(), ", expected contiguous [", rows.size(), ", slots, ", count, ", ",
                    decoder.shape.hidden, "] on the CPU");
  TORCH_CHECK_TYPE(states->scalar_type() == dtype, "tap_states is ", states->scalar_type(), ", the model writes ", dtype);
  for (size_t r = 0; r < rows.size(); ++r) {
    const int64_t reached = rows[r].end() + rows[r].deepest() + static_cast<int64_t>(rows[r].nodes.size());
    TORCH_CHECK_INDEX(reached <= states->size(1), "row ", r, " reaches ", reached, " tokens, tap_states has ", states->size(1), " slots");
  }
  return {layers, states->mutable_data_ptr(), states->size(1)};
}

template <class T>
at::Tensor as_tensor(const std::vector<T>& values, at::ScalarType dtype) {
  at::Tensor out = at::empty({static_cast<int64_t>(values.size())}, dtype);
  std::copy(values.begin(), values.end(), static_cast<T*>(out.mutable_data_ptr()));
  return out;
}

}  // namespace mlspec
