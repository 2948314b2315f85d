// Attention over coded keys and values (storage/codec/) in vectors: codes are decoded from blocks into registers,
// without a decoded copy in memory.
#pragma once

#include "level/coded_scores.h"
#include "level/coded_values.h"

namespace octavo::OCTAVO_LEVEL {

// From scores to weights, in place of scratch.scores and in scratch.weights as [row][64 tokens] floats; updates the
// rows' maxima and sums. What else the rows' states hold has to be multiplied by `rescale`.
[[gnu::noinline]] inline void weigh_coded_rows(const AttendTask& task, int begin, const Visible& visible, int first,
                                               int count, const Rows& rows, AttendScratch& scratch, float* rescale) {
    F16 sum;
    const auto score = [&](int r, int v) { return F16::load(scratch.scores + r * kSpan + v * 16); };
    const auto weigh = [&](int r, int v, F16 low, F16 high, float factor) {
        store_both(low, high, reinterpret_cast<float*>(scratch.weights) + r * kSpan + v * 16);
        sum = v == 0 ? low + high : sum + low + high;
        if (v + 2 < kVectors) return;
        float* row_sum = rows.sum(first + r);
        fma(F16::load(row_sum), F16::set1(factor), sum).store(row_sum);
    };
    softmax_rows<kF32>(task, begin, visible, first, count, rows, rescale, score, [](int) {}, weigh);
}

// One span for rows [first, first + count) of a head.
inline void coded_rows(const AttendTask& task, const SpanPair& spans, int head, int first, int count,
                       const uint32_t* query, const Rows& rows, AttendScratch& scratch) {
    const LayerKV& kv = *task.kv;
    const Visible visible = visible_tokens(task, spans.now.begin, first, count);
    if (visible.nothing()) return;
    for (int v = visible.first_vector; v < visible.end_vector; ++v) prefetch_fields(spans.next, v);
    const int row = head * task.rows_per_head() + first;
    with_code(kv.key_side.code, [&](auto code) {
        with_constant<kMaxRows>(count, [&](auto constant) {
            all_scores<code, constant>(kv, spans, visible, query, scratch.query_zero + 2 * row, scratch.scores);
        });
        finish_scores<code>(task, spans.now, visible, head, row, count, scratch);
    });
    float rescale[kMaxRows];
    weigh_coded_rows(task, spans.now.begin, visible, first, count, rows, scratch, rescale);
    Digits digits;
    with_code(kv.value_side.code, [&](auto code) {
        scale_weights<code>(task, spans.now, visible, head, first, count, rows, scratch, digits);
        with_constant<kMaxRows>(count, [&](auto constant) {
            if constexpr (is_fp8(code))
                all_float_values<code, constant>(kv, spans, visible, reinterpret_cast<const float*>(scratch.weights),
                                                 rescale, rows, first);
            else
                all_integer_values<code, false, constant>(kv, spans, visible, scratch.weights, digits, rescale, rows,
                                                          first);
            if constexpr (code == kCodeInt4)
                all_integer_values<code, true, constant>(kv, spans, visible, scratch.weights, digits, rescale, rows,
                                                         first);
        });
    });
}

struct CodedRowPasses {
    static void pack(const AttendTask& task, int head, uint32_t* packed, AttendScratch& scratch) {
        pack_coded_query(task, head, packed, scratch);
    }
    static void add(const AttendTask& task, const Split& split, const Rows& rows, AttendScratch& scratch) {
        const int num_rows = task.rows_per_head();
        each_span(task, split, [&](int head, const SpanPair& spans) {
            const uint32_t* of_head = scratch.query + head * num_rows * task.kv->key_units;
            const int units = coded_query_units(*task.kv);
            each_group(num_rows, units, of_head, [&](int first, int count, const uint32_t* query) {
                const SpanPair prefetched{spans.now, first ? spans.now : spans.next};  // prefetching once is enough
                coded_rows(task, prefetched, head, first, count, query, rows.from(head * num_rows), scratch);
            });
        });
    }
};

}  // namespace octavo::OCTAVO_LEVEL
