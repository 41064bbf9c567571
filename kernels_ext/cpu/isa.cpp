// Which instruction set do the kernels of this process use? Asked once: cpuid and what the operating system saves.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#define MLSPEC_DECLARE_PACK(isa) void mlspec_pack_rows_##isa(const mlspec_pack_args*, int64_t, int64_t, int64_t, int64_t);
#define MLSPEC_DECLARE_LINEAR(name) void mlspec_##name(const mlspec_linear_args*, int64_t, int64_t);
#define MLSPEC_DECLARE_BF16(isa) MLSPEC_DECLARE_LINEAR(bf16_linear_##isa) MLSPEC_DECLARE_LINEAR(nested_linear_exact_##isa)
#define MLSPEC_DECLARE_DENSE(isa) MLSPEC_DECLARE_BF16(isa) MLSPEC_DECLARE_LINEAR(f32_linear_##isa)
#define MLSPEC_DECLARE_INT8(isa)                                                                                       \
  MLSPEC_DECLARE_LINEAR(mxfp4_linear_int8_##isa) MLSPEC_DECLARE_LINEAR(int4_linear_int8_##isa) \
  MLSPEC_DECLARE_LINEAR(nested_linear_int8_##isa) MLSPEC_DECLARE_LINEAR(bitplane_linear_int8_##isa)
#define MLSPEC_DECLARE_W4A16(isa)                                                                                      \
  MLSPEC_DECLARE_LINEAR(mxfp4_linear_bf16_##isa) MLSPEC_DECLARE_LINEAR(int4_linear_bf16_##isa) \
  MLSPEC_DECLARE_LINEAR(nested_linear_bf16_##isa) MLSPEC_DECLARE_LINEAR(bitplane_linear_##isa)
#define MLSPEC_DECLARE_LUT(isa) MLSPEC_DECLARE_LINEAR(lut_linear_##isa)
#define MLSPEC_DECLARE_HIGH(isa) void mlspec_zipper_lut_##isa(const mlspec_zipper_args*, int64_t, int64_t);
#define MLSPEC_DECLARE_DEQUANTIZE(isa) void mlspec_int4_dequantize_##isa(const mlspec_linear_args*, int64_t, int64_t, uint16_t*);
#define MLSPEC_DECLARE_ATTENTION(isa) void mlspec_attention_##isa(const mlspec_attention_args*);
#define MLSPEC_DECLARE_ROWS(isa) extern const mlspec_row_ops mlspec_row_ops_##isa;
#define MLSPEC_DECLARE_HADAMARD(isa) void mlspec_hadamard_##isa(const mlspec_hadamard*, int64_t, float*);
#define MLSPEC_DECLARE_WORDS(isa)                                                \
  void mlspec_pack_gptq_##isa(const mlspec_words_args*, int64_t, int64_t); \
  void mlspec_pack_awq_##isa(const mlspec_words_args*, int64_t, int64_t);
#define MLSPEC_DECLARE_DELTA(isa)                        \
  void mlspec_delta_rule_##isa(const mlspec_delta_args*); \
  void mlspec_sigmoid_mul_##isa(const float*, int64_t, float*);
#define MLSPEC_DECLARE_ALL(isa)                                                            \
  MLSPEC_DECLARE_PACK(isa) MLSPEC_DECLARE_DENSE(isa) MLSPEC_DECLARE_INT8(isa) MLSPEC_DECLARE_W4A16(isa) \
  MLSPEC_DECLARE_ATTENTION(isa) MLSPEC_DECLARE_ROWS(isa) MLSPEC_DECLARE_DELTA(isa)

extern "C" {
MLSPEC_DECLARE_ALL(generic)
MLSPEC_DECLARE_LUT(generic)
MLSPEC_DECLARE_HIGH(generic)
MLSPEC_DECLARE_DEQUANTIZE(generic)
MLSPEC_DECLARE_HADAMARD(generic)
MLSPEC_DECLARE_WORDS(generic)
#if defined(__x86_64__)
MLSPEC_DECLARE_ALL(avx2)
MLSPEC_DECLARE_LUT(avx2)
MLSPEC_DECLARE_HIGH(avx2)
MLSPEC_DECLARE_HADAMARD(avx2)
MLSPEC_DECLARE_WORDS(avx2)
MLSPEC_DECLARE_INT8(avxvnni)
MLSPEC_DECLARE_INT8(avxvnniint8)
MLSPEC_DECLARE_ALL(avx512vnni)
MLSPEC_DECLARE_HIGH(avx512vnni)
MLSPEC_DECLARE_DEQUANTIZE(avx512vnni)
MLSPEC_DECLARE_HADAMARD(avx512vnni)
MLSPEC_DECLARE_WORDS(avx512vnni)
MLSPEC_DECLARE_BF16(avx512bf16)
MLSPEC_DECLARE_INT8(avx512bf16)
MLSPEC_DECLARE_W4A16(avx512bf16)
MLSPEC_DECLARE_ATTENTION(avx512bf16)
MLSPEC_DECLARE_PACK(amx)
MLSPEC_DECLARE_BF16(amx)
MLSPEC_DECLARE_INT8(amx)
MLSPEC_DECLARE_W4A16(amx)
MLSPEC_DECLARE_ATTENTION(amx)
#endif
}

namespace mlspec {
namespace {

#if defined(__x86_64__)
constexpr bool bit(unsigned word, int place) { return word >> place & 1; }

// What the processor has and the operating system saves at a switch of threads.
struct Machine {
  bool avx2 = false, avxvnni = false, avxvnniint8 = false, avx512vnni = false, avx512bf16 = false, amx = false;

  Machine() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27)) return;  // OSXSAVE: xgetbv exists
    const bool fma_f16c = bit(c, 12) && bit(c, 29);
    unsigned low = 0, high = 0;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (low & 0x6) != 0x6) return;
    const unsigned highest_subleaf = a, b0 = b, c0 = c, d0 = d;
    unsigned a1 = 0, d1 = 0;
    if (highest_subleaf >= 1) __get_cpuid_count(7, 1, &a1, &b, &c, &d1);
    avx2 = fma_f16c && bit(b0, 5);
    avxvnni = avx2 && bit(a1, 4);
    avxvnniint8 = avxvnni && bit(d1, 4);
    const bool f_dq_bw_vl = bit(b0, 16) && bit(b0, 17) && bit(b0, 30) && bit(b0, 31);
    avx512vnni = avx2 && (low & 0xE0) == 0xE0 && f_dq_bw_vl && bit(c0, 11);
    avx512bf16 = avx512vnni && bit(a1, 5) && bit(c0, 1);  // BF16 and VBMI
    amx = avx512bf16 && (low & 0x60000) == 0x60000 && bit(d0, 22) && bit(d0, 24) && bit(d0, 25);  // BF16, TILE, INT8
  }
};

const Machine& machine() {
  static const Machine here;
  return here;
}

// Linux grants the 8 KiB tile registers to a process that asks, and to all its threads with it.
bool tiles_granted() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

struct Tier {
  CpuKernels kernels;
  bool (*supported)();
};

// The columns: pack_rows, the kind of activations bf16_linear takes, bf16_linear (with the exact nested one, which has its bits)
// and f32_linear, int8, bf16, lut_linear, sparse high parts, dequantize, attention, row ops (with those of delta nets), hadamard, words.
#define MLSPEC_TIER(name, pack, acts, bf16, f32, int8, w4a16, lut, high, dequantize, attention, row, hadamard, words)     \
  CpuKernels {                                                                                                          \
    #name, mlspec_pack_rows_##pack, acts, mlspec_bf16_linear_##bf16, mlspec_f32_linear_##f32,                           \
        mlspec_mxfp4_linear_int8_##int8, mlspec_mxfp4_linear_bf16_##w4a16, mlspec_int4_linear_int8_##int8,              \
        mlspec_int4_linear_bf16_##w4a16, mlspec_nested_linear_int8_##int8, mlspec_nested_linear_bf16_##w4a16,           \
        mlspec_nested_linear_exact_##bf16, mlspec_bitplane_linear_##w4a16, mlspec_lut_linear_##lut,                     \
        mlspec_zipper_lut_##high,                                                                                       \
        mlspec_int4_dequantize_##dequantize, mlspec_attention_##attention, mlspec_row_ops_##row,                        \
        mlspec_hadamard_##hadamard, mlspec_pack_gptq_##words, mlspec_pack_awq_##words,                                  \
        mlspec_delta_rule_##row, mlspec_sigmoid_mul_##row, mlspec_bitplane_linear_int8_##int8                           \
  }

// Ascending: the last one that is supported is the best. Not constant: mlspec_row_ops_* may be set at load time.
const Tier* tiers(int* count) {
  static const Tier list[] = {
      {MLSPEC_TIER(generic, generic, MLSPEC_ACTS_BF16, generic, generic, generic, generic, generic, generic, generic,
                   generic, generic, generic, generic),
       [] { return true; }},
#if defined(__x86_64__)
      {MLSPEC_TIER(avx2, avx2, MLSPEC_ACTS_BF16, avx2, avx2, avx2, avx2, avx2, avx2, generic, avx2, avx2, avx2, avx2),
       [] { return machine().avx2; }},
      {MLSPEC_TIER(avxvnni, avx2, MLSPEC_ACTS_BF16, avx2, avx2, avxvnni, avx2, avx2, avx2, generic, avx2, avx2, avx2, avx2),
       [] { return machine().avxvnni; }},
      {MLSPEC_TIER(avxvnniint8, avx2, MLSPEC_ACTS_BF16, avx2, avx2, avxvnniint8, avx2, avx2, avx2, generic, avx2, avx2, avx2, avx2),
       [] { return machine().avxvnniint8; }},
      {MLSPEC_TIER(avx512vnni, avx512vnni, MLSPEC_ACTS_BF16, avx512vnni, avx512vnni, avx512vnni, avx512vnni, avx2,
                   avx512vnni, avx512vnni, avx512vnni, avx512vnni, avx512vnni, avx512vnni),
       [] { return machine().avx512vnni; }},
      {MLSPEC_TIER(avx512bf16, avx512vnni, MLSPEC_ACTS_BF16, avx512bf16, avx512vnni, avx512bf16, avx512bf16, avx2, avx512vnni, avx512vnni,
                   avx512bf16, avx512vnni, avx512vnni, avx512vnni),
       [] { return machine().avx512bf16; }},
      {MLSPEC_TIER(amx, amx, MLSPEC_ACTS_BF16_TILES, amx, avx512vnni, amx, amx, avx2, avx512vnni, avx512vnni, amx, avx512vnni,
                   avx512vnni, avx512vnni),
       [] { return machine().amx && tiles_granted(); }},
#endif
  };
  *count = sizeof(list) / sizeof(list[0]);
  return list;
}

CpuKernels choose() {
  const char* named = std::getenv("MLSPEC_CPU_ISA");
  const std::string wanted = named ? named : "";
  int count = 0;
  const Tier* list = tiers(&count);
  std::string known;
  for (int i = count - 1; i >= 0; --i) {
    if (wanted.empty() ? list[i].supported() : wanted == list[i].kernels.isa && list[i].supported())
      return list[i].kernels;
    if (wanted == list[i].kernels.isa)
      throw std::runtime_error("MLSPEC_CPU_ISA=" + wanted + " is not supported by this CPU");
    known = list[i].kernels.isa + (known.empty() ? "" : ", " + known);
  }
  throw std::runtime_error("MLSPEC_CPU_ISA=" + wanted + " is unknown, choose one of " + known);
}

}  // namespace

const CpuKernels& cpu_kernels() {
  static const CpuKernels chosen = choose();
  return chosen;
}

}  // namespace mlspec
