// How do the tokens of a pass go through a layer of experts? Routed one by one, multiplied expert by expert, summed token by token.
//
// Only the experts that a token chose are read. A token's sum runs over its own choices in their order, so that its bits do not
// depend on who else visits its experts.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "decoder_workspace.h"

namespace mlspec {
namespace {

constexpr int64_t kChunk = 128;  // elements of one piece of packing: a multiple of every group

int64_t tiles_of(int64_t rows) { return (rows + kTileOutputs - 1) / kTileOutputs; }

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// The `chosen` largest of `count` values, the lower number first of equal ones; NaN counts as less than all.
template <class F>
void choose_largest(F&& value, int64_t count, int64_t chosen, int32_t* to) {
  const auto before = [&](int32_t a, int32_t b) {
    const float one = value(a), other = value(b);
    return one > other || (std::isnan(other) && !std::isnan(one));
  };
  for (int64_t found = 0, i = 0; i < count; ++i) {
    const int32_t expert = static_cast<int32_t>(i);
    if (found == chosen && !before(expert, to[chosen - 1])) continue;
    int64_t at = found < chosen ? found++ : chosen - 1;
    for (; at > 0 && before(expert, to[at - 1]); --at) to[at] = to[at - 1];
    to[at] = expert;
  }
}

// A token's experts, by its logits or, of sigmoids, by its scores.
void choose_experts(const Experts& experts, const float* scores, int32_t* to) {
  if (!experts.sigmoids) return choose_largest([&](int32_t i) { return scores[i]; }, experts.count, experts.chosen, to);
  const int64_t size = experts.count / experts.groups;
  const auto biased = [&](int32_t i) { return scores[i] + experts.choice_bias[i]; };
  uint64_t seen = ~uint64_t(0);  // a bit for each group
  if (experts.chosen_groups < experts.groups) {
    float sums[kMostGroups];
    int32_t best[kMostGroups];
    for (int64_t g = 0; g < experts.groups; ++g) {
      int32_t two[2];
      choose_largest([&](int32_t i) { return biased(static_cast<int32_t>(g * size) + i); }, size, 2, two);
      sums[g] = biased(static_cast<int32_t>(g * size) + two[0]) + biased(static_cast<int32_t>(g * size) + two[1]);
    }
    choose_largest([&](int32_t g) { return sums[g]; }, experts.groups, experts.chosen_groups, best);
    seen = 0;
    for (int64_t i = 0; i < experts.chosen_groups; ++i) seen |= uint64_t(1) << best[i];
  }
  choose_largest([&](int32_t i) { return seen >> (i / size) & 1 ? biased(i) : -INFINITY; }, experts.count, experts.chosen, to);
}

void weigh_by_scores(const Experts& experts, const float* scores, const int32_t* chosen, float* weights) {
  float total = 1e-20f;  // as transformers has it
  for (int64_t i = 0; i < experts.chosen; ++i) total += scores[chosen[i]];
  for (int64_t i = 0; i < experts.chosen; ++i)
    weights[i] = (experts.renormalize ? scores[chosen[i]] / total : scores[chosen[i]]) * experts.scale;
}

void weigh_by_softmax(const Experts& experts, const float* logits, const int32_t* chosen, float* weights) {
  const float largest = logits[chosen[0]];
  float total = 0;
  for (int64_t i = 0; i < experts.chosen; ++i) weights[i] = std::exp(logits[chosen[i]] - largest);
  if (experts.renormalize) {
    for (int64_t i = 0; i < experts.chosen; ++i) total += weights[i];
  } else {
    for (int64_t i = 0; i < experts.count; ++i) total += std::exp(logits[i] - largest);
  }
  for (int64_t i = 0; i < experts.chosen; ++i) weights[i] /= total;
}

// What the outputs of a token's experts are multiplied by: NaN, as softmax has it, where any logit is. scores: logits, or sigmoids.
void weigh_experts(const Experts& experts, const float* scores, const int32_t* chosen, float* weights) {
  const float* const broken = std::find_if(scores, scores + experts.count, [](float x) { return std::isnan(x); });
  if (broken != scores + experts.count) return void(std::fill_n(weights, experts.places(), *broken));
  experts.sigmoids ? weigh_by_scores(experts, scores, chosen, weights) : weigh_by_softmax(experts, scores, chosen, weights);
  if (experts.has_shared) weights[experts.chosen] = experts.weighs_shared ? sigmoid(scores[experts.count]) : 1.0f;
}

// f(visit, row, row_end, k, k_end) for pieces of up to 16 rows of a visit by kChunk elements.
template <class F>
void share_tiles(Team& team, const std::vector<RowTile>& tiles, const std::vector<Visit>& visits, int64_t widest, F&& f) {
  const int64_t across = (widest + kChunk - 1) / kChunk;
  team.share(tiles.size() * across, 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const RowTile& tile = tiles[piece / across];
      const int64_t k = piece % across * kChunk;
      f(visits[tile.visit], tile.row, tile.row_end, k, k + kChunk);
    }
  });
}

// Bytes of activations that visits of so many rows in all can take, each with padding of its own.
int64_t bytes_of_visits(mlspec_acts acts, int64_t visits) {
  acts.num_rows += visits * kTileOutputs;
  return mlspec_acts_bytes(&acts) + visits * 256;
}

}  // namespace

void Products::add(const Linear& linear, mlspec_linear_fn compute, const mlspec_linear_args& args, int64_t bytes_per_tile,
                   bool dequantized) {
  const int64_t own = tiles_of(args.out_features);
  list.push_back({&linear, compute, args, tiles, own * bytes_per_tile, dequantized});
  tiles += own, bytes += list.back().bytes;
}

// Room for a pass of n tokens through the widest layer of experts: also for its plan, as nothing may be allocated within the pass.
void Decoder::reserve_experts(int threads, int64_t n) {
  Workspace& w = *work_;
  for (const DecoderLayer& layer : layers) {
    if (!layer.experts) continue;
    const Experts& e = *layer.experts;
    const int64_t inner = e.up[0].out_features / 2, routed = n * e.chosen, visits = std::min(e.count, routed);
    for (const Linear* one : {&e.up[0], &e.down[0]}) reserve_escaped(*one, threads, n), reserve_escaped_acts(*one, threads, n);
    w.router.reserve(n * e.scores());
    w.chosen.reserve(n * e.chosen);
    w.weights.reserve(n * e.places());
    w.place.reserve(n * e.places());
    w.visitors.reserve(n * e.places());
    w.input_weights.reserve(e.weighs_inputs ? n * e.places() : 0);
    w.expert_out.reserve(n * e.places() * shape.hidden);
    int64_t floats = routed * 2 * inner;
    int64_t in = bytes_of_visits(acts_for(e.up[0], routed), visits), mid = bytes_of_visits(acts_for(e.down[0], routed), visits);
    if (e.has_shared) {
      floats += n * 2 * e.shared_up.out_features;
      in += bytes_of_visits(acts_for(e.shared_up, n), 1), mid += bytes_of_visits(acts_for(e.shared_down, n), 1);
    }
    w.expert_gate_up.reserve(floats);
    w.expert_acts.reserve(std::max(in, mid));
    const int64_t all_visits = visits + e.has_shared;
    w.next.reserve(e.count + 1);
    w.visits.reserve(all_visits);
    w.row_tiles.reserve(all_visits + n * e.places() / kTileOutputs);  // each visit may end in a tile that is not full
    w.up_products.list.reserve(visits + 2 * e.has_shared);
    w.down_products.list.reserve(all_visits);
  }
}

// hidden (+)= experts(normed), or block = experts(normed) where a norm follows.
void Decoder::visit_experts(Team& team, const Experts& experts, int64_t rows, bool has_norm_behind) {
  route(team, experts, rows);
  if (team.index() == 0) plan_visits(experts, rows);
  team.barrier();
  pack_visits(team, experts);
  multiply_products(team, work_->up_products);
  activate_visits(team, experts);
  multiply_products(team, work_->down_products);
  sum_experts(team, experts, rows, has_norm_behind);
}

// Logits of all experts, and of every token the experts it goes to with their weights.
void Decoder::route(Team& team, const Experts& experts, int64_t rows) {
  Workspace& w = *work_;
  const mlspec_acts acts{MLSPEC_ACTS_F32, rows, shape.hidden, 0, 0, w.normed.data()};
  mlspec_linear_args args{};
  args.weight = experts.router, args.bias = experts.router_bias;
  args.acts = &acts, args.y = w.router.data(), args.y_stride = experts.scores();
  args.in_features = shape.hidden, args.out_features = experts.scores();
  team.share(tiles_of(args.out_features), 1, [&](int64_t begin, int64_t end) {
    cpu_kernels().f32_linear(&args, begin * kTileOutputs, std::min(end * kTileOutputs, args.out_features));
  });
  team.share(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      float* const scores = w.router.data() + n * experts.scores();
      int32_t* const chosen = w.chosen.data() + n * experts.chosen;
      for (int64_t i = 0; experts.sigmoids && i < experts.count; ++i) scores[i] = sigmoid(scores[i]);
      choose_experts(experts, scores, chosen);
      weigh_experts(experts, scores, chosen, w.weights.data() + n * experts.places());
    }
  });
}

// Tokens by expert, and all products, in what reserve_experts holds ready: one thread's work, a few words a token.
void Decoder::plan_visits(const Experts& experts, int64_t rows) {
  Workspace& w = *work_;
  w.visits.clear(), w.row_tiles.clear();
  std::vector<int64_t>& next = w.next;
  next.assign(experts.count + 1, 0);
  for (int64_t i = 0; i < rows * experts.chosen; ++i) ++next[w.chosen.data()[i]];
  next[experts.count] = experts.has_shared ? rows : 0;
  int64_t first = 0;
  for (int64_t expert = 0; expert <= experts.count; ++expert) {
    const int64_t own = next[expert];
    next[expert] = first;
    if (own > 0) add_visit(experts, expert, first, own, rows);
    first += own;
  }
  const auto put = [&](int64_t expert, int64_t token, int64_t which) {
    const int64_t at = next[expert]++;
    w.visitors.data()[at] = static_cast<int32_t>(token);
    w.place.data()[token * experts.places() + which] = static_cast<int32_t>(at);
    if (experts.weighs_inputs) std::swap(w.input_weights.data()[at] = 1.0f, w.weights.data()[token * experts.places() + which]);
  };
  for (int64_t token = 0; token < rows; ++token) {
    for (int64_t i = 0; i < experts.chosen; ++i) put(w.chosen.data()[token * experts.chosen + i], token, i);
    if (experts.has_shared) put(experts.count, token, experts.chosen);
  }
  plan_products(experts);
}

// Activations and outputs of a visit lie behind those of the one before. A single token is packed once for all experts of a layer.
void Decoder::add_visit(const Experts& experts, int64_t expert, int64_t first, int64_t own, int64_t rows) {
  Workspace& w = *work_;
  const bool shared = expert == experts.count;
  const Linear& up = shared ? experts.shared_up : experts.up[expert];
  const Linear& down = shared ? experts.shared_down : experts.down[expert];
  Visit visit{expert, first, own, down.in_features, true, acts_for(up, own), acts_for(down, own), w.expert_gate_up.data()};
  const Visit* const last = w.visits.empty() ? nullptr : &w.visits.back();
  const auto behind = [&](const mlspec_acts& acts) { return static_cast<char*>(acts.data) + mlspec_align64(mlspec_acts_bytes(&acts)); };
  visit.in.data = last ? behind(last->in) : w.expert_acts.data();
  visit.mid.data = last ? behind(last->mid) : w.expert_acts.data();
  if (last) visit.gate_up = last->gate_up + last->rows * 2 * last->inner;
  if (last && rows == 1 && !shared && !experts.weighs_inputs) visit.packs = false, visit.in.data = last->in.data;
  for (int64_t row = 0; row < own; row += kTileOutputs)
    w.row_tiles.push_back({static_cast<int64_t>(w.visits.size()), row, std::min(row + kTileOutputs, own)});
  w.visits.push_back(visit);
}

void Decoder::plan_products(const Experts& experts) {
  Workspace& w = *work_;
  w.up_products.clear(), w.down_products.clear();
  const auto add = [&](Products& to, const Linear& linear, const mlspec_acts& acts, float* y, int64_t stride) {
    mlspec_linear_args args{};
    args.weight = linear.weight, args.scale = linear.scale, args.zero = linear.zero, args.group = linear.group;
    args.bias = linear.bias, args.acts = &acts, args.y = y, args.y_stride = stride;
    args.in_features = linear.in_features, args.out_features = linear.out_features;
    args.low = linear.low, args.codebook = linear.codebook, args.table_columns = linear.table_columns;
    args.num_planes = planes_of(linear), args.stored_planes = linear.stored_planes;
    args.plane_bytes = linear.plane_bytes, args.zero_doubled = linear.zero_doubled;
    to.add(linear, kernel_for(linear), args, linear.bytes_per_tile(w.bits), dequantizes(linear));
  };
  for (const Visit& visit : w.visits) {
    const bool shared = visit.expert == experts.count;
    if (shared) add(w.up_products, experts.shared_gate, visit.in, visit.gate_up, 2 * visit.inner);
    add(w.up_products, shared ? experts.shared_up : experts.up[visit.expert], visit.in, visit.gate_up + (shared ? visit.inner : 0),
        2 * visit.inner);
    add(w.down_products, shared ? experts.shared_down : experts.down[visit.expert], visit.mid,
        w.expert_out.data() + visit.first * shape.hidden, shape.hidden);
  }
}

void Decoder::pack_visits(Team& team, const Experts& experts) {
  Workspace& w = *work_;
  float* const own = w.rows.data() + team.index() * w.row_stride;
  share_tiles(team, w.row_tiles, w.visits, shape.hidden, [&](const Visit& visit, int64_t row, int64_t row_end, int64_t k, int64_t k_end) {
    if (!visit.packs) return;
    k_end = std::min(k_end, shape.hidden);
    for (int64_t n = row; n < row_end; ++n) {
      const float* const x = w.normed.data() + w.visitors.data()[visit.first + n] * shape.hidden;
      float* const to = own + (n - row) * kChunk;
      if (experts.weighs_inputs) {
        cpu_kernels().row.widen(x + k, MLSPEC_FLOAT32, w.input_weights.data()[visit.first + n], k_end - k, to);
        continue;
      }
      std::memcpy(to, x + k, (k_end - k) * sizeof(float));
    }
    const mlspec_pack_args pack{own - row * kChunk - k, kChunk, &visit.in};
    cpu_kernels().pack_rows(&pack, row, row_end, k, k_end);
  });
}

// Outputs of all products, in pieces of nearly equal bytes.
void Decoder::multiply_products(Team& team, const Products& products) {
  const int64_t piece = std::clamp<int64_t>(products.bytes / (team.size() * 16), 1 << 14, 1 << 17);
  const int64_t grain = std::max<int64_t>(1, piece * products.tiles / std::max<int64_t>(products.bytes, 1));
  team.share(products.tiles, grain, [&](int64_t begin, int64_t end) {
    const auto behind = [](int64_t tile, const Product& product) { return tile < product.first; };
    auto product = std::upper_bound(products.list.begin(), products.list.end(), begin, behind) - 1;
    for (; product != products.list.end() && product->first < end; ++product) {
      const int64_t lo = (std::max(begin, product->first) - product->first) * kTileOutputs;
      const int64_t hi = std::min((end - product->first) * kTileOutputs, product->args.out_features);
      if (has_escapes(*product->linear)) {
        multiply_escaped_visit(team, *product->linear, product->args, lo, hi);
        continue;
      }
      if (!product->dequantized) {
        product->compute(&product->args, lo, hi);
        continue;
      }
      for (int64_t at = lo; at < hi; at += kDenseOutputs) multiply_dequantized(team, product->args, at, std::min(at + kDenseOutputs, hi));
    }
  });
}

// What the down projections multiply: activation(gate) * up, or what gate_pairs makes of both.
void Decoder::activate_visits(Team& team, const Experts& experts) {
  Workspace& w = *work_;
  float* const own = w.rows.data() + team.index() * w.row_stride;
  const mlspec_row_ops& ops = cpu_kernels().row;
  int64_t widest = 0;
  for (const Visit& visit : w.visits) widest = std::max(widest, visit.inner);
  share_tiles(team, w.row_tiles, w.visits, widest, [&](const Visit& visit, int64_t row, int64_t row_end, int64_t k, int64_t k_end) {
    k_end = std::min(k_end, visit.inner);
    if (k >= k_end) return;
    for (int64_t n = row; n < row_end; ++n) {
      const float* const gate_up = visit.gate_up + n * 2 * visit.inner;
      float* const to = own + (n - row) * kChunk;
      if (experts.in_turns) {
        ops.gate_pairs(gate_up + 2 * k, experts.slope, experts.limit, k_end - k, to);
      } else {
        ops.activate_mul(gate_up + k, gate_up + visit.inner + k, shape.activation, k_end - k, to);
      }
    }
    const mlspec_pack_args pack{own - row * kChunk - k, kChunk, &visit.mid};
    cpu_kernels().pack_rows(&pack, row, row_end, k, k_end);
  });
}

// Every token's experts in the order of its choice.
void Decoder::sum_experts(Team& team, const Experts& experts, int64_t rows, bool has_norm_behind) {
  Workspace& w = *work_;
  const int64_t hidden = shape.hidden, across = (hidden + kChunk - 1) / kChunk;
  team.share(rows * across, 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t n = piece / across, k = piece % across * kChunk, count = std::min(kChunk, hidden - k);
      const float* const weights = w.weights.data() + n * experts.places();
      float total[kChunk] = {};
      for (int64_t i = 0; i < experts.places(); ++i) {
        const float* const out = w.expert_out.data() + w.place.data()[n * experts.places() + i] * hidden + k;
        for (int64_t j = 0; j < count; ++j) total[j] += weights[i] * out[j];
      }
      float* const to = (has_norm_behind ? w.block.data() : w.hidden.data()) + n * hidden + k;
      if (has_norm_behind) std::fill_n(to, count, 0.0f);
      cpu_kernels().row.add(total, count, to);
    }
  });
}

}  // namespace mlspec
