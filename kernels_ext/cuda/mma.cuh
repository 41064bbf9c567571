// How do tensor cores multiply 16 rows of weights with tokens? One warp (mma) or four (wgmma), bfloat16 or int8.
//
// Weights are operand A and live in registers: lane = 4 r + q holds, of 16 rows x 32 bytes of k, rows r and r + 8 at
// bytes 4q..4q+3 and 16+4q..16+4q+3: a[0] = (r, low half), a[1] = (r + 8, low), a[2] = (r, high), a[3] = (r + 8, high).
// Results: d[0], d[1] = row r, tokens 2q, 2q + 1 of 8; d[2], d[3] = row r + 8.
#pragma once

#include "ptx.cuh"

namespace mlspec {

__device__ __forceinline__ void load_matrices(uint32_t (&b)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(address)
               : "memory");
}

// Rows of the four 8 x 8 matrices are columns in shared memory.
__device__ __forceinline__ void store_transposed(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- wgmma: four warps, 64 rows; tokens are read from shared memory, rows of 128 bytes, 128-byte swizzle.

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Of a tile aligned to 1024 bytes; a step of 32 bytes along k adds 2.
__device__ __forceinline__ uint32_t swizzled_tile_address(uint32_t address) { return (address & 0x3FFFF) >> 4 | 1u << 16; }

__device__ __forceinline__ uint64_t swizzled_tile_descriptor(uint32_t address) {
  constexpr uint32_t kEightRows = 1024 >> 4, kSwizzle128 = 1;
  return uint64_t(kEightRows | kSwizzle128 << 30) << 32 | address;
}

// Of an operand whose rows, of 128 bytes, are steps of k: what lies behind its first 64 columns is `further` bytes away.
__device__ __forceinline__ uint64_t swizzled_rows_descriptor(uint32_t address, uint32_t further) {
  constexpr uint32_t kEightRows = 1024 >> 4, kSwizzle128 = 1;
  return uint64_t(kEightRows | kSwizzle128 << 30) << 32 | (further >> 4) << 16 | (address & 0x3FFFF) >> 4;
}

#define MLSPEC_REGS4 "%0,%1,%2,%3"
#define MLSPEC_REGS8 MLSPEC_REGS4 ",%4,%5,%6,%7"
#define MLSPEC_REGS16 MLSPEC_REGS8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define MLSPEC_REGS32 \
  MLSPEC_REGS16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define MLSPEC_REGS64                                                                                      \
  MLSPEC_REGS32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53" \
                ",%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define MLSPEC_REGS72                 \
  MLSPEC_REGS64                       \
  ",%64,%65,%66,%67,%68,%69,%70,%71"
#define MLSPEC_REGS128                                                                                \
  MLSPEC_REGS64                                                                                       \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87"  \
  ",%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108"     \
  ",%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define MLSPEC_OUT4(c, t) c(d[t][0]), c(d[t][1]), c(d[t][2]), c(d[t][3])
#define MLSPEC_OUT8(c, t) MLSPEC_OUT4(c, t), MLSPEC_OUT4(c, t + 1)
#define MLSPEC_OUT16(c, t) MLSPEC_OUT8(c, t), MLSPEC_OUT8(c, t + 2)
#define MLSPEC_OUT32(c, t) MLSPEC_OUT16(c, t), MLSPEC_OUT16(c, t + 4)
#define MLSPEC_OUT64(c, t) MLSPEC_OUT32(c, t), MLSPEC_OUT32(c, t + 8)
#define MLSPEC_OUT72(c, t) MLSPEC_OUT64(c, t), MLSPEC_OUT8(c, t + 16)
#define MLSPEC_OUT128(c, t) MLSPEC_OUT64(c, t), MLSPEC_OUT64(c, t + 16)

// d += a x tokens (d = a x tokens unless `accumulate`). a0..a5: the numbers of the operands behind the registers of d.
#define MLSPEC_WGMMA(tiles, n, regs, a0, a1, a2, a3, a4, a5)                                                          \
  __device__ __forceinline__ void wgmma(float (&d)[tiles][4], const uint32_t (&a)[4], uint64_t tokens, bool accumulate) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #a5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n                \
                 "k16.f32.bf16.bf16 {" MLSPEC_REGS##regs "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #a4            \
                 ", p, 1, 1, 0;\n}"                                                                                   \
                 : MLSPEC_OUT##regs("+f", 0)                                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens), "r"(int(accumulate)));                    \
  }                                                                                                                   \
  __device__ __forceinline__ void wgmma(int (&d)[tiles][4], const uint32_t (&a)[4], uint64_t tokens, bool accumulate) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #a5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n                \
                 "k32.s32.s8.s8 {" MLSPEC_REGS##regs "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #a4 ", p;\n}"      \
                 : MLSPEC_OUT##regs("+r", 0)                                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens), "r"(int(accumulate)));                    \
  }

MLSPEC_WGMMA(1, 8, 4, 4, 5, 6, 7, 8, 9)
MLSPEC_WGMMA(2, 16, 8, 8, 9, 10, 11, 12, 13)
MLSPEC_WGMMA(4, 32, 16, 16, 17, 18, 19, 20, 21)
MLSPEC_WGMMA(8, 64, 32, 32, 33, 34, 35, 36, 37)
MLSPEC_WGMMA(16, 128, 64, 64, 65, 66, 67, 68, 69)
MLSPEC_WGMMA(18, 144, 72, 72, 73, 74, 75, 76, 77)
MLSPEC_WGMMA(32, 256, 128, 128, 129, 130, 131, 132, 133)

// --- weights in shared memory too, 64 rows of 128 bytes: bfloat16, a step of 16 inputs.

// d += weights x tokens. a0..a2: the numbers of the operands behind the registers of d.
#define MLSPEC_WGMMA_SHARED(tiles, n, regs, a0, a1, a2)                                                   \
  __device__ __forceinline__ void wgmma(float (&d)[tiles][4], uint64_t weights, uint64_t tokens) {        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #a2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n    \
                 "k16.f32.bf16.bf16 {" MLSPEC_REGS##regs "}, %" #a0 ", %" #a1 ", p, 1, 1, 0, 0;\n}"       \
                 : MLSPEC_OUT##regs("+f", 0)                                                              \
                 : "l"(weights), "l"(tokens), "r"(1));                                                    \
  }

MLSPEC_WGMMA_SHARED(1, 8, 4, 4, 5, 6)
MLSPEC_WGMMA_SHARED(2, 16, 8, 8, 9, 10)
MLSPEC_WGMMA_SHARED(4, 32, 16, 16, 17, 18)
MLSPEC_WGMMA_SHARED(8, 64, 32, 32, 33, 34)
MLSPEC_WGMMA_SHARED(16, 128, 64, 64, 65, 66)
MLSPEC_WGMMA_SHARED(18, 144, 72, 72, 73, 74)
MLSPEC_WGMMA_SHARED(32, 256, 128, 128, 129, 130)

// --- attention: `b` lies in shared memory, rows of 128 bytes. Queries x keys, both along their elements; d = a x b unless
// `accumulate`.

__device__ __forceinline__ void wgmma(float (&d)[8][4], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" MLSPEC_REGS32
               "}, %32, %33, p, 1, 1, 0, 0;\n}"
               : MLSPEC_OUT32("+f", 0)
               : "l"(a), "l"(b), "r"(int(accumulate)));
}

// Weights x values, whose rows are slots: 16 of them.
#define MLSPEC_WGMMA_ROWS(tiles, n, regs, a0, a1, a2, a3, a4, a5)                                                        \
  __device__ __forceinline__ void wgmma_rows(float (&d)[tiles][4], const uint32_t* a, uint64_t values, bool accumulate) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #a5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n                  \
                 "k16.f32.bf16.bf16 {" MLSPEC_REGS##regs "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #a4               \
                 ", p, 1, 1, 1;\n}"                                                                                     \
                 : MLSPEC_OUT##regs("+f", 0)                                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(values), "r"(int(accumulate)));                       \
  }

MLSPEC_WGMMA_ROWS(8, 64, 32, 32, 33, 34, 35, 36, 37)
MLSPEC_WGMMA_ROWS(16, 128, 64, 64, 65, 66, 67, 68, 69)

}  // namespace mlspec
