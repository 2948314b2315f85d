// The values of latents, which are stored as keys only: [unit][token] -> [token / pair][dim][pair].
//
//     bf16, pair 2    | t0 d0 d1 | t1 d0 d1 | ..    ->    | t0 t1 of d0 | t0 t1 of d1 | t0 t1 of d2 | t0 t1 of d3 |
//                     | t0 d2 d3 | t1 d2 d3 | ..
//
// Once for each span and task, whose rows then read them as the values of other plain blocks.
#pragma once

#include "level/attention_driver.h"

namespace octavo::OCTAVO_LEVEL {

// Sixteen tokens, whose units are `stride` bytes apart.
template <Storage S> inline void transpose_latents(const char* from, int64_t stride, int dim, uint32_t* to) {
    using Halves [[gnu::vector_size(16)]] = uint16_t;
    if constexpr (S == kF32) {
        for (int d = 0; d < dim; d += 4) {
            const char* rows[4];
            for (int i = 0; i < 4; ++i) rows[i] = from + (d + i) * stride;
            for (int token = 0; token < 16; token += 4)
                transpose_quads(rows, token, to + token * int64_t{dim} + d, dim);
        }
        return;
    }
    for (int d = 0; d < dim; d += 4, from += 2 * stride)
        OCTAVO_UNROLL for (int token = 0; token < 16; token += 4) {
            Halves low, high;
            __builtin_memcpy(&low, from + token * 4, sizeof low);
            __builtin_memcpy(&high, from + stride + token * 4, sizeof high);
            const Halves pairs[2] = {__builtin_shufflevector(low, high, 0, 2, 1, 3, 8, 10, 9, 11),
                                     __builtin_shufflevector(low, high, 4, 6, 5, 7, 12, 14, 13, 15)};
            for (int pair = 0; pair < 2; ++pair)
                __builtin_memcpy(to + (token / 2 + pair) * int64_t{dim} + d, &pairs[pair], sizeof low);
        }
}

// The span itself unless it is of latents; then `other`, with what is visible of its values in scratch.decoded.
template <Storage S>
inline const Span& with_values(const LayerKV& kv, const Span& span, const Visible& visible, AttendScratch& scratch,
                               Span& other) {
    if (!kv.latent) return span;
    other = span;
    for (int v = visible.first_vector; v < visible.end_vector; ++v) {
        uint32_t* values = scratch.decoded + v * (16 / kPair<S>) * int64_t{kv.value_dim};
        transpose_latents<S>(span.value[v], int64_t{kv.block_size} * 4, kv.value_dim, values);
        other.value[v] = reinterpret_cast<const char*>(values);
    }
    return other;
}

}  // namespace octavo::OCTAVO_LEVEL
