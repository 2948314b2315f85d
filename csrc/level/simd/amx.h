// Tiles of up to 16 rows of 64 bytes, as Intel's AMX has them (Architecture Instruction Set Extensions, chapter 3).
// The compiler does not know about tiles: it must neither keep in registers what a tile is to read from memory, nor
// move its stores past a tile's, so loads and stores are barriers.
#pragma once

#include "level/simd/avx512.h"
#include "level/simd/tile_config.h"

namespace octavo::OCTAVO_LEVEL {

// Also zeroes every tile.
inline void load_tile_config(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config) : "memory"); }
// If a thread does not release its tiles, the system saves 8 KiB at each context switch.
inline void release_tiles() { asm volatile("tilerelease" ::: "memory"); }
template <int T> inline void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T> inline void tile_load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T> inline void tile_store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
// sums[m][n] += sum over units of a[m][unit] . b[unit][n], pairs of bf16. Even and odd inputs are summed separately,
// in order, then added to each other and to the sum; subnormal numbers count as zero.
template <int Sums, int A, int B> inline void tile_dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(A), "i"(B));
}

// See tile_codes.h: the bytes of the bf16 that each code of seven bits stands for; the eighth bit is the sign.
struct CodeWords {
    __m512i high[2], low[2];
};
inline CodeWords load_code_words(const uint8_t* high, const uint8_t* low) {
    return {{_mm512_loadu_si512(high), _mm512_loadu_si512(high + 64)},
            {_mm512_loadu_si512(low), _mm512_loadu_si512(low + 64)}};
}
// Of every sixteen codes, the first eight -> `first`, the others -> `second`.
template <bool TwosComplement>
inline void decode_words(__m512i codes, const CodeWords& words, U16& first, U16& second) {
    constexpr int kOrAnd = 0xf8;  // a | (b & c)
    const __m512i size = TwosComplement ? _mm512_abs_epi8(codes) : codes;
    const __m512i low = _mm512_permutex2var_epi8(words.low[0], size, words.low[1]);
    const __m512i high = _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(words.high[0], size, words.high[1]), codes,
                                                   _mm512_set1_epi8(-128), kOrAnd);
    first.v = _mm512_unpacklo_epi8(low, high);
    second.v = _mm512_unpackhi_epi8(low, high);
}
// fp8 is a bf16 with a shorter exponent, whose missing upper bits are the same for every normal number. The codes are
// in the upper bytes of 16-bit words.
template <int Exponent> inline U16 decode_normal(__m512i words) {
    constexpr int kAndOr = 0xea;  // (a & b) | c
    constexpr int kKept = Exponent == 4 ? 0x87f0 : 0x8fe0, kUpper = Exponent == 4 ? 0x3800 : 0x3000;
    return {_mm512_ternarylogic_epi32(_mm512_srai_epi16(words, Exponent == 4 ? 4 : 3),
                                      _mm512_set1_epi16(static_cast<int16_t>(kKept)), _mm512_set1_epi16(kUpper),
                                      kAndOr)};
}
template <int Exponent> inline __mmask64 subnormals(__m512i codes) {
    return _mm512_testn_epi8_mask(codes, _mm512_set1_epi8(Exponent == 4 ? 0x78 : 0x7c));
}
// [4 dims][16 tokens] of fp8 -> two of [16 tokens][2 dims]
template <int Exponent> inline void decode_keys(const char* from, const CodeWords& words, U16* to) {
    struct Order {
        alignas(64) uint8_t of[64] = {}, upper[2][64] = {};
        constexpr Order() {
            for (int i = 0; i < 64; ++i) {
                of[i] = static_cast<uint8_t>((i % 16 / 8 * 2 + i % 2) * 16 + i / 16 * 4 + i % 8 / 2);
                for (int half = 0; half < 2; ++half)
                    upper[half][i] = static_cast<uint8_t>((half * 2 + i % 4 / 2) * 16 + i / 4);
            }
        }
    };
    static constexpr Order kOrder;
    constexpr __mmask64 kUpperBytes = 0xaaaaaaaaaaaaaaaa;
    const __m512i codes = _mm512_loadu_si512(from);
    if (__builtin_expect(subnormals<Exponent>(codes) != 0, 0))
        return decode_words<false>(_mm512_permutexvar_epi8(_mm512_load_si512(kOrder.of), codes), words, to[0], to[1]);
    for (int half = 0; half < 2; ++half)
        to[half] = decode_normal<Exponent>(
            _mm512_maskz_permutexvar_epi8(kUpperBytes, _mm512_load_si512(kOrder.upper[half]), codes));
}
// Two tokens' [64 dims] of fp8 -> four of [16 dims][2 tokens]: dimension d is in column d / 16 * 4 + d % 4 of vector
// d % 16 / 4.
template <int Exponent>
inline void decode_values(const char* one, const char* other, const CodeWords& words, U16* to) {
    const __m512i a = _mm512_loadu_si512(one), b = _mm512_loadu_si512(other);
    const __m512i both[2] = {_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b)};
    if (__builtin_expect((subnormals<Exponent>(a) | subnormals<Exponent>(b)) != 0, 0)) {
        decode_words<false>(both[0], words, to[0], to[1]);
        return decode_words<false>(both[1], words, to[2], to[3]);
    }
    const __m512i lower = _mm512_broadcast_i32x4(_mm_setr_epi8(-1, 0, -1, 1, -1, 2, -1, 3, -1, 4, -1, 5, -1, 6, -1, 7));
    const __m512i upper =
        _mm512_broadcast_i32x4(_mm_setr_epi8(-1, 8, -1, 9, -1, 10, -1, 11, -1, 12, -1, 13, -1, 14, -1, 15));
    for (int half = 0; half < 2; ++half) {
        to[half * 2] = decode_normal<Exponent>(_mm512_shuffle_epi8(both[half], lower));
        to[half * 2 + 1] = decode_normal<Exponent>(_mm512_shuffle_epi8(both[half], upper));
    }
}
// [16][4] signed bytes -> two of [16][2]
inline void decode_quads(U16 codes, const CodeWords& words, U16* to) {
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    decode_words<true>(_mm512_shuffle_epi8(codes.v, order), words, to[0], to[1]);
}
inline U16 subtract_bytes(U16 a, U16 b) { return {_mm512_sub_epi8(a.v, b.v)}; }

}  // namespace octavo::OCTAVO_LEVEL
