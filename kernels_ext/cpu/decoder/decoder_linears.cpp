// How does a decoder multiply? Which activations and which kernel a linear takes in this call, and outputs shared out.
#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "decoder_workspace.h"

namespace mlspec {

// What the running pass asks of a linear.
Bits Decoder::asked(const Linear& linear) const {
  const Workspace& w = *work_;
  if (w.width_now && linear.block >= 0) return {w.width_now, 0};
  return w.widths && linear.block >= 0 ? Bits{(*w.widths)[linear.block], 0} : w.bits;
}

// Of the block whose inputs are in `normed`, where the pass is to pick.
void Decoder::choose_width(Team& team, Pass& pass, int64_t block, int64_t rows) {
  if (!pass.choose) return;
  if (team.index() == 0 && !planes_missing) {
    Workspace& w = *work_;
    w.token_widths.resize(rows), w.distinct.clear(), w.mixed_block = -1;
    planes_missing = pass.choose(block, w.normed.data(), rows, w.token_widths.data()) < 0;
    if (!planes_missing) {
      pass.widths[block] = w.token_widths[0];
      if (pass.mixes) w.distinct = w.token_widths;
      std::sort(w.distinct.begin(), w.distinct.end());
      w.distinct.erase(std::unique(w.distinct.begin(), w.distinct.end()), w.distinct.end());
      if (w.distinct.size() > 1) w.mixed_block = block;
    }
  }
  team.barrier();
}

// Whether the tokens of the pass read different planes of a linear.
bool Decoder::mixes(const Linear& linear) const { return linear.block >= 0 && linear.block == work_->mixed_block; }

// Of every number of planes that occurs the product of all tokens, of which its own are taken: the bits of a token are those of a
// pass of its own.
void Decoder::multiply_mixed(Team& team, const Linear* const* parts, int count, float* y, int64_t stride, bool accumulate,
                             int64_t rows) {
  Workspace& w = *work_;
  int64_t outputs = 0;
  for (int i = 0; i < count; ++i) outputs += parts[i]->out_features;
  const size_t kinds = w.distinct.size();
  for (size_t kind = 0; kind < kinds; ++kind) {
    const int64_t width = w.distinct[kind];
    if (team.index() == 0) w.width_now = width;
    team.barrier();
    multiply_at_once(team, parts, count, w.mixed.data(), outputs, false, rows);
    team.share(rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        if (w.token_widths[row] != width) continue;
        const float* from = w.mixed.data() + row * outputs;
        float* to = y + row * stride;
        for (int64_t i = 0; i < outputs; ++i) to[i] = accumulate ? to[i] + from[i] : from[i];
      }
    });
  }
  if (team.index() == 0) w.width_now = 0;
  team.barrier();
}

bool Decoder::dequantizes(const Linear& linear) const {
  return dequantize && linear.format == WeightFormat::kInt4 && !linear.outliers && linear.at(asked(linear)).activation == 16;
}

mlspec_acts Decoder::acts_for(const Linear& next, int64_t rows) const {
  mlspec_acts acts{MLSPEC_ACTS_BF16, rows, next.columns(), 0, 0, work_->acts.data()};
  const int64_t bits = next.at(asked(next)).activation;
  if (next.format == WeightFormat::kF32) {
    acts.kind = MLSPEC_ACTS_F32;
  } else if (next.format == WeightFormat::kBf16 || dequantizes(next)) {
    acts.kind = cpu_kernels().bf16_linear_acts;
  } else if (bits < 16) {
    acts.kind = MLSPEC_ACTS_INT;
    acts.group = next.format == WeightFormat::kInt4 ? next.group : next.format == WeightFormat::kZipper ? next.zipper_group() : 32;
    acts.bits = bits;
    acts.wide = 2 * next.outliers;
    acts.clip = next.activation_clip;
  }
  return acts;
}

// For each thread the outputs of one part that share() can hand it at once.
void Decoder::reserve_dense(int threads) {
  int64_t elements = 0;
  const auto measure = [&](std::initializer_list<const Linear*> parts) {
    int64_t tiles = 0, most = 0;
    for (const Linear* part : parts) {
      const int64_t own = (part->out_features + kTileOutputs - 1) / kTileOutputs;
      tiles += own, most = std::max(most, own);
    }
    const Linear& any = **parts.begin();
    if (dequantizes(any)) elements = std::max(elements, std::min(most, (tiles + threads - 1) / threads) * kTileOutputs * any.in_features);
  };
  for (const DecoderLayer& l : layers) {
    measure({&l.q, &l.k, &l.v});
    measure({&l.o});
    if (l.delta) measure({&l.delta->qkv, &l.delta->z, &l.delta->b, &l.delta->a}), measure({&l.delta->b, &l.delta->a}), measure({&l.delta->out});
    !shape.plain_mlp ? measure({&l.gate, &l.up}) : measure({&l.up});
    measure({&l.down});
    if (l.inputs) measure({&l.inputs->gate}), measure({&l.inputs->projection});
    if (!l.experts) continue;
    const Experts& e = *l.experts;
    for (const Linear* one : {&e.up[0], &e.down[0], &e.shared_gate, &e.shared_up, &e.shared_down})
      if (dequantizes(*one)) elements = std::max(elements, kDenseOutputs * one->in_features);
  }
  measure({&token_inputs.projection});
  measure({&head});
  work_->dense_stride = (elements + 31) / 32 * 32;
  work_->dense.reserve(threads * work_->dense_stride);
}

// Outputs [begin, end) of an int4 linear: to bfloat16 in this thread's memory, which is used again and again and so
// stays in its cache where it fits, then a dense product.
void Decoder::multiply_dequantized(const Team& team, mlspec_linear_args args, int64_t begin, int64_t end) {
  uint16_t* const dense = work_->dense.data() + team.index() * work_->dense_stride;
  cpu_kernels().int4_dequantize(&args, begin, end, dense);
  args.weight = dense;
  args.bias = args.bias ? args.bias + begin : nullptr;
  args.y += begin;
  args.out_features = end - begin;
  cpu_kernels().bf16_linear(&args, 0, end - begin);
}

mlspec_linear_fn Decoder::kernel_for(const Linear& linear) const {
  const CpuKernels& kernels = cpu_kernels();
  const Bits bits = linear.at(asked(linear));
  const bool integer = bits.activation < 16;
  switch (linear.format) {
    case WeightFormat::kBf16: return kernels.bf16_linear;
    case WeightFormat::kF32: return kernels.f32_linear;
    case WeightFormat::kMxfp4: return integer ? kernels.mxfp4_linear_int8 : kernels.mxfp4_linear_bf16;
    case WeightFormat::kInt4: return integer ? kernels.int4_linear_int8 : kernels.int4_linear_bf16;
    case WeightFormat::kPlanes: return kernels.bitplane_linear;
    case WeightFormat::kZipper:
      if (linear.stored_planes) return integer ? kernels.bitplane_linear_int8 : kernels.bitplane_linear;
      return integer ? kernels.int4_linear_int8 : kernels.int4_linear_bf16;
    case WeightFormat::kLut: return kernels.lut_linear;
    case WeightFormat::kNested: break;
  }
  if (bits.weight == 16) return kernels.nested_linear_exact;
  return integer ? kernels.nested_linear_int8 : kernels.nested_linear_bf16;
}

// Those that a call reads of a weight that has some: all of a low part.
int64_t Decoder::planes_of(const Linear& linear) const {
  return linear.format == WeightFormat::kZipper ? linear.stored_planes : linear.at(asked(linear)).weight;
}

// y (+)= rows of packed activations times every part; the parts' outputs lie side by side in y. Parts whose planes have to come are
// multiplied one weight after the other, while its planes are there. Where they cannot be had, y is left as it was.
void Decoder::multiply(Team& team, const Linear* const* parts, int count, float* y, int64_t stride, bool accumulate,
                       int64_t rows) {
  if (mixes(*parts[0])) return multiply_mixed(team, parts, count, y, stride, accumulate, rows);
  multiply_at_once(team, parts, count, y, stride, accumulate, rows);
}

// The same at one number of planes.
void Decoder::multiply_at_once(Team& team, const Linear* const* parts, int count, float* y, int64_t stride, bool accumulate,
                               int64_t rows) {
  if (!std::any_of(parts, parts + count, [&](const Linear* part) { return part->fetches(asked(*part)); }))
    return multiply_in_place(team, parts, count, y, stride, accumulate, rows);
  for (int first = 0, next = 0; first < count; first = next) {
    const Linear& weight = *parts[first];
    int64_t outputs = 0;
    for (; next < count && (next == first || parts[next]->key == weight.key); ++next) outputs += parts[next]->out_features;
    if (team.index() == 0 && !planes_missing && weight.fetches(asked(weight)))
      planes_missing = !planes.begin(weight.key, planes_of(weight));
    team.barrier();
    if (planes_missing) return;
    multiply_in_place(team, parts + first, next - first, y, stride, accumulate, rows);
    if (team.index() == 0 && weight.fetches(asked(weight))) planes.end(weight.key);
    y += outputs;
  }
}

// The same where all planes are in their place.
void Decoder::multiply_in_place(Team& team, const Linear* const* parts, int count, float* y, int64_t stride, bool accumulate,
                                int64_t rows) {
  const mlspec_acts acts = acts_for(*parts[0], rows);
  const bool dequantized = dequantizes(*parts[0]);
  constexpr int kMostParts = 4;
  mlspec_linear_args args[kMostParts];
  mlspec_linear_fn compute[kMostParts];
  bool escapes[kMostParts], any_escapes = false, any_high = false;
  int64_t first[kMostParts + 1] = {0}, bytes = 0, column = 0;
  for (int i = 0; i < count; ++i) {
    const Linear& part = *parts[i];
    args[i] = {part.weight, part.scale, part.zero, part.group, part.bias, &acts, y + column, stride, accumulate,
               part.columns(), part.out_features, part.low, part.codebook, planes_of(part),
               part.stored_planes, part.plane_bytes, part.zero_doubled, part.table_columns};
    compute[i] = kernel_for(part);
    escapes[i] = has_escapes(part);
    any_escapes |= escapes[i];
    any_high |= adds_high(part);
    const int64_t tiles = (part.out_features + kTileOutputs - 1) / kTileOutputs;
    first[i + 1] = first[i] + tiles;
    bytes += tiles * part.bytes_per_tile(asked(part));
    column += part.out_features;
  }
  const mlspec_acts dense_acts = any_escapes ? acts_for_escaped(team, acts) : acts;
  // The smallest piece: threads of unlike speed finish within the time of one, and a kernel's first rows start cold.
  const int64_t piece = std::clamp<int64_t>(bytes / (team.size() * 16), 1 << 14, 1 << 17);
  const int64_t own = (first[count] + team.size() - 1) / team.size();
  const int64_t grain = dequantized ? own : std::max<int64_t>(1, piece * first[count] / std::max<int64_t>(bytes, 1));
  team.share(first[count], grain, [&](int64_t begin, int64_t end) {
    for (int i = 0; i < count; ++i) {
      const int64_t lo = (std::max(begin, first[i]) - first[i]) * kTileOutputs;
      const int64_t hi = std::min((std::min(end, first[i + 1]) - first[i]) * kTileOutputs, args[i].out_features);
      if (lo >= hi) continue;
      if (escapes[i]) {
        multiply_escaped(team, *parts[i], args[i], dense_acts, lo, hi);
      } else if (dequantized) {
        multiply_dequantized(team, args[i], lo, hi);
      } else {
        compute[i](&args[i], lo, hi);
      }
    }
  });
  if (any_high) add_high(team, parts, count, acts, y, stride);
}

}  // namespace mlspec
