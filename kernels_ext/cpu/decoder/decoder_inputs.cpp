// How do tokens become what layers read? Rows of a table; and inputs of each layer's own, one product of all embeddings for all layers,
// then a gated one behind every MLP.
#include <algorithm>
#include <cstring>

#include "decoder_workspace.h"

namespace mlspec {

// The row of a nested table: exactly, from what escaped where it is there.
void Decoder::nested_row(int64_t id, uint16_t* row) const {
  const Linear& table = nested_embedding;
  const int64_t* const end = table.escaped.rows + table.escaped.count;
  const int64_t* const found = std::lower_bound(table.escaped.rows, end, id);
  if (found != end && *found == id) {
    std::memcpy(row, table.escaped.weight + (found - table.escaped.rows) * shape.hidden, shape.hidden * sizeof *row);
    return;
  }
  mlspec_linear_args args{};
  args.weight = table.weight, args.scale = table.scale, args.low = table.low, args.in_features = shape.hidden;
  mlspec_nested_row(&args, id, row);
}

// hidden = rows of the table, times embedding_scale, and those of the table of positions.
void Decoder::embed(Team& team, const Pass& pass) {
  const int64_t element = shape.embedding_dtype == MLSPEC_FLOAT32 ? 4 : 2;
  Workspace& w = *work_;
  auto* const own = reinterpret_cast<uint16_t*>(w.rows.data() + team.index() * w.row_stride);
  team.share(pass.tokens.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* const hidden = w.hidden.data() + i * shape.hidden;
      if (zipper_embedding.planes) {
        zipper_row(zipper_embedding, pass.tokens[i], hidden);
        cpu_kernels().row.narrow(hidden, MLSPEC_BFLOAT16, shape.hidden, own);
      } else if (!embedding) {
        nested_row(pass.tokens[i], own);
      }
      const char* const row = static_cast<const char*>(embedding) + (embedding ? pass.tokens[i] * shape.hidden * element : 0);
      const void* const from = embedding ? static_cast<const void*>(row) : own;
      cpu_kernels().row.widen(from, shape.embedding_dtype, shape.embedding_scale, shape.hidden, hidden);
      if (!position_embedding) continue;
      const char* const place = static_cast<const char*>(position_embedding) + pass.positions[i] * shape.hidden * element;
      float* const position = w.rows.data() + team.index() * w.row_stride;
      cpu_kernels().row.widen(place, shape.embedding_dtype, 1.0f, shape.hidden, position);
      cpu_kernels().row.add(position, shape.hidden, hidden);
    }
  });
}

void Decoder::reserve_inputs(int64_t n) {
  if (token_inputs) work_->layer_inputs.reserve(n * token_inputs.projection.out_features);
}

// Of all layers, from embeddings as the first layer reads them.
void Decoder::embed_inputs(Team& team, const Pass& pass) {
  if (!token_inputs) return;
  const mlspec_row_ops& row = cpu_kernels().row;
  const TokenInputs& own = token_inputs;
  Workspace& w = *work_;
  const int64_t n = pass.tokens.size(), whole = own.projection.out_features;
  const int64_t element = shape.embedding_dtype == MLSPEC_FLOAT32 ? 4 : 2;
  pack_rows(team, w.hidden.data(), shape.hidden, n, own.projection);
  const Linear* const parts[] = {&own.projection};
  multiply(team, parts, 1, w.layer_inputs.data(), whole, false, n);
  float* const said = w.rows.data() + team.index() * w.row_stride;
  team.share(n, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const char* const table = static_cast<const char*>(own.table) + pass.tokens[i] * own.stride * element;
      for (int64_t at = 0; at < whole; at += own.width) {
        float* const to = w.layer_inputs.data() + i * whole + at;
        row.rms_norm(to, own.norm_weight, own.norm_eps, own.width, to);
        row.widen(table + at * element, shape.embedding_dtype, own.scale, own.width, said);
        row.add(said, own.width, to);
      }
    }
  });
}

// What waits is added; then what layer `index` makes of its inputs lies in `block`, and waits.
Pending Decoder::add_inputs(Team& team, int64_t rows, const Pending& pending, int64_t index) {
  Workspace& w = *work_;
  const LayerInputs& own = *layers[index].inputs;
  const int64_t width = token_inputs.width, whole = token_inputs.projection.out_features;
  const Linear *const gate[] = {&own.gate}, *const projection[] = {&own.projection};
  normalize(team, rows, pending, {}, &own.gate);
  multiply(team, gate, 1, w.gate_up.data(), width, false, rows);
  team.share(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      float* const row = w.gate_up.data() + n * width;
      cpu_kernels().row.activate_mul(row, w.layer_inputs.data() + n * whole + index * width, shape.activation, width, row);
    }
  });
  pack_rows(team, w.gate_up.data(), width, rows, own.projection);
  multiply(team, projection, 1, w.block.data(), shape.hidden, false, rows);
  return {true, own.out_norm, layers[index].scale};
}

}  // namespace mlspec
