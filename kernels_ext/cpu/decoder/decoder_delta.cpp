// How do the tokens of a pass go through a gated delta net, or a layer of Mamba-2? Projected together, then head by head, each row's tokens in order.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "decoder_workspace.h"

namespace mlspec {
namespace {

// The heads of a token from the order of key heads, each with its values and gates, to queries, keys, values, gates, b, a.
void part_heads(const DeltaShape& s, float* row, float* room) {
  const int64_t each = s.value_heads / s.key_heads, values = each * s.value_dim, head = 2 * s.key_dim + 2 * values;
  std::memcpy(room, row, s.width() * sizeof(float));
  float *const keys = row + s.keys(), *const v = keys + s.keys(), *const z = v + s.values(), *const b = z + s.values();
  for (int64_t h = 0; h < s.key_heads; ++h) {
    const float* const from = room + h * head;
    std::memcpy(row + h * s.key_dim, from, s.key_dim * sizeof(float));
    std::memcpy(keys + h * s.key_dim, from + s.key_dim, s.key_dim * sizeof(float));
    std::memcpy(v + h * values, from + 2 * s.key_dim, values * sizeof(float));
    std::memcpy(z + h * values, from + 2 * s.key_dim + values, values * sizeof(float));
    const float* const of_both = room + s.key_heads * head + h * 2 * each;
    std::memcpy(b + h * each, of_both, each * sizeof(float));
    std::memcpy(b + s.value_heads + h * each, of_both + each, each * sizeof(float));
  }
}

// b and a of a token become decay and beta, in that order; of Mamba-2 there is one number a head, and beta is its time step.
void weigh_token(const DeltaNet& net, int64_t heads, bool additive, float* ba) {
  for (int64_t h = 0; h < heads; ++h) {
    const float b = ba[h], a = (additive ? b : ba[heads + h]) + net.shift[h];
    const float soft = a > 20.f ? a : std::log1p(std::exp(a));
    ba[h] = std::exp(net.rate[h] * soft), ba[heads + h] = additive ? soft : 1.f / (1.f + std::exp(-b));
  }
}

// What all calls for a head of a layer have in common.
mlspec_delta_args head_args(const DeltaShape& s, const DeltaNet& net, int64_t head) {
  const int64_t key_head = head / (s.value_heads / s.key_heads);
  mlspec_delta_args args{};
  args.taps = net.taps, args.bias = net.bias, args.num_taps = s.num_taps, args.channels = s.channels();
  args.q_at = s.queries_at() + key_head * s.key_dim, args.k_at = s.keys_at() + key_head * s.key_dim;
  args.v_at = s.values_at() + head * s.value_dim;
  args.additive = s.additive, args.skip = net.skip ? net.skip[head] : 0.f;
  args.key_dim = s.key_dim, args.value_dim = s.value_dim;
  return args;
}

}  // namespace

// States that a pass begins with: those that were taken back are run again, then those of others are copied.
void Decoder::restore_states(Team& team, const Pass& pass) {
  const int64_t heads = delta.value_heads, layers_of_states = delta_nets.size(), size = delta.key_dim * delta.value_dim;
  const int64_t replays = pass.replays.size() * layers_of_states * heads, forks = pass.forks.size() * layers_of_states;
  if (replays) team.share(replays, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const Replay& again = pass.replays[item / (layers_of_states * heads)];
      const int64_t index = item / heads % layers_of_states, head = item % heads;
      const RecurrentStates& own = again.source;
      mlspec_delta_args args = head_args(delta, *delta_nets[index], head);
      args.x_stride = own.width;
      args.from = again.from == RecurrentStates::kZeros ? nullptr : own.state(index, again.row, again.from) + head * size;
      args.to = again.states.state(index, again.row, again.to) + head * size;
      for (int64_t at = again.begin; at < again.end;) {  // up to where the ring of inputs begins anew
        args.num_tokens = std::min(again.end, (at / own.window + 1) * own.window) - at;
        args.x = own.input(index, again.row, at);
        args.decay = args.x + args.channels + head, args.beta = args.decay + heads;
        for (int64_t j = 0; j < args.num_taps - 1; ++j) {
          const int64_t token = at - (args.num_taps - 1) + j;
          args.before[j] = token < 0 ? nullptr : own.input(index, again.row, token);
        }
        cpu_kernels().delta_rule(&args);
        args.from = args.to, at += args.num_tokens;
      }
    }
  });
  if (forks) team.share(forks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const Fork& fork = pass.forks[item / layers_of_states];
      const int64_t index = item % layers_of_states;
      const RecurrentStates &from = fork.source, &to = fork.states;
      if (fork.from != RecurrentStates::kZeros)
        std::memcpy(to.state(index, fork.row, fork.to), from.state(index, fork.row, fork.from), to.state_size * sizeof(float));
      for (int64_t token = std::max<int64_t>(fork.length - to.before, 0); token < fork.length; ++token)
        std::memcpy(to.input(index, fork.row, token), from.input(index, fork.row, token), to.width * sizeof(float));
    }
  });
}

bool Decoder::shares_inputs(const DeltaNet& net) const {
  if (delta.additive) return true;
  const mlspec_acts one = acts_for(net.qkv, 1), other = acts_for(net.b, 1);
  return one.kind == other.kind && one.group == other.group && one.bits == other.bits && one.wide == other.wide &&
         one.clip == other.clip && one.in_features == other.in_features && net.qkv.order == net.b.order &&
         dequantizes(net.qkv) == dequantizes(net.b);  // a product has one way for all of its parts
}

// The packed activations, or `normed` where not all of its linears want the same, to the packed inputs of `out`.
void Decoder::delta_net(Team& team, const Pass& pass, const DeltaNet& net) {
  const CpuKernels& kernels = cpu_kernels();
  const DeltaShape& s = delta;
  const int64_t tokens = pass.tokens.size(), stride = s.width(), width = s.values(), heads = s.value_heads;
  Workspace& w = *work_;
  float* const x = w.qkv.data();
  const Linear* const large[] = {&net.qkv, &net.z, &net.b, &net.a};
  const Linear* const all_grouped[] = {&net.qkv, &net.b};
  const int split = s.grouped ? 1 : 2;
  if (shares_inputs(net)) {
    multiply(team, s.grouped ? all_grouped : large, s.additive ? 1 : 2 * split, x, stride, false, tokens);
  } else {
    pack_rows(team, w.normed.data(), shape.hidden, tokens, net.qkv);
    multiply(team, large, split, x, stride, false, tokens);
    pack_rows(team, w.normed.data(), shape.hidden, tokens, net.b);
    multiply(team, large + 2, split, x + s.channels() + width, stride, false, tokens);
  }
  float* const own = w.rows.data() + team.index() * w.row_stride;
  team.share(tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      float* const row = x + n * stride;
      if (s.grouped) part_heads(s, row, own);
      weigh_token(net, heads, s.additive, row + s.weights_at());
    }
  });
  const RecurrentStates& states = pass.states;
  const int64_t size = s.key_dim * s.value_dim;
  const int64_t rows = pass.row_runs.size();
  team.share(rows * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t head = item % heads, row_first = pass.runs_of(item / heads).front().first;
      for (const Run& run : pass.runs_of(item / heads)) {
        mlspec_delta_args args = head_args(s, net, head);
        const float* const tokens_of_run = x + run.first * stride;
        args.num_tokens = run.count, args.x = tokens_of_run + s.channels_at(), args.x_stride = stride;
        args.decay = tokens_of_run + s.weights_at() + head, args.beta = args.decay + heads;
        for (int64_t j = 0; j < s.num_taps - 1; ++j) {
          const int64_t back = s.num_taps - 1 - j, token = run.start - back, at = run.first - back;
          args.before[j] = token < 0 ? nullptr : at >= row_first ? x + at * stride + s.channels_at() : states.input(net.index, run.row, token);
        }
        args.from = run.from == RecurrentStates::kZeros ? nullptr : states.state(net.index, run.row, run.from) + head * size;
        args.to = states.state(net.index, run.row, run.to) + head * size;
        args.out = w.context.data() + run.first * width + head * s.value_dim, args.out_stride = width;
        kernels.delta_rule(&args);
        for (int64_t t = 0; t < run.count && !s.additive; ++t) {
          float* const out = args.out + t * width;
          kernels.row.rms_norm(out, net.norm, net.eps, s.value_dim, out);
          const float* const gate = tokens_of_run + t * stride + s.gates_at() + head * s.value_dim;
          kernels.row.activate_mul(gate, out, MLSPEC_SILU, s.value_dim, out);
        }
      }
    }
  });
  const int64_t parts = width / s.normed;
  if (s.additive) team.share(tokens * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t at = item % parts * s.normed;
      float* const out = w.context.data() + item / parts * width + at;
      kernels.row.activate_mul(x + item / parts * stride + s.gates_at() + at, out, MLSPEC_SILU, s.normed, out);
      kernels.row.rms_norm(out, net.norm + at, net.eps, s.normed, out);
    }
  });
  team.share(rows, 1, [&](int64_t begin, int64_t end) {  // only now: tokens of this pass may have read what was there
    for (int64_t item = begin; item < end; ++item) {
      const int64_t stop = pass.runs_of(item).back().start + pass.runs_of(item).back().count;
      for (const Run& run : pass.runs_of(item)) {
        for (int64_t t = std::max<int64_t>(0, stop - states.window - run.start); t < run.count; ++t) {
          const float* const from = x + (run.first + t) * stride;
          float* const to = states.input(net.index, run.row, run.start + t);
          std::memcpy(to, from + s.channels_at(), s.channels() * sizeof(float));
          std::memcpy(to + s.channels(), from + s.weights_at(), 2 * heads * sizeof(float));
        }
      }
    }
  });
  if (net.out.rotates()) return rotate_and_pack(team, w.context.data(), width, tokens, net.out);
  pack_rows(team, w.context.data(), width, tokens, net.out);
}

}  // namespace mlspec
