// AVX-512 on processors with AVX2, for tests: SIMDe computes each operation in halves or lane by lane. Included before
// the source of a level that is compiled without AVX-512's flags. Operations that SIMDe 0.7.4 lacks, or rounds twice,
// are here.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <immintrin.h>
#include <simde/x86/avx512.h>

namespace octavo::emulated {

template <class To, class From> inline To as(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
template <class Half> struct Both {
    Half low, high;
};
template <class Half, class Wide> inline Both<Half> halves(Wide wide) { return as<Both<Half>>(wide); }
template <class Wide, class Half> inline Wide join(Half low, Half high) { return as<Wide>(Both<Half>{low, high}); }

inline __m512 fmadd(__m512 a, __m512 b, __m512 c) {
    const auto x = halves<__m256>(a), y = halves<__m256>(b), z = halves<__m256>(c);
    return join<__m512>(_mm256_fmadd_ps(x.low, y.low, z.low), _mm256_fmadd_ps(x.high, y.high, z.high));
}
inline __m512 max(__m512 a, __m512 b) {  // b where either is NaN
    const auto x = halves<__m256>(a), y = halves<__m256>(b);
    return join<__m512>(_mm256_max_ps(x.low, y.low), _mm256_max_ps(x.high, y.high));
}
inline __m512 min(__m512 a, __m512 b) {
    const auto x = halves<__m256>(a), y = halves<__m256>(b);
    return join<__m512>(_mm256_min_ps(x.low, y.low), _mm256_min_ps(x.high, y.high));
}
inline __m512 from_halves(__m256i p) {
    return join<__m512>(_mm256_cvtph_ps(_mm256_castsi256_si128(p)), _mm256_cvtph_ps(_mm256_extracti128_si256(p, 1)));
}
inline __m512 from_int(__m512i a) {
    const auto x = halves<__m256i>(a);
    return join<__m512>(_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high));
}
inline __m512i to_int(uint16_t kept, __m512 a) {
    const auto x = halves<__m256>(a);
    auto out = as<Both<__m256i>>(Both<__m256i>{_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)});
    int32_t lanes[16];
    __builtin_memcpy(lanes, &out, 64);
    for (int i = 0; i < 16; ++i)
        if (!(kept >> i & 1)) lanes[i] = 0;
    __builtin_memcpy(&out, lanes, 64);
    return as<__m512i>(out);
}
template <class To, class From, class Result, class Source> inline Result convert(Source source) {
    constexpr int kLanes = static_cast<int>(sizeof(Result) / sizeof(To));
    From from[kLanes];
    To to[kLanes];
    __builtin_memcpy(from, &source, sizeof from);
    for (int i = 0; i < kLanes; ++i) to[i] = static_cast<To>(from[i]);
    return as<Result>(to);
}
inline float reduce_add(__m512 a) {  // in the order of GCC's
    const auto x = halves<__m256>(a);
    const __m256 eight = _mm256_add_ps(x.high, x.low);
    const __m128 four = _mm_add_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_add_ps(_mm_shuffle_ps(four, four, 0x4e), four);
    return two[0] + two[1];
}
inline float reduce_max(__m512 a) {
    const auto x = halves<__m256>(a);
    const __m256 eight = _mm256_max_ps(x.high, x.low);
    const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_max_ps(_mm_shuffle_ps(four, four, 0x4e), four);
    return two[0] > two[1] ? two[0] : two[1];
}
inline int reduce_max(__m512i a) {
    const auto lanes = as<Both<__m256i>>(a);
    int32_t all[16], most = INT32_MIN;
    __builtin_memcpy(all, &lanes, 64);
    for (const int32_t lane : all) most = lane > most ? lane : most;
    return most;
}
inline uint16_t less(__m512i a, __m512i b) {
    int32_t x[16], y[16];
    __builtin_memcpy(x, &a, 64);
    __builtin_memcpy(y, &b, 64);
    uint16_t mask = 0;
    for (int i = 0; i < 16; ++i) mask = static_cast<uint16_t>(mask | (x[i] < y[i]) << i);
    return mask;
}
// a * 2^floor(b), flushed like the instruction: infinite and NaN b included.
inline __m512 scale(__m512 a, __m512 b) {
    float x[16], n[16];
    __builtin_memcpy(x, &a, 64);
    __builtin_memcpy(n, &b, 64);
    for (int i = 0; i < 16; ++i) {
        const float power = __builtin_floorf(n[i]);
        if (power != power)
            x[i] = power;
        else if (__builtin_isinf(power))
            x[i] = power > 0.0f ? power : 0.0f;
        else
            x[i] = __builtin_ldexpf(x[i], power < -300.0f ? -300 : power > 300.0f ? 300 : static_cast<int>(power));
    }
    return as<__m512>(x);
}

inline __m256i dot_nibbles(__m256i a, __m256i b) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_and_si256(a, _mm256_set1_epi8(15)), b), _mm256_set1_epi16(1));
}
inline __m512i dot_bytes(__m512i sum, __m512i a, __m512i b) {
    const auto dot = [](__m256i s, __m256i x, __m256i y) {
        const __m256i high = _mm256_slli_epi32(dot_nibbles(_mm256_srli_epi16(x, 4), y), 4);
        return _mm256_add_epi32(_mm256_add_epi32(s, high), dot_nibbles(x, y));
    };
    const auto s = halves<__m256i>(sum), x = halves<__m256i>(a), y = halves<__m256i>(b);
    return join<__m512i>(dot(s.low, x.low, y.low), dot(s.high, x.high, y.high));
}

}  // namespace octavo::emulated

#undef _mm512_madd_epi16  // SIMDe's has a mask's parameters
#undef _mm512_fmadd_ps
#undef _mm512_max_ps
#undef _mm512_min_ps
#undef _mm512_scalef_ps
#undef _mm512_cmpge_epi32_mask
#undef _mm512_cvtepi8_epi16
#define _mm512_madd_epi16 simde_mm512_madd_epi16
#undef _mm512_dpbusd_epi32  // GCC 12 fails to compile SIMDe's
#define _mm512_dpbusd_epi32 octavo::emulated::dot_bytes
#define _mm512_fmadd_ps octavo::emulated::fmadd
#define _mm512_max_ps octavo::emulated::max
#define _mm512_min_ps octavo::emulated::min
#define _mm512_scalef_ps octavo::emulated::scale
#define _mm512_cvtph_ps octavo::emulated::from_halves
#define _mm512_cvtepi32_ps octavo::emulated::from_int
#define _mm512_maskz_cvtps_epi32 octavo::emulated::to_int
#define _mm512_reduce_add_ps octavo::emulated::reduce_add
#define _mm512_reduce_max_ps octavo::emulated::reduce_max
#define _mm512_reduce_max_epi32 octavo::emulated::reduce_max
#define _mm512_cmplt_epi32_mask octavo::emulated::less
#define _mm512_cmpge_epi32_mask(a, b) static_cast<__mmask16>(~octavo::emulated::less(a, b))
#define _mm512_cvtepu8_epi32 octavo::emulated::convert<uint32_t, uint8_t, __m512i>
#define _mm512_cvtepi8_epi32 octavo::emulated::convert<int32_t, int8_t, __m512i>
#define _mm512_cvtepu16_epi32 octavo::emulated::convert<uint32_t, uint16_t, __m512i>
#define _mm512_cvtepu8_epi16 octavo::emulated::convert<uint16_t, uint8_t, __m512i>
#define _mm512_cvtepi8_epi16 octavo::emulated::convert<int16_t, int8_t, __m512i>
#define _mm512_cvtepi32_epi8 octavo::emulated::convert<int8_t, int32_t, __m128i>
#define _mm512_cvtepi32_epi16 octavo::emulated::convert<int16_t, int32_t, __m256i>
