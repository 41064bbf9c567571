// How do the kernels of bit-planes on GPUs meet torch? Check the operands, choose Hopper's kernels or those for every GPU,
// enqueue. The schema is that of hf_mlspec/ops/planes, tiles are drawn in hf_mlspec/ops/planes/tiles_cuda.py.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "linear.h"
#include "row_checks.h"
#include "../../cuda/planes/planes_linear.h"
#include "../../cuda/rows/choose_planes.h"

namespace {

using namespace mlspec;
using at::Tensor;

#if MLSPEC_HOPPER
constexpr LinearKernel kHopper = mlspec_cuda_bitplane_linear, kHopperChosen = mlspec_cuda_bitplane_chosen;
#else
constexpr LinearKernel kHopper = nullptr, kHopperChosen = nullptr;
#endif

const char* no_portable_chosen(const mlspec_cuda_linear*) { return "planes that the device counts are multiplied on Hopper alone"; }

// plane_tiles, whose scale_tiles tell in_features, and how many planes they store.
mlspec_cuda_linear check_planes(const char* op, const Tensor& tiles, const Tensor& scale_tiles, int64_t out, int64_t group) {
  check_dtype(op, "plane_tiles", tiles, at::kByte);
  TORCH_CHECK_VALUE(scale_tiles.dim() == 3, op, ": scale_tiles has shape ", scale_tiles.sizes(),
                    ", expected 3 axes from prepack_planes");
  const int64_t in = scale_tiles.size(1) * group, pairs = round_up(std::max<int64_t>(out, 0), kPairOutputs) / kPairOutputs;
  const int64_t chunks = round_up(in, kPairInputs) / kPairInputs, scales = kPairOutputs * (kPairInputs / group) * 2;
  const int64_t bytes = tiles.dim() == 3 ? tiles.size(2) - scales : -1, stored = bytes / gpu_tiles::kPairPlaneBytes;
  const bool fits = out >= 0 && bytes % gpu_tiles::kPairPlaneBytes == 0 && 1 <= stored && stored <= kMaxPlanes;
  TORCH_CHECK_VALUE(fits && tiles.size(0) == pairs && tiles.size(1) == chunks, op, ": plane_tiles has shape ", tiles.sizes(),
                    ", expected [", pairs, ", ", chunks, ", ", scales, " + 1 to ", kMaxPlanes, " times ", gpu_tiles::kPairPlaneBytes,
                    "] from prepack_planes on a GPU for out_features = ", out, ", in_features = ", in, ", groups of ", group);
  check_part(op, "plane_tiles", tiles, at::kByte, tiles.sizes(), "plane_tiles", tiles);
  check_part(op, "scale_tiles", scale_tiles, at::kHalf, {0, scale_tiles.size(1), 16}, "plane_tiles", tiles);
  mlspec_cuda_linear args{};
  args.tiles = tiles.const_data_ptr();
  args.in_features = in;
  args.out_features = out;
  args.group_size = static_cast<int32_t>(group);
  args.tile_stride = static_cast<int32_t>(tiles.size(2) / 2);
  args.activation_bits = 16;
  return args;
}

// Planes of a weight behind those of its tiles, uint8 [planes, bytes of one]: what is resident, then what was fetched.
struct Apart {
  std::optional<Tensor> resident, fetched;
};

// What a product says beside its operands. total: planes of the weight, 0: those that its tiles store.
struct Product {
  int64_t group_size, zero_doubled, num_planes, total = 0, outputs_of_weight = 0;
  bool sums = false;
};

int64_t planes_of(const Apart& apart) {
  return (apart.resident ? apart.resident->size(0) : 0) + (apart.fetched ? apart.fetched->size(0) : 0);
}

// The weight of which these are some planes, or some outputs.
void check_whole(const char* op, mlspec_cuda_linear& args, int64_t stored, const Product& how) {
  const int64_t total = how.total, least_zero = total == kMaxPlanes ? 254 : 0;
  TORCH_CHECK_VALUE(stored <= total && total <= kMaxPlanes, op, ": total_planes is ", total, ", the tiles store ", stored,
                    ": it is that to ", kMaxPlanes);
  TORCH_CHECK_VALUE(!how.outputs_of_weight || how.outputs_of_weight >= args.out_features, op, ": outputs_of_weight is ",
                    how.outputs_of_weight, ", and out_features, some of them, ", args.out_features);
  TORCH_CHECK_VALUE(least_zero <= how.zero_doubled && how.zero_doubled <= 256, op, ": zero_doubled is ", how.zero_doubled,
                    ", of ", total, " planes it must be ", least_zero, " to 256, else weights are not exact in bfloat16");
  args.zero_doubled = static_cast<int32_t>(how.zero_doubled);
  args.absent_planes = static_cast<int32_t>(total - stored);
  args.outputs_of_weight = how.outputs_of_weight;
}

// Where planes that lie apart begin: as many as are multiplied.
void find_apart(const char* op, const Apart& apart, const Tensor& tiles, int64_t stored, mlspec_cuda_linear& args) {
  const int64_t bytes = tiles.size(0) * tiles.size(1) * gpu_tiles::kPairPlaneBytes;
  int32_t found = 0;
  for (const auto& [name, planes] : {std::pair{"resident", apart.resident}, std::pair{"fetched", apart.fetched}}) {
    if (!planes) continue;
    check_part(op, name, *planes, at::kByte, {planes->dim() ? planes->size(0) : 0, bytes}, "plane_tiles", tiles);
    for (int64_t i = 0; i < planes->size(0) && found + stored < args.num_planes; ++i)
      args.apart[found++] = planes->const_data_ptr<uint8_t>() + i * bytes;
  }
  args.num_apart = found;
}

Tensor product(const char* op, const Tensor& x, const Tensor& plane_tiles, const Tensor& scale_tiles, int64_t out_features,
               const std::optional<Tensor>& bias, const Product& how, const Apart& apart = {}) {
  const auto [group_size, zero_doubled, num_planes, said, outputs_of_weight, sums] = how;
  check_one_of(op, "group_size", group_size, kGroupSizes);
  mlspec_cuda_linear args = check_planes(op, plane_tiles, scale_tiles, out_features, group_size);
  const int64_t stored = plane_tiles.size(2) / gpu_tiles::kPairPlaneBytes, total = said ? said : stored;
  check_whole(op, args, stored, {group_size, zero_doubled, num_planes, total, outputs_of_weight});
  const int64_t most = std::min(stored + planes_of(apart), total);
  TORCH_CHECK_VALUE(1 <= num_planes && num_planes <= most, op, ": num_planes is ", num_planes, ", the weight stores ", most,
                    ": choose 1 to ", most);
  check_linear_x(op, x, "plane_tiles", plane_tiles, args.in_features, bias, out_features);
  args.num_planes = static_cast<int32_t>(num_planes);
  args.out_is_float32 = sums;
  find_apart(op, apart, plane_tiles, stored, args);
  const bool may_overlap = !apart.fetched;  // else a copy in front brings them
  return multiply(CudaCall(op, x), {op, args, kHopper, mlspec_cuda_portable_bitplane_linear, true, may_overlap}, x, bias);
}

Tensor bitplane_linear(const Tensor& x, const Tensor& plane_tiles, const Tensor& scale_tiles, int64_t out_features,
                       const std::optional<Tensor>& bias, int64_t group_size, int64_t zero_doubled, int64_t num_planes) {
  return product("bitplane_linear", x, plane_tiles, scale_tiles, out_features, bias, {group_size, zero_doubled, num_planes});
}

Tensor bitplane_part(const Tensor& x, const Tensor& plane_tiles, const Tensor& scale_tiles, int64_t out_features,
                     const std::optional<Tensor>& bias, int64_t group_size, int64_t zero_doubled, int64_t num_planes,
                     int64_t total_planes, int64_t outputs_of_weight) {
  return product("bitplane_part", x, plane_tiles, scale_tiles, out_features, bias,
                 {group_size, zero_doubled, num_planes, total_planes, outputs_of_weight});
}

Tensor bitplane_apart(const Tensor& x, const Tensor& plane_tiles, const Tensor& scale_tiles,
                      const std::optional<Tensor>& resident, const std::optional<Tensor>& fetched, int64_t out_features,
                      const std::optional<Tensor>& bias, int64_t group_size, int64_t zero_doubled, int64_t num_planes,
                      int64_t total_planes, int64_t outputs_of_weight) {
  return product("bitplane_apart", x, plane_tiles, scale_tiles, out_features, bias,
                 {group_size, zero_doubled, num_planes, total_planes, outputs_of_weight}, {resident, fetched});
}

Tensor bitplane_sums(const Tensor& x, const Tensor& plane_tiles, const Tensor& scale_tiles, int64_t out_features, int64_t group_size,
                     int64_t zero_doubled, int64_t num_planes) {
  return product("bitplane_sums", x, plane_tiles, scale_tiles, out_features, {}, {group_size, zero_doubled, num_planes, 0, 0, true});
}

Tensor bitplane_chosen(const Tensor& x, const Tensor& plane_tiles, const Tensor& scale_tiles, const std::optional<Tensor>& resident,
                       const std::optional<Tensor>& fetched, const Tensor& widths, int64_t out_features,
                       const std::optional<Tensor>& bias, int64_t group_size, int64_t zero_doubled, int64_t total_planes,
                       int64_t outputs_of_weight) {
  constexpr const char* op = "bitplane_chosen";
  check_one_of(op, "group_size", group_size, kGroupSizes);
  mlspec_cuda_linear args = check_planes(op, plane_tiles, scale_tiles, out_features, group_size);
  const Apart apart{resident, fetched};
  const int64_t stored = plane_tiles.size(2) / gpu_tiles::kPairPlaneBytes;
  args.num_planes = static_cast<int32_t>(std::min(stored + planes_of(apart), total_planes));
  check_whole(op, args, stored, {group_size, zero_doubled, args.num_planes, total_planes, outputs_of_weight});
  check_linear_x(op, x, "plane_tiles", plane_tiles, args.in_features, bias, out_features);
  find_apart(op, apart, plane_tiles, stored, args);
  const int64_t tokens = args.in_features ? x.numel() / args.in_features : 0, count = widths.dim() == 1 ? widths.size(0) : -1;
  TORCH_CHECK_VALUE(count == 1 || count == tokens, op, ": widths has shape ", widths.sizes(), ", expected [1], or [", tokens,
                    "], one for each token");
  check_vector(op, "widths", widths, count, "x", x);
  args.widths = widths.const_data_ptr<int32_t>();
  args.num_widths = count;
  return multiply(CudaCall(op, x), {op, args, kHopperChosen, no_portable_chosen, true, !fetched}, x, bias);
}

// A router's MLP, as hf_mlspec/ops/planes/choosing.py says.
mlspec_cuda_choose_planes check_router(const char* op, const Tensor& x, const Tensor& means, const Tensor& inner, const Tensor& inner_bias,
                                       const Tensor& outer, const Tensor& outer_bias, const Tensor& candidates, const Tensor& arrived) {
  check_bf16(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() == 2 && x.size(0) > 0, op, ": x has shape ", x.sizes(), ", expected [tokens, width]");
  TORCH_CHECK_VALUE(inner.dim() == 2 && outer.dim() == 2, op, ": inner and outer have shapes ", inner.sizes(), " and ", outer.sizes(),
                    ", expected [hidden, width] and [candidates, hidden]");
  const int64_t width = x.size(1), hidden = inner.size(0), choices = outer.size(0);
  std::vector<int64_t> of_rows{width};  // of one row, or of every one
  if (means.dim() == 2) of_rows.insert(of_rows.begin(), means.size(0));
  check_part(op, "means", means, at::kFloat, of_rows, "x", x);
  check_part(op, "inner", inner, at::kFloat, {hidden, width}, "x", x);
  check_part(op, "inner_bias", inner_bias, at::kFloat, {hidden}, "x", x);
  check_part(op, "outer", outer, at::kFloat, {choices, hidden}, "x", x);
  check_part(op, "outer_bias", outer_bias, at::kFloat, {choices}, "x", x);
  check_vector(op, "candidates", candidates, choices, "x", x);
  check_vector(op, "arrived", arrived, arrived.numel(), "x", x);
  mlspec_cuda_choose_planes args{};
  args.means = means.mutable_data_ptr<float>();
  args.inner = inner.const_data_ptr<float>(), args.inner_bias = inner_bias.const_data_ptr<float>();
  args.outer = outer.const_data_ptr<float>(), args.outer_bias = outer_bias.const_data_ptr<float>();
  args.candidates = candidates.const_data_ptr<int32_t>();
  args.arrived = arrived.mutable_data_ptr<int32_t>();
  args.n = x.size(0), args.width = width, args.batch = 1;
  args.hidden = static_cast<int32_t>(hidden), args.num_candidates = static_cast<int32_t>(choices);
  const int64_t counters = means.dim() == 2 ? args.n : mlspec_cuda_choose_planes_groups(&args) + 1;
  TORCH_CHECK_VALUE(arrived.numel() >= counters, op, ": arrived has ", arrived.numel(), " numbers, ", counters, " are needed");
  return args;
}

Tensor choose(const CudaCall& call, mlspec_cuda_choose_planes args, const Tensor& x, const Tensor& failed, int64_t count) {
  const Tensor rows = dense(x), widths = at::empty({count}, x.options().dtype(at::kInt));
  args.x = rows.const_data_ptr();
  args.widths = widths.mutable_data_ptr<int32_t>();
  args.failed = failed.mutable_data_ptr<int32_t>();
  const Tensor partial = at::empty({mlspec_cuda_choose_planes_room(&args)}, x.options().dtype(at::kFloat));
  args.partial = partial.mutable_data_ptr<float>();
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_choose_widths(&args, &launch));
  return widths;
}

Tensor choose_of_prompt(const Tensor& x, const Tensor& mean, const Tensor& inner, const Tensor& inner_bias, const Tensor& outer,
                        const Tensor& outer_bias, const Tensor& candidates, const Tensor& failed, const Tensor& arrived) {
  constexpr const char* op = "choose_of_prompt";
  const mlspec_cuda_choose_planes args = check_router(op, x, mean, inner, inner_bias, outer, outer_bias, candidates, arrived);
  TORCH_CHECK_VALUE(mean.dim() == 1, op, ": mean has shape ", mean.sizes(), ", expected [width]");
  check_vector(op, "failed", failed, 1, "x", x);
  return choose(CudaCall(op, x), args, x, failed, 1);
}

Tensor choose_of_steps(const Tensor& x, const Tensor& starts, const Tensor& lengths, const Tensor& known, const Tensor& means,
                       const Tensor& inner, const Tensor& inner_bias, const Tensor& outer, const Tensor& outer_bias,
                       const Tensor& candidates, const Tensor& failed, const Tensor& arrived, double share) {
  constexpr const char* op = "choose_of_steps";
  mlspec_cuda_choose_planes args = check_router(op, x, means, inner, inner_bias, outer, outer_bias, candidates, arrived);
  TORCH_CHECK_VALUE(means.dim() == 2 && means.size(0) > 0 && x.size(0) % means.size(0) == 0, op, ": means has shape ", means.sizes(),
                    " and x ", x.sizes(), ", expected [rows, width] and as many tokens of every row");
  const int64_t batch = means.size(0);
  check_vector(op, "starts", starts, batch, "x", x);
  check_vector(op, "lengths", lengths, batch, "x", x);
  check_vector(op, "known", known, batch, "x", x);
  check_vector(op, "failed", failed, 1, "x", x);
  args.batch = batch;
  args.starts = starts.const_data_ptr<int32_t>(), args.lengths = lengths.const_data_ptr<int32_t>();
  args.known = known.const_data_ptr<int32_t>();
  args.share = static_cast<float>(share);
  return choose(CudaCall(op, x), args, x, failed, x.size(0));
}

}  // namespace

TORCH_LIBRARY_IMPL(mlspec, CUDA, m) {
  m.impl("bitplane_linear", bitplane_linear);
  m.impl("bitplane_part", bitplane_part);
  m.impl("bitplane_apart", bitplane_apart);
  m.impl("bitplane_sums", bitplane_sums);
  m.impl("bitplane_chosen", bitplane_chosen);
  m.impl("choose_of_prompt", choose_of_prompt);
  m.impl("choose_of_steps", choose_of_steps);
}
