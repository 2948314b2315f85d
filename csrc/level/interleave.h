// Interleaves rows of 32-bit units: [row][unit] -> [unit][row].
#pragma once

#include <cstdint>

#include "level/with_constant.h"

namespace octavo::OCTAVO_LEVEL {

using Quad [[gnu::vector_size(16)]] = uint32_t;

// Four units of four rows -> [unit][row], with units `stride` apart.
inline void transpose_quads(const char* const* rows, int64_t unit, uint32_t* to, int64_t stride) {
    Quad row[4];
    for (int r = 0; r < 4; ++r) __builtin_memcpy(&row[r], rows[r] + unit * 4, sizeof(Quad));
    const Quad low01 = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5);
    const Quad high01 = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7);
    const Quad low23 = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5);
    const Quad high23 = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
    const Quad units[4] = {
        __builtin_shufflevector(low01, low23, 0, 1, 4, 5), __builtin_shufflevector(low01, low23, 2, 3, 6, 7),
        __builtin_shufflevector(high01, high23, 0, 1, 4, 5), __builtin_shufflevector(high01, high23, 2, 3, 6, 7)};
    for (int u = 0; u < 4; ++u) __builtin_memcpy(to + u * stride, &units[u], sizeof(Quad));
}

// rows of `units` units -> [unit][row]
template <int R> void interleave_rows(const char* const* rows, int64_t units, uint32_t* packed) {
    const int64_t whole = units / 4 * 4;
    for (int64_t unit = 0; unit < whole; unit += 4) {
        int r = 0;
        for (; r + 4 <= R; r += 4) transpose_quads(rows + r, unit, packed + unit * R + r, R);
        for (; r < R; ++r)
            for (int64_t u = unit; u < unit + 4; ++u) __builtin_memcpy(packed + u * R + r, rows[r] + u * 4, 4);
    }
    for (int64_t unit = whole; unit < units; ++unit)
        for (int r = 0; r < R; ++r) __builtin_memcpy(packed + unit * R + r, rows[r] + unit * 4, 4);
}

constexpr int kMostInterleavedRows = 12;
inline void interleave(const char* const* rows, int64_t count, int64_t units, uint32_t* packed) {
    with_constant<kMostInterleavedRows>(static_cast<int>(count),
                                        [&](auto constant) { interleave_rows<constant>(rows, units, packed); });
}

}  // namespace octavo::OCTAVO_LEVEL
