// Sixteen lanes in four NEON registers. OCTAVO_HAS_BF16 adds bfdot and bfmmla, OCTAVO_HAS_I8MM usdot and usmmla.
#pragma once

#include <arm_neon.h>

#include "level/simd/common.h"

namespace octavo::OCTAVO_LEVEL {

// A vector has four registers, so GCC considers these functions large and would not inline many of them.
#define OCTAVO_INLINE [[gnu::always_inline]] inline
#define OCTAVO_QUARTERS for (int i = 0; i < 4; ++i)
#define OCTAVO_RETURN(Type, quarter)    \
    Type out;                           \
    OCTAVO_QUARTERS out.v[i] = quarter; \
    return out

struct U16 {
    uint32x4_t v[4];
    OCTAVO_INLINE static U16 load(const void* p) {
        OCTAVO_RETURN(U16, vreinterpretq_u32_u8(vld1q_u8(static_cast<const uint8_t*>(p) + i * 16)));
    }
    OCTAVO_INLINE static U16 set1(uint32_t x) {
        uint32x4_t four = vdupq_n_u32(x);
#ifdef OCTAVO_HAS_BF16
        // GCC 12 writes a constant bf16 1.0 as `fmov .8h`, whose 1.0 is binary16's, 2^-7 to bfdot: hide constants.
        if (__builtin_constant_p(x)) asm("" : "+w"(four));
#endif
        return {{four, four, four, four}};
    }
    OCTAVO_INLINE static U16 zero() { return set1(0); }
};
OCTAVO_INLINE U16 operator&(U16 a, U16 b) { OCTAVO_RETURN(U16, vandq_u32(a.v[i], b.v[i])); }
OCTAVO_INLINE U16 operator|(U16 a, U16 b) { OCTAVO_RETURN(U16, vorrq_u32(a.v[i], b.v[i])); }
OCTAVO_INLINE U16 operator^(U16 a, U16 b) { OCTAVO_RETURN(U16, veorq_u32(a.v[i], b.v[i])); }
OCTAVO_INLINE U16 operator+(U16 a, U16 b) { OCTAVO_RETURN(U16, vaddq_u32(a.v[i], b.v[i])); }
OCTAVO_INLINE U16 max(U16 a, U16 b) {  // of signed integers
    OCTAVO_RETURN(U16, vreinterpretq_u32_s32(vmaxq_s32(vreinterpretq_s32_u32(a.v[i]), vreinterpretq_s32_u32(b.v[i]))));
}
OCTAVO_INLINE int32_t reduce_max(U16 a) {
    int32x4_t most = vreinterpretq_s32_u32(a.v[0]);
    OCTAVO_QUARTERS most = vmaxq_s32(most, vreinterpretq_s32_u32(a.v[i]));
    return vmaxvq_s32(most);
}
// table[code] of each byte, which is less than 16.
OCTAVO_INLINE U16 look_up(const uint8_t* table, U16 codes) {
    const uint8x16_t bytes = vld1q_u8(table);
    OCTAVO_QUARTERS codes.v[i] = vreinterpretq_u32_u8(vqtbl1q_u8(bytes, vreinterpretq_u8_u32(codes.v[i])));
    return codes;
}
template <int N> OCTAVO_INLINE U16 shift_left(U16 a) { OCTAVO_RETURN(U16, vshlq_n_u32(a.v[i], N)); }
template <int N> OCTAVO_INLINE U16 shift_right(U16 a) { OCTAVO_RETURN(U16, vshrq_n_u32(a.v[i], N)); }

struct F16 {
    float32x4_t v[4];
    OCTAVO_INLINE static F16 load(const float* p) { OCTAVO_RETURN(F16, vld1q_f32(p + i * 4)); }
    OCTAVO_INLINE static F16 load(const bf16* p) {
        OCTAVO_RETURN(F16, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + i * 4), 16)));
    }
    OCTAVO_INLINE static F16 load_half(const uint16_t* p) {  // IEEE binary16
        OCTAVO_RETURN(F16, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + i * 4))));
    }
    OCTAVO_INLINE static F16 set1(float x) {
        const float32x4_t four = vdupq_n_f32(x);
        return {{four, four, four, four}};
    }
    OCTAVO_INLINE static F16 zero() { return set1(0.0f); }
    OCTAVO_INLINE static F16 from_int(U16 x) { OCTAVO_RETURN(F16, vcvtq_f32_s32(vreinterpretq_s32_u32(x.v[i]))); }
    OCTAVO_INLINE void store(float* p) const { OCTAVO_QUARTERS vst1q_f32(p + i * 4, v[i]); }
    OCTAVO_INLINE void store(bf16* p) const {
        OCTAVO_QUARTERS {
            const uint32x4_t bits = vreinterpretq_u32_f32(v[i]);
            const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
            const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
            const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
            vst1_u16(p + i * 4, vshrn_n_u32(vbslq_u32(vceqq_f32(v[i], v[i]), rounded, quiet), 16));
        }
    }
};
template <class T> OCTAVO_INLINE void store_both(F16 a, F16 b, T* p) {
    a.store(p);
    b.store(p + 16);
}
OCTAVO_INLINE F16 as_float(U16 a) { OCTAVO_RETURN(F16, vreinterpretq_f32_u32(a.v[i])); }
OCTAVO_INLINE U16 as_bits(F16 a) { OCTAVO_RETURN(U16, vreinterpretq_u32_f32(a.v[i])); }
OCTAVO_INLINE F16 operator+(F16 a, F16 b) { OCTAVO_RETURN(F16, vaddq_f32(a.v[i], b.v[i])); }
OCTAVO_INLINE F16 operator-(F16 a, F16 b) { OCTAVO_RETURN(F16, vsubq_f32(a.v[i], b.v[i])); }
OCTAVO_INLINE F16 operator*(F16 a, F16 b) { OCTAVO_RETURN(F16, vmulq_f32(a.v[i], b.v[i])); }
OCTAVO_INLINE F16 operator/(F16 a, F16 b) { OCTAVO_RETURN(F16, vdivq_f32(a.v[i], b.v[i])); }
OCTAVO_INLINE F16 fma(F16 a, F16 b, F16 c) { OCTAVO_RETURN(F16, vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
OCTAVO_INLINE F16 max(F16 a, F16 b) {  // b where either is NaN
    OCTAVO_RETURN(F16, vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]));
}
OCTAVO_INLINE F16 min(F16 a, F16 b) { OCTAVO_RETURN(F16, vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
OCTAVO_INLINE float reduce_add(F16 a) {
    const float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
OCTAVO_INLINE float reduce_max(F16 a) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3])));
}
OCTAVO_INLINE bool any_greater(F16 a, F16 b) {
    uint32x4_t any = vdupq_n_u32(0);
    OCTAVO_QUARTERS any = vorrq_u32(any, vcgtq_f32(a.v[i], b.v[i]));
    return vmaxvq_u32(any) != 0;
}
OCTAVO_INLINE bool all_at_most(F16 a, F16 b) {  // no NaN
    uint32x4_t all = vdupq_n_u32(~0u);
    OCTAVO_QUARTERS all = vandq_u32(all, vcleq_f32(a.v[i], b.v[i]));
    return vminvq_u32(all) != 0;
}

// Lane i of `a` where low <= i < high, `other` elsewhere.
OCTAVO_INLINE F16 keep_lanes(F16 a, int low, int high, F16 other) {
    const int32_t first[4] = {0, 1, 2, 3};
    OCTAVO_QUARTERS {
        const int32x4_t lane = vaddq_s32(vld1q_s32(first), vdupq_n_s32(i * 4));
        const uint32x4_t keep = vandq_u32(vcgeq_s32(lane, vdupq_n_s32(low)), vcltq_s32(lane, vdupq_n_s32(high)));
        a.v[i] = vbslq_f32(keep, a.v[i], other.v[i]);
    }
    return a;
}

OCTAVO_INLINE F16 exp2(F16 x) {
    OCTAVO_QUARTERS {
        // Below 2^-126 the result is flushed to zero, so that a masked score weighs exactly nothing.
        const uint32x4_t small = vcltq_f32(x.v[i], vdupq_n_f32(-126.0f));
        const float32x4_t clamped = vminq_f32(vmaxq_f32(x.v[i], vdupq_n_f32(-126.0f)), vdupq_n_f32(127.0f));
        const float32x4_t n = vrndnq_f32(clamped), f = vsubq_f32(clamped, n);
        float32x4_t p = vdupq_n_f32(kExp2Poly[5]);
        for (int j = 4; j >= 0; --j) p = vfmaq_f32(vdupq_n_f32(kExp2Poly[j]), p, f);
        const int32x4_t exponent = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
        const float32x4_t power = vmulq_f32(p, vreinterpretq_f32_s32(exponent));
        x.v[i] = vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(power), small));
    }
    return x;
}
OCTAVO_INLINE F16 exp2_bounded(F16 x) { return exp2(x); }
OCTAVO_INLINE F16 exp2_coarse(F16 x) { return exp2(x); }

// acc + a.lo * b.lo + a.hi * b.hi for pairs of bf16.
OCTAVO_INLINE F16 mac_bf16(F16 acc, U16 a, U16 b) {
#ifdef OCTAVO_HAS_BF16
    OCTAVO_QUARTERS acc.v[i] = vbfdotq_f32(acc.v[i], vreinterpretq_bf16_u32(a.v[i]), vreinterpretq_bf16_u32(b.v[i]));
#else
    const uint32x4_t high = vdupq_n_u32(0xffff0000u);
    OCTAVO_QUARTERS {
        const float32x4_t low = vfmaq_f32(acc.v[i], vreinterpretq_f32_u32(vshlq_n_u32(a.v[i], 16)),
                                          vreinterpretq_f32_u32(vshlq_n_u32(b.v[i], 16)));
        acc.v[i] = vfmaq_f32(low, vreinterpretq_f32_u32(vandq_u32(a.v[i], high)),
                             vreinterpretq_f32_u32(vandq_u32(b.v[i], high)));
    }
#endif
    return acc;
}
OCTAVO_INLINE F16 mac_f32(F16 acc, U16 a, U16 b) { return fma(as_float(a), as_float(b), acc); }

// acc + sum over four bytes of a (unsigned, at most 127) * b (signed), lane by lane.
OCTAVO_INLINE U16 dot_small(U16 acc, U16 a, U16 b) {
    OCTAVO_QUARTERS {
#ifdef OCTAVO_HAS_I8MM
        acc.v[i] = vreinterpretq_u32_s32(
            vusdotq_s32(vreinterpretq_s32_u32(acc.v[i]), vreinterpretq_u8_u32(a.v[i]), vreinterpretq_s8_u32(b.v[i])));
#else
        const int8x16_t x = vreinterpretq_s8_u32(a.v[i]), y = vreinterpretq_s8_u32(b.v[i]);
        const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(y)));  // at most 127 * 128: fits
        const int32x4_t high = vpaddlq_s16(vmull_high_s8(x, y));
        acc.v[i] = vaddq_u32(acc.v[i], vreinterpretq_u32_s32(vpaddq_s32(low, high)));
#endif
    }
    return acc;
}
// The same for any unsigned bytes.
OCTAVO_INLINE U16 dot_bytes(U16 acc, U16 a, U16 b) {
#ifdef OCTAVO_HAS_I8MM
    return dot_small(acc, a, b);
#else
    const U16 mask = U16::set1(0x0f0f0f0f);
    const U16 high = dot_small(U16::zero(), shift_right<4>(a) & mask, b);
    return dot_small(acc + shift_left<4>(high), a & mask, b);
#endif
}

#ifdef OCTAVO_HAS_I8MM
// Products of pairs of rows, see row_pairs.h.
#define OCTAVO_ROW_PAIRS
// | a0 b0 a1 b1 | of each four lanes, or | a2 b2 a3 b3 |; and back.
template <int Half> OCTAVO_INLINE U16 zip(U16 a, U16 b) {
    OCTAVO_RETURN(U16, Half ? vzip2q_u32(a.v[i], b.v[i]) : vzip1q_u32(a.v[i], b.v[i]));
}
template <int Half> OCTAVO_INLINE U16 unzip(U16 a, U16 b) {
    OCTAVO_RETURN(U16, Half ? vuzp2q_u32(a.v[i], b.v[i]) : vuzp1q_u32(a.v[i], b.v[i]));
}
template <int Half> OCTAVO_INLINE F16 zip(F16 a, F16 b) { return as_float(zip<Half>(as_bits(a), as_bits(b))); }
template <int Half> OCTAVO_INLINE F16 unzip(F16 a, F16 b) { return as_float(unzip<Half>(as_bits(a), as_bits(b))); }
// The same of four numbers each, in all four lanes.
template <int Half> OCTAVO_INLINE U16 zip_broadcast(const uint32_t* a, const uint32_t* b) {
    const uint32x4_t x = vld1q_u32(a), y = vld1q_u32(b), four = Half ? vzip2q_u32(x, y) : vzip1q_u32(x, y);
    return {{four, four, four, four}};
}
// In each four lanes, acc + a b^T, where a and b are matrices of two rows, of two units each.
OCTAVO_INLINE U16 multiply_pairs(U16 acc, U16 a, U16 b) {  // a's bytes unsigned, b's signed
    OCTAVO_RETURN(U16, vreinterpretq_u32_s32(vusmmlaq_s32(vreinterpretq_s32_u32(acc.v[i]), vreinterpretq_u8_u32(a.v[i]),
                                                          vreinterpretq_s8_u32(b.v[i]))));
}
OCTAVO_INLINE F16 multiply_pairs(F16 acc, U16 a, U16 b) {  // bf16
    OCTAVO_RETURN(F16, vbfmmlaq_f32(acc.v[i], vreinterpretq_bf16_u32(a.v[i]), vreinterpretq_bf16_u32(b.v[i])));
}
#endif

// Rounds to the nearest integers, which are in [-128, 127]; NaN becomes zero.
OCTAVO_INLINE void round_to_int8(F16 x, int8_t* p) {
    int16x4_t words[4];
    OCTAVO_QUARTERS words[i] = vqmovn_s32(vcvtnq_s32_f32(x.v[i]));
    vst1_s8(p, vqmovn_s16(vcombine_s16(words[0], words[1])));
    vst1_s8(p + 8, vqmovn_s16(vcombine_s16(words[2], words[3])));
}

// Sixteen bytes to 32-bit integers, and back.
OCTAVO_INLINE U16 widen(const uint8_t* p) {
    const uint8x16_t bytes = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
    return {{vmovl_u16(vget_low_u16(low)), vmovl_u16(vget_high_u16(low)), vmovl_u16(vget_low_u16(high)),
             vmovl_u16(vget_high_u16(high))}};
}
OCTAVO_INLINE U16 widen_signed(const uint8_t* p) {
    U16 out = widen(p);
    OCTAVO_QUARTERS out.v[i] = vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(vshlq_n_u32(out.v[i], 24)), 24));
    return out;
}
OCTAVO_INLINE void narrow(U16 x, uint8_t* p) {
    const uint16x8_t low = vcombine_u16(vmovn_u32(x.v[0]), vmovn_u32(x.v[1]));
    const uint16x8_t high = vcombine_u16(vmovn_u32(x.v[2]), vmovn_u32(x.v[3]));
    vst1q_u8(p, vcombine_u8(vmovn_u16(low), vmovn_u16(high)));
}

// Converts fp8 by way of binary16: e5m2 is the upper byte of a half, and the exponent of e4m3 comes out 8 less.
// Subnormals are converted correctly.
OCTAVO_INLINE F16 load_e5m2(const uint8_t* p) {
    uint16_t halves[16];
    for (int i = 0; i < 16; ++i) halves[i] = static_cast<uint16_t>(p[i] << 8);
    return F16::load_half(halves);
}
OCTAVO_INLINE F16 load_e4m3(const uint8_t* p) {
    uint16_t halves[16];
    for (int i = 0; i < 16; ++i) halves[i] = static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7);
    return F16::load_half(halves);
}

OCTAVO_INLINE void store(U16 x, void* p) {
    OCTAVO_QUARTERS vst1q_u8(static_cast<uint8_t*>(p) + i * 16, vreinterpretq_u8_u32(x.v[i]));
}

#define OCTAVO_DECOMPRESSES
// See compressed.h: exponent bits of the high and of the low bytes by code, with which a unit's weights are decoded.
struct ExponentTables {
    uint8x16_t high, low;
};
OCTAVO_INLINE ExponentTables load_tables(const uint8_t* tables) { return {vld1q_u8(tables), vld1q_u8(tables + 16)}; }
template <int K>
OCTAVO_INLINE void decompress_unit(const char* from, const ExponentTables& tables, U16& low, U16& high) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(from);
    const uint8x16_t sign = vdupq_n_u8(0x80);
    OCTAVO_QUARTERS {
        const uint8x16_t both = vld1q_u8(bytes + 128 + i * 16), rest = vld1q_u8(bytes + K * 64 + i * 16);
        const uint8x16_t codes = K ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15));
        const uint8x16_t highs = vorrq_u8(vandq_u8(rest, sign), vqtbl1q_u8(tables.high, codes));
        const uint8x16_t lows = vorrq_u8(vbicq_u8(rest, sign), vqtbl1q_u8(tables.low, codes));
        low.v[i] = vreinterpretq_u32_u8(vzip1q_u8(lows, highs));
        high.v[i] = vreinterpretq_u32_u8(vzip2q_u8(lows, highs));
    }
}

#undef OCTAVO_QUARTERS
#undef OCTAVO_RETURN
#undef OCTAVO_INLINE

// Register blocking: rows x vectors accumulators, of four of the 32 registers each.
constexpr int kVectorsPerPass = 1;
constexpr int kMaxRows = 4;
#ifdef OCTAVO_ROW_PAIRS
constexpr int kGemmRows = 4, kQuantRows = 4;  // sums of eight, even of half a panel, do not fit into the registers
#else
constexpr int kGemmRows = 2, kQuantRows = 2;  // times two vectors of outputs
#endif
constexpr int kGemmRowsOfBothHalves = 3, kQuantRowsOfBothHalves = 1;
constexpr DecodedFormats kDecodedFormats = DecodedFormats::none;  // not measured

}  // namespace octavo::OCTAVO_LEVEL
