// Sixteen lanes in two AVX2 registers (with FMA and F16C). OCTAVO_HAS_VNNI adds AVX-VNNI's vpdpbusd.
#pragma once

#include <immintrin.h>

#include "level/simd/common.h"

namespace octavo::OCTAVO_LEVEL {

struct U16 {
    __m256i lo, hi;
    static U16 load(const void* p) {
        const auto* q = static_cast<const __m256i*>(p);
        return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
    }
    static U16 set1(uint32_t x) {
        const __m256i v = _mm256_set1_epi32(static_cast<int>(x));
        return {v, v};
    }
    static U16 zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
};
inline U16 operator&(U16 a, U16 b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
inline U16 operator|(U16 a, U16 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
inline U16 operator^(U16 a, U16 b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
inline U16 operator+(U16 a, U16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline U16 max(U16 a, U16 b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }  // signed
inline int32_t reduce_max(U16 a) {
    const __m256i eight = _mm256_max_epi32(a.lo, a.hi);
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
// table[code] of each byte, which is less than 16.
inline U16 look_up(const uint8_t* table, U16 codes) {
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return {_mm256_shuffle_epi8(both, codes.lo), _mm256_shuffle_epi8(both, codes.hi)};
}
template <int N> inline U16 shift_left(U16 a) { return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)}; }
template <int N> inline U16 shift_right(U16 a) { return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)}; }

struct F16 {
    __m256 lo, hi;
    static F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static F16 load(const bf16* p) {
        const auto* q = reinterpret_cast<const __m128i*>(p);
        const __m256i lo = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), 16);
        const __m256i hi = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1)), 16);
        return {_mm256_castsi256_ps(lo), _mm256_castsi256_ps(hi)};
    }
    static F16 load_half(const uint16_t* p) {  // IEEE binary16
        const auto* q = reinterpret_cast<const __m128i*>(p);
        return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
    }
    static F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    static F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
    static F16 from_int(U16 x) { return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }
    void store(float* p) const {
        _mm256_storeu_ps(p, lo);
        _mm256_storeu_ps(p + 8, hi);
    }
    void store(bf16* p) const {
        const __m256i packed = _mm256_packus_epi32(round_to_bf16(lo), round_to_bf16(hi));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
    }

  private:
    static __m256i round_to_bf16(__m256 x) {
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    }
};
template <class T> inline void store_both(F16 a, F16 b, T* p) {
    a.store(p);
    b.store(p + 16);
}
inline F16 as_float(U16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline U16 as_bits(F16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
inline F16 operator+(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline float reduce_add(F16 a) {
    const __m256 eight = _mm256_add_ps(a.lo, a.hi);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
inline float reduce_max(F16 a) {
    const __m256 eight = _mm256_max_ps(a.lo, a.hi);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}
inline bool any_greater(F16 a, F16 b) {
    const __m256 either = _mm256_or_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ));
    return _mm256_movemask_ps(either) != 0;
}
inline bool all_at_most(F16 a, F16 b) {  // no NaN
    const __m256 both = _mm256_and_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_LE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LE_OQ));
    return _mm256_movemask_ps(both) == 0xff;
}

inline __m256 keep_lanes8(__m256 a, int low, int high, __m256 other) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i keep = _mm256_and_si256(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(low - 1)),
                                          _mm256_cmpgt_epi32(_mm256_set1_epi32(high), lane));
    return _mm256_blendv_ps(other, a, _mm256_castsi256_ps(keep));
}
inline F16 keep_lanes(F16 a, int low, int high, F16 other) {
    return {keep_lanes8(a.lo, low, high, other.lo), keep_lanes8(a.hi, low - 8, high - 8, other.hi)};
}

inline __m256 exp2_8(__m256 x) {
    // Below 2^-126 the result is flushed to zero, so that a masked score weighs exactly nothing.
    const __m256 normal = _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ);
    x = _mm256_max_ps(_mm256_set1_ps(-126.0f), _mm256_min_ps(_mm256_set1_ps(127.0f), x));
    const __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 f = _mm256_sub_ps(x, n);
    __m256 p = _mm256_set1_ps(kExp2Poly[5]);
    for (int i = 4; i >= 0; --i) p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(kExp2Poly[i]));
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(exponent)), normal);
}
inline F16 exp2(F16 x) { return {exp2_8(x.lo), exp2_8(x.hi)}; }

inline F16 exp2_bounded(F16 x) { return exp2(x); }
inline F16 exp2_coarse(F16 x) { return exp2(x); }

inline __m256 mac_bf16_8(__m256 acc, __m256i a, __m256i b) {
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    const __m256 low = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)),
                                       _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)), acc);
    return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(a, high)),
                           _mm256_castsi256_ps(_mm256_and_si256(b, high)), low);
}
inline F16 mac_bf16(F16 acc, U16 a, U16 b) { return {mac_bf16_8(acc.lo, a.lo, b.lo), mac_bf16_8(acc.hi, a.hi, b.hi)}; }
inline F16 mac_f32(F16 acc, U16 a, U16 b) {
    return {_mm256_fmadd_ps(_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(b.lo), acc.lo),
            _mm256_fmadd_ps(_mm256_castsi256_ps(a.hi), _mm256_castsi256_ps(b.hi), acc.hi)};
}

inline __m256i dot_small8(__m256i acc, __m256i a, __m256i b) {
#ifdef OCTAVO_HAS_VNNI
    return _mm256_dpbusd_avx_epi32(acc, a, b);
#endif
    const __m256i pairs = _mm256_maddubs_epi16(a, b);  // at most 2 * 127 * 128: does not saturate
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline U16 dot_small(U16 acc, U16 a, U16 b) {
    return {dot_small8(acc.lo, a.lo, b.lo), dot_small8(acc.hi, a.hi, b.hi)};
}
inline U16 dot_bytes(U16 acc, U16 a, U16 b) {
#ifdef OCTAVO_HAS_VNNI
    return dot_small(acc, a, b);
#endif
    const U16 mask = U16::set1(0x0f0f0f0f);
    const U16 high = dot_small(U16::zero(), shift_right<4>(a) & mask, b);
    const U16 sum{_mm256_add_epi32(acc.lo, _mm256_slli_epi32(high.lo, 4)),
                  _mm256_add_epi32(acc.hi, _mm256_slli_epi32(high.hi, 4))};
    return dot_small(sum, a & mask, b);
}

#ifndef OCTAVO_HAS_VNNI
// Neither changes a number. The first keeps the compiler from computing several rows' products before it adds any, the
// second from holding what is needed once a section in registers: the sums of words would not stay in theirs.
inline U16 in_order(U16 sum) {
    asm volatile("" : "+x"(sum.lo), "+x"(sum.hi));
    return sum;
}
inline void keep_in_memory(F16& total) { asm volatile("" : "+m"(total.lo), "+m"(total.hi) : : "memory"); }
// Sums of products in the two 16-bit halves of each lane, for a few products of small numbers: see quant.h.
#define OCTAVO_SUMS_WORDS
inline U16 dot_words(U16 words, U16 a, U16 b) {
    const U16 sum{_mm256_add_epi16(words.lo, _mm256_maddubs_epi16(a.lo, b.lo)),
                  _mm256_add_epi16(words.hi, _mm256_maddubs_epi16(a.hi, b.hi))};
    return in_order(sum);
}
inline U16 add_words(U16 acc, U16 words) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(words.lo, ones)),
            _mm256_add_epi32(acc.hi, _mm256_madd_epi16(words.hi, ones))};
}
// acc + sum over four bytes of a (signed) * b (signed, not -128).
inline U16 dot_signed(U16 acc, U16 a, U16 b) {
    return in_order({dot_small8(acc.lo, _mm256_abs_epi8(a.lo), _mm256_sign_epi8(b.lo, a.lo)),
                     dot_small8(acc.hi, _mm256_abs_epi8(a.hi), _mm256_sign_epi8(b.hi, a.hi))});
}
#endif

// Rounds to the nearest integers, which are in [-128, 127]; NaN becomes zero.
inline __m256i round8(__m256 x) {
    return _mm256_cvtps_epi32(_mm256_and_ps(x, _mm256_cmp_ps(x, x, _CMP_ORD_Q)));
}
inline void round_to_int8(F16 x, int8_t* p) {
    const __m256i words = _mm256_packs_epi32(round8(x.lo), round8(x.hi));
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

// Sixteen bytes to 32-bit integers, and back.
inline U16 widen(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
inline U16 widen_signed(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
inline void narrow(U16 x, uint8_t* p) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(x.lo, x.hi), 0xd8);
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

// Converts fp8 by way of binary16: e5m2 is the upper byte of a half, and the exponent of e4m3 comes out 8 less.
// Subnormals are converted correctly.
inline F16 from_halves(__m256i halves) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
inline F16 load_e5m2(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return from_halves(_mm256_slli_epi16(wide, 8));
}
inline F16 load_e4m3(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return from_halves(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80))));
}

inline void store(U16 x, void* p) {
    auto* q = static_cast<__m256i*>(p);
    _mm256_storeu_si256(q, x.lo);
    _mm256_storeu_si256(q + 1, x.hi);
}

constexpr int kVectorsPerPass = 1;
constexpr int kMaxRows = 4;
constexpr int kGemmRows = 3, kGemmRowsOfBothHalves = 3;  // times two vectors of outputs
#ifdef OCTAVO_HAS_VNNI
constexpr int kQuantRows = 2, kQuantRowsOfBothHalves = 2;
#else
constexpr int kQuantRows = 4, kQuantRowsOfBothHalves = 2;  // sums of words stay in registers, the others do not
#endif
constexpr DecodedFormats kDecodedFormats = DecodedFormats::all;

}  // namespace octavo::OCTAVO_LEVEL
