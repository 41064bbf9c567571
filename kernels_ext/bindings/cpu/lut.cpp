// How does the kernel of lookup-table planes meet torch? Operands are checked here; the rest is as for every linear.
#include <torch/library.h>

#include "../../formats.h"
#include "linear.h"

namespace {

using namespace mlspec;
using namespace mlspec::cpu_tiles;
using at::Tensor;

Tensor lut_linear(const Tensor& x, const Tensor& plane_tiles, const Tensor& table_tiles, int64_t out_features,
                  const std::optional<Tensor>& bias, int64_t num_planes) {
  constexpr const char* op = "lut_linear";
  check_dtype(op, "plane_tiles", plane_tiles, at::kByte);
  TORCH_CHECK_VALUE(out_features >= 0, op, ": out_features is ", out_features, ", it cannot be negative");
  TORCH_CHECK_VALUE(plane_tiles.dim() == 4 && plane_tiles.size(0) >= 1 && plane_tiles.size(0) <= kMaxPlanes, op,
                    ": plane_tiles has shape ", plane_tiles.sizes(), ", expected [1 to ", kMaxPlanes, " planes, out / 16, in / ",
                    kBlock, ", ", kPlaneBytes, "] from prepack_lut");
  const int64_t stored = plane_tiles.size(0), tiles = round_up(out_features, kTileOutputs);
  check_weight_part(op, "plane_tiles", plane_tiles, at::kByte, {stored, tiles, plane_tiles.size(2), kPlaneBytes});
  const int64_t columns = table_tiles.dim() == 3 ? table_tiles.size(2) : 0, least = least_planes_of(stored, columns);
  TORCH_CHECK_VALUE(least, op, ": table_tiles has shape ", table_tiles.sizes(), ", expected [", tiles, ", ", kTileOutputs,
                    ", 2^", stored + 1, " - 2^S] with S from 1 to ", stored, " from prepack_lut");
  check_weight_part(op, "table_tiles", table_tiles, at::kHalf, {tiles, kTileOutputs, columns});
  TORCH_CHECK_VALUE(num_planes >= least && num_planes <= stored, op, ": num_planes is ", num_planes,
                    ", the weight has tables of ", least, " to ", stored, " bits: choose one of these");
  mlspec_linear_args args{};
  args.weight = plane_tiles.const_data_ptr();
  args.scale = table_tiles.const_data_ptr();
  args.in_features = plane_tiles.size(2) * kBlock;
  args.out_features = out_features;
  args.num_planes = num_planes;
  args.stored_planes = stored;
  args.plane_bytes = tiles * plane_tiles.size(2) * kPlaneBytes;
  args.table_columns = columns;
  return multiply(op, {cpu_kernels().lut_linear, MLSPEC_ACTS_BF16, 0, 0}, x, args, bias);
}

}  // namespace

TORCH_LIBRARY_IMPL(mlspec, CPU, m) { m.impl("lut_linear", lut_linear); }
