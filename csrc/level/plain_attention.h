// Attention of up to 48 query rows over plain blocks, in vectors.
//
// A span is 64 tokens. A row's scores of one span live in four vectors, then as 32-bit units of weights:
//
//          16 tokens  16         16         16             query row r, unit u: one 32-bit broadcast
//   K u=0 [k0 k0 ..][        ][        ][        ]         score[r][token] += q[r][u] . k[u][token]
//     u=1 [k1 k1 ..][        ][        ][        ]
//
//          16 dims    16  ..                               weight unit p of row r: one 32-bit broadcast
//   V p=0 [v v v ..][        ]                             out[r][dim] += w[r][p] . v[p][dim]
//     p=1 [v v v ..][        ]
//
// Only a row's weights are summed across lanes, once, at the end. Every row goes through the same operations in the
// same order whatever rows it shares a pass with, and a span that is masked for a row leaves its bits unchanged.
//
// Spans come in pieces of one block and head each, too short for the hardware to predict the next one: while one span
// is read, each of its loads prefetches the same place in the next span. Prefetches go to L2, since the few buffers for
// L1 misses would allow only half the bandwidth. A prefetch that finds the queue full is dropped, so the softmax, which
// reads no keys or values, prefetches some values of the next span before the loads that prefetch them again:
//
//     reads         K K K K  softmax  V V V V
//     prefetches    k k k k    v v    v v v v      of the next span
//
// This reads a seventh more from DRAM, from blocks and from contiguous memory alike. If the rows need more than one
// pass, as in prompts, computing a span takes longer than fetching the next one, and nothing is prefetched.
#pragma once

#include "level/latent.h"

namespace octavo::OCTAVO_LEVEL {

constexpr int kLinesPrefetchedTwice = 16;  // cache lines per row

// scores[r][v * 16 ..] for rows [0, R) and vectors [first, first + N).
template <Storage S, int R, int N, bool Prefetch>
inline void score_pass(const LayerKV& kv, const SpanPair& spans, int first, const uint32_t* query, float* scores) {
    F16 acc[R][N];
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
        OCTAVO_UNROLL for (int n = 0; n < N; ++n) acc[r][n] = F16::zero();
    const int64_t unit_stride = static_cast<int64_t>(kv.block_size) * 4;
    int64_t at = 0;
    for (int u = 0; u < kv.key_units; ++u, at += unit_stride, query += R) {
        U16 k[N];
        OCTAVO_UNROLL for (int n = 0; n < N; ++n) {
            k[n] = U16::load(spans.now.key[first + n] + at);
            if constexpr (Prefetch) __builtin_prefetch(spans.next.key[first + n] + at, 0, 2);
        }
        OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
            const U16 q = U16::set1(query[r]);
            OCTAVO_UNROLL for (int n = 0; n < N; ++n) acc[r][n] = mac<S>(acc[r][n], k[n], q);
        }
    }
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
        OCTAVO_UNROLL for (int n = 0; n < N; ++n) acc[r][n].store(scores + r * kSpan + (first + n) * 16);
}

// values[r][d ..] = values[r][d ..] * rescale[r] + weights[r] . V over units [begin_unit, end_unit) of the span. Every
// row must see all of them. Without `rescale` all factors are 1.
template <Storage S, int R, int N, bool Prefetch>
inline void value_pass(const LayerKV& kv, const SpanPair& spans, int begin_unit, int end_unit, int dim,
                       const uint32_t* weights, const float* rescale, const Rows& rows, int first_row) {
    F16 acc[R][N];
    const int64_t state_stride = rows.stride();
    float* const state = rows.values(first_row) + dim;
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
        OCTAVO_UNROLL for (int n = 0; n < N; ++n) acc[r][n] = F16::load(state + r * state_stride + n * 16);
    if (rescale)
        OCTAVO_UNROLL for (int r = 0; r < R; ++r)
            OCTAVO_UNROLL for (int n = 0; n < N; ++n) acc[r][n] = acc[r][n] * F16::set1(rescale[r]);
    const int64_t unit_stride = static_cast<int64_t>(kv.value_dim) * 4;
    for (int unit = begin_unit; unit < end_unit;) {
        constexpr int units_per_vector = 16 / kPair<S>;
        const int vector = unit / units_per_vector;
        const int stop = min(end_unit, (vector + 1) * units_per_vector);
        const int64_t offset = (unit - vector * units_per_vector) * unit_stride + dim * 4;
        const char *v = spans.now.value[vector] + offset, *next = spans.next.value[vector] + offset;
        for (; unit < stop; ++unit, v += unit_stride, next += unit_stride) {
            U16 loaded[N];
            OCTAVO_UNROLL for (int n = 0; n < N; ++n) {
                loaded[n] = U16::load(v + n * 64);
                if constexpr (Prefetch) __builtin_prefetch(next + n * 64, 0, 2);
            }
            OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
                const U16 w = U16::set1(weights[r * kSpan + unit]);
                OCTAVO_UNROLL for (int n = 0; n < N; ++n) acc[r][n] = mac<S>(acc[r][n], loaded[n], w);
            }
        }
    }
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
        OCTAVO_UNROLL for (int n = 0; n < N; ++n) acc[r][n].store(state + r * state_stride + n * 16);
}

// The same for all dimensions.
template <Storage S, int R, bool Prefetch>
[[gnu::noinline]] void all_values(const LayerKV& kv, const SpanPair& spans, int begin_unit, int end_unit,
                                  const uint32_t* weights, const float* rescale, const Rows& rows, int first_row) {
    each_vectors<kVectorsPerPass>(kv.value_dim, [&](int dim, auto vectors) {
        value_pass<S, R, vectors, Prefetch>(kv, spans, begin_unit, end_unit, dim, weights, rescale, rows, first_row);
    });
}

// The same for one row and tokens [low, high) that not all rows of its pass see. A token outside the range, of another
// sequence or of the row's own future, may hold an infinity, and zero times infinity is NaN: it is not multiplied at
// all.
template <Storage S>
[[gnu::noinline]] void value_edge(const LayerKV& kv, const Span& span, TokenRange tokens, const uint32_t* weights,
                                  float rescale, float* values) {
    constexpr int pair = kPair<S>;
    for (int dim = 0; dim < kv.value_dim; dim += 16) {
        F16 acc = F16::load(values + dim) * F16::set1(rescale);
        for (int unit = tokens.low / pair; unit * pair < tokens.high; ++unit) {
            const int token = unit * pair;
            U16 v = U16::load(span.value[token / 16] + (token % 16 / pair * int64_t{kv.value_dim} + dim) * 4);
            if (pair == 2 && token < tokens.low) v = v & U16::set1(0xffff0000u);
            if (pair == 2 && token + 1 == tokens.high) v = v & U16::set1(0x0000ffffu);
            acc = mac<S>(acc, v, U16::set1(weights[unit]));
        }
        acc.store(values + dim);
    }
}

// Scores of rows [0, R) over a span.
template <Storage S, int R, bool Prefetch>
inline void score_rows(const LayerKV& kv, const SpanPair& spans, const Visible& visible, const uint32_t* query,
                       float* scores) {
    // One vector takes half as long as all four: its sums wait for each other.
    if (kVectorsPerPass == kVectors && visible.end_vector - visible.first_vector > 1)
        return score_pass<S, R, kVectors, Prefetch>(kv, spans, 0, query, scores);
    for (int v = visible.first_vector; v < visible.end_vector; ++v)
        score_pass<S, R, 1, Prefetch>(kv, spans, v, query, scores);
}

// From scratch.scores to scratch.weights; adds the weights as rounded to the rows' sums. Returns as softmax_rows does.
template <Storage S, bool Prefetch>
[[gnu::noinline]] bool weigh_rows(const AttendTask& task, const SpanPair& spans, const Visible& visible, int first_row,
                                  int count, const Rows& rows, AttendScratch& scratch, float* rescales) {
    const U16 ones = U16::set1(S == kBf16 ? 0x3f803f80 : 0x3f800000);
    F16 sum;
    const auto score = [&](int r, int v) { return F16::load(scratch.scores + r * kSpan + v * 16); };
    const auto prefetch = [&](int r) {
        if constexpr (Prefetch)
            for (int line = 0; line < kLinesPrefetchedTwice; ++line)
                __builtin_prefetch(spans.next.value[line % kVectors] + (r * 4 + line / kVectors) * 64, 0, 2);
    };
    const auto weigh = [&](int r, int v, F16 low, F16 high, float rescale) {
        uint32_t* to = scratch.weights + r * kSpan + v * 16 / kPair<S>;
        store_both(low, high, reinterpret_cast<Element<S>*>(to));
        if (v == 0) sum = F16::zero();
        OCTAVO_UNROLL for (int u = 0; u < 32 / kPair<S>; u += 16) sum = mac<S>(sum, U16::load(to + u), ones);
        if (v + 2 < kVectors) return;
        float* row_sum = rows.sum(first_row + r);
        fma(F16::load(row_sum), F16::set1(rescale), sum).store(row_sum);
    };
    return softmax_rows<S>(task, spans.now.begin, visible, first_row, count, rows, rescales, score, prefetch, weigh);
}

// Adds the weighted values of a span that not all rows see: units that all of them see together, and what a row sees
// before and after these row by row.
template <Storage S, int R, bool Prefetch>
[[gnu::noinline]] void add_visible_values(const AttendTask& task, const SpanPair& spans, int first_row,
                                          const Rows& rows, const uint32_t* weights, float* rescale) {
    const LayerKV& kv = *task.kv;
    constexpr int pair = kPair<S>;
    TokenRange seen[R];  // non-decreasing from row to row, as positions are
    for (int r = 0; r < R; ++r) seen[r] = tokens_seen(task, spans.now.begin, first_row + r);
    int begin_unit = (seen[R - 1].low + pair - 1) / pair, end_unit = seen[0].high / pair;
    if (begin_unit >= end_unit) begin_unit = end_unit = kSpan / pair;
    const auto edge = [&](int r, TokenRange tokens) {
        if (tokens.low >= tokens.high) return;
        value_edge<S>(kv, spans.now, tokens, weights + r * kSpan, rescale[r], rows.values(first_row + r));
        rescale[r] = 1.0f;
    };
    for (int r = 0; r < R; ++r) edge(r, {seen[r].low, min(seen[r].high, begin_unit * pair)});
    all_values<S, R, Prefetch>(kv, spans, begin_unit, end_unit, weights, rescale, rows, first_row);
    for (int r = 0; r < R; ++r) rescale[r] = 1.0f;
    for (int r = 0; r < R; ++r) edge(r, {max(seen[r].low, end_unit * pair), seen[r].high});
}

// One span for rows [first_row, first_row + R): scores, new maximum, weights, weighted values.
template <Storage S, int R, bool Prefetch>
void span_rows(const AttendTask& task, const SpanPair& spans, const Visible& visible, int first_row,
               const uint32_t* query, const Rows& rows, AttendScratch& scratch) {
    float rescale[R];
    score_rows<S, R, Prefetch>(*task.kv, spans, visible, query, scratch.scores);
    const bool rescales = weigh_rows<S, Prefetch>(task, spans, visible, first_row, R, rows, scratch, rescale);
    if (visible.all)
        all_values<S, R, Prefetch>(*task.kv, spans, 0, kSpan / kPair<S>, scratch.weights,
                                   rescales ? rescale : nullptr, rows, first_row);
    else
        add_visible_values<S, R, Prefetch>(task, spans, first_row, rows, scratch.weights, rescale);
}

// One KV head's rows over one span after the other.
template <Storage S> struct RowPasses {
    static void pack(const AttendTask& task, int head, uint32_t* packed, AttendScratch&) {
        const int units = task.kv->key_units, num_rows = task.rows_per_head();
        for (int r = 0; r < num_rows; ++r)  // the hardware does not prefetch rows that are far apart
            for (int at = 0; at < units * 4; at += 64) __builtin_prefetch(query_row(task, head, r) + at);
        pack_groups<1>(num_rows, units, packed,
                       [&](int row, int, const char** from) { *from = query_row(task, head, row); });
    }

    static void add(const AttendTask& task, const Split& split, const Rows& rows, AttendScratch& scratch) {
        const int num_rows = task.rows_per_head(), units = task.kv->key_units;
        Span latents;
        each_span(task, split, [&](int head, const SpanPair& stored) {
            const Visible visible = visible_tokens(task, stored.now.begin, 0, num_rows);
            if (visible.nothing()) return;
            const SpanPair spans{with_values<S>(*task.kv, stored.now, visible, scratch, latents), stored.next};
            const uint32_t* of_head = scratch.query + head * num_rows * units;
            const Rows state = rows.from(head * num_rows);
            if (num_rows <= kMaxRows) return pass<true>(num_rows, task, spans, visible, 0, of_head, state, scratch);
            each_group(num_rows, units, of_head, [&](int first, int count, const uint32_t* query) {
                const Visible of_group = visible.all ? visible : visible_tokens(task, spans.now.begin, first, count);
                if (!of_group.nothing()) pass<false>(count, task, spans, of_group, first, query, state, scratch);
            });
        });
    }

  private:
    template <bool Prefetch, class... Arguments> static void pass(int count, Arguments&&... arguments) {
        with_constant<kMaxRows>(count, [&](auto constant) { span_rows<S, constant, Prefetch>(arguments...); });
    }
};

}  // namespace octavo::OCTAVO_LEVEL
