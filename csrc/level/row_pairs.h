// Products of 16 outputs and R rows by instructions that multiply rows in pairs, at the levels that have them.
//
// Two units of two outputs, and of two rows, are matrices of two rows; a vector holds four of them, and of their
// products:
//
//     units u, u + 1 of outputs 0 and 1     rows r and r + 1              sums
//     | w[u][0]  w[u + 1][0] |              | x[u][r]      x[u + 1][r]     |     | (0, r)  (0, r + 1) |
//     | w[u][1]  w[u + 1][1] |              | x[u][r + 1]  x[u + 1][r + 1] |     | (1, r)  (1, r + 1) |
//
// The bits are those that each row has alone: sums of integers are exact, and Arm defines bfmmla as two bfdot, one
// after the other (BFMatMulAdd), unless FPCR.EBF is set.
#pragma once

#include "level/simd/types.h"

namespace octavo::OCTAVO_LEVEL {

#ifdef OCTAVO_ROW_PAIRS
template <int R> constexpr bool kInPairs = R % 4 == 0;  // for fewer, arranging the operands takes as long as it saves

// Turns sums of sixteen outputs of one row each into those of pairs, and back.
template <int R, class V> [[gnu::always_inline]] inline void join_pairs(V (&sums)[R][1]) {
    OCTAVO_UNROLL for (int r = 0; r < R; r += 2) {
        const V a = sums[r][0], b = sums[r + 1][0];
        sums[r][0] = zip<0>(a, b);
        sums[r + 1][0] = zip<1>(a, b);
    }
}
template <int R, class V> [[gnu::always_inline]] inline void split_pairs(V (&sums)[R][1]) {
    OCTAVO_UNROLL for (int r = 0; r < R; r += 2) {
        const V a = sums[r][0], b = sums[r + 1][0];
        sums[r][0] = unzip<0>(a, b);
        sums[r + 1][0] = unzip<1>(a, b);
    }
}
// Adds the products with two units, which x has as [2][R].
template <int R, class V>
[[gnu::always_inline]] inline void add_pairs(V (&sums)[R][1], U16 first, U16 second, const uint32_t* x) {
    const U16 low = zip<0>(first, second), high = zip<1>(first, second);
    OCTAVO_UNROLL for (int r = 0; r < R; r += 2) {
        const U16 rows = r % 4 ? zip_broadcast<1>(x + r - 2, x + R + r - 2) : zip_broadcast<0>(x + r, x + R + r);
        sums[r][0] = multiply_pairs(sums[r][0], low, rows);
        sums[r + 1][0] = multiply_pairs(sums[r + 1][0], high, rows);
    }
}
#else
template <int R> constexpr bool kInPairs = false;
#endif

}  // namespace octavo::OCTAVO_LEVEL
