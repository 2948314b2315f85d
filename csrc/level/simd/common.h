// What all instruction-set levels share, inside each level's own namespace, so that the linker never replaces one
// level's code with another's.
#pragma once

#include <cstdint>

#include "level/simd/name.h"

// Before a loop over a block of sums: unrolled early, so that the sums are kept in registers.
#define OCTAVO_UNROLL _Pragma("GCC unroll 32")

namespace octavo::OCTAVO_LEVEL {

using bf16 = uint16_t;  // the upper half of a float

inline int max(int a, int b) { return a > b ? a : b; }  // std::max could come from another level
inline int min(int a, int b) { return a < b ? a : b; }

inline float bits_to_float(uint32_t bits) {
    float out;
    __builtin_memcpy(&out, &bits, 4);
    return out;
}
inline uint32_t float_bits(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}

inline float bf16_to_float(bf16 x) { return bits_to_float(static_cast<uint32_t>(x) << 16); }
inline bf16 float_to_bf16(float x) {  // round to nearest, ties to even; NaN stays NaN
    const uint32_t bits = float_bits(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<bf16>(bits >> 16 | 0x40);
    return static_cast<bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float half_to_float(uint16_t x) {
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16, magnitude = x & 0x7fff;
    if (magnitude >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    // Multiplying by 2^112 adjusts the exponent's bias and makes subnormal halves normal.
    return bits_to_float(sign) + (sign ? -1.0f : 1.0f) * (bits_to_float(magnitude << 13) * 0x1p112f);
}

// Prefetches a line for writing. Other cores have usually read it since, and their copies must be invalidated first;
// stores, which would wait for that one after the other, then find it done.
inline void prefetch_for_write(const void* p) { __builtin_prefetch(p, 1, 3); }

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.69314718055994531f;

// 2^f on [-1/2, 1/2]: a minimax polynomial, relative error 1e-7, exactly 1 at 0.
constexpr float kExp2Poly[] = {1.0f, 0.6931469776f, 0.2402224208f, 0.0555073375f, 0.0096715128f, 0.0013264725f};
// The same with relative error 1e-4, for results that are rounded to bf16 (4e-3).
constexpr float kExp2CoarsePoly[] = {1.0f, 0.6932828426f, 0.2422086746f, 0.0550074503f};

// How far ahead of their use weights are prefetched, in bytes, by products of a few rows: these wait for their weights,
// and the hardware does not prefetch that far. With more rows, the groups that read a panel prefetch the next one.
constexpr int kGemmRowsThatWait = 4, kQuantRowsThatWait = 4;
constexpr int kWeightPrefetch = 4096;

// Formats whose panels a level decodes once for all groups of rows: where that was faster. See quant_panels.h.
enum class DecodedFormats { none, costly, all };

}  // namespace octavo::OCTAVO_LEVEL
