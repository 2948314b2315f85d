// The tiles of amx.h in plain C++, bit for bit, so that the amx level's logic can be tested on any machine.
// The functions are no templates, so that they are compiled once and not for each tile.
#pragma once

#include "level/simd/portable.h"
#include "level/simd/tile_config.h"

namespace octavo::OCTAVO_LEVEL {

struct Tiles {
    TileConfig config;
    uint32_t values[8][16][16];
};
inline thread_local Tiles t_tiles;

inline void load_tile_config(const TileConfig& config) {
    t_tiles.config = config;
    __builtin_memset(t_tiles.values, 0, sizeof t_tiles.values);
}
// In hardware, using tiles without a configuration is an illegal instruction; here they have no rows.
inline void release_tiles() { t_tiles.config = {}; }
template <int T> inline void tile_zero() { __builtin_memset(t_tiles.values[T], 0, sizeof t_tiles.values[T]); }
inline void load_rows(int tile, const void* from, int64_t stride) {
    __builtin_memset(t_tiles.values[tile], 0, sizeof t_tiles.values[tile]);
    for (int row = 0; row < t_tiles.config.rows[tile]; ++row)
        __builtin_memcpy(t_tiles.values[tile][row], static_cast<const char*>(from) + row * stride,
                         t_tiles.config.row_bytes[tile]);
}
inline void store_rows_of(int tile, void* to, int64_t stride) {
    for (int row = 0; row < t_tiles.config.rows[tile]; ++row)
        __builtin_memcpy(static_cast<char*>(to) + row * stride, t_tiles.values[tile][row],
                         t_tiles.config.row_bytes[tile]);
}
template <int T> inline void tile_load(const void* from, int64_t stride) { load_rows(T, from, stride); }
template <int T> inline void tile_store(void* to, int64_t stride) { store_rows_of(T, to, stride); }
inline float without_subnormals(float x) {
    return (float_bits(x) & 0x7f800000) ? x : bits_to_float(float_bits(x) & 0x80000000);
}
// Whether products of these pairs, and what is left when they cancel, are exact in float32 and not subnormal: then a
// multiplication and an addition round like the one operation that they stand for.
inline bool multiplies_exactly(const uint32_t (&rows)[16][16]) {
    const auto is_moderate = [](uint32_t bits) {
        const uint32_t exponent = bits >> 7 & 0xff;
        return (bits & 0x7fff) == 0 || (exponent > 127 - 40 && exponent < 127 + 40);
    };
    bool all = true;
    for (const auto& row : rows)
        for (const uint32_t pair : row) all &= is_moderate(pair & 0xffff) & is_moderate(pair >> 16);
    return all;
}
inline void dot_bf16(int sums, int a_tile, int b_tile) {
    const TileConfig& config = t_tiles.config;
    const int columns = config.row_bytes[sums] / 4, units = config.row_bytes[a_tile] / 4;
    const auto low = [](uint32_t pair) { return without_subnormals(bits_to_float(pair << 16)); };
    const auto high = [](uint32_t pair) { return without_subnormals(bits_to_float(pair & 0xffff0000u)); };
    const bool exact = multiplies_exactly(t_tiles.values[a_tile]) && multiplies_exactly(t_tiles.values[b_tile]);
    for (int m = 0; m < config.rows[sums]; ++m) {
        float even[16] = {}, odd[16] = {};
        for (int unit = 0; unit < units; ++unit) {
            const uint32_t a = t_tiles.values[a_tile][m][unit];
            const uint32_t* b = t_tiles.values[b_tile][unit];
            if (exact) {
                for (int n = 0; n < 16; ++n) even[n] += bits_to_float(a << 16) * bits_to_float(b[n] << 16);
                for (int n = 0; n < 16; ++n)
                    odd[n] += bits_to_float(a & 0xffff0000u) * bits_to_float(b[n] & 0xffff0000u);
                continue;
            }
            for (int n = 0; n < 16; ++n) {
                even[n] = without_subnormals(__builtin_fmaf(low(a), low(b[n]), even[n]));
                odd[n] = without_subnormals(__builtin_fmaf(high(a), high(b[n]), odd[n]));
            }
        }
        for (int n = 0; n < columns; ++n) {
            const float sum = without_subnormals(even[n] + odd[n]);
            uint32_t& to = t_tiles.values[sums][m][n];
            to = float_bits(without_subnormals(without_subnormals(bits_to_float(to)) + sum));
        }
    }
}
template <int Sums, int A, int B> inline void tile_dot_bf16() { dot_bf16(Sums, A, B); }

}  // namespace octavo::OCTAVO_LEVEL
