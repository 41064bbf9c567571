// What does a whole decoder compute, and in which order? One pass from token ids to the best next tokens, no torch.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "decoder_delta.h"
#include "decoder_experts.h"
#include "decoder_inputs.h"
#include "decoder_linear.h"
#include "decoder_states.h"
#include "../kernels.h"
#include "../threads/parallel.h"
#include "../zipper/zipper_rows.h"

namespace mlspec {

// Of all norms of a decoder one of two forms: DecoderShape::norms_have_mean. Weights are float32 with any +1 already added.
struct Norm {
  const float* weight = nullptr;  // null: there is no such norm
  const float* bias = nullptr;    // null: none
  explicit operator bool() const { return weight; }
};

// What the output of a block waits for, which lies in Workspace::block, before it is added to the residual stream.
struct Pending {
  bool waits = false;
  Norm norm;  // none: it is added as it is
  float scale = 1;  // what the stream is multiplied by behind that; 1 where nothing waits
};

// What a layer adds behind its MLP: out_norm(projection(activation(gate x) * its inputs of the token)).
struct LayerInputs {
  Linear gate, projection;  // [width][hidden] and [hidden][width]
  Norm out_norm;
};

// A decoder layer of the Llama family.
struct DecoderLayer {
  Linear q, k, v, o, gate, up, down;  // q: of queries, keys and values where qkv is grouped
  std::shared_ptr<Experts> experts;  // in place of gate, up and down; null: these
  std::shared_ptr<DeltaNet> delta;   // in place of q, k, v and o; null: these
  std::shared_ptr<LayerInputs> inputs;  // of its own, behind the MLP; null: none
  int64_t kv_heads = 0, head_dim = 0, intermediate = 0;  // at most those of DecoderShape
  int64_t kv_index = 0;              // of its keys and values, which a delta net has none of
  bool reuses_keys = false;          // those of an earlier layer: it has no k and v, and writes none
  bool values_are_keys = false;      // as k computes them, neither normed nor rotated: it has no v
  Norm attention_norm, mlp_norm;  // none: the block reads the residual stream itself (OLMo 2)
  Norm attention_out_norm, mlp_out_norm;  // between a block and its residual: Gemma 2 and 3
  Norm q_norm, k_norm;  // per head: Qwen3, Gemma 3; over all heads: OLMoE
  int64_t q_norm_width = 0, k_norm_width = 0;  // elements that are normed together
  Norm v_norm;             // of values, per head
  float scale = 1;         // what the residual stream is multiplied by behind it
  QueryScale query_scale;  // of positions far back
  const float* sinks = nullptr;  // [heads], or null: mlspec_attention_args::sinks
  int64_t window = 0;      // 0: full attention
  int64_t span = 0;        // mlspec_attention_args::span
  int64_t rope_table = 0;  // which of Decoder::ropes

  // f(linear) for all that lie in the layer itself, also those that it has none of; experts have theirs.
  template <class F>
  void each_linear(F&& f) const {
    for (const Linear* linear : {&q, &k, &v, &o, &gate, &up, &down}) f(*linear);
    for (const Linear* linear : {inputs ? &inputs->gate : nullptr, inputs ? &inputs->projection : nullptr})
      if (linear) f(*linear);
    if (!delta) return;
    for (const Linear* linear : {&delta->qkv, &delta->z, &delta->b, &delta->a, &delta->out}) f(*linear);
  }
};

struct RopeTable {
  const float* cos = nullptr;  // [positions][half]
  const float* sin = nullptr;
  int64_t half = 0;  // of the elements that are rotated
};

// Key heads, head_dim and intermediate: of the widest layer.
struct DecoderShape {
  int64_t hidden, heads, kv_heads, head_dim, intermediate, vocab, embeddings, rotary_dim, positions;
  float norm_eps, embedding_scale, attention_scale, attention_softcap, logit_softcap;
  mlspec_activation activation;
  mlspec_dtype embedding_dtype, kv_dtype;
  bool norms_have_mean;    // layer norms, not RMS norms
  bool rotates_pairs;      // an element and its neighbour, not the one half a head further
  bool parallel;           // attention and MLP both read the residual stream as it was before both
  bool grouped_qkv;        // outputs of q: of every key head its queries, key and value
  bool norms_behind_rotation;  // of queries and keys
  bool plain_mlp;          // down(activation(up)): no layer has a gate
  bool no_mlp;             // no layer has one: blocks of Mamba-2 alone
  bool gated_heads;        // q gives of every head its query and, behind it, a gate of what the head gives
};

// Keys and values of a batch: [layers that have some][2][batch][kv_heads][slots] rows of row_bytes, of different lengths. Of layers with fewer
// key heads, or shorter heads, the first ones, and the beginning of a row.
struct RaggedKv {
  void* data = nullptr;
  int64_t layers = 0, batch = 0, slots = 0;
  mlspec_dtype dtype = MLSPEC_FLOAT32;  // the decoder's kv_dtype, or rows of codes
  int64_t heads = 0, row_bytes = 0;
};

class Decoder;

// Who brings streamed planes; called by one thread, the caller's. begin: the first `planes` planes of a linear are in their place
// until end(key); false: they cannot be had, and end is not called.
struct PlaneReader {
  bool (*begin)(int64_t key, int64_t planes) = nullptr;
  void (*end)(int64_t key) = nullptr;
};

// The processes that share a model, as one of them reaches the others; called by one thread, the caller's, by all of them in one order.
// sum: data becomes the sum of what all have there, the same bits on each. gather: rows of all their parts, [rows][width], side by side.
// false: another one is gone.
struct Ranks {
  bool (*sum)(float* data, int64_t count) = nullptr;  // null: nobody shares it
  bool (*gather)(const float* part, int64_t rows, int64_t width, float* whole) = nullptr;
  int64_t count = 1;
};

// Consecutive tokens of one row of the batch, at positions start, start + 1, ...
struct Segment {
  int64_t row, start, first, count;  // first: index of its first token in Pass::tokens
  bool branch = false;  // of a tree: its keys and values are in Pass::slots, and come to their positions before it attends
};

// Where the residual stream in front of some layers is written, for heads that read it: of every token of a pass, in the place of its
// row and slot (of `Pass::slots`). layers: ascending, 0 (the embedding) to the number of layers (behind the last one).
struct Tap {
  std::vector<int64_t> layers;
  void* states = nullptr;  // [rows][slots][layers.size()][hidden], of the decoder's kv_dtype; null: nobody reads
  int64_t slots = 0;
};

// Who picks how many planes a block reads of a pass; called by one thread, the caller's. inputs: float32 [tokens][hidden], what the
// block's first linears are about to read. widths: [tokens], of each token; alike but where a pass mixes them. -1: none can be picked.
using ChooseWidth = int64_t (*)(int64_t block, const float* inputs, int64_t tokens, int64_t* widths);

// One pass of a decoder over at most Decoder::kMaxTokens tokens.
struct Pass {
  Decoder* decoder = nullptr;
  RaggedKv kv;
  std::vector<Segment> blocks;                   // of consecutive tokens of one row, short enough to share out
  std::vector<int64_t> items;                    // the first block of what one thread does: the branches of a tree in order, else a block
  std::vector<int64_t> tokens, positions, rows;  // of all segments, one behind the other
  std::vector<int64_t> slots;                    // where each token's keys and values are written: its position, if it is no branch's
  std::vector<int64_t> kept;                     // indices of the tokens whose successor is asked for
  RecurrentStates states;                        // of layers that keep some, else none
  std::vector<Run> runs;                         // the tokens as these layers go through them, in order
  std::vector<int64_t> row_runs;                 // the first run of every row
  std::vector<Replay> replays;                   // before the first token: all of these, then all forks
  std::vector<Fork> forks;
  // What came out, one entry per kept token. best: argmax of the logits, -1 where they hold NaN.
  std::vector<int64_t> best;
  std::vector<float> confidence;  // probability of best; left empty unless want_confidence
  float* logits = nullptr;        // [kept][vocab], or null: nobody wants them
  Bits bits;                      // of every linear with packed weights; 0: each one's own
  std::vector<int64_t> widths;    // planes of every block, in place of bits there; none: bits
  ChooseWidth choose = nullptr;   // picks them as the pass comes to a block; null: they are known
  bool mixes = false;             // the tokens of a pass may read different planes of a block
  int64_t draft_window = 0;       // of every layer, as in mlspec_attention_args
  Tap tap;
  bool want_confidence = false;

  // Those of the number-th row.
  std::span<const Run> runs_of(int64_t number) const {
    const bool last = number + 1 == static_cast<int64_t>(row_runs.size());
    return {runs.data() + row_runs[number], runs.data() + (last ? runs.size() : row_runs[number + 1])};
  }
};

class Decoder {
 public:
  static constexpr int64_t kMaxTokens = 512;

  DecoderShape shape;
  std::vector<DecoderLayer> layers;
  std::vector<RopeTable> ropes;
  DeltaShape delta;                         // of all layers that are delta nets
  std::vector<const DeltaNet*> delta_nets;  // these
  int64_t num_kv_layers() const {
    return std::count_if(layers.begin(), layers.end(), [](const DecoderLayer& l) { return !l.delta && !l.reuses_keys; });
  }
  // Layers have sizes of their own, and a cache may have room for wider ones than these: those of the model whose first layers these are.
  bool layers_differ = false;
  TokenInputs token_inputs;  // of layers that have some of their own
  const void* embedding = nullptr;  // [embeddings][hidden], or null: the table is nested, or holds codes
  Linear nested_embedding;
  ZipperTable zipper_embedding;
  const void* position_embedding = nullptr;  // [positions][hidden], of the embedding's dtype, added to it; null: none
  Norm final_norm;
  Linear head;
  // int4 weights times 16-bit activations: first to bfloat16 in memory, then a dense product (what systems without a kernel
  // for it do; for comparison).
  bool dequantize = false;
  PlaneReader planes;
  Ranks ranks;  // heads, key heads, intermediate and outputs of the head are this process's; vocab is the whole one
  bool rank_lost = false;  // in the last pass: what it computed is nothing
  bool planes_missing = false;  // in the last pass, or no width could be picked: what it computed is nothing
  std::mutex busy;  // one call at a time: the workspace is the decoder's

  // Room for a pass; called by one thread before the team starts on it.
  void prepare(Pass& pass, int threads);
  // Executed by every member of the team; ends with a barrier.
  void forward(Team& team, Pass& pass);

 private:
  struct Workspace;
  Bits asked(const Linear& linear) const;
  void choose_width(Team& team, Pass& pass, int64_t block, int64_t rows);
  mlspec_acts acts_for(const Linear& next, int64_t rows) const;
  bool dequantizes(const Linear& linear) const;
  mlspec_linear_fn kernel_for(const Linear& linear) const;
  void reserve_dense(int threads);
  void multiply_dequantized(const Team& team, mlspec_linear_args args, int64_t begin, int64_t end);
  int64_t planes_of(const Linear& linear) const;
  bool adds_high(const Linear& linear) const;
  bool reads_wide(const Linear& linear) const;
  mlspec_acts wide_acts(const mlspec_acts& acts) const;
  void pack_piece(const Linear& next, const mlspec_pack_args& pack, int64_t row, int64_t row_end, int64_t k, int64_t k_end) const;
  void add_high(Team& team, const Linear* const* parts, int count, const mlspec_acts& acts, float* y, int64_t stride);
  void reserve_adapters(int64_t n);
  void add_adapters(Team& team, const Linear* const* parts, int count, const float* x, float* y, int64_t stride, int64_t rows);
  bool has_escapes(const Linear& linear) const;
  void reserve_escaped(const Linear& linear, int threads, int64_t rows);
  mlspec_acts acts_for_escaped(Team& team, const mlspec_acts& acts);
  void reserve_escaped_acts(const Linear& linear, int threads, int64_t rows);
  void multiply_escaped_visit(const Team& team, const Linear& linear, const mlspec_linear_args& args, int64_t begin, int64_t end);
  void multiply_escaped(const Team& team, const Linear& linear, const mlspec_linear_args& args, const mlspec_acts& dense_acts,
                        int64_t begin, int64_t end);
  void embed(Team& team, const Pass& pass);
  void nested_row(int64_t id, uint16_t* row) const;
  void multiply(Team& team, const Linear* const* parts, int count, float* y, int64_t stride, bool accumulate, int64_t rows);
  bool mixes(const Linear& linear) const;
  void multiply_mixed(Team& team, const Linear* const* parts, int count, float* y, int64_t stride, bool accumulate, int64_t rows);
  void multiply_at_once(Team& team, const Linear* const* parts, int count, float* y, int64_t stride, bool accumulate, int64_t rows);
  void multiply_in_place(Team& team, const Linear* const* parts, int count, float* y, int64_t stride, bool accumulate, int64_t rows);
  void norm_row(const Norm& norm, const float* x, int64_t width, float* y) const;
  void settle(const Pending& pending, const float* block, float* hidden, float* room) const;
  void normalize(Team& team, int64_t rows, const Pending& pending, const Norm& norm, const Linear* next, bool keep = false);
  void norm_heads(const Norm& norm, int64_t norm_width, int64_t width, float* heads) const;
  int64_t qkv_width(const DecoderLayer& layer) const;
  int64_t queries_at(const DecoderLayer& layer, int64_t kv_head) const;
  int64_t key_at(const DecoderLayer& layer, int64_t kv_head) const;
  int64_t value_at(const DecoderLayer& layer, int64_t kv_head) const;
  void turn_heads(const DecoderLayer& layer, int64_t position, float* qkv) const;
  void part_gates(const DecoderLayer& layer, const float* from, float* queries, float* gates) const;
  void write_keys(const Pass& pass, const DecoderLayer& layer, int64_t token, float* qkv);
  char* lane(const RaggedKv& kv, const DecoderLayer& layer, int64_t which, int64_t row, int64_t head) const;
  void attention(Team& team, const Pass& pass, const DecoderLayer& layer);
  void restore_states(Team& team, const Pass& pass);
  bool shares_inputs(const DeltaNet& net) const;
  void delta_net(Team& team, const Pass& pass, const DeltaNet& net);
  void pack_rows(Team& team, const float* x, int64_t stride, int64_t rows, const Linear& next);
  void rotate_and_pack(Team& team, float* x, int64_t stride, int64_t rows, const Linear& next);
  void activate(Team& team, int64_t rows, const DecoderLayer& layer);
  void activate_whole(Team& team, int64_t rows, const DecoderLayer& layer);
  void activate_piece(const float* gate, int64_t inner, int64_t count, float* to) const;
  void reserve_inputs(int64_t n);
  void embed_inputs(Team& team, const Pass& pass);
  Pending add_inputs(Team& team, int64_t rows, const Pending& pending, int64_t index);
  void sum_over_ranks(Team& team, int64_t rows);
  void gather_over_ranks(Team& team, int64_t rows, float* logits);
  void mlp(Team& team, int64_t rows, const DecoderLayer& layer, float* to, bool accumulate);
  void reserve_experts(int threads, int64_t n);
  void visit_experts(Team& team, const Experts& experts, int64_t rows, bool has_norm_behind);
  void route(Team& team, const Experts& experts, int64_t rows);
  void plan_visits(const Experts& experts, int64_t rows);
  void add_visit(const Experts& experts, int64_t expert, int64_t first, int64_t own, int64_t rows);
  void plan_products(const Experts& experts);
  void pack_visits(Team& team, const Experts& experts);
  void multiply_products(Team& team, const Products& products);
  void activate_visits(Team& team, const Experts& experts);
  void sum_experts(Team& team, const Experts& experts, int64_t rows, bool has_norm_behind);
  void tap(Team& team, const Pass& pass, const Pending& pending, int64_t layer);
  void score(Team& team, Pass& pass, const Pending& pending, int64_t first, int64_t count, float* logits);

  std::shared_ptr<Workspace> work_;
};

}  // namespace mlspec
