// Writes new keys and values to their blocks, applying the rotation (and the per-head norm) on the way.
//
//     qkv row   | q0 q1 .. | k0 .. | v0 .. |        one token
//                 rotated    rotated, then key   [block][head][unit][offset]     one unit every block_size units
//                 in place   as they are, value  [block][head][offset / pair][dim][offset % pair]
//                            (latents only as keys)
#pragma once

#include "level/coded_write.h"
#include "level/rowwise.h"

namespace octavo::OCTAVO_LEVEL {

template <Storage S> inline void normalise_head(char* head, const NormWeights& norm, int width) {
    if (!norm.weight) return;
    switch (norm.kind) {
        case kRmsNorm: return normalise<S, S, kRmsNorm>(head, nullptr, norm, head, width);
        case kRmsNormRoundedOnce: return normalise<S, S, kRmsNormRoundedOnce>(head, nullptr, norm, head, width);
        default: return normalise<S, S, kLayerNorm>(head, nullptr, norm, head, width);
    }
}

// Hugging Face's half rotation: (a, b) -> (a cos - b sin, b cos + a sin), a and b rotary_dim / 2 apart.
template <class T> inline void rotate(T* head, const float* cos, const float* sin, int rotary_dim) {
    const int half = rotary_dim / 2;
    for (int i = 0; i < half; i += 16) {
        const int count = half - i;
        const F16 a = load_partial(head + i, count), b = load_partial(head + half + i, count);
        const F16 c = load_partial(cos + i, count), s = load_partial(sin + i, count);
        store_partial(a * c - b * s, head + i, count);
        store_partial(fma(a, s, b * c), head + half + i, count);
    }
}

// Normalises and rotates a head of a query or a key in place.
template <Storage S>
void rope_head(const RopeTask& task, const NormWeights& norm, Element<S>* head, int64_t position) {
    const int64_t angles = position * (task.rotary_dim / 2);
    if (!task.rotates_first) normalise_head<S>(reinterpret_cast<char*>(head), norm, task.key_dim);
    rotate(head, task.cos + angles, task.sin + angles, task.rotary_dim);
    if (task.rotates_first) normalise_head<S>(reinterpret_cast<char*>(head), norm, task.key_dim);
}

template <Storage S> void rope_queries(const RopeTask& task, Element<S>* row, int64_t position) {
    for (int head = 0; head < task.num_heads; ++head, row += task.key_dim)
        rope_head<S>(task, task.query_norm, row, position);
}

template <Storage S> void rope_write(const RopeTask& task, int64_t token_begin, int64_t token_end) {
    using T = Element<S>;
    const LayerKV& kv = *task.kv;
    const auto as_bytes = [](T* p) { return reinterpret_cast<char*>(p); };
    for (int64_t token = token_begin; token < token_end; ++token) {
        T* row = reinterpret_cast<T*>(task.qkv + token * task.qkv_stride);
        const int64_t block = task.slots[token] / kv.block_size, offset = task.slots[token] % kv.block_size;
        const int64_t copies_block = task.copies ? task.copies_slots[token] / kv.block_size : 0;  // the same offset
        for (int head = 0; head < kv.kv_heads && !kv.coded(); ++head)
            for (int unit = 0; unit < kv.key_units; ++unit)
                prefetch_for_write(kv.key + block * kv.key_block_stride + head * kv.key_head_stride +
                                   (int64_t{unit} * kv.block_size + offset) * 4);
        const int64_t query_width = int64_t{task.num_heads} * task.key_dim;
        if (task.sink_queries && task.sink_positions[token] != task.positions[token]) {
            T* again = reinterpret_cast<T*>(task.sink_queries + token * task.sink_stride);
            __builtin_memcpy(again, row, query_width * sizeof(T));
            rope_queries<S>(task, again, task.sink_positions[token]);
        }
        rope_queries<S>(task, row, task.positions[token]);
        row += query_width;
        for (int head = 0; head < kv.kv_heads; ++head, row += task.key_dim) {
            rope_head<S>(task, task.key_norm, row, task.positions[token]);
            if (kv.coded()) {
                write_coded_key(kv, row, task.key_dim, block, head, offset);
                if (task.copies) write_coded_key(*task.copies, row, task.key_dim, copies_block, head, offset);
                continue;
            }
            char* key =
                const_cast<char*>(kv.key) + block * kv.key_block_stride + head * kv.key_head_stride + offset * 4;
            for (int unit = 0; unit < kv.key_units; ++unit)
                __builtin_memcpy(key + int64_t{unit} * kv.block_size * 4, as_bytes(row) + unit * 4, 4);
        }
        for (int head = 0; head < kv.kv_heads && !kv.latent; ++head, row += kv.value_dim) {
            if (kv.coded()) {
                write_coded_value(kv, row, block, head, offset);
                if (task.copies) write_coded_value(*task.copies, row, copies_block, head, offset);
                continue;
            }
            constexpr int pair = kPair<S>;
            auto* value = reinterpret_cast<T*>(const_cast<char*>(kv.value) + block * kv.value_block_stride +
                                               head * kv.value_head_stride);
            value += offset / pair * kv.value_dim * pair + offset % pair;
            for (int dim = 0; dim < kv.value_dim; ++dim) value[dim * pair] = row[dim];
        }
    }
}

}  // namespace octavo::OCTAVO_LEVEL
