// Scores of queries with coded keys: fp8 as floats times float32, integers as integers times integers.
//
// For the latter, a query is q ≈ s (256 h + l) with signed bytes h and l: the sums are exact, and only the query is
// rounded (to 2^-15 of its largest element). Scores continue in float32, times their token's scale.
#pragma once

#include "level/coded_layout.h"

namespace octavo::OCTAVO_LEVEL {

// Loads a query row as float32, rotated if keys are.
inline void load_query(const AttendTask& task, int head, int row, float* to) {
    const LayerKV& kv = *task.kv;
    const char* from = query_row(task, head, row);
    for (int d = 0; d < kv.key_units; d += 16)
        (kv.storage == kBf16 ? F16::load(reinterpret_cast<const bf16*>(from) + d)
                             : F16::load(reinterpret_cast<const float*>(from) + d))
            .store(to + d);
    if (kv.key_side.code == kCodeInt4) rotate_head(to, kv.key_units);
}

// q ≈ scale (256 h + l).
inline float split_query(const float* query, int dim, int8_t* high, int8_t* low) {
    const U16 size = U16::set1(0x7fffffffu);
    F16 most = F16::zero();
    for (int d = 0; d < dim; d += 16) most = max(most, as_float(as_bits(F16::load(query + d)) & size));
    const float largest = reduce_max(most);
    const float scale = largest / 32512.0f;
    const F16 inverse = F16::set1(scale > 1e-37f ? 1.0f / scale : 0.0f);
    for (int d = 0; d < dim; d += 16) {
        const F16 whole = F16::load(query + d) * inverse;
        round_to_int8(whole * F16::set1(1.0f / 256.0f), high + d);
        const F16 upper = F16::from_int(widen_signed(reinterpret_cast<const uint8_t*>(high + d)));
        const F16 rest = whole - upper * F16::set1(256.0f);
        round_to_int8(min(rest, F16::set1(127.0f)), low + d);
    }
    // An infinity or NaN must give NaN: a sum over bytes would hide it.
    float check = 0.0f;
    for (int d = 0; d < dim; ++d) check += query[d] * 0.0f;
    return scale + check;
}

// [group of kMaxRows rows][dim][row] floats, or [group][dim / 4][row][2] four bytes of h and of l.
inline int coded_query_units(const LayerKV& kv) { return is_fp8(kv.key_side.code) ? kv.key_units : kv.key_units / 2; }
inline void pack_coded_query(const AttendTask& task, int head, uint32_t* packed, AttendScratch& scratch) {
    const int dim = task.kv->key_units, num_rows = task.rows_per_head(), units = coded_query_units(*task.kv);
    float query[kMaxRows][kMaxHeadDim];
    if (is_fp8(task.kv->key_side.code))
        return pack_groups<1>(num_rows, units, packed, [&](int row, int r, const char** from) {
            load_query(task, head, row, query[r]);
            *from = reinterpret_cast<const char*>(query[r]);
        });
    int8_t bytes[kMaxRows][2][kMaxHeadDim];
    pack_groups<2>(num_rows, units, packed, [&](int row, int r, const char** from) {
        load_query(task, head, row, query[r]);
        int32_t* sums = scratch.query_zero + 2 * (head * num_rows + row);
        scratch.query_scale[head * num_rows + row] = split_query(query[r], dim, bytes[r][0], bytes[r][1]);
        for (int half = 0; half < 2; ++half) {
            sums[half] = 0;
            for (int d = 0; d < dim; ++d) sums[half] += bytes[r][half][d];
            from[half] = reinterpret_cast<const char*>(bytes[r][half]);
        }
    });
}

// Scores of rows [0, R) and vectors [first, first + N), not yet multiplied by any scale.
template <Code C, int R, int N>
inline void float_scores(const LayerKV& kv, const SpanPair& spans, int first, const uint32_t* query,
                         float* scores) {
    F16 acc[R][N];
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
        OCTAVO_UNROLL for (int n = 0; n < N; ++n) acc[r][n] = F16::zero();
    for (int dim = 0; dim < kv.key_units; dim += 2, query += 2 * R) {
        OCTAVO_UNROLL for (int n = 0; n < N; ++n) {
            F16 even, odd;
            decode32<C>(spans.now.key[first + n] + dim * 16, even, odd);
            if (dim % 4 == 0) __builtin_prefetch(spans.next.key[first + n] + dim * 16, 0, 2);
            OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
                acc[r][n] = fma(even, F16::set1(bits_to_float(query[r])), acc[r][n]);
                acc[r][n] = fma(odd, F16::set1(bits_to_float(query[R + r])), acc[r][n]);
            }
        }
    }
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
        OCTAVO_UNROLL for (int n = 0; n < N; ++n) acc[r][n].store(scores + r * kSpan + (first + n) * 16);
}

// The same for integer codes: products with h and with l, as [h, l][row][64 tokens].
template <Code C, int R, int N>
inline void integer_scores(const LayerKV& kv, const SpanPair& spans, int first, const uint32_t* query,
                           const int32_t* query_zero, uint32_t* scores) {
    U16 high[R][N], low[R][N];
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
        OCTAVO_UNROLL for (int n = 0; n < N; ++n) {
            // int8 codes are multiplied as unsigned bytes, 128 larger.
            high[r][n] = U16::set1(static_cast<uint32_t>(C == kCodeInt8 ? query_zero[2 * r] * -128 : 0));
            low[r][n] = U16::set1(static_cast<uint32_t>(C == kCodeInt8 ? query_zero[2 * r + 1] * -128 : 0));
        }
    constexpr int kParts = C == kCodeInt8 ? 1 : 2;
    const int units = kv.key_units / (4 * kParts);
    for (int unit = 0; unit < units; ++unit, query += kParts * 2 * R) {
        OCTAVO_UNROLL for (int n = 0; n < N; ++n) {
            const U16 codes = U16::load(spans.now.key[first + n] + unit * 64);
            __builtin_prefetch(spans.next.key[first + n] + unit * 64, 0, 2);
            if constexpr (C == kCodeInt8) {
                const U16 bytes = codes ^ U16::set1(0x80808080u);
                OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
                    high[r][n] = dot_bytes(high[r][n], bytes, U16::set1(query[2 * r]));
                    low[r][n] = dot_bytes(low[r][n], bytes, U16::set1(query[2 * r + 1]));
                }
            } else {
                const U16 mask = U16::set1(0x0f0f0f0fu);
                const U16 first_half = codes & mask, second_half = shift_right<4>(codes) & mask;
                OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
                    high[r][n] = dot_small(high[r][n], first_half, U16::set1(query[2 * r]));
                    low[r][n] = dot_small(low[r][n], first_half, U16::set1(query[2 * r + 1]));
                    high[r][n] = dot_small(high[r][n], second_half, U16::set1(query[2 * (R + r)]));
                    low[r][n] = dot_small(low[r][n], second_half, U16::set1(query[2 * (R + r) + 1]));
                }
            }
        }
    }
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
        OCTAVO_UNROLL for (int n = 0; n < N; ++n) {
            store(high[r][n], scores + r * kSpan + (first + n) * 16);
            store(low[r][n], scores + (R + r) * kSpan + (first + n) * 16);
        }
}

// Not inlined, so that there is one function per code and number of rows rather than per pair of codes: these functions
// take most of the compile time of this file.
template <Code K, int R>
[[gnu::noinline]] void all_scores(const LayerKV& kv, const SpanPair& spans, const Visible& visible,
                                  const uint32_t* query, const int32_t* query_zero, float* scores) {
    constexpr int N = kVectorsPerPass == 1 ? 1 : R <= (is_fp8(K) ? 6 : 2) ? 4 : 2;  // what fits into registers
    each_vectors<N>((visible.end_vector - visible.first_vector) * 16, [&](int token, auto vectors) {
        const int v = visible.first_vector + token / 16;
        if constexpr (is_fp8(K))
            float_scores<K, R, vectors>(kv, spans, v, query, scores);
        else
            integer_scores<K, R, vectors>(kv, spans, v, query, query_zero, reinterpret_cast<uint32_t*>(scores));
    });
}

// Scores in float32, from the sums in scratch.scores, which for integer codes are [h, l][rows][64 tokens]. `row` is the
// first of `count` rows among those of all heads.
template <Code K>
[[gnu::noinline]] void finish_scores(const AttendTask& task, const Span& span, const Visible& visible, int head,
                                     int row, int count, AttendScratch& scratch) {
    for (int v = visible.first_vector; v < visible.end_vector; ++v) {
        F16 scale = F16::set1(task.kv->key_side.scale(task.kv_head + head) * code_unit(K)), zero = F16::zero();
        if constexpr (!is_fp8(K)) scale = token_scale(span.key_field[v][0]);
        if constexpr (K == kCodeInt4) zero = token_zeros(span.key_field[v][1]);
        for (int r = 0; r < count; ++r) {
            float* at = scratch.scores + r * kSpan + v * 16;
            if constexpr (is_fp8(K)) {
                (F16::load(at) * scale).store(at);
            } else {
                const F16 high = F16::from_int(U16::load(at)), low = F16::from_int(U16::load(at + count * kSpan));
                F16 sum = fma(high, F16::set1(256.0f), low);
                const int32_t* sums = scratch.query_zero + 2 * (row + r);
                if constexpr (K == kCodeInt4)
                    sum = sum - zero * F16::set1(static_cast<float>(sums[0] * 256 + sums[1]));
                (sum * F16::set1(scratch.query_scale[row + r]) * scale).store(at);
            }
        }
    }
}

}  // namespace octavo::OCTAVO_LEVEL
