// How fast is ggml's matrix product? A weight in one of its types, several copies of it, one graph of one product each.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "ggml.h"

namespace {

struct Linear {
  ggml_type type;
  int64_t rows, columns;  // of the weight
  int threads;
  ggml_context* weights = nullptr;
  std::vector<ggml_tensor*> copies;
  ggml_context* products = nullptr;  // made anew for every number of activation rows
  ggml_tensor* input = nullptr;
  std::vector<ggml_cgraph*> graphs;
  std::vector<ggml_cplan> plans;
  std::vector<uint8_t> work;

  ~Linear() {
    if (products) ggml_free(products);
    if (weights) ggml_free(weights);
  }
};

ggml_context* context(size_t bytes) {
  ggml_init_params params{};
  params.mem_size = bytes;
  return ggml_init(params);
}

ggml_type type_of(const char* name) {
  for (int type = 0; type < GGML_TYPE_COUNT; ++type) {
    const char* known = ggml_type_name(ggml_type(type));
    if (known && std::strcmp(known, name) == 0) return ggml_type(type);
  }
  return GGML_TYPE_COUNT;
}

}  // namespace

extern "C" {

// slab [slab_rows][columns] is quantized once; a weight is the slab again and again, rows in all. Null: no such type, or no
// memory. A weight's rows are interleaved by 8 or 16 at most, so slab_rows and rows are multiples of 16.
void* mlspec_ggml_open(const char* name, const float* slab, int64_t slab_rows, int64_t rows, int64_t columns, int copies,
                       int threads) {
  const ggml_type type = type_of(name);
  if (type == GGML_TYPE_COUNT || slab_rows % 16 || rows % slab_rows) return nullptr;
  auto* linear = new Linear{type, rows, columns, threads};
  const size_t bytes = ggml_row_size(type, columns) * rows;
  linear->weights = context((bytes + ggml_tensor_overhead() + 4096) * copies);
  if (!linear->weights) {
    delete linear;
    return nullptr;
  }
  std::vector<uint8_t> quantized(ggml_row_size(type, columns) * slab_rows);
  ggml_quantize_chunk(type, slab, quantized.data(), 0, slab_rows, columns, nullptr, nullptr);
  for (int copy = 0; copy < copies; ++copy) {
    ggml_tensor* weight = ggml_new_tensor_2d(linear->weights, type, columns, rows);
    for (size_t at = 0; at < bytes; at += quantized.size())
      std::memcpy(static_cast<uint8_t*>(weight->data) + at, quantized.data(), quantized.size());
    linear->copies.push_back(weight);
  }
  return linear;
}

int64_t mlspec_ggml_weight_bytes(void* handle) { return int64_t(ggml_nbytes(static_cast<Linear*>(handle)->copies[0])); }

// The products of x [n][columns] with every copy become ready to run.
int mlspec_ggml_input(void* handle, const float* x, int64_t n) {
  auto* linear = static_cast<Linear*>(handle);
  if (linear->products) ggml_free(linear->products);
  linear->graphs.clear();
  linear->plans.clear();
  const size_t copies = linear->copies.size();
  const size_t each = linear->rows * n * 4 + 2 * ggml_tensor_overhead() + ggml_graph_overhead_custom(8, false) + 4096;
  linear->products = context(linear->columns * n * 4 + ggml_tensor_overhead() + 4096 + copies * each);
  if (!linear->products) return 1;
  linear->input = ggml_new_tensor_2d(linear->products, GGML_TYPE_F32, linear->columns, n);
  std::memcpy(linear->input->data, x, linear->columns * n * 4);
  size_t most = 0;
  for (ggml_tensor* weight : linear->copies) {
    ggml_cgraph* graph = ggml_new_graph_custom(linear->products, 8, false);
    ggml_build_forward_expand(graph, ggml_mul_mat(linear->products, weight, linear->input));
    linear->graphs.push_back(graph);
    linear->plans.push_back(ggml_graph_plan(graph, linear->threads));
    if (linear->plans.back().work_size > most) most = linear->plans.back().work_size;
  }
  linear->work.resize(most);
  for (ggml_cplan& plan : linear->plans) plan.work_data = linear->work.data();
  return 0;
}

// -> [n][rows] of this copy's product, valid until the next mlspec_ggml_input; null when ggml reports a failure.
const float* mlspec_ggml_run(void* handle, int copy) {
  auto* linear = static_cast<Linear*>(handle);
  ggml_cgraph* graph = linear->graphs[copy];
  if (ggml_graph_compute(graph, &linear->plans[copy]) != GGML_STATUS_SUCCESS) return nullptr;
  return static_cast<const float*>(ggml_graph_node(graph, -1)->data);
}

void mlspec_ggml_close(void* handle) { delete static_cast<Linear*>(handle); }
}
