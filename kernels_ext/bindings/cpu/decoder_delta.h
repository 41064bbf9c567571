// Which gated delta nets may a compiled decoder hold, and over which states may a call run them?
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "decoder_tensors.h"

namespace mlspec {

// What a call is given of the states of recurrent layers: [states, inputs, marks] of the level itself, then of others; and of every row 0, or
// the number of the one whose state it begins with. Others are alive as long as the call.
struct RecurrentLevel {
  std::vector<at::Tensor> tensors;
  std::vector<int64_t> sources;
};

// dims: key_heads, value_heads, key_dim, value_dim, taps, grouped, additive, normed.
inline DeltaShape delta_shape(const std::vector<int64_t>& dims) {
  TORCH_CHECK_VALUE(dims.size() == 8, "recurrent layers have 8 sizes, got ", dims.size());
  DeltaShape s{dims[0], dims[1], dims[2], dims[3], dims[4], dims[5] != 0, dims[6] != 0, dims[7]};
  TORCH_CHECK_VALUE(s.key_heads > 0 && s.value_heads > 0 && s.value_heads % s.key_heads == 0 && s.key_dim > 0 && s.value_dim > 0 &&
                        s.key_dim <= MLSPEC_DELTA_MAX_DIM && s.value_dim <= MLSPEC_DELTA_MAX_DIM && s.num_taps >= 2 &&
                        s.num_taps <= MLSPEC_DELTA_MAX_TAPS && !(s.grouped && s.additive) && s.normed > 0 &&
                        (s.additive ? s.values() % s.normed == 0 : s.normed == s.value_dim),
                    "recurrent layers: impossible sizes ", at::IntArrayRef(dims));
  return s;
}

// in and out of a linear of a delta net by its name; the decoder has room for these.
inline void check_delta_place(const std::string& name, const DeltaShape& s, int64_t hidden, int64_t in, int64_t out) {
  const int64_t gates = s.grouped ? s.values() : s.additive ? s.values() + s.value_heads : 0;
  const int64_t outputs = name == "delta_qkv"   ? s.channels() + gates
                          : name == "delta_z"   ? s.values()
                          : name == "delta_out" ? hidden
                                                : (s.grouped ? 2 : 1) * s.value_heads;
  const int64_t inputs = name == "delta_out" ? s.values() : hidden;
  TORCH_CHECK_VALUE(in == inputs && out == outputs, name, " maps ", in, " to ", out, " features, the decoder's maps ", inputs, " to ",
                    outputs);
}

template <class Alike, class Ready>
void check_delta(const DeltaNet& net, const DeltaShape& s, Alike&& alike, Ready&& ready, const std::string& what) {
  const bool whole = s.grouped || s.additive;
  const bool there = ready(net.qkv) && ready(net.out) && (s.additive || ready(net.b)) && (whole || (ready(net.z) && ready(net.a)));
  TORCH_CHECK_VALUE(there, what, " has not all of its linears yet");
  TORCH_CHECK_VALUE(whole || (alike(net.qkv, net.z) && alike(net.b, net.a)), what,
                    ": delta_qkv, delta_z and delta_b, delta_a need weights of one format, group, numbers of bits, clip of activations, and "
                    "order of inputs");
}

// states: float32 [at least the decoder's layers, batch, kept, value_heads, key_dim, value_dim]; inputs: float32 [layers, batch, window, kept_width]; marks: int64
// [batch, kept + 2].
inline RecurrentStates checked_states(const Decoder& decoder, const at::Tensor* tensors) {
  const DeltaShape& s = decoder.delta;
  const at::Tensor &states = tensors[0], &inputs = tensors[1], &marks = tensors[2];
  const int64_t layers = states.dim() == 6 ? states.size(0) : 0;  // more where a view of a model's first layers follows it
  TORCH_CHECK_VALUE(layers >= static_cast<int64_t>(decoder.delta_nets.size()) && inputs.dim() == 4, "states have shape ", states.sizes(), " and their inputs ", inputs.sizes());
  const int64_t batch = states.size(1), kept = states.size(2), window = inputs.size(2);
  check_plain(states, "the states", at::kFloat, {layers, batch, kept, s.value_heads, s.key_dim, s.value_dim});
  check_plain(inputs, "the inputs of states", at::kFloat, {layers, batch, window, s.kept_width()});
  check_plain(marks, "the marks of states", at::kLong, {batch, kept + 2});
  TORCH_CHECK_VALUE(kept >= 2 && window >= s.num_taps, "there are ", kept, " states of a row and ", window,
                    " inputs: at least 2 and ", s.num_taps, " are meant");
  return {states.mutable_data_ptr<float>(), inputs.mutable_data_ptr<float>(), marks.mutable_data_ptr<int64_t>(), layers, batch, kept,
          window, s.state_size(), s.kept_width(), s.num_taps - 1};
}

// The states of a level that has recurrent layers; every row may begin as it is told to.
inline void put_states(Level& level, const RecurrentLevel& given) {
  const Decoder& decoder = *level.decoder;
  const bool needed = !decoder.delta_nets.empty();
  TORCH_CHECK_VALUE(given.tensors.size() % 3 == 0 && needed == !given.tensors.empty(), "the decoder has ", decoder.delta_nets.size(),
                    " layers that keep states, got ", given.tensors.size(), " tensors of them");
  if (!needed) return;
  level.states = checked_states(decoder, given.tensors.data());
  TORCH_CHECK_VALUE(given.sources.size() == level.lengths.size() && static_cast<int64_t>(level.lengths.size()) <= level.states.batch,
                    "there are states of ", level.states.batch, " rows; got ", level.lengths.size(), " rows and ", given.sources.size(),
                    " sources");
  const int64_t owners = given.tensors.size() / 3;
  level.owners = std::make_shared<std::vector<RecurrentStates>>();
  for (int64_t i = 0; i < owners; ++i) level.owners->push_back(checked_states(decoder, &given.tensors[3 * i]));
  for (const int64_t source : given.sources) {
    TORCH_CHECK_VALUE(source >= 0 && source < owners, "a row begins with the state of owner ", source, " of ", owners);
    level.sources.push_back(source ? &(*level.owners)[source] : nullptr);
    const RecurrentStates& from = (*level.owners)[source];
    TORCH_CHECK_VALUE(static_cast<int64_t>(level.sources.size()) <= from.batch, "owner ", source, " has ", from.batch, " rows");
  }
}

// A row that is fed goes on from a state that there is.
inline void check_reached(const Level& level, const std::vector<int64_t>& fed) {
  if (!level.states) return;
  for (size_t r = 0; r < fed.size(); ++r) {
    if (fed[r] == 0) continue;
    int64_t found = 0;
    (level.sources[r] ? *level.sources[r] : level.states).nearest(r, level.lengths[r], found);
    TORCH_CHECK_VALUE(found == level.lengths[r], "row ", r, " goes on behind ", level.lengths[r], " tokens, and there is a state of ", found);
  }
}

}  // namespace mlspec
