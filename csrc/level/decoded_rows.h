// Shared by the kernels that decode coded keys and values to bf16 before they multiply them, in tiles or in vectors:
// scales are factors of scores and of weights.
//
//     scratch.factors    [span of 64 tokens][scales of keys, of values][token]
#pragma once

#include "level/coded_scores.h"

namespace octavo::OCTAVO_LEVEL {

enum Factor { kKeyScale, kValueScale, kFactors };

// Loads the factors of a span's tokens.
inline void load_factors(const AttendTask& task, const Span& span, int head, const Visible& visible, float* to) {
    const LayerKV& kv = *task.kv;
    const Code keys = kv.key_side.code, values = kv.value_side.code;
    const F16 key_head = F16::set1(kv.key_side.scale(task.kv_head + head) * code_unit(keys));
    const F16 value_head = F16::set1(kv.value_side.scale(task.kv_head + head) * code_unit(values));
    for (int v = 0; v < kVectors; ++v, to += 16) {
        F16 key = key_head, value = value_head;
        if (v >= visible.first_vector && v < visible.end_vector) {
            if (!is_fp8(keys)) key = token_scale(span.key_field[v][0]);
            if (!is_fp8(values)) value = token_scale(span.value_field[v][0]);
        }
        key.store(to + kKeyScale * kSpan);
        value.store(to + kValueScale * kSpan);
    }
}

// Rotates a query if keys are, and rounds it to bf16.
inline void load_rounded_query(const AttendTask& task, int head, int row, bf16* to) {
    const int dim = task.kv->key_units;
    if (task.kv->key_side.code != kCodeInt4) {
        __builtin_memcpy(to, query_row(task, head, row), int64_t{dim} * 2);
        return;
    }
    float query[kMaxHeadDim];
    load_query(task, head, row, query);
    for (int d = 0; d < dim; d += 16) F16::load(query + d).store(to + d);
}

// From scratch.scores to scratch.weights, in bf16; updates the rows' maxima and sums. What else the rows' states hold
// has to be multiplied by `rescale`.
[[gnu::noinline]] inline void weigh_decoded_rows(const AttendTask& task, int begin, const Visible& visible,
                                                 const float* factors, int first, int count, const Rows& rows,
                                                 AttendScratch& scratch, float* rescale) {
    const auto factor = [&](Factor which, int v) { return F16::load(factors + which * kSpan + v * 16); };
    const auto score_of = [&](int r, int v) {
        return F16::load(scratch.scores + r * kSpan + v * 16) * factor(kKeyScale, v);
    };
    F16 sums[16];
    for (int r = 0; r < count; ++r) sums[r] = F16::zero();
    const auto weigh_two = [&](int r, int v, F16 low, F16 high, float) {
        sums[r] = sums[r] + low + high;
        low = low * factor(kValueScale, v), high = high * factor(kValueScale, v + 1);
        if (!visible.all) {
            // The scale of a token that the row does not see may be NaN.
            const TokenRange seen = tokens_seen(task, begin, first + r);
            low = keep_lanes(low, seen.low - v * 16, seen.high - v * 16, F16::zero());
            high = keep_lanes(high, seen.low - v * 16 - 16, seen.high - v * 16 - 16, F16::zero());
        }
        store_both(low, high, reinterpret_cast<bf16*>(scratch.weights + r * kSpan) + v * 16);
    };
    softmax_rows<kBf16>(task, begin, visible, first, count, rows, rescale, score_of, [](int) {}, weigh_two);
    for (int r = 0; r < count; ++r) {
        float* sum = rows.sum(first + r);
        fma(F16::load(sum), F16::set1(rescale[r]), sums[r]).store(sum);
    }
}

}  // namespace octavo::OCTAVO_LEVEL
