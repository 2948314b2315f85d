// Decodes keys and values to tiles of bf16, which holds every code exactly:
//
//     keys       [16 tokens][dim / 2][token][2]
//     values     [16 columns][token / 2][column][2]
//
// Columns of fp8 values are dimensions in the order that is fastest to decode (value_column). Zero points are
// subtracted from codes of int4; bf16 holds the differences exactly too.
#pragma once

#include "level/coded_tile.h"
#include "level/simd/tiles.h"

namespace octavo::OCTAVO_LEVEL {

// The factor of a decoded code, besides its scale: fp8 is decoded with an exponent whose upper bits are constant.
constexpr float tile_unit(Code code) { return code == kCodeE4m3 ? 0x1p8f : code == kCodeE5m2 ? 0x1p16f : 1.0f; }
constexpr int exponent_bits(Code code) { return code == kCodeE4m3 ? 4 : 5; }

// The bf16 of each code divided by that factor, without its sign. A byte of -128, which no encoder writes, counts as
// zero.
struct CodeTable {
    alignas(64) uint8_t high[128] = {};
    alignas(64) uint8_t low[128] = {};
    constexpr explicit CodeTable(Code code) {
        for (int bits = 0; bits < 128; ++bits) {
            const int mantissa_bits = code == kCodeE4m3 ? 3 : 2, bias = code == kCodeE4m3 ? 7 : 15;
            float value = static_cast<float>(bits);
            if (code != kCodeInt8) {
                const int exponent = bits >> mantissa_bits, fraction = bits & ((1 << mantissa_bits) - 1);
                value = static_cast<float>(exponent ? fraction | 1 << mantissa_bits : fraction);
                for (int e = (exponent ? exponent : 1) - bias - mantissa_bits; e != 0; e += e > 0 ? -1 : 1)
                    value = e > 0 ? value * 2.0f : value * 0.5f;
            }
            const uint32_t word = __builtin_bit_cast(uint32_t, value / tile_unit(code)) >> 16;
            high[bits] = static_cast<uint8_t>(word >> 8);
            low[bits] = static_cast<uint8_t>(word);
        }
    }
};
template <Code C> inline CodeWords code_words() {
    static constexpr CodeTable kTable{C};
    return load_code_words(kTable.high, kTable.low);
}

// The column into which decode_values puts a dimension of fp8.
inline int value_column(int dim) { return dim / 64 * 64 + dim % 16 / 4 * 16 + dim % 64 / 16 * 4 + dim % 4; }

// Decodes two units of int4, [16][4] bytes of two nibbles each, minus the zero points in the corresponding bytes.
inline void decode_nibbles(U16 codes, U16 zeros, const CodeWords& words, U16* to) {
    const U16 mask = U16::set1(0x0f0f0f0fu);
    decode_quads(subtract_bytes(codes & mask, zeros), words, to);
    decode_quads(subtract_bytes(shift_right<4>(codes) & mask, zeros), words, to + 2);
}
// Zero points of 16 tokens, each repeated in four bytes.
inline U16 zeros_of_tokens(const char* field) {
    const U16 zeros = widen(reinterpret_cast<const uint8_t*>(field)), pairs = zeros | shift_left<8>(zeros);
    return pairs | shift_left<16>(pairs);
}

// Decodes the keys of one tile of the context for all rows that see any of it; `visible` is what they see together.
template <Code K>
inline void decode_tile_keys(const LayerKV& kv, const TilePair& tiles, const Visible& visible, uint32_t* to) {
    const int64_t bytes = int64_t{kv.key_units} * (K == kCodeInt4 ? 8 : 16);  // of 16 tokens' codes
    const CodeWords words = code_words<is_fp8(K) ? K : kCodeInt8>();
    for (int v = visible.first_vector; v < visible.end_vector; ++v) {
        const char *from = tiles.now.key[v], *next = tiles.next.key[v];
        uint32_t* line = to + v * int64_t{kv.key_units} * 8;
        U16 zeros = U16::zero();
        if constexpr (K == kCodeInt4) zeros = zeros_of_tokens(tiles.now.key_field[v][1]);
        for (int64_t at = 0; at < bytes; at += 64) {
            __builtin_prefetch(next + at, 0, 2);
            U16 pairs[4];
            if constexpr (is_fp8(K)) {
                decode_keys<exponent_bits(K)>(from + at, words, pairs);
            } else if constexpr (K == kCodeInt8) {
                decode_quads(U16::load(from + at), words, pairs);
            } else {
                decode_nibbles(U16::load(from + at), zeros, words, pairs);
            }
            for (int i = 0; i < (K == kCodeInt4 ? 4 : 2); ++i, line += 16) store(pairs[i], line);
        }
    }
}
// Decodes the values of 16 tokens, with zeros for tokens that no row sees.
template <Code V>
inline void decode_vector(const LayerKV& kv, const TilePair& tiles, int v, const Visible& visible,
                                 uint32_t* values) {
    constexpr int kTokens = is_fp8(V) ? 2 : 4;  // stored together, or decoded together
    const CodeWords words = code_words<is_fp8(V) ? V : kCodeInt8>();
    const int64_t stride = kv.value_side.code_bytes;
    const char *from = tiles.now.value[v], *next = tiles.next.value[v];
    const bool whole = visible.low <= v * 16 && v * 16 + 16 <= visible.high;
    for (int token = v * 16; token < v * 16 + 16; token += kTokens) {
        const auto half = [&](int t) { return t >= visible.low && t < visible.high ? 0xffffu : 0u; };
        const auto mask = [&](int t) { return U16::set1(whole ? 0xffffffffu : half(t) | half(t + 1) << 16); };
        const U16 masks[2] = {mask(token), mask(token + 2)};
        uint32_t zeros = 0;  // of four tokens
        if constexpr (V == kCodeInt4) __builtin_memcpy(&zeros, tiles.now.value_field[v][1] + token % 16, 4);
        const auto put = [&](U16 pair, int which, int column) {
            store(whole ? pair : pair & masks[which],
                  values + (token / 2 + which) * 16 + column * (kTile / 2 * 16));
        };
        for (int64_t at = 0; at < stride * kTokens; at += is_fp8(V) ? 128 : 64, from += 64, next += 64) {
            __builtin_prefetch(next, 0, 2);
            U16 pairs[4];
            if constexpr (is_fp8(V)) {
                __builtin_prefetch(next + stride, 0, 2);
                decode_values<exponent_bits(V)>(from, from + stride, words, pairs);
                for (int i = 0; i < 4; ++i) put(pairs[i], 0, static_cast<int>(at / 32) + i);
            } else if constexpr (V == kCodeInt8) {
                decode_quads(U16::load(from), words, pairs);
                for (int i = 0; i < 2; ++i) put(pairs[i], i, static_cast<int>(at / 64));
            } else {
                decode_nibbles(U16::load(from), U16::set1(zeros), words, pairs);
                const int column = static_cast<int>(at / 64);
                for (int i = 0; i < 4; ++i) put(pairs[i], i % 2, column + i / 2 * (kv.value_dim / 32));
            }
        }
        if constexpr (is_fp8(V)) from += stride, next += stride;
    }
}

// Decodes the values of one tile of the context, in whole steps of 32 tokens.
template <Code V>
inline void decode_tile_values(const LayerKV& kv, const TilePair& tiles, const Visible& visible, uint32_t* to) {
    for (int v = visible.first_vector / 2 * 2; v < (visible.end_vector + 1) / 2 * 2; ++v)
        decode_vector<V>(kv, tiles, v, visible, to);
}

}  // namespace octavo::OCTAVO_LEVEL
