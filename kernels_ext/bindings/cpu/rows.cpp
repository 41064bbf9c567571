// How do the kernels over single rows meet torch: norm, gated activation and the choice of a token?
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <tuple>
#include <utility>

#include "../operands.h"
#include "../../cpu/threads/parallel.h"

namespace {

using namespace mlspec;
using at::Tensor;

// -> x normalized times weight, and x + residual (of no elements without a residual). Both rounded to x.dtype once.
std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps, const std::optional<Tensor>& residual) {
  constexpr const char* op = "rms_norm";
  const mlspec_dtype dtype = float_dtype(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() > 0, op, ": x is a scalar, it must have at least one axis");
  const int64_t n = x.size(-1);
  float_dtype(op, "weight", weight);
  check_shape(op, "weight", weight, {n});
  check_cpu(op, "weight", weight);
  if (residual) check_same(op, "residual", *residual, "x", x);
  const Tensor flat = x.contiguous(), wide_weight = weight.to(at::kFloat).contiguous();
  const Tensor other = residual ? residual->contiguous() : Tensor();
  Tensor normed = at::empty(x.sizes(), x.options());
  Tensor sum = residual ? at::empty(x.sizes(), x.options()) : at::empty({0}, x.options());
  if (x.numel() == 0) return {normed, sum};
  const int64_t rows = flat.numel() / n;
  const int threads = threads_for(4.0 * rows * n);
  const Tensor scratch = at::empty({threads, 2, n}, at::kFloat);
  const void *in = flat.const_data_ptr(), *add = residual ? other.const_data_ptr() : nullptr;
  void *out = normed.mutable_data_ptr(), *total = sum.mutable_data_ptr();
  const float* scales = wide_weight.const_data_ptr<float>();
  float* const rooms = scratch.mutable_data_ptr<float>();
  const mlspec_row_ops& ops = cpu_kernels().row;
  run(threads, [&](Team& team) {
    float *row = rooms + team.index() * 2 * n, *second = row + n;
    team.share(rows, rows_per_piece(n), [&](int64_t r, int64_t end) {
      for (; r < end; ++r) {
        ops.widen(bytes_at(in, dtype, r * n), dtype, 1.0f, n, row);
        if (add) {  // the norm reads the sum as it is handed on: rounded
          ops.widen(bytes_at(add, dtype, r * n), dtype, 1.0f, n, second);
          ops.add(second, n, row);
          ops.narrow(row, dtype, n, bytes_at(total, dtype, r * n));
          ops.widen(bytes_at(total, dtype, r * n), dtype, 1.0f, n, row);
        }
        ops.rms_norm(row, scales, static_cast<float>(eps), n, row);
        ops.narrow(row, dtype, n, bytes_at(out, dtype, r * n));
      }
    });
  });
  return {normed, sum};
}

Tensor silu_mul(const Tensor& gate, const Tensor& up) {
  constexpr const char* op = "silu_mul";
  const mlspec_dtype dtype = float_dtype(op, "gate", gate);
  check_same(op, "up", up, "gate", gate);
  Tensor y = at::empty(gate.sizes(), gate.options());
  const Tensor flat_gate = gate.contiguous(), flat_up = up.contiguous();
  const void *a = flat_gate.const_data_ptr(), *b = flat_up.const_data_ptr();
  void* out = y.mutable_data_ptr();
  constexpr int64_t kPiece = 512;
  const mlspec_row_ops& ops = cpu_kernels().row;
  const int64_t items = y.numel();
  run(threads_for(16.0 * static_cast<double>(items)), [&](Team& team) {
    team.share((items + kPiece - 1) / kPiece, kGrain / kPiece, [&](int64_t piece, int64_t end) {
      float wide_gate[kPiece], wide_up[kPiece];
      for (; piece < end; ++piece) {
        const int64_t first = piece * kPiece, n = std::min(kPiece, items - first);
        ops.widen(bytes_at(a, dtype, first), dtype, 1.0f, n, wide_gate);
        ops.widen(bytes_at(b, dtype, first), dtype, 1.0f, n, wide_up);
        ops.activate_mul(wide_gate, wide_up, MLSPEC_SILU, n, wide_gate);
        ops.narrow(wide_gate, dtype, n, bytes_at(out, dtype, first));
      }
    });
  });
  return y;
}

using Maybe = std::optional<Tensor>;

Tensor hadamard_rows(const Tensor& x, const Maybe& matrix, int64_t size, int64_t inner) {
  constexpr const char* op = "hadamard_rows";
  const mlspec_dtype dtype = float_dtype(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() > 0, op, ": x is a scalar, it must have at least one axis");
  const int64_t n = x.size(-1);
  const mlspec_hadamard how = checked_hadamard(op, n, matrix, size, inner);
  Tensor y = at::empty(x.sizes(), x.options());
  if (x.numel() == 0) return y;
  const Tensor flat = x.contiguous();
  const int64_t rows = flat.numel() / n;
  const int threads = threads_for(static_cast<double>(rows * n) * static_cast<double>(how.order + 16));
  const Tensor scratch = at::empty({threads, n}, at::kFloat);
  const void* in = flat.const_data_ptr();
  void* out = y.mutable_data_ptr();
  float* const rooms = scratch.mutable_data_ptr<float>();
  const CpuKernels& kernels = cpu_kernels();
  run(threads, [&](Team& team) {
    float* const row = rooms + team.index() * n;
    team.share(rows, rows_per_piece(n), [&](int64_t r, int64_t end) {
      for (; r < end; ++r) {
        kernels.row.widen(bytes_at(in, dtype, r * n), dtype, 1.0f, n, row);
        kernels.hadamard(&how, n, row);
        kernels.row.narrow(row, dtype, n, bytes_at(out, dtype, r * n));
      }
    });
  });
  return y;
}

void check_noise(const char* op, int64_t n, const Maybe& seed, const Maybe& streams, const Maybe& positions) {
  TORCH_CHECK_VALUE(seed.has_value() == streams.has_value() && seed.has_value() == positions.has_value(), op, ": ",
                    positions ? "positions " : "", positions && (seed || streams) ? "and " : "", seed ? "seed " : "",
                    seed && streams ? "and " : "", streams ? "streams " : "",
                    "given alone; noise needs seed, streams and positions");
  if (!seed) return;
  check_dtype(op, "seed", *seed, at::kLong);
  TORCH_CHECK_VALUE(seed->dim() == 1 && (seed->size(0) == 1 || seed->size(0) == n), op, ": seed has shape ", seed->sizes(),
                    ", expected [1], or one for each of ", n, " rows of logits");
  for (const auto& [name, numbers] : {std::pair{"streams", &*streams}, std::pair{"positions", &*positions}}) {
    check_dtype(op, name, *numbers, at::kInt);
    check_shape(op, name, *numbers, {n});
    check_contiguous(op, name, *numbers);
    check_cpu(op, name, *numbers);
  }
}

// One row of logits -> the token that wins and its probability; scores: room for vocab floats.
struct Chooser {
  mlspec_dtype dtype;
  int64_t vocab;
  float softcap;

  std::pair<int32_t, float> operator()(const void* logits, const mlspec_noise* noise, float* scores) const {
    const mlspec_row_ops& ops = cpu_kernels().row;
    float largest, total;
    ops.widen(logits, dtype, 1.0f, vocab, scores);
    int64_t token = noise ? 0 : ops.argmax(scores, vocab, &largest, nullptr);  // of what is not capped: the cap makes ties
    if (softcap > 0) ops.softcap(scores, softcap, vocab);
    if (ops.argmax(scores, vocab, &largest, &total) < 0) return {-1, NAN};
    if (noise) token = ops.draw(noise, scores, vocab);
    return {static_cast<int32_t>(token), std::exp(scores[token] - total)};
  }
};

std::tuple<Tensor, Tensor> choose_rows(const Tensor& logits, double softcap, const Maybe& seed, const Maybe& streams,
                                       const Maybe& positions) {
  constexpr const char* op = "choose_rows";
  const mlspec_dtype dtype = float_dtype(op, "logits", logits);
  TORCH_CHECK_TYPE(dtype != MLSPEC_FLOAT16, op, ": logits is ", logits.scalar_type(), ", expected float32 or bfloat16");
  TORCH_CHECK_VALUE(logits.dim() == 2 && logits.size(1) > 0, op, ": logits has shape ", logits.sizes(),
                    ", expected [n, vocab] with a vocab of 1 or more");
  TORCH_CHECK_VALUE(softcap >= 0 && std::isfinite(softcap), op, ": softcap is ", softcap,
                    ", expected 0 (none) or a positive number");
  const int64_t n = logits.size(0), vocab = logits.size(1);
  check_noise(op, n, seed, streams, positions);
  Tensor tokens = at::empty({n}, logits.options().dtype(at::kInt)), confidence = at::empty({n}, logits.options().dtype(at::kFloat));
  if (n == 0) return {tokens, confidence};
  const Tensor rows = logits.contiguous();
  const int threads = threads_for((seed ? 32.0 : 4.0) * n * vocab);
  const Tensor scratch = at::empty({threads, vocab}, at::kFloat);
  float* const rooms = scratch.mutable_data_ptr<float>();
  const void* in = rows.const_data_ptr();
  int32_t* const chosen = tokens.mutable_data_ptr<int32_t>();
  float* const sure = confidence.mutable_data_ptr<float>();
  const Tensor keys = seed ? seed->contiguous() : Tensor();
  const int64_t* const key = seed ? keys.const_data_ptr<int64_t>() : nullptr;
  const int64_t next_key = seed && seed->size(0) > 1 ? 1 : 0;
  const int32_t* const stream = seed ? streams->const_data_ptr<int32_t>() : nullptr;
  const int32_t* const position = seed ? positions->const_data_ptr<int32_t>() : nullptr;
  const Chooser choose{dtype, vocab, static_cast<float>(softcap)};
  run(threads, [&](Team& team) {
    float* const room = rooms + team.index() * vocab;
    team.share(n, rows_per_piece(vocab), [&](int64_t r, int64_t end) {
      for (; r < end; ++r) {
        mlspec_noise noise{};
        const bool drawn = stream && stream[r] >= 0;
        if (drawn) noise = {static_cast<uint64_t>(key[r * next_key]), static_cast<uint32_t>(position[r]), static_cast<uint32_t>(stream[r])};
        const auto picked = choose(bytes_at(in, dtype, r * vocab), drawn ? &noise : nullptr, room);
        std::tie(chosen[r], sure[r]) = picked;
      }
    });
  });
  return {tokens, confidence};
}

}  // namespace

TORCH_LIBRARY_IMPL(mlspec, CPU, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("silu_mul", silu_mul);
  m.impl("hadamard_rows", hadamard_rows);
  m.impl("choose_rows", choose_rows);
}
