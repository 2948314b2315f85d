// The layout of the codes of 64 tokens (storage/codec/). Keys of 16 tokens are stored together, in units of one or more
// dimensions of a token; values are stored token by token, or with four tokens of one dimension together:
//
//     fp8    K [dim][16 tokens]              V [token][dim]
//     int8   K [dim / 4][16 tokens][4]       V [token / 4][dim][4]
//     int4   K [dim / 8][16 tokens][4]       V [token / 4][dim / 2][4]
#pragma once

#include "level/attention_driver.h"
#include "level/coded_codes.h"

namespace octavo::OCTAVO_LEVEL {

// The factor of a decoded code, apart from its scale: e4m3 is decoded as the half whose exponent is 8 less.
constexpr float code_unit(Code code) { return code == kCodeE4m3 ? 256.0f : 1.0f; }

#ifndef OCTAVO_LOADS_FP8_IN_PAIRS
inline void load_e5m2(const uint8_t* p, F16& low, F16& high) {
    low = load_e5m2(p);
    high = load_e5m2(p + 16);
}
inline void load_e4m3(const uint8_t* p, F16& low, F16& high) {
    low = load_e4m3(p);
    high = load_e4m3(p + 16);
}
#endif

// 32 codes of fp8 -> two vectors, in the same order.
template <Code C> inline void decode32(const char* p, F16& low, F16& high) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(p);
    if constexpr (C == kCodeE4m3)
        load_e4m3(bytes, low, high);
    else
        load_e5m2(bytes, low, high);
}

template <Code C> inline F16 decode16(const char* p) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(p);
    if constexpr (C == kCodeE4m3)
        return load_e4m3(bytes);
    else
        return load_e5m2(bytes);
}

inline void prefetch_fields(const Span& span, int v) {
    for (int f = 0; f < 2; ++f) {
        if (span.key_field[v][f]) __builtin_prefetch(span.key_field[v][f], 0, 2);
        if (span.value_field[v][f]) __builtin_prefetch(span.value_field[v][f], 0, 2);
    }
}

inline F16 token_scale(const char* field) { return F16::load(reinterpret_cast<const bf16*>(field)); }
inline F16 token_zeros(const char* field) {
    return F16::from_int(widen(reinterpret_cast<const uint8_t*>(field)));
}

}  // namespace octavo::OCTAVO_LEVEL
