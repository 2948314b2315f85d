// Decodes coded keys and values to the layout of plain blocks of 16 tokens in bf16, which holds every code exactly:
//
//     keys       [16 tokens][dim / 2][token][2]
//     values     [token / 2][dim][2]
//
// Zero points of int4 are subtracted from codes; bf16 holds the differences exactly too. Scales are factors of scores
// and of weights.
#pragma once

#include "level/coded_layout.h"

namespace octavo::OCTAVO_LEVEL {

// Floats that bf16 holds exactly, in pairs.
inline U16 pair_exactly(F16 even, F16 odd) {
    return shift_right<16>(as_bits(even)) | (as_bits(odd) & U16::set1(0xffff0000u));
}

// A byte b in the lowest bits of 2^23 is 2^23 + b. Subtracting 2^23 + z leaves b - z.
constexpr float kByteBase = 0x1p23f;
template <int Byte> inline F16 subtract_zero(U16 bytes, F16 zero) {
    const U16 byte = Byte == 3 ? shift_right<24>(bytes) : shift_right<Byte * 8>(bytes) & U16::set1(0xff);
    return as_float(byte | U16::set1(float_bits(kByteBase))) - zero;
}
// [16][4] unsigned bytes, minus the zero points of the first to the fourth of each lane -> two of [16][2]. `zeros` are
// 2^23 larger.
inline void pair_bytes(U16 bytes, const F16 (&zeros)[4], U16* to) {
    to[0] = pair_exactly(subtract_zero<0>(bytes, zeros[0]), subtract_zero<1>(bytes, zeros[1]));
    to[1] = pair_exactly(subtract_zero<2>(bytes, zeros[2]), subtract_zero<3>(bytes, zeros[3]));
}
// 64 bytes of int8, or 128 nibbles of int4 -> two or four of [16][2], those of the lower nibbles first.
template <Code C> inline void pair_integers(const char* from, const F16 (&zeros)[4], U16* to) {
    const U16 codes = U16::load(from);
    if constexpr (C == kCodeInt8) return pair_bytes(codes ^ U16::set1(0x80808080u), zeros, to);
    const U16 mask = U16::set1(0x0f0f0f0fu);
    pair_bytes(codes & mask, zeros, to);
    pair_bytes(shift_right<4>(codes) & mask, zeros, to + 2);
}

// The keys of 16 tokens.
template <Code K>
inline void decode_keys_to_pairs(const char* from, const char* next, const char* zero_field, int dim, uint32_t* to) {
    if constexpr (is_fp8(K)) {
        for (int d = 0; d < dim; d += 2, from += 32, next += 32, to += 16) {
            F16 even, odd;
            decode32<K>(from, even, odd);
            if (d % 4 == 0) __builtin_prefetch(next, 0, 2);
            store(pair_exactly(even, odd), to);
        }
    } else {
        F16 zero = F16::set1(kByteBase + 128.0f);
        if constexpr (K == kCodeInt4)
            zero = F16::from_int(widen(reinterpret_cast<const uint8_t*>(zero_field))) + F16::set1(kByteBase);
        const F16 zeros[4] = {zero, zero, zero, zero};
        constexpr int kPairs = K == kCodeInt8 ? 2 : 4;
        for (int d = 0; d < dim; d += 2 * kPairs, from += 64, next += 64) {
            U16 pairs[kPairs];
            __builtin_prefetch(next, 0, 2);
            pair_integers<K>(from, zeros, pairs);
            OCTAVO_UNROLL for (int i = 0; i < kPairs; ++i, to += 16) store(pairs[i], to);
        }
    }
}

// The values of 16 tokens, of which those outside [low, high) become zero: what no row sees may be NaN.
template <Code V>
inline void decode_values_to_pairs(const char* from, const char* next, const char* zero_field, int dim, int low,
                                   int high, uint32_t* to) {
    const bool whole = low <= 0 && high >= 16;
    const auto mask_of = [&](int token) {
        const auto half = [&](int t) { return t >= low && t < high ? 0xffffu : 0u; };
        return U16::set1(half(token) | half(token + 1) << 16);
    };
    const auto put = [&](U16 pairs, int token, int d) {
        store(whole ? pairs : pairs & mask_of(token), to + token / 2 * int64_t{dim} + d);
    };
    if constexpr (is_fp8(V)) {
        for (int token = 0; token < 16; token += 2, from += 2 * dim, next += 2 * dim)
            for (int d = 0; d < dim; d += 16) {
                __builtin_prefetch(next + 2 * d, 0, 2);
                put(pair_exactly(decode16<V>(from + d), decode16<V>(from + dim + d)), token, d);
            }
    } else {
        F16 zeros[4];
        for (F16& zero : zeros) zero = F16::set1(kByteBase + 128.0f);
        const int columns = V == kCodeInt8 ? dim : dim / 2;
        for (int token = 0; token < 16; token += 4) {
            if constexpr (V == kCodeInt4)
                for (int i = 0; i < 4; ++i)
                    zeros[i] = F16::set1(kByteBase + static_cast<float>(static_cast<uint8_t>(zero_field[token + i])));
            for (int d = 0; d < columns; d += 16, from += 64, next += 64) {
                U16 pairs[V == kCodeInt8 ? 2 : 4];
                __builtin_prefetch(next, 0, 2);
                pair_integers<V>(from, zeros, pairs);
                put(pairs[0], token, d);
                put(pairs[1], token + 2, d);
                if constexpr (V == kCodeInt4) {
                    put(pairs[2], token, columns + d);
                    put(pairs[3], token + 2, columns + d);
                }
            }
        }
    }
}

// One span of the context for all rows that see any of it; `visible` is what they see together. Values become whole
// steps of 32 tokens, which matrix tiles multiply.
inline void decode_to_plain(const LayerKV& kv, const SpanPair& spans, const Visible& visible, uint32_t* keys,
                            uint32_t* values) {
    const Span &now = spans.now, &next = spans.next;
    for (int v = visible.first_vector; v < visible.end_vector; ++v) {
        prefetch_fields(next, v);
        with_code(kv.key_side.code, [&](auto code) {
            decode_keys_to_pairs<code>(now.key[v], next.key[v], now.key_field[v][1], kv.key_units,
                                       keys + v * int64_t{kv.key_units} * 8);
        });
    }
    for (int v = visible.first_vector / 2 * 2; v < (visible.end_vector + 1) / 2 * 2; ++v)
        with_code(kv.value_side.code, [&](auto code) {
            decode_values_to_pairs<code>(now.value[v], next.value[v], now.value_field[v][1], kv.value_dim,
                                         visible.low - v * 16, visible.high - v * 16,
                                         values + v * int64_t{kv.value_dim} * 8);
        });
}

}  // namespace octavo::OCTAVO_LEVEL
