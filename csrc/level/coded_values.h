// Sums of coded values times weights: fp8 as floats times float32, integers as integers times integers.
//
// For the latter, a span's weights, times the scales of their tokens, are w ≈ u (128 h + l) with h and l of seven bits
// and u set by the largest of them: the sums are exact, and only the weights are rounded (to 2^-15 of the largest).
// Sums continue in float32, times u. A token that a row does not see has weight zero; codes of fp8 of a token that no
// row of a pass sees are not read, since they may be NaN.
#pragma once

#include "level/coded_layout.h"

namespace octavo::OCTAVO_LEVEL {

// values[r][d ..] = values[r][d ..] * rescale[r] + weights[r] . codes, over tokens [low, high) of the span.
template <Code C, int R, int N>
inline void float_values(const LayerKV& kv, const SpanPair& spans, int low, int high, int dim,
                         const float* weights, const float* rescale, const Rows& rows, int first_row) {
    F16 acc[R][N];
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
        OCTAVO_UNROLL for (int n = 0; n < N; ++n)
            acc[r][n] = F16::load(rows.values(first_row + r) + dim + n * 16) * F16::set1(rescale[r]);
    const int64_t stride = kv.value_side.code_bytes;
    for (int token = low; token < high;) {
        const int vector = token / 16, stop = min(high, vector * 16 + 16);
        const int64_t offset = (token - vector * 16) * stride + dim;
        const char *from = spans.now.value[vector] + offset, *next = spans.next.value[vector] + offset;
        for (; token < stop; ++token, from += stride, next += stride) {
            __builtin_prefetch(next, 0, 2);
            F16 x[N];
            if constexpr (N == 1) {
                x[0] = decode16<C>(from);
            } else {
                OCTAVO_UNROLL for (int n = 0; n < N; n += 2) decode32<C>(from + n * 16, x[n], x[n + 1]);
            }
            OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
                const F16 w = F16::set1(weights[r * kSpan + token]);
                OCTAVO_UNROLL for (int n = 0; n < N; ++n) acc[r][n] = fma(x[n], w, acc[r][n]);
            }
        }
    }
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
        OCTAVO_UNROLL for (int n = 0; n < N; ++n) acc[r][n].store(rows.values(first_row + r) + dim + n * 16);
}

// Per row, what relates the integer weights of one span to the real ones.
struct Digits {
    float unit[kMaxRows];   // u
    float zeros[kMaxRows];  // the sum of integer weights times their tokens' zero points
};
constexpr float kMostWeight = 16383.0f;

// The same for integer codes, with weights in scratch.weights as [row][h, l][64 tokens] bytes. For int4, `Upper`
// selects the dimensions in the upper nibbles.
template <Code C, bool Upper, int R, int N>
inline void integer_values(const LayerKV& kv, const SpanPair& spans, int low, int high, int column,
                           const uint32_t* weights, const Digits& digits, const float* rescale, const Rows& rows,
                           int first_row) {
    U16 h[R][N], l[R][N];
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
        OCTAVO_UNROLL for (int n = 0; n < N; ++n) h[r][n] = l[r][n] = U16::zero();
    const int64_t stride = kv.value_side.code_bytes * 4;
    for (int quad = low / 4, end = (high + 3) / 4; quad < end;) {
        const int vector = quad / 4, stop = min(end, vector * 4 + 4);
        const int64_t offset = (quad - vector * 4) * stride + column * 4;
        const char *from = spans.now.value[vector] + offset, *next = spans.next.value[vector] + offset;
        for (; quad < stop; ++quad, from += stride, next += stride) {
            U16 codes[N];
            OCTAVO_UNROLL for (int n = 0; n < N; ++n) {
                codes[n] = U16::load(from + n * 64);
                if constexpr (!Upper) __builtin_prefetch(next + n * 64, 0, 2);
                if constexpr (Upper) codes[n] = shift_right<4>(codes[n]);
                if constexpr (C == kCodeInt4) codes[n] = codes[n] & U16::set1(0x0f0f0f0fu);
            }
            OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
                const U16 high_digits = U16::set1(weights[r * kSpan + quad]);
                const U16 low_digits = U16::set1(weights[r * kSpan + kSpan / 4 + quad]);
                OCTAVO_UNROLL for (int n = 0; n < N; ++n) {
                    h[r][n] = dot_small(h[r][n], high_digits, codes[n]);
                    l[r][n] = dot_small(l[r][n], low_digits, codes[n]);
                }
            }
        }
    }
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
        OCTAVO_UNROLL for (int n = 0; n < N; ++n) {
            F16 sum = F16::from_int(shift_left<7>(h[r][n]) + l[r][n]);
            if constexpr (C == kCodeInt4) sum = sum - F16::set1(digits.zeros[r]);
            float* values = rows.values(first_row + r) + column + n * 16 + (Upper ? kv.value_dim / 2 : 0);
            fma(sum, F16::set1(digits.unit[r]), F16::load(values) * F16::set1(rescale[r])).store(values);
        }
}

template <Code V, int R>
[[gnu::noinline]] void all_float_values(const LayerKV& kv, const SpanPair& spans, const Visible& visible,
                                        const float* weights, const float* rescale, const Rows& rows, int first_row) {
    each_vectors<kVectorsPerPass>(kv.value_dim, [&](int dim, auto vectors) {
        float_values<V, R, vectors>(kv, spans, visible.low, visible.high, dim, weights, rescale, rows, first_row);
    });
}

template <Code V, bool Upper, int R>
[[gnu::noinline]] void all_integer_values(const LayerKV& kv, const SpanPair& spans, const Visible& visible,
                                          const uint32_t* weights, const Digits& digits, const float* rescale,
                                          const Rows& rows, int first_row) {
    constexpr int N = kVectorsPerPass == 1 ? 1 : R <= 2 ? 4 : 2;
    each_vectors<N>(static_cast<int>(kv.value_side.code_bytes), [&](int column, auto vectors) {
        integer_values<V, Upper, R, vectors>(kv, spans, visible.low, visible.high, column, weights, digits, rescale,
                                             rows, first_row);
    });
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

// Turns the weights of a span, in scratch.weights as [row][64 tokens] floats, into the form by which its values are
// multiplied.
template <Code V>
[[gnu::noinline]] void scale_weights(const AttendTask& task, const Span& span, const Visible& visible, int head,
                                     int first_row, int count, const Rows& rows, AttendScratch& scratch,
                                     Digits& digits) {
    F16 scale[kVectors], zeros[kVectors];
    for (int v = visible.first_vector; v < visible.end_vector; ++v) {
        scale[v] = F16::set1(task.kv->value_side.scale(task.kv_head + head) * code_unit(V));
        if constexpr (!is_fp8(V)) scale[v] = token_scale(span.value_field[v][0]);
        if constexpr (V == kCodeInt4) zeros[v] = token_zeros(span.value_field[v][1]);
    }
    for (int r = 0; r < count; ++r) {
        uint32_t* row = scratch.weights + r * kSpan;
        auto* weights = reinterpret_cast<float*>(row);
        F16 scaled[kVectors], check = F16::zero();
        for (int v = 0; v < kVectors; ++v) {
            scaled[v] = F16::zero();
            if (v >= visible.first_vector && v < visible.end_vector) {
                scaled[v] = F16::load(weights + v * 16) * scale[v];
                if (!is_fp8(V) && !visible.all) {
                    // The scale of a token that the row does not see may be NaN.
                    const TokenRange seen = tokens_seen(task, span.begin, first_row + r);
                    scaled[v] = keep_lanes(scaled[v], seen.low - v * 16, seen.high - v * 16, F16::zero());
                }
            }
            check = fma(scaled[v], F16::zero(), check);
        }
        if constexpr (is_fp8(V)) {
            for (int v = 0; v < kVectors; ++v) scaled[v].store(weights + v * 16);
            continue;
        }
        // If the row sees such a token, the result must be NaN: a sum of integers would hide it.
        float* row_sum = rows.sum(first_row + r);
        (F16::load(row_sum) + check).store(row_sum);
        constexpr float kMagic = 0x1p23f;  // the value of its last place is 1
        const float most = reduce_max(max(max(scaled[0], scaled[1]), max(scaled[2], scaled[3])));
        digits.unit[r] = most * (1.0f / kMostWeight);
        const F16 inverse = F16::set1(most > 1e-33f ? kMostWeight / most : 0.0f);
        U16 bits[kVectors];
        F16 zero = F16::zero();
        for (int v = 0; v < kVectors; ++v) {
            const F16 whole = fma(scaled[v], inverse, F16::set1(kMagic));
            bits[v] = as_bits(whole);
            if (V == kCodeInt4 && v >= visible.first_vector && v < visible.end_vector)
                zero = fma(whole - F16::set1(kMagic), zeros[v], zero);
        }
        auto* to = reinterpret_cast<uint8_t*>(row);
        store_digits(bits, to, to + kSpan);
        if constexpr (V == kCodeInt4) digits.zeros[r] = reduce_add(zero);
    }
}

}  // namespace octavo::OCTAVO_LEVEL
