// Sixteen lanes in one AVX-512 register. OCTAVO_HAS_BF16 adds vdpbf16ps and vcvtneps2bf16, OCTAVO_HAS_VNNI
// vpdpbusd.
#pragma once

#include <immintrin.h>
#include <type_traits>

#include "level/simd/common.h"

namespace octavo::OCTAVO_LEVEL {

struct U16 {  // 16 x 32 bits: pairs of bf16, floats or quads of int8, as the layouts store them
    __m512i v;
    static U16 load(const void* p) { return {_mm512_loadu_si512(p)}; }
    static U16 set1(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
    static U16 zero() { return {_mm512_setzero_si512()}; }
};
inline U16 operator&(U16 a, U16 b) { return {_mm512_and_si512(a.v, b.v)}; }
inline U16 operator|(U16 a, U16 b) { return {_mm512_or_si512(a.v, b.v)}; }
inline U16 operator^(U16 a, U16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline U16 operator+(U16 a, U16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline U16 max(U16 a, U16 b) { return {_mm512_max_epi32(a.v, b.v)}; }  // of signed integers
inline int32_t reduce_max(U16 a) { return _mm512_reduce_max_epi32(a.v); }
// table[code] of each byte, which is less than 16.
inline U16 look_up(const uint8_t* table, U16 codes) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), codes.v)};
}
template <int N> inline U16 shift_left(U16 a) { return {_mm512_slli_epi32(a.v, N)}; }
template <int N> inline U16 shift_right(U16 a) { return {_mm512_srli_epi32(a.v, N)}; }

struct F16 {
    __m512 v;
    static F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static F16 load(const bf16* p) {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
    }
    static F16 load_half(const uint16_t* p) {  // IEEE binary16
        return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
    }
    static F16 set1(float x) { return {_mm512_set1_ps(x)}; }
    static F16 zero() { return {_mm512_setzero_ps()}; }
    static F16 from_int(U16 x) { return {_mm512_cvtepi32_ps(x.v)}; }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
    void store(bf16* p) const {
#ifdef OCTAVO_HAS_BF16
        const __m256i half = (__m256i)_mm512_cvtneps_pbh(v);
#else
        const __m512i bits = _mm512_castps_si512(v);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
        const __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
    }
};
template <class T> inline void store_both(F16 a, F16 b, T* p) {
#ifdef OCTAVO_HAS_BF16
    if constexpr (std::is_same_v<T, bf16>) return _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v));
#endif
    a.store(p);
    b.store(p + 16);
}
inline F16 as_float(U16 a) { return {_mm512_castsi512_ps(a.v)}; }
inline U16 as_bits(F16 a) { return {_mm512_castps_si512(a.v)}; }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where either is NaN
inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline float reduce_add(F16 a) { return _mm512_reduce_add_ps(a.v); }
inline float reduce_max(F16 a) { return _mm512_reduce_max_ps(a.v); }
inline bool any_greater(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ) != 0; }
inline bool all_at_most(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_NLE_UQ) == 0; }  // no NaN

// Lane i of `a` where low <= i < high, `other` elsewhere.
inline F16 keep_lanes(F16 a, int low, int high, F16 other) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 keep =
        _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(low)) & _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(high));
    return {_mm512_mask_blend_ps(keep, other.v, a.v)};
}

// p(f) * 2^n, where p is the polynomial and x = n + f.
template <int N> inline F16 exp2_by(const float (&poly)[N], F16 x) {
    const __m512 n = _mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const F16 f{_mm512_sub_ps(x.v, n)};
    F16 p = F16::set1(poly[N - 1]);
#pragma GCC unroll 5
    for (int i = N - 2; i >= 0; --i) p = fma(p, f, F16::set1(poly[i]));
    return {_mm512_scalef_ps(p.v, n)};
}
// For finite x up to 200, however small; 2^0 is exactly 1.
inline F16 exp2_bounded(F16 x) { return exp2_by(kExp2Poly, x); }
inline F16 exp2_coarse(F16 x) { return exp2_by(kExp2CoarsePoly, x); }
inline F16 exp2(F16 x) { return exp2_bounded(max(F16::set1(-200.0f), min(F16::set1(200.0f), x))); }

// acc + a.lo * b.lo + a.hi * b.hi for pairs of bf16.
inline F16 mac_bf16(F16 acc, U16 a, U16 b) {
#ifdef OCTAVO_HAS_BF16
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)};
#else
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const F16 a_lo{_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))},
        b_lo{_mm512_castsi512_ps(_mm512_slli_epi32(b.v, 16))};
    const F16 a_hi{_mm512_castsi512_ps(_mm512_and_si512(a.v, high))},
        b_hi{_mm512_castsi512_ps(_mm512_and_si512(b.v, high))};
    return fma(a_hi, b_hi, fma(a_lo, b_lo, acc));
#endif
}
inline F16 mac_f32(F16 acc, U16 a, U16 b) {
    return {_mm512_fmadd_ps(_mm512_castsi512_ps(a.v), _mm512_castsi512_ps(b.v), acc.v)};
}

// acc + sum over four bytes of a (unsigned, at most 127) * b (signed), lane by lane.
inline U16 dot_small(U16 acc, U16 a, U16 b) {
#ifdef OCTAVO_HAS_VNNI
    return {_mm512_dpbusd_epi32(acc.v, a.v, b.v)};
#else
    const __m512i pairs = _mm512_maddubs_epi16(a.v, b.v);  // at most 2 * 127 * 128: does not saturate
    return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
#endif
}
// The same for any unsigned bytes.
inline U16 dot_bytes(U16 acc, U16 a, U16 b) {
#ifdef OCTAVO_HAS_VNNI
    return {_mm512_dpbusd_epi32(acc.v, a.v, b.v)};
#else
    const U16 mask = U16::set1(0x0f0f0f0f);
    const U16 high = dot_small(U16::zero(), shift_right<4>(a) & mask, b);
    return dot_small({_mm512_add_epi32(acc.v, _mm512_slli_epi32(high.v, 4))}, a & mask, b);
#endif
}

#ifndef OCTAVO_HAS_VNNI
// Sums of products in the two 16-bit halves of each lane, for a few products of small numbers: see quant.h.
#define OCTAVO_SUMS_WORDS
inline void keep_in_memory(F16& total) { asm volatile("" : "+m"(total.v) : : "memory"); }
inline U16 dot_words(U16 words, U16 a, U16 b) {
    return {_mm512_add_epi16(words.v, _mm512_maddubs_epi16(a.v, b.v))};
}
inline U16 add_words(U16 acc, U16 words) {
    return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(words.v, _mm512_set1_epi16(1)))};
}
// acc + sum over four bytes of a (signed) * b (signed, not -128).
inline U16 dot_signed(U16 acc, U16 a, U16 b) {
    const __m512i signed_b = _mm512_mask_sub_epi8(b.v, _mm512_movepi8_mask(a.v), _mm512_setzero_si512(), b.v);
    return dot_small(acc, {_mm512_abs_epi8(a.v)}, {signed_b});
}
#endif

// Rounds to the nearest integers, which are in [-128, 127]; NaN becomes zero.
inline void round_to_int8(F16 x, int8_t* p) {
    const __m512i whole = _mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask(x.v, x.v, _CMP_ORD_Q), x.v);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(whole));
}

// Sixteen bytes to 32-bit integers, and back.
inline U16 widen(const uint8_t* p) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline U16 widen_signed(const uint8_t* p) {
    return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline void narrow(U16 x, uint8_t* p) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x.v));
}

#define OCTAVO_STORES_DIGITS
// See coded_values.h. Narrowing each vector by itself would take three times as many operations:
//
//     words      | x0 | x1 |   | x2 | x3 |         of lane i; then in bytes | x0 | x2 | x1 | x3 |, of each digit;
//     bytes      a lane of 128 bits has four of each, which are brought together, then those of all lanes
inline void store_digits(const U16 (&x)[4], uint8_t* high, uint8_t* low) {
    constexpr int kSelect = 0xca;  // a ? b : c
    const __m512i first = _mm512_mask_blend_epi16(0xaaaaaaaa, x[0].v, _mm512_slli_epi32(x[1].v, 16));
    const __m512i second = _mm512_mask_blend_epi16(0xaaaaaaaa, x[2].v, _mm512_slli_epi32(x[3].v, 16));
    const __m512i lower = _mm512_set1_epi16(0x00ff);
    const __m512i lows = _mm512_and_si512(
        _mm512_ternarylogic_epi32(lower, first, _mm512_slli_epi16(second, 8), kSelect), _mm512_set1_epi8(127));
    const __m512i highs = _mm512_ternarylogic_epi32(lower, _mm512_srli_epi16(first, 7), _mm512_slli_epi16(second, 1),
                                                    kSelect);
    const __m512i within = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15));
    const __m512i across = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(high, _mm512_permutexvar_epi32(across, _mm512_shuffle_epi8(highs, within)));
    _mm512_storeu_si512(low, _mm512_permutexvar_epi32(across, _mm512_shuffle_epi8(lows, within)));
}

// Converts fp8 by way of binary16: e5m2 is the upper byte of a half, and the exponent of e4m3 comes out 8 less.
// Subnormals are converted correctly.
inline void load_halves(__m512i halves, F16& low, F16& high) {
    low = {_mm512_cvtph_ps(_mm512_castsi512_si256(halves))};
    high = {_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1))};
}
inline F16 load_e5m2(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm512_cvtph_ps(_mm256_slli_epi16(wide, 8))};
}
inline F16 load_e4m3(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
    return {_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), mask))};
}
#define OCTAVO_LOADS_FP8_IN_PAIRS
inline void load_e5m2(const uint8_t* p, F16& low, F16& high) {
    const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    load_halves(_mm512_slli_epi16(wide, 8), low, high);
}
inline void load_e4m3(const uint8_t* p, F16& low, F16& high) {
    const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const __m512i mask = _mm512_set1_epi16(static_cast<int16_t>(0xbf80));
    load_halves(_mm512_and_si512(_mm512_slli_epi16(wide, 7), mask), low, high);
}

inline void store(U16 x, void* p) { _mm512_storeu_si512(p, x.v); }

#define OCTAVO_DECOMPRESSES
// See compressed.h: exponent bits of the high and of the low bytes by code, with which a unit's weights are decoded.
struct ExponentTables {
    __m512i high, low;
};
inline ExponentTables load_tables(const uint8_t* tables) {
    const auto* both = reinterpret_cast<const __m128i*>(tables);
    return {_mm512_broadcast_i32x4(_mm_loadu_si128(both)), _mm512_broadcast_i32x4(_mm_loadu_si128(both + 1))};
}
template <int K> inline void decompress_unit(const char* from, const ExponentTables& tables, U16& low, U16& high) {
    constexpr int kAndOr = 0xea;  // (a & b) | c
    __m512i codes = _mm512_loadu_si512(from + 128);
    if constexpr (K == 1) codes = _mm512_srli_epi16(codes, 4);
    codes = _mm512_and_si512(codes, _mm512_set1_epi8(0x0f));
    const __m512i rest = _mm512_loadu_si512(from + K * 64);
    const __m512i highs =
        _mm512_ternarylogic_epi32(rest, _mm512_set1_epi8(-128), _mm512_shuffle_epi8(tables.high, codes), kAndOr);
    const __m512i lows =
        _mm512_ternarylogic_epi32(rest, _mm512_set1_epi8(127), _mm512_shuffle_epi8(tables.low, codes), kAndOr);
    low.v = _mm512_unpacklo_epi8(lows, highs);
    high.v = _mm512_unpackhi_epi8(lows, highs);
}

constexpr int kVectorsPerPass = 4;  // register blocking: rows x vectors accumulators
constexpr int kMaxRows = 6;
constexpr int kGemmRows = 12, kGemmRowsOfBothHalves = 12;  // times two vectors of outputs
#ifdef OCTAVO_HAS_VNNI
constexpr int kQuantRows = 8, kQuantRowsOfBothHalves = 8;  // a block's sums stay in registers, the totals do not
#else
constexpr int kQuantRows = 8, kQuantRowsOfBothHalves = 4;  // neither do sums of words for both halves
#endif
constexpr DecodedFormats kDecodedFormats = DecodedFormats::costly;

}  // namespace octavo::OCTAVO_LEVEL
