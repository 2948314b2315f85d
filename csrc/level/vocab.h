// Passes over a row of logits.
#pragma once

#include "level/rowwise.h"

namespace octavo::OCTAVO_LEVEL {

// The next sixteen logits, with -inf past the end.
inline F16 load_logits(const float* p, int64_t count) {
    if (count >= 16) return F16::load(p);
    float padded[16];
    for (int i = 0; i < 16; ++i) padded[i] = i < count ? p[i] : -__builtin_inff();
    return F16::load(padded);
}

// The maximum of every kVocabBlock consecutive logits, ignoring NaNs. Returns whether there are no NaNs.
inline bool block_maxima(const float* x, int64_t count, float* maxima) {
    const F16 infinity = F16::set1(__builtin_inff());
    bool numbers = true;
    for (int64_t begin = 0; begin < count; begin += kVocabBlock) {
        F16 most = F16::set1(-__builtin_inff());
        for (int64_t i = begin; i < count && i < begin + kVocabBlock; i += 16) {
            const F16 v = load_logits(x + i, count - i);
            numbers &= all_at_most(v, infinity);
            most = max(v, most);  // `most` where v is NaN
        }
        maxima[begin / kVocabBlock] = reduce_max(most);
    }
    return numbers;
}

// masses[i] = 2^((x[i] - most) * scale) for i in [0, count), count <= kVocabChunk; returns their sum. masses may be
// null.
inline float vocab_masses(const float* x, int64_t count, float most, float scale, float* masses) {
    const F16 top = F16::set1(most), factor = F16::set1(scale);
    F16 sums[2] = {F16::zero(), F16::zero()};
    for (int64_t i = 0; i < count; i += 16) {
        const F16 mass = exp2((load_logits(x + i, count - i) - top) * factor);
        sums[i / 16 % 2] = sums[i / 16 % 2] + mass;
        if (masses) store_some(mass, masses + i, count - i);
    }
    return reduce_add(sums[0] + sums[1]);
}

inline int64_t count_above(const float* x, int64_t count, float value) {
    int64_t above = 0;
    for (int64_t begin = 0; begin < count; begin += 1 << 16) {
        const int64_t end = count < begin + (1 << 16) ? count : begin + (1 << 16);
        int32_t some = 0;
        for (int64_t i = begin; i < end; ++i) some += x[i] > value;
        above += some;
    }
    return above;
}

}  // namespace octavo::OCTAVO_LEVEL
