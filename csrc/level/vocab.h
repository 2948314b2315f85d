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
    F16 even = F16::zero(), odd = F16::zero();
    // Exponents are not positive: `most` is the largest.
    const auto mass_of = [&](F16 v) { return exp2_bounded(max(F16::set1(-200.0f), (v - top) * factor)); };
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const F16 first = mass_of(F16::load(x + i)), second = mass_of(F16::load(x + i + 16));
        even = even + first, odd = odd + second;
        if (masses) first.store(masses + i), second.store(masses + i + 16);
    }
    const auto add_some = [&](F16& sum) {
        if (i >= count) return;
        const F16 mass = mass_of(load_logits(x + i, count - i));
        sum = sum + mass;
        if (masses) store_partial(mass, masses + i, count - i);
        i += 16;
    };
    add_some(even);
    add_some(odd);
    return reduce_add(even + odd);
}

// The sum of the masses that are at least `least`; `count` is a multiple of 16.
inline double mass_from(const float* masses, int64_t count, float least) {
    double sums[16] = {};
    for (int64_t i = 0; i < count; i += 16)
        for (int lane = 0; lane < 16; ++lane) sums[lane] += masses[i + lane] >= least ? masses[i + lane] : 0.0f;
    double four[4];
    for (int lane = 0; lane < 4; ++lane) four[lane] = sums[lane] + sums[lane + 4] + (sums[lane + 8] + sums[lane + 12]);
    return four[0] + four[1] + (four[2] + four[3]);
}

// The places of the numbers in [least, beyond), in ascending order; returns how many. `count` is a multiple of 16.
inline int64_t list_between(const float* x, int64_t count, float least, float beyond, int32_t* places) {
    int64_t found = 0;
    for (int64_t begin = 0; begin < count; begin += 16) {
        int some = 0;
        for (int64_t i = begin; i < begin + 16; ++i) some |= (x[i] >= least) & (x[i] < beyond);
        for (int64_t i = begin; some && i < begin + 16; ++i)
            if (x[i] >= least && x[i] < beyond) places[found++] = static_cast<int32_t>(i);
    }
    return found;
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
