// Tiles of up to 16 rows of 64 bytes, as Intel's AMX has them (Architecture Instruction Set Extensions, chapter 3).
// The compiler knows nothing of tiles: it must neither keep in registers what a tile is to read from memory, nor move
// its stores past a tile's, so loads and stores are barriers.
#pragma once

#include "level/simd/avx512.h"

namespace octavo::OCTAVO_LEVEL {

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
    void set(int tile, int num_rows, int bytes) {
        rows[tile] = static_cast<uint8_t>(num_rows);
        row_bytes[tile] = static_cast<uint16_t>(bytes);
    }
};
static_assert(sizeof(TileConfig) == 64);

// Also zeroes every tile.
inline void load_tile_config(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config) : "memory"); }
// A thread whose tiles are not released costs the system 8 KiB at each switch.
inline void release_tiles() { asm volatile("tilerelease" ::: "memory"); }
template <int T> inline void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T> inline void tile_load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T> inline void tile_store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
// sums[m][n] += sum over units of a[m][unit] . b[unit][n], pairs of bf16. Even and odd inputs are summed apart, in
// order, then added to each other and to the sum; subnormal numbers count as zero.
template <int Sums, int A, int B> inline void tile_dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(A), "i"(B));
}

// tile_coded_attention.h: bytes of the bf16 that each code of seven bits stands for; the eighth is its sign.
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
// [4 dims][16 tokens] -> two of [16 tokens][2 dims]
inline void decode_keys(const char* from, const CodeWords& words, U16* to) {
    struct Order {
        alignas(64) uint8_t of[64] = {};
        constexpr Order() {
            for (int i = 0; i < 64; ++i)
                of[i] = static_cast<uint8_t>((i % 16 / 8 * 2 + i % 2) * 16 + i / 16 * 4 + i % 8 / 2);
        }
    };
    static constexpr Order kOrder;
    const __m512i codes = _mm512_permutexvar_epi8(_mm512_load_si512(kOrder.of), _mm512_loadu_si512(from));
    decode_words<false>(codes, words, to[0], to[1]);
}
// [16 tokens][4 dims] of signed bytes -> the same
inline void decode_key_quads(U16 codes, const CodeWords& words, U16* to) {
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    decode_words<true>(_mm512_shuffle_epi8(codes.v, order), words, to[0], to[1]);
}
// Two tokens' [64 dims] -> four of [16 dims][2 tokens]: dimension d is in column d / 16 * 4 + d % 4 of d % 16 / 4.
template <bool TwosComplement>
inline void decode_values(const char* one, const char* other, const CodeWords& words, U16* to) {
    const __m512i a = _mm512_loadu_si512(one), b = _mm512_loadu_si512(other);
    decode_words<TwosComplement>(_mm512_unpacklo_epi8(a, b), words, to[0], to[1]);
    decode_words<TwosComplement>(_mm512_unpackhi_epi8(a, b), words, to[2], to[3]);
}
// Two tokens' [32 bytes] of two nibbles -> four of [16 words][2 tokens], each word's nibbles from the lowest on. They
// come 16 larger, which takes no conversion.
inline void decode_nibbles(const char* one, const char* other, U16* to) {
    constexpr int kAndOr = 0xea;  // (a & b) | c
    struct Order {
        alignas(64) uint16_t of[32] = {};
        constexpr Order() {
            for (int i = 0; i < 32; ++i) of[i] = static_cast<uint16_t>(i % 2 * 16 + i / 2);
        }
    };
    static constexpr Order kOrder;
    const __m512i both = _mm512_inserti64x4(
        _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(one))),
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(other)), 1);
    const __m512i words = _mm512_permutexvar_epi16(_mm512_load_si512(kOrder.of), both);
    const __m512i mask = _mm512_set1_epi16(0x78), sixteen = _mm512_set1_epi16(0x4180);
    to[0].v = _mm512_ternarylogic_epi32(_mm512_slli_epi16(words, 3), mask, sixteen, kAndOr);
    to[1].v = _mm512_ternarylogic_epi32(_mm512_srli_epi16(words, 1), mask, sixteen, kAndOr);
    to[2].v = _mm512_ternarylogic_epi32(_mm512_srli_epi16(words, 5), mask, sixteen, kAndOr);
    to[3].v = _mm512_ternarylogic_epi32(_mm512_srli_epi16(words, 9), mask, sixteen, kAndOr);
}

}  // namespace octavo::OCTAVO_LEVEL
