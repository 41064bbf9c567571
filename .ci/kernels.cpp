// Do the kernels of generic C++ compute what kernels.h says, on the machine that this is compiled for? A program without torch,
// for machines that no test reaches: .ci/run compiles it for aarch64, and runs it in an emulator where there is one.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "../kernels_ext/cpu/kernels.h"
#include "../kernels_ext/cpu/threads/parallel.h"

namespace {

using namespace mlspec;

constexpr int64_t kRows = 5, kIn = 96, kOut = 40, kTiles = 3, kSteps = kIn / kBlock;
int failed = 0;

uint32_t next_bits() {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 33);
}

std::vector<float> numbers(int64_t n) {
  std::vector<float> all(n);
  for (float& value : all) value = static_cast<float>(next_bits() % 20001) / 10000.0f - 1.0f;
  return all;
}

std::vector<uint8_t> bytes(int64_t n, int lowest, int count) {
  std::vector<uint8_t> all(n);
  for (uint8_t& value : all) value = static_cast<uint8_t>(lowest + next_bits() % count);
  return all;
}

float from_bfloat16(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

void report(const char* what, bool good, double error) {
  std::printf("%-18s %s  largest error %.2g\n", what, good ? "ok" : "WRONG", error);
  failed += !good;
}

struct Packed {
  std::vector<char> room;
  mlspec_acts acts;
};

Packed pack(mlspec_acts_kind kind, const float* x, int64_t rows, int64_t group, int64_t bits) {
  Packed packed{{}, {kind, rows, kIn, group, bits, nullptr}};
  packed.room.resize(mlspec_acts_bytes(&packed.acts) + 64);
  const auto address = reinterpret_cast<uintptr_t>(packed.room.data());
  packed.acts.data = reinterpret_cast<void*>((address + 63) & ~uintptr_t(63));
  const mlspec_pack_args args{x, kIn, &packed.acts};
  cpu_kernels().pack_rows(&args, 0, rows, 0, kIn);
  return packed;
}

std::vector<float> multiply(mlspec_linear_fn kernel, mlspec_linear_args args, const Packed& x, int threads) {
  std::vector<float> y(x.acts.num_rows * kOut, NAN);
  args.in_features = kIn, args.out_features = kOut, args.y = y.data(), args.y_stride = kOut, args.acts = &x.acts;
  run(threads, [&](Team& team) {
    team.share(kTiles, 1, [&](int64_t begin, int64_t end) { kernel(&args, begin * 16, end * 16 < kOut ? end * 16 : kOut); });
  });
  return y;
}

// wanted(row, output, packed rows): what the kernel shall give, within `tolerance`; a row alone has the bits it has among others.
void check(const char* what, mlspec_linear_fn kernel, const mlspec_linear_args& args, mlspec_acts_kind kind, int64_t group,
           int64_t bits, double tolerance, const std::function<double(int64_t, int64_t, const mlspec_acts&)>& wanted) {
  const std::vector<float> x = numbers(kRows * kIn);
  const Packed all = pack(kind, x.data(), kRows, group, bits);
  const std::vector<float> y = multiply(kernel, args, all, 2);
  double error = 0;
  bool same = true;
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t o = 0; o < kOut; ++o) {
      const double off = std::fabs(y[r * kOut + o] - wanted(r, o, all.acts));
      error = off <= error ? error : off;  // NaN stays
    }
    const std::vector<float> alone = multiply(kernel, args, pack(kind, x.data() + r * kIn, 1, group, bits), 1);
    same &= std::memcmp(alone.data(), &y[r * kOut], kOut * sizeof(float)) == 0;
  }
  report(what, error <= tolerance && same, error);
  if (!same) std::printf("  a row alone has other bits than among others\n");
}

int code_of(const std::vector<uint8_t>& tiles, int64_t output, int64_t k) {  // the layout of kernels.h
  const int64_t step = output / 16 * kSteps + k / 32, j = k % 32 / 8, i = k % 8;
  const uint8_t pair = tiles[((step * 4 + j) * 16 + output % 16) * 4 + i % 4];
  return i < 4 ? pair & 15 : pair >> 4;
}

double activation(const mlspec_acts& acts, int64_t row, int64_t k) {
  return from_bfloat16(static_cast<const uint16_t*>(acts.data)[row * kIn + k]);
}

void check_dense() {
  const std::vector<float> wide = numbers(kOut * kIn);
  std::vector<uint16_t> narrow(wide.size());
  cpu_kernels().row.narrow(wide.data(), MLSPEC_BFLOAT16, kOut * kIn, narrow.data());
  mlspec_linear_args args{};
  args.weight = wide.data();
  check("f32_linear", cpu_kernels().f32_linear, args, MLSPEC_ACTS_F32, 0, 0, 1e-5, [&](int64_t r, int64_t o, const auto& acts) {
    double sum = 0;
    const float* row = static_cast<const float*>(acts.data) + r * kIn;
    for (int64_t k = 0; k < kIn; ++k) sum += row[k] * static_cast<double>(wide[o * kIn + k]);
    return sum;
  });
  args.weight = narrow.data();
  check("bf16_linear", cpu_kernels().bf16_linear, args, MLSPEC_ACTS_BF16, 0, 0, 1e-5,
        [&](int64_t r, int64_t o, const auto& acts) {
    double sum = 0;
    for (int64_t k = 0; k < kIn; ++k) sum += activation(acts, r, k) * from_bfloat16(narrow[o * kIn + k]);
    return sum;
  });
}

void check_mxfp4() {
  const std::vector<uint8_t> tiles = bytes(kTiles * kSteps * 256, 0, 256), scales = bytes(kTiles * kSteps * 16, 120, 8);
  mlspec_linear_args args{};
  args.weight = tiles.data(), args.scale = scales.data();
  const auto doubled = [&](int64_t o, int64_t k) {
    const int code = code_of(tiles, o, k), magnitude = kDoubledMagnitudes.of[code & 7];
    return code & 8 ? -magnitude : magnitude;
  };
  const auto scale_of = [&](int64_t o, int64_t k) { return scales[(o / 16 * kSteps + k / 32) * 16 + o % 16]; };
  check("mxfp4_linear_bf16", cpu_kernels().mxfp4_linear_bf16, args, MLSPEC_ACTS_BF16, 0, 0, 1e-5,
        [&](int64_t r, int64_t o, const auto& acts) {
          double sum = 0;
          for (int64_t k = 0; k < kIn; ++k) sum += activation(acts, r, k) * std::ldexp(doubled(o, k), scale_of(o, k) - 128);
          return sum;
        });
  // Bit for bit: sums of integers, then one fma a block.
  check("mxfp4_linear_int8", cpu_kernels().mxfp4_linear_int8, args, MLSPEC_ACTS_INT, 32, 8, 0,
        [&](int64_t r, int64_t o, const auto& acts) {
          float total = 0;
          for (int64_t block = 0; block < kSteps; ++block) {
            int sum = 0;
            for (int64_t k = block * 32; k < block * 32 + 32; ++k) sum += doubled(o, k) * mlspec_acts_codes(&acts)[r * kIn + k];
            const float unit = std::ldexp(1.0f, scale_of(o, block * 32) - 128);
            total = std::fma(static_cast<float>(sum), unit * mlspec_acts_scales(&acts)[r * kSteps + block], total);
          }
          return total;
        });
}

// The rows that a nested weight means, as bfloat16, give the same bits.
void check_nested() {
  const std::vector<uint8_t> tiles = bytes(kTiles * kSteps * 256, 0, 256), exponents = bytes(kTiles * kSteps * 16, 110, 15);
  const std::vector<uint8_t> low = bytes(kTiles * kSteps * 768, 0, 256);
  mlspec_linear_args args{};
  args.weight = tiles.data(), args.scale = exponents.data(), args.low = low.data(), args.in_features = kIn;
  std::vector<uint16_t> rows(kOut * kIn);
  for (int64_t o = 0; o < kOut; ++o) mlspec_nested_row(&args, o, &rows[o * kIn]);
  mlspec_linear_args dense{};
  dense.weight = rows.data();
  std::vector<float> y;
  check("nested_exact", cpu_kernels().nested_linear_exact, args, MLSPEC_ACTS_BF16, 0, 0, 0,
        [&](int64_t r, int64_t o, const auto& acts) {
          if (r == 0 && o == 0) y = multiply(cpu_kernels().bf16_linear, dense, Packed{{}, acts}, 1);
          return y[r * kOut + o];
        });
}

void check_rows() {
  const std::vector<float> x = numbers(kIn), weight = numbers(kIn);
  std::vector<float> y(kIn);
  cpu_kernels().row.rms_norm(x.data(), weight.data(), 1e-6f, kIn, y.data());
  double squares = 0, error = 0;
  for (const float value : x) squares += static_cast<double>(value) * value;
  for (int64_t k = 0; k < kIn; ++k)
    error = std::fmax(error, std::fabs(y[k] - x[k] * weight[k] / std::sqrt(squares / kIn + 1e-6)));
  report("rms_norm", error < 1e-5, error);
  float largest = 0, log_sum_exp = 0;
  const int64_t best = cpu_kernels().row.argmax(x.data(), kIn, &largest, &log_sum_exp);
  double sum = 0;
  for (const float value : x) sum += std::exp(static_cast<double>(value));
  error = std::fabs(log_sum_exp - std::log(sum));
  const bool found = largest == x[best] && *std::max_element(x.begin(), x.end()) == largest;
  report("argmax", found && error < 1e-5, error);
}

}  // namespace

int main() {
  std::printf("kernels: %s\n", cpu_kernels().isa);
  check_dense();
  check_mxfp4();
  check_nested();
  check_rows();
  return failed ? 1 : 0;
}
