// Where does a pass of a decoder keep what it computes? Memory that grows with the largest pass and is used again.
#pragma once
#include <cstdint>
#include <new>
#include <vector>

#include "decoder.h"

namespace mlspec {

// Memory that grows and is never read before it is written, aligned for the kernels.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { release(); }
  void reserve(int64_t count) {
    if (count <= count_) return;
    release();
    data_ = nullptr, count_ = 0;  // what is free stays so where there is no memory for more
    data_ = static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64)));
    count_ = count;
  }
  T* data() const { return data_; }

 private:
  void release() { ::operator delete(data_, std::align_val_t(64)); }
  T* data_ = nullptr;
  int64_t count_ = 0;
};

using cpu_tiles::kTileOutputs;

constexpr int64_t kDenseOutputs = 2 * kTileOutputs;  // of experts, that are dequantized at once

// AMX tiles hold 16 rows of activations in every cache line: two threads packing rows of one tile would fight for it.
inline bool rows_share_lines(const mlspec_acts& acts) { return acts.kind == MLSPEC_ACTS_BF16_TILES && acts.num_rows > 1; }

// Up to 16 rows of a visit.
struct RowTile {
  int64_t visit, row, row_end;
};

struct Decoder::Workspace {
  Buffer<float> hidden;     // [n][hidden], the residual stream
  Buffer<float> qkv;        // [n][(heads + 2 kv_heads) * head_dim], with gates twice the heads; or [n][DeltaShape::width()]
  Buffer<float> head_gates; // [n][heads * head_dim], where heads have gates
  Buffer<float> context;    // [n][heads * head_dim]
  Buffer<float> gate_up;    // [n][2 * intermediate]
  Buffer<float> layer_inputs; // [n][layers][TokenInputs::width]
  Buffer<float> block;      // [n][hidden], a block's output where a norm follows it
  Buffer<float> scored;     // [kScoredTogether][hidden]
  Buffer<float> logits;     // [kScoredTogether][vocab], where nobody asked for them
  Buffer<float> own_logits; // [kScoredTogether][outputs of head], where processes share it
  Buffer<float> normed;     // [n][hidden], where rows share the lines of packed activations
  Buffer<float> rows;       // [threads][row_stride]: a row and the same in order, or a piece of packing
  Buffer<char> acts;        // activations as the next linear wants them
  Buffer<char> dense_acts;  // the same as bf16_linear wants them, where a nested linear has escaped rows
  Buffer<uint16_t> wide_acts;  // [n][in]: in bfloat16, where a low part meets integers and a high part does not
  Buffer<char> visit_acts;  // [threads][visit_acts_stride]: the same of the rows of a visit
  Buffer<uint16_t> dense;   // [threads][dense_stride]: bfloat16 weights of a thread's outputs
  Buffer<float> low_rank;   // [n][rank] of each adapter of linears that share their inputs, one behind the other
  Buffer<float> inner;      // [n][intermediate], inputs of down where that has an adapter
  Buffer<float> escaped;    // [threads][escaped_stride]: outputs of escaped rows, and what y held there
  // of a layer of experts
  Buffer<float> router;              // [n][scores], logits or their sigmoids
  Buffer<int32_t> chosen;            // [n][chosen]
  Buffer<float> weights;             // [n][places]
  Buffer<int32_t> place, visitors;   // [n][places]: in which row of its visit a token is; the token of each such row
  Buffer<float> input_weights;       // [n][places]: what the inputs of each such row are multiplied by
  Buffer<float> expert_gate_up, expert_out;
  Buffer<char> expert_acts;          // inputs of up, then of down
  std::vector<int64_t> next;         // [experts + 1], while visits are planned
  std::vector<Visit> visits;
  std::vector<RowTile> row_tiles;    // of all visits
  Products up_products, down_products;
  int64_t row_stride = 0, dense_stride = 0, escaped_stride = 0, visit_acts_stride = 0;
  Bits bits;                // of the running pass
  const std::vector<int64_t>* widths = nullptr;  // likewise; null: it has none
  // Of the block that the pass has come to, where its tokens read different planes:
  std::vector<int64_t> token_widths, distinct;   // of each token; those that occur, two at least, else none
  int64_t mixed_block = -1, width_now = 0;       // 0: nothing is multiplied for some of the tokens
  Buffer<float> mixed;                           // [n][outputs] of all tokens at one of them
};

}  // namespace mlspec
