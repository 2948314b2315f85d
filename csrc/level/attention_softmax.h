// The softmax of attention over one span of tokens: which tokens rows see, the running maximum, and the weights.
#pragma once

#include "level/attention_state.h"
#include "level/rowwise.h"

namespace octavo::OCTAVO_LEVEL {

constexpr float kMasked = -1e33f;  // its weight is exactly zero against any maximum, at any scale
constexpr float kGrowth = 8.0f;    // how far scores may exceed a row's maximum, in powers of two
// A maximum is a rounded product; the scores' products are not rounded before it is subtracted. Above this maximum they
// are: rounding would leave them more than a float holds as a power of two (2^26: the last place counts kGrowth).
constexpr float kExactMax = 0x1p26f;
constexpr int kVectors = kSpan / 16;

// Weights are multiplied in the storage type, which determines how exact they need to be.
template <Storage S> inline F16 exp2_weight(F16 x) {
    if constexpr (S == kBf16)
        return exp2_coarse(x);
    else
        return exp2_bounded(x);
}

struct TokenRange {
    int low, high;  // within a span
};
inline TokenRange tokens_seen(const AttendTask& task, int begin, int row) {
    const int position = task.first_position + row / task.group_size;
    return {max(task.first_read(position) - begin, 0), min(task.end_read(position) - begin, kSpan)};
}

// The tokens [low, high) of a span that some of its rows see, and the vectors that hold them.
struct Visible {
    int low, high, first_vector, end_vector;
    bool all;    // every row sees every token, as in most spans of a long context
    bool whole;  // and scores are not capped
    bool nothing() const { return high <= 0 || low >= kSpan || low >= high; }
};
inline Visible visible_tokens(const AttendTask& task, int begin, int first_row, int count) {
    const int first = task.first_position + first_row / task.group_size;
    const int last = task.first_position + (first_row + count - 1) / task.group_size;
    Visible visible;
    visible.high = min(task.end_read(last) - begin, kSpan);
    visible.low = max(task.first_read(first) - begin, 0);
    visible.first_vector = visible.low / 16;
    visible.end_vector = (visible.high + 15) / 16;
    visible.all = task.end_read(first) - begin >= kSpan && task.first_read(last) <= begin;
    visible.whole = visible.all && task.softcap == 0.0f;
    return visible;
}

// Notes the sum of a row's weights for each 16 tokens of which it sees some.
template <class Weights>
inline void record_mass(const AttendTask& task, int begin, int row, TokenRange seen, float row_max,
                      const Weights& weights) {
    RowMass* mass = task.mass + row * task.mass_stride + begin / 16;
    for (int v = 0; v < kVectors; ++v)
        if (seen.low < v * 16 + 16 && seen.high > v * 16) mass[v] = {reduce_add(weights(v)), row_max};
}

// The softmax of rows [first_row, first_row + count) over a span: takes score(r, vector) and passes the weights, two
// vectors at a time, to weigh(r, vector, low, high, rescale), where `rescale` is the factor by which the row's state
// must then be multiplied. Updates the rows' maxima, keeps the factors in `rescales`, and returns whether any of them
// is not 1. Calls `meanwhile(r)` in between.
//
// A row's maximum is the largest score of one of its spans so far, and others may exceed it by kGrowth: for weights and
// sums, which are floating-point numbers, a common factor makes no difference. Following every growth would rescale
// the states about three times in eight spans, after branches that cannot be predicted.
template <Storage S, class Score, class Meanwhile, class Weigh>
[[gnu::always_inline]] inline bool softmax_rows(const AttendTask& task, int begin, const Visible& visible,
                                                int first_row, int count, const Rows& rows, float* rescales,
                                                const Score& score, const Meanwhile& meanwhile, const Weigh& weigh) {
    // Without a cap, scores are scaled together with the subtraction of the maximum: scaling and rounding keep their
    // order, so the maximum can be found first.
    const float cap = task.softcap * kLog2E, into_cap = task.scale / task.softcap;
    const F16 factor = F16::set1(task.softcap != 0.0f ? 1.0f : task.scale * kLog2E);
    bool any = false;
    for (int r = 0; r < count; ++r) {
        F16 s[kVectors], top = F16::set1(kNoScore);
        TokenRange seen{0, kSpan};
        if (visible.whole) {
            OCTAVO_UNROLL for (int v = 0; v < kVectors; ++v) {
                s[v] = score(r, v);
                top = max(top, s[v]);
            }
        } else {
            seen = tokens_seen(task, begin, first_row + r);
            OCTAVO_UNROLL for (int v = 0; v < kVectors; ++v) {
                s[v] = F16::set1(kMasked);
                if (v < visible.first_vector || v >= visible.end_vector) continue;
                s[v] = score(r, v);
                if (task.softcap != 0.0f) s[v] = tanh16(s[v] * F16::set1(into_cap)) * F16::set1(cap);
                if (seen.low > v * 16 || seen.high < v * 16 + 16)
                    s[v] = keep_lanes(s[v], seen.low - v * 16, seen.high - v * 16, F16::set1(kMasked));
                top = max(top, s[v]);
            }
        }
        meanwhile(r);
        top = top * factor;
        float& row_max = rows.max(first_row + r);
        rescales[r] = 1.0f;
        if (any_greater(top, F16::set1(row_max + kGrowth))) {
            const float new_max = reduce_max(top);
            if (row_max != kNoScore) {  // else the state is zero
                rescales[r] = exp2_scalar(row_max - new_max);
                any = true;
            }
            row_max = new_max;
        }
        F16 still = factor;
        if (__builtin_fabsf(row_max) > kExactMax) [[unlikely]] {
            for (int v = 0; v < kVectors; ++v) s[v] = s[v] * factor;
            still = F16::set1(1.0f);
        }
        const F16 less = F16::set1(-row_max);
        if (task.mass) [[unlikely]]
            record_mass(task, begin, rows.first + first_row + r, seen, row_max,
                      [&](int v) { return exp2_weight<S>(fma(s[v], still, less)); });
        OCTAVO_UNROLL for (int v = 0; v < kVectors; v += 2)
            weigh(r, v, exp2_weight<S>(fma(s[v], still, less)), exp2_weight<S>(fma(s[v + 1], still, less)),
                  rescales[r]);
    }
    return any;
}

}  // namespace octavo::OCTAVO_LEVEL
