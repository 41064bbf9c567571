// How does the kernel of bit-planes meet torch? Operands are checked here; the rest is as for every linear.
#include <torch/library.h>

#include "linear.h"
#include "planes.h"
#include "../../formats.h"

namespace {

using namespace mlspec;
using namespace mlspec::cpu_tiles;
using at::Tensor;


void check_planes(const char* op, const Tensor& tiles, int64_t out_features) {
  check_dtype(op, "plane_tiles", tiles, at::kByte);
  TORCH_CHECK_VALUE(out_features >= 0, op, ": out_features is ", out_features, ", it cannot be negative");
  TORCH_CHECK_VALUE(tiles.dim() == 4 && tiles.size(0) >= 1 && tiles.size(0) <= kMaxPlanes, op, ": plane_tiles has shape ",
                    tiles.sizes(), ", expected [1 to ", kMaxPlanes, " planes, out / 16, in / ", kBlock, ", ", kPlaneBytes,
                    "] from prepack_planes");
  check_weight_part(op, "plane_tiles", tiles, at::kByte,
                    {tiles.size(0), round_up(out_features, kTileOutputs), tiles.size(2), kPlaneBytes});
}

// All of the arguments but activations, bias, result and which planes are read.
mlspec_linear_args planes_weight(const char* op, const Tensor& plane_tiles, const Tensor& scale_tiles, int64_t out_features,
                                 int64_t group_size) {
  check_one_of(op, "group_size", group_size, kGroupSizes);
  check_planes(op, plane_tiles, out_features);
  const int64_t in = plane_tiles.size(2) * kBlock;
  TORCH_CHECK_VALUE(in % group_size == 0, op, ": group_size ", group_size, " does not divide in_features = ", in);
  check_weight_part(op, "scale_tiles", scale_tiles, at::kHalf, {plane_tiles.size(1), in / group_size, kTileOutputs});
  mlspec_linear_args args{};
  args.weight = plane_tiles.const_data_ptr();
  args.scale = scale_tiles.const_data_ptr();
  args.group = group_size;
  args.in_features = in;
  args.out_features = out_features;
  args.stored_planes = plane_tiles.size(0);
  args.plane_bytes = plane_tiles.size(1) * plane_tiles.size(2) * kPlaneBytes;
  return args;
}

Tensor bitplane_linear(const Tensor& x, const Tensor& plane_tiles, const Tensor& scale_tiles, int64_t out_features,
                       const std::optional<Tensor>& bias, int64_t group_size, int64_t zero_doubled, int64_t num_planes) {
  constexpr const char* op = "bitplane_linear";
  mlspec_linear_args args = planes_weight(op, plane_tiles, scale_tiles, out_features, group_size);
  args.num_planes = num_planes;
  args.zero_doubled = zero_doubled;
  TORCH_CHECK_VALUE(num_planes >= 1 && num_planes <= args.stored_planes, op, ": num_planes is ", num_planes,
                    ", the weight stores ", args.stored_planes, ": choose 1 to ", args.stored_planes);
  check_zero_doubled(op, zero_doubled, args.stored_planes);
  return multiply(op, {cpu_kernels().bitplane_linear, MLSPEC_ACTS_BF16, 0, 0}, x, args, bias);
}

Tensor bitplane_integers(const Tensor& x, const Tensor& plane_tiles, const Tensor& scale_tiles, int64_t out_features,
                         const std::optional<Tensor>& bias, int64_t group_size, int64_t activation_group, int64_t activation_bits) {
  constexpr const char* op = "bitplane_integers";
  mlspec_linear_args args = planes_weight(op, plane_tiles, scale_tiles, out_features, group_size);
  args.num_planes = args.stored_planes;
  check_one_of(op, "activation_group", activation_group, kGroupSizes);
  check_one_of(op, "activation_bits", activation_bits, {4, 8});
  TORCH_CHECK_VALUE(args.stored_planes <= kIntegerPlanes, op, ": the weight stores ", args.stored_planes,
                    " planes, integers meet 1 to ", kIntegerPlanes);
  TORCH_CHECK_VALUE(activation_group <= group_size, op, ": activation_group is ", activation_group, ", more than group_size = ",
                    group_size);
  return multiply(op, {cpu_kernels().bitplane_linear_int8, MLSPEC_ACTS_INT, activation_group, activation_bits}, x, args, bias);
}

}  // namespace

TORCH_LIBRARY_IMPL(mlspec, CPU, m) {
  m.impl("bitplane_linear", bitplane_linear);
  m.impl("bitplane_integers", bitplane_integers);
}
