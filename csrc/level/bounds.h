// The bounds of a block's keys, and how high a query could score against any key within them (Quest, Tang et al. 2024).
//
//     bounds of a head   | largest of each dimension | smallest of each |
//     query              | max(q, 0)                 | min(q, 0)        |        their product bounds q . k from above
#pragma once

#include "level/rowwise.h"

namespace octavo::OCTAVO_LEVEL {

template <class T> inline T element_of(float x) {
    if constexpr (std::is_same_v<T, float>)
        return x;
    else
        return float_to_bf16(x);
}

// Writes the bounds of one head of a full block.
template <Storage S> void bound_keys(const LayerKV& kv, int64_t block, int head, char* bounds) {
    constexpr int pair = kPair<S>;
    auto* largest = reinterpret_cast<Element<S>*>(bounds);
    auto* smallest = largest + kv.key_units * pair;
    const char* key = kv.key + block * kv.key_block_stride + head * kv.key_head_stride;
    for (int unit = 0; unit < kv.key_units; ++unit) {
        F16 top[pair], low[pair];  // low: of the negated elements
        for (int offset = 0; offset < kv.block_size; offset += 16, key += 64) {
            const U16 loaded = U16::load(key);
            for (int i = 0; i < pair; ++i) {
                const F16 x = as_float(pair == 1 ? loaded : i == 0 ? shift_left<16>(loaded)
                                                                   : loaded & U16::set1(0xffff0000u));
                const F16 negated = F16::zero() - x;
                top[i] = offset ? max(top[i], x) : x;
                low[i] = offset ? max(low[i], negated) : negated;
            }
        }
        for (int i = 0; i < pair; ++i) {
            largest[unit * pair + i] = element_of<Element<S>>(reduce_max(top[i]));
            smallest[unit * pair + i] = element_of<Element<S>>(-reduce_max(low[i]));
        }
    }
}

constexpr int kPrefetched = 8;  // blocks: they are far apart, so the hardware does not prefetch the next one

// The highest score that any of a KV head's queries could have in each of some blocks.
template <Storage S> void score_bounds(const BoundsTask& task) {
    using T = Element<S>;
    constexpr int kAtOnce = 4, step = 16 * kPair<S>;
    const int width = 2 * task.key_dim;
    alignas(64) T queries[kAtOnce][2 * kMaxHeadDim];
    for (int first = 0; first < task.group_size; first += kAtOnce) {
        const int count = min(task.group_size - first, kAtOnce);
        for (int h = 0; h < count; ++h) {
            const auto* query = reinterpret_cast<const T*>(task.query + (first + h) * task.query_head_stride);
            for (int d = 0; d < task.key_dim; d += 16) {
                const F16 q = F16::load(query + d);
                max(q, F16::zero()).store(queries[h] + d);
                min(q, F16::zero()).store(queries[h] + task.key_dim + d);
            }
        }
        for (int i = 0; i < task.count; ++i) {
            const auto bounds_at = [&](int at) {
                return reinterpret_cast<const T*>(task.bounds + task.blocks[at] * task.block_stride);
            };
            const T *bounds = bounds_at(i), *later = bounds_at(min(i + kPrefetched, task.count - 1));
            F16 sums[kAtOnce] = {F16::zero(), F16::zero(), F16::zero(), F16::zero()};
            for (int d = 0; d < width; d += step) {
                const U16 bound = U16::load(bounds + d);
                __builtin_prefetch(later + d, 0, 3);
                for (int h = 0; h < count; ++h) sums[h] = mac<S>(sums[h], bound, U16::load(queries[h] + d));
            }
            float best = first ? task.scores[i] : reduce_add(sums[0]);
            for (int h = first ? 0 : 1; h < count; ++h) {
                const float score = reduce_add(sums[h]);
                best = score > best ? score : best;
            }
            task.scores[i] = best;
        }
    }
}

}  // namespace octavo::OCTAVO_LEVEL
