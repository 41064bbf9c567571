// How do the kernels of lookup-table planes on GPUs meet torch? Check the operands, choose Hopper's kernels or those for every
// GPU, enqueue. The schema is that of hf_mlspec/ops/lut, tiles are drawn in hf_mlspec/ops/lut/tiles_cuda.py.
#include <torch/library.h>

#include <algorithm>

#include "linear.h"
#include "../../cuda/lut/lut_linear.h"

namespace {

using namespace mlspec;
using at::Tensor;

constexpr const char* kOp = "lut_linear";
constexpr int64_t kLackingBytes = 32;  // of a pair of tiles, for each block of inputs that the last one lacks

#if MLSPEC_HOPPER
constexpr LinearKernel kHopper = mlspec_cuda_lut_linear;
#else
constexpr LinearKernel kHopper = nullptr;
#endif

// plane_tiles, whose shape tells in_features, and table_tiles.
mlspec_cuda_linear check_lut(const Tensor& tiles, const Tensor& tables, int64_t out) {
  check_dtype(kOp, "plane_tiles", tiles, at::kByte);
  const int64_t pairs = round_up(std::max<int64_t>(out, 0), kPairOutputs) / kPairOutputs;
  const int64_t bytes = tiles.dim() == 3 ? tiles.size(2) : 0, stored = bytes / gpu_tiles::kPairPlaneBytes;
  const int64_t lacking = bytes % gpu_tiles::kPairPlaneBytes;
  const bool fits = tiles.dim() == 3 && out >= 0 && 1 <= stored && stored <= kMaxPlanes && lacking % kLackingBytes == 0 &&
                    lacking / kLackingBytes < kPairInputs / kBlock && tiles.size(0) == pairs;
  TORCH_CHECK_VALUE(fits, kOp, ": plane_tiles has shape ", tiles.sizes(), ", expected [", pairs, ", in / ", kPairInputs,
                    ", 1 to ", kMaxPlanes, " times ", gpu_tiles::kPairPlaneBytes,
                    " bytes] from prepack_lut on a GPU for out_features = ", out);
  check_part(kOp, "plane_tiles", tiles, at::kByte, tiles.sizes(), "plane_tiles", tiles);
  const int64_t columns = tables.dim() == 3 ? tables.size(2) : 0;
  TORCH_CHECK_VALUE(least_planes_of(stored, columns), kOp, ": table_tiles has shape ", tables.sizes(), ", expected [", pairs, ", ",
                    kPairOutputs, ", 2^", stored + 1, " - 2^S] with S from 1 to ", stored, " from prepack_lut");
  check_part(kOp, "table_tiles", tables, at::kHalf, {pairs, kPairOutputs, columns}, "plane_tiles", tiles);
  mlspec_cuda_linear args{};
  args.tiles = tiles.const_data_ptr();
  args.tables = tables.const_data_ptr();
  args.table_columns = static_cast<int32_t>(columns);
  args.in_features = std::max<int64_t>(tiles.size(1) * kPairInputs - lacking / kLackingBytes * kBlock, 0);
  args.out_features = out;
  args.tile_stride = static_cast<int32_t>(bytes / 2);
  args.activation_bits = 16;
  return args;
}

Tensor lut_linear(const Tensor& x, const Tensor& plane_tiles, const Tensor& table_tiles, int64_t out_features,
                  const std::optional<Tensor>& bias, int64_t num_planes) {
  mlspec_cuda_linear args = check_lut(plane_tiles, table_tiles, out_features);
  const int64_t stored = plane_tiles.size(2) / gpu_tiles::kPairPlaneBytes;
  const int64_t least = least_planes_of(stored, args.table_columns);
  TORCH_CHECK_VALUE(least <= num_planes && num_planes <= stored, kOp, ": num_planes is ", num_planes,
                    ", the weight has tables of ", least, " to ", stored, " bits: choose one of these");
  check_linear_x(kOp, x, "plane_tiles", plane_tiles, args.in_features, bias, out_features);
  args.num_planes = static_cast<int32_t>(num_planes);
  return multiply(CudaCall(kOp, x), {kOp, args, kHopper, mlspec_cuda_portable_lut_linear, true}, x, bias);
}

}  // namespace

TORCH_LIBRARY_IMPL(mlspec, CUDA, m) { m.impl("lut_linear", lut_linear); }
