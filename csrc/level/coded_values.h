// Sums of coded values times weights: fp8 as floats times float32, integers as integers times integers.
//
// For the latter, a tile's weights, times the scales of their tokens, are w ≈ u (128 h + l) with h and l of seven bits
// and u set by the largest of them: the sums are exact, and only the weights are rounded (to 2^-15 of the largest).
// Sums continue in float32, times u. A token that a row does not see has weight zero; codes of fp8 of a token that no
// row of a pass sees are not read, since they may be NaN.
#pragma once

#include "level/coded_tile.h"

namespace octavo::OCTAVO_LEVEL {

// values[r][d ..] = values[r][d ..] * rescale[r] + weights[r] . codes, over tokens [low, high) of the tile.
template <Code C, int R, int N>
inline void float_values(const LayerKV& kv, const CodedTilePair& tiles, int low, int high, int dim,
                         const float* weights, const float* rescale, const Rows& rows, int first_row) {
    F16 acc[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n)
            acc[r][n] = F16::load(rows.values(first_row + r) + dim + n * 16) * F16::set1(rescale[r]);
    const int64_t stride = kv.value_side.code_bytes;
    for (int token = low; token < high;) {
        const int vector = token / 16, stop = min(high, vector * 16 + 16);
        const int64_t offset = (token - vector * 16) * stride + dim;
        const char *from = tiles.now.value[vector] + offset, *next = tiles.next.value[vector] + offset;
        for (; token < stop; ++token, from += stride, next += stride) {
            __builtin_prefetch(next, 0, 2);
            F16 x[N];
            if constexpr (N == 1) {
                x[0] = decode16<C>(from);
            } else {
#pragma GCC unroll 4
                for (int n = 0; n < N; n += 2) decode32<C>(from + n * 16, x[n], x[n + 1]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const F16 w = F16::set1(weights[r * kTile + token]);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) acc[r][n] = fma(x[n], w, acc[r][n]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) acc[r][n].store(rows.values(first_row + r) + dim + n * 16);
}

// Per row, what relates the integer weights of one tile to the real ones.
template <int R> struct Digits {
    float unit[R], zeros[R];  // `unit`: u; `zeros`: the sum of integer weights times their tokens' zero points
};
constexpr float kMostWeight = 16383.0f;

// The same for integer codes, with weights in scratch.weights as [row][h, l][64 tokens] bytes. For int4, `Upper`
// selects the dimensions in the upper nibbles.
template <Code C, bool Upper, int R, int N>
inline void integer_values(const LayerKV& kv, const CodedTilePair& tiles, int low, int high, int column,
                           const uint32_t* weights, const Digits<R>& digits, const float* rescale, const Rows& rows,
                           int first_row) {
    U16 h[R][N], l[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) h[r][n] = l[r][n] = U16::zero();
    const int64_t stride = kv.value_side.code_bytes * 4;
    for (int quad = low / 4, end = (high + 3) / 4; quad < end;) {
        const int vector = quad / 4, stop = min(end, vector * 4 + 4);
        const int64_t offset = (quad - vector * 4) * stride + column * 4;
        const char *from = tiles.now.value[vector] + offset, *next = tiles.next.value[vector] + offset;
        for (; quad < stop; ++quad, from += stride, next += stride) {
            U16 codes[N];
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                codes[n] = U16::load(from + n * 64);
                if constexpr (!Upper) __builtin_prefetch(next + n * 64, 0, 2);
                if constexpr (Upper) codes[n] = shift_right<4>(codes[n]);
                if constexpr (C == kCodeInt4) codes[n] = codes[n] & U16::set1(0x0f0f0f0fu);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const U16 high_digits = U16::set1(weights[r * kTile + quad]);
                const U16 low_digits = U16::set1(weights[r * kTile + kTile / 4 + quad]);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) {
                    h[r][n] = dot_small(h[r][n], high_digits, codes[n]);
                    l[r][n] = dot_small(l[r][n], low_digits, codes[n]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            F16 sum = F16::from_int(shift_left<7>(h[r][n]) + l[r][n]);
            if constexpr (C == kCodeInt4) sum = sum - F16::set1(digits.zeros[r]);
            float* values = rows.values(first_row + r) + column + n * 16 + (Upper ? kv.value_dim / 2 : 0);
            fma(sum, F16::set1(digits.unit[r]), F16::load(values) * F16::set1(rescale[r])).store(values);
        }
}

template <Code V, int R>
[[gnu::noinline]] void all_float_values(const LayerKV& kv, const CodedTilePair& tiles, const Visible& visible,
                                        const float* weights, const float* rescale, const Rows& rows, int first_row) {
    constexpr int N = kVectorsPerPass;
    int dim = 0;
    for (; dim + N * 16 <= kv.value_dim; dim += N * 16)
        float_values<V, R, N>(kv, tiles, visible.low, visible.high, dim, weights, rescale, rows, first_row);
    if constexpr (N > 1)
        for (; dim < kv.value_dim; dim += 16)
            float_values<V, R, 1>(kv, tiles, visible.low, visible.high, dim, weights, rescale, rows, first_row);
}

template <Code V, bool Upper, int R>
[[gnu::noinline]] void all_integer_values(const LayerKV& kv, const CodedTilePair& tiles, const Visible& visible,
                                          const uint32_t* weights, const Digits<R>& digits, const float* rescale,
                                          const Rows& rows, int first_row) {
    constexpr int N = kVectorsPerPass == 1 ? 1 : R <= 2 ? 4 : 2;
    const int end = static_cast<int>(kv.value_side.code_bytes);
    int column = 0;
    for (; column + N * 16 <= end; column += N * 16)
        integer_values<V, Upper, R, N>(kv, tiles, visible.low, visible.high, column, weights, digits, rescale, rows,
                                       first_row);
    if constexpr (N > 1)
        for (; column < end; column += 16)
            integer_values<V, Upper, R, 1>(kv, tiles, visible.low, visible.high, column, weights, digits, rescale, rows,
                                           first_row);
}

#ifndef OCTAVO_STORES_DIGITS
// The lower 14 bits of 64 numbers -> the upper seven and the lower seven of each. Bits 14 and 15 are zero.
inline void store_digits(const U16 (&x)[kVectors], uint8_t* high, uint8_t* low) {
    const U16 digit = U16::set1(127);
    for (int v = 0; v < kVectors; ++v) {
        narrow(shift_right<7>(x[v]) & digit, high + v * 16);
        narrow(x[v] & digit, low + v * 16);
    }
}
#endif

// Writes the weights of a tile to scratch.weights, in the form by which its values are multiplied, and updates the
// rows' sums.
template <Code V, int R> class TileWeights {
  public:
    TileWeights(const AttendTask& task, const CodedTile& tile, const Visible& visible, int head, int first_row,
                const Rows& rows, AttendScratch& scratch)
        : task_(task), tile_(tile), visible_(visible), first_row_(first_row), rows_(rows), scratch_(scratch) {
        const F16 head_scale = F16::set1(task.kv->value_side.scale(task.kv_head + head) * code_unit(V));
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            scale_[v] = head_scale, zero_[v] = F16::zero();
            if (v < visible.first_vector || v >= visible.end_vector) continue;
            if constexpr (!is_fp8(V)) scale_[v] = token_scale(tile.value_field[v][0]);
            if constexpr (V == kCodeInt4)
                zero_[v] = F16::from_int(widen(reinterpret_cast<const uint8_t*>(tile.value_field[v][1])));
        }
    }
    // Adds vectors v and v + 1 of row r; the first pair comes before the second.
    void add(int r, int v, F16 low, F16 high, float rescale) {
        add_vector(r, v, low);
        add_vector(r, v + 1, high);
        if (v + 2 == kVectors) finish(r, rescale);
    }
    Digits<R> digits;

  private:
    void add_vector(int r, int v, F16 weight) {
        sum_ = v == 0 ? weight : sum_ + weight;
        if (v < visible_.first_vector || v >= visible_.end_vector) {
            scaled_[v] = F16::zero();
            return;
        }
        scaled_[v] = weight * scale_[v];
        if constexpr (is_fp8(V)) return;
        if (!visible_.all) {
            // The scale of a token that the row does not see may be NaN.
            const TokenRange seen = tokens_seen(task_, tile_.begin, first_row_ + r);
            scaled_[v] = keep_lanes(scaled_[v], seen.low - v * 16, seen.high - v * 16, F16::zero());
        }
        // If it sees such a token, the result must be NaN: a sum of integers would hide it.
        sum_ = fma(scaled_[v], F16::zero(), sum_);
    }
    void finish(int r, float rescale) {
        float* row_sum = rows_.sum(first_row_ + r);
        fma(F16::load(row_sum), F16::set1(rescale), sum_).store(row_sum);
        uint32_t* row = scratch_.weights + r * kTile;
        if constexpr (is_fp8(V)) {
            for (int v = 0; v < kVectors; ++v) scaled_[v].store(reinterpret_cast<float*>(row) + v * 16);
            return;
        }
        constexpr float kMagic = 0x1p23f;  // the value of its last place is 1
        const float largest = reduce_max(max(max(scaled_[0], scaled_[1]), max(scaled_[2], scaled_[3])));
        digits.unit[r] = largest * (1.0f / kMostWeight);
        const F16 inverse = F16::set1(largest > 1e-33f ? kMostWeight / largest : 0.0f);
        U16 bits[kVectors];
        F16 zero = F16::zero();
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            const F16 whole = fma(scaled_[v], inverse, F16::set1(kMagic));
            bits[v] = as_bits(whole);
            if constexpr (V == kCodeInt4) zero = fma(whole - F16::set1(kMagic), zero_[v], zero);
        }
        auto* to = reinterpret_cast<uint8_t*>(row);
        store_digits(bits, to, to + kTile);
        if constexpr (V == kCodeInt4) digits.zeros[r] = reduce_add(zero);
    }

    const AttendTask& task_;
    const CodedTile& tile_;
    const Visible& visible_;
    int first_row_;
    const Rows& rows_;
    AttendScratch& scratch_;
    F16 scale_[kVectors], zero_[kVectors], scaled_[kVectors], sum_;
};

}  // namespace octavo::OCTAVO_LEVEL
