// Attention of a prompt over coded keys and values in tiles, where its bits may be others than a decode's.
//
// A tile of the context is decoded once, into the core's cache, for all the rows of a KV head, and multiplied from
// there as in tile_attention.h:
//
//     K -> scratch.keys       [16 tokens][dim / 2][token][2]
//     V -> scratch.values     [16 columns][token / 2][column][2]
//
// bf16 holds every code exactly. Queries, rotated where keys are, and weights, times their token's scale, are rounded
// to it as those of uncoded blocks are. Columns of fp8 are dimensions in an order that decoding is quick in, until the
// end.
// int4's values are 16 too large: that and the zero points are summed by row, and taken off once a split.
#pragma once

#include "level/coded_attention.h"
#include "level/tile_attention.h"

namespace octavo::OCTAVO_LEVEL {

// Heads that fill tiles, of a prompt: a token that comes alone is sooner done in vectors, which also read each code for
// itself, and so would be those that must have the same bits. What is float32 stays so: no tile multiplies it.
inline bool attends_codes_in_tiles(const AttendTask& task) {
    const LayerKV& kv = *task.kv;
    return kv.storage == kBf16 && kv.key_units % 64 == 0 && kv.value_dim % 64 == 0 && !task.exact &&
           task.num_tokens > 1;
}

// What a code is a multiple of, beside its scale: fp8 is decoded with an exponent whose upper bits are constant.
constexpr float tile_unit(Code code) { return code == kCodeE4m3 ? 0x1p8f : code == kCodeE5m2 ? 0x1p16f : 1.0f; }
constexpr int exponent_bits(Code code) { return code == kCodeE4m3 ? 4 : 5; }

// The bf16 of each code over that unit, without its sign. A byte of -128, which no vector is encoded to, counts as
// zero.
struct CodeTable {
    alignas(64) uint8_t high[128] = {};
    alignas(64) uint8_t low[128] = {};
    constexpr explicit CodeTable(Code code) {
        for (int bits = 0; bits < 128; ++bits) {
            const int mantissa_bits = code == kCodeE4m3 ? 3 : 2, bias = code == kCodeE4m3 ? 7 : 15;
            float value = static_cast<float>(bits);
            if (code != kCodeInt8) {
                const int exponent = bits >> mantissa_bits, fraction = bits & ((1 << mantissa_bits) - 1);
                value = static_cast<float>(exponent ? fraction | 1 << mantissa_bits : fraction);
                for (int e = (exponent ? exponent : 1) - bias - mantissa_bits; e != 0; e += e > 0 ? -1 : 1)
                    value = e > 0 ? value * 2.0f : value * 0.5f;
            }
            const uint32_t word = __builtin_bit_cast(uint32_t, value / tile_unit(code)) >> 16;
            high[bits] = static_cast<uint8_t>(word >> 8);
            low[bits] = static_cast<uint8_t>(word);
        }
    }
};
template <Code C> inline CodeWords code_words() {
    static constexpr CodeTable kTable{C};
    return load_code_words(kTable.high, kTable.low);
}

// Where decode_values puts a dimension of fp8.
inline int value_column(int dim) { return dim / 64 * 64 + dim % 16 / 4 * 16 + dim % 64 / 16 * 4 + dim % 4; }

template <Code K, Code V> class CodedTilePasses {
  public:
    ~CodedTilePasses() {
        if (configured_) release_tiles();
    }

    // [row][dim] bf16, in the room of [row][dim] floats.
    static void pack(const AttendTask& task, int head, uint32_t* packed, AttendScratch& scratch) {
        const int dim = task.kv->key_units;
        for (int r = 0; r < task.rows_per_head(); ++r, packed += dim) {
            if constexpr (K != kCodeInt4) {
                __builtin_memcpy(packed, query_row(task, head, r), int64_t{dim} * 2);
                continue;
            }
            float query[kMaxHeadDim];
            load_query(task, head, r, query);
            F16 sum = F16::zero();
            for (int d = 0; d < dim; d += 16) {
                auto* to = reinterpret_cast<bf16*>(packed) + d;
                F16::load(query + d).store(to);
                sum = sum + F16::load(to);
            }
            scratch.query_sum[head * task.rows_per_head() + r] = reduce_add(sum);
        }
    }

    static void begin_split(const AttendTask& task, AttendScratch& scratch) {
        if constexpr (V == kCodeInt4)
            for (int r = 0; r < task.kv_heads * task.rows_per_head(); ++r) F16::zero().store(scratch.excess + r * 16);
    }

    // All rows of one KV head over one tile of the context.
    void add(const AttendTask& task, const CodedTilePair& tiles, int head, const uint32_t* query, const Rows& rows,
             AttendScratch& scratch) {
        const LayerKV& kv = *task.kv;
        const int num_rows = task.rows_per_head();
        const Visible all = visible_tokens(task, tiles.now.begin, 0, num_rows);
        if (all.nothing()) return;
        if (num_rows <= kTileRows)
            decode<true>(kv, tiles, all, scratch);
        else
            decode<false>(kv, tiles, all, scratch);
        const Scales scales(task, tiles.now, head, all);
        const RowGroups groups(num_rows, kTileRows);
        for (int64_t group = 0; group < groups.count; ++group) {
            const int first = static_cast<int>(groups.begin(group));
            const int count = static_cast<int>(groups.begin(group + 1)) - first;
            const Visible visible = visible_tokens(task, tiles.now.begin, first, count);
            if (visible.nothing()) continue;
            configure(count);
            score(kv, visible, query + int64_t{first} * kv.key_units, scratch);
            weigh(task, tiles.now.begin, visible, scales, head, first, count, rows, scratch);
            add_values(kv, visible, first, rows, scratch);
        }
    }

    static void end_split(const AttendTask& task, const Rows& rows, const AttendScratch& scratch) {
        if constexpr (V == kCodeInt4)
            for (int r = 0; r < task.kv_heads * task.rows_per_head(); ++r) {
                const F16 excess = F16::set1(reduce_add(F16::load(scratch.excess + r * 16)));
                float* values = rows.values(r);
                for (int d = 0; d < rows.value_dim; d += 16) (F16::load(values + d) - excess).store(values + d);
            }
    }

    // Columns become dimensions.
    static void finish(const AttendTask& task, const Rows& total) {
        if constexpr (!is_fp8(V)) return;
        int column[kMaxHeadDim];
        for (int d = 0; d < total.value_dim; ++d) column[d] = value_column(d);
        float columns[kMaxHeadDim];
        for (int r = 0; r < task.kv_heads * task.rows_per_head(); ++r) {
            __builtin_memcpy(columns, total.values(r), int64_t{total.value_dim} * 4);
            for (int d = 0; d < total.value_dim; ++d) total.values(r)[d] = columns[column[d]];
        }
    }

  private:
    // What a tile's tokens are multiplied by, and what is to be taken off codes of values.
    struct Scales {
        F16 key[kVectors], key_zero[kVectors], value[kVectors], value_zero[kVectors];
        Scales(const AttendTask& task, const CodedTile& tile, int head, const Visible& visible) {
            const LayerKV& kv = *task.kv;
            const F16 key_head = F16::set1(kv.key_side.scale(task.kv_head + head) * tile_unit(K));
            const F16 value_head = F16::set1(kv.value_side.scale(task.kv_head + head) * tile_unit(V));
            const auto zero_point = [](const char* field) {
                return F16::from_int(widen(reinterpret_cast<const uint8_t*>(field)));
            };
            for (int v = 0; v < kVectors; ++v) {
                key[v] = key_head, value[v] = value_head, key_zero[v] = value_zero[v] = F16::zero();
                if (v < visible.first_vector || v >= visible.end_vector) continue;
                if constexpr (!is_fp8(K)) key[v] = token_scale(tile.key_field[v][0]);
                if constexpr (!is_fp8(V)) value[v] = token_scale(tile.value_field[v][0]);
                if constexpr (K == kCodeInt4) key_zero[v] = zero_point(tile.key_field[v][1]);
                if constexpr (V == kCodeInt4) value_zero[v] = zero_point(tile.value_field[v][1]) + F16::set1(16.0f);
            }
        }
    };

    void configure(int rows) {
        if (rows == configured_) return;
        configured_ = rows;
        TileConfig config;
        for (int tile = 0; tile < 6; ++tile) config.set(tile, rows, 64);
        config.set(6, 16, 64);
        config.set(7, 16, 64);
        load_tile_config(config);
    }

    template <bool Ask>
    static void decode(const LayerKV& kv, const CodedTilePair& tiles, const Visible& visible, AttendScratch& scratch) {
        decode_tile_keys<Ask>(kv, tiles, visible, scratch.keys);
        const int step = kTileTokens / 16;
        for (int v = visible.first_vector / step * step; v < (visible.end_vector + step - 1) / step * step; ++v)
            decode_vector_values<Ask>(kv, tiles, v, visible, scratch.values);
        if constexpr (Ask)
            for (int v = visible.first_vector; v < visible.end_vector; ++v) ask_fields(tiles.next, v);
    }

    template <bool Ask>
    static void decode_tile_keys(const LayerKV& kv, const CodedTilePair& tiles, const Visible& visible, uint32_t* to) {
        const int64_t bytes = int64_t{kv.key_units} * (K == kCodeInt4 ? 8 : 16);  // of 16 tokens' codes
        const CodeWords words = code_words<is_fp8(K) ? K : kCodeInt8>();
        for (int v = visible.first_vector; v < visible.end_vector; ++v) {
            const char *from = tiles.now.key[v], *next = tiles.next.key[v];
            uint32_t* line = to + v * keys_stride(kv);
            for (int64_t at = 0; at < bytes; at += 64) {
                if constexpr (Ask) __builtin_prefetch(next + at, 0, 2);
                U16 pairs[4];
                if constexpr (is_fp8(K)) {
                    decode_keys<exponent_bits(K)>(from + at, words, pairs);
                } else if constexpr (K == kCodeInt8) {
                    decode_quads(U16::load(from + at), words, pairs);
                } else {
                    const U16 codes = U16::load(from + at), mask = U16::set1(0x0f0f0f0fu);
                    decode_quads(codes & mask, words, pairs);
                    decode_quads(shift_right<4>(codes) & mask, words, pairs + 2);
                }
                for (int i = 0; i < (K == kCodeInt4 ? 4 : 2); ++i, line += 16) store(pairs[i], line);
            }
        }
    }
    // Units of 16 tokens' keys in scratch.keys.
    static int64_t keys_stride(const LayerKV& kv) { return int64_t{kv.key_units} * 8; }

    // Zeros for tokens that no row sees.
    template <bool Ask>
    static void decode_vector_values(const LayerKV& kv, const CodedTilePair& tiles, int v, const Visible& visible,
                                     uint32_t* values) {
        constexpr int kTokens = is_fp8(V) ? 2 : 4;  // that lie together, or are decoded together
        const CodeWords words = V == kCodeInt4 ? CodeWords{} : code_words<V>();
        const int64_t stride = kv.value_side.code_bytes;
        const char *from = tiles.now.value[v], *next = tiles.next.value[v];
        const bool whole = visible.low <= v * 16 && v * 16 + 16 <= visible.high;
        for (int token = v * 16; token < v * 16 + 16; token += kTokens) {
            const auto half = [&](int t) { return t >= visible.low && t < visible.high ? 0xffffu : 0u; };
            const auto mask = [&](int t) { return U16::set1(whole ? 0xffffffffu : half(t) | half(t + 1) << 16); };
            const U16 masks[2] = {mask(token), mask(token + 2)};
            const auto put = [&](U16 pair, int which, int column) {
                store(whole ? pair : pair & masks[which],
                      values + (token / 2 + which) * 16 + column * (kTile / 2 * 16));
            };
            for (int64_t at = 0; at < stride * kTokens; at += is_fp8(V) ? 128 : 64, from += 64, next += 64) {
                if constexpr (Ask) __builtin_prefetch(next, 0, 2);
                U16 pairs[4];
                if constexpr (is_fp8(V)) {
                    if constexpr (Ask) __builtin_prefetch(next + stride, 0, 2);
                    decode_values<exponent_bits(V)>(from, from + stride, words, pairs);
                    for (int i = 0; i < 4; ++i) put(pairs[i], 0, static_cast<int>(at / 32) + i);
                } else if constexpr (V == kCodeInt8) {
                    decode_quads(U16::load(from), words, pairs);
                    for (int i = 0; i < 2; ++i) put(pairs[i], i, static_cast<int>(at / 64));
                } else {
                    decode_nibbles(from, pairs);
                    const int column = static_cast<int>(at / 64);
                    for (int i = 0; i < 4; ++i) put(pairs[i], i / 2, column + i % 2 * (kv.value_dim / 32));
                }
            }
            if constexpr (is_fp8(V)) from += stride, next += stride;
        }
    }

    template <int Sums, int Keys> static void add_score(const void* keys) {
        tile_load<Keys>(keys, 64);
        tile_dot_bf16<Sums, 4, Keys>();
    }
    static void score(const LayerKV& kv, const Visible& visible, const uint32_t* query, AttendScratch& scratch) {
        const int64_t query_stride = int64_t{kv.key_units} * 4, stride = keys_stride(kv);
        const uint32_t* keys = scratch.keys;
        tile_zero<0>();
        tile_zero<1>();
        tile_zero<2>();
        tile_zero<3>();
        for (int64_t at = 0; at < stride; at += 256, query += 16) {
            tile_load<4>(query, query_stride);
            if (visible.first_vector == 0) add_score<0, 6>(keys + at);
            if (visible.first_vector <= 1 && visible.end_vector > 1) add_score<1, 7>(keys + stride + at);
            if (visible.first_vector <= 2 && visible.end_vector > 2) add_score<2, 6>(keys + 2 * stride + at);
            if (visible.end_vector > 3) add_score<3, 7>(keys + 3 * stride + at);
        }
        tile_store<0>(scratch.scores, kTile * 4);
        tile_store<1>(scratch.scores + 16, kTile * 4);
        tile_store<2>(scratch.scores + 32, kTile * 4);
        tile_store<3>(scratch.scores + 48, kTile * 4);
    }

    static void weigh(const AttendTask& task, int begin, const Visible& visible, const Scales& scales, int head,
                      int first, int count, const Rows& rows, AttendScratch& scratch) {
        const int first_row = head * task.rows_per_head() + first;
        const auto score_of = [&](int r, int v) {
            F16 sum = F16::load(scratch.scores + r * kTile + v * 16);
            if constexpr (K == kCodeInt4)
                sum = sum - scales.key_zero[v] * F16::set1(scratch.query_sum[first_row + r]);
            return sum * scales.key[v];
        };
        float rescale[kTileRows];
        F16 sums[kTileRows], excess[kTileRows];
        for (int r = 0; r < count; ++r) sums[r] = excess[r] = F16::zero();
        const auto weigh_two = [&](int r, int v, F16 low, F16 high) {
            sums[r] = sums[r] + low + high;
            low = low * scales.value[v], high = high * scales.value[v + 1];
            if (!visible.all) {
                // A scale that the row does not see may be no number.
                const TokenRange seen = tokens_seen(task, begin, first + r);
                low = keep_lanes(low, seen.low - v * 16, seen.high - v * 16, F16::zero());
                high = keep_lanes(high, seen.low - v * 16 - 16, seen.high - v * 16 - 16, F16::zero());
            }
            auto* to = reinterpret_cast<bf16*>(scratch.weights + r * kTile) + v * 16;
            store_both(low, high, to);
            if constexpr (V == kCodeInt4)
                excess[r] = fma(F16::load(to), scales.value_zero[v],
                                fma(F16::load(to + 16), scales.value_zero[v + 1], excess[r]));
        };
        soften_rows<kBf16>(task, begin, visible, first, count, rows, rescale, score_of, [](int) {}, weigh_two);
        for (int r = 0; r < count; ++r) {
            float *values = rows.values(first + r), *sum = rows.sum(first + r);
            fma(F16::load(sum), F16::set1(rescale[r]), sums[r]).store(sum);
            if constexpr (V == kCodeInt4) {
                float* total = scratch.excess + (first_row + r) * 16;
                fma(F16::load(total), F16::set1(rescale[r]), excess[r]).store(total);
            }
            if (rescale[r] == 1.0f) continue;
            for (int d = 0; d < rows.value_dim; d += 16)
                (F16::load(values + d) * F16::set1(rescale[r])).store(values + d);
        }
    }

    template <int Sums, int Values> static void add_column(const uint32_t* values) {
        tile_load<Values>(values, 64);
        tile_dot_bf16<Sums, 4, Values>();
    }
    static void add_values(const LayerKV& kv, const Visible& visible, int first, const Rows& rows,
                           const AttendScratch& scratch) {
        constexpr int64_t kColumns = kTile / 2 * 16;  // units of sixteen
        const int64_t stride = int64_t{rows.stride()} * 4;
        const int begin = visible.low / kTileTokens * (kTileTokens / 2);
        const int end = (visible.high + kTileTokens - 1) / kTileTokens * (kTileTokens / 2);
        float* sums = rows.values(first);
        const uint32_t* values = scratch.values;
        for (int column = 0; column < kv.value_dim; column += 64, sums += 64, values += 4 * kColumns) {
            tile_load<0>(sums, stride);
            tile_load<1>(sums + 16, stride);
            tile_load<2>(sums + 32, stride);
            tile_load<3>(sums + 48, stride);
            for (int pair = begin; pair < end; pair += kTileTokens / 2) {
                tile_load<4>(scratch.weights + pair, kTile * 4);
                add_column<0, 6>(values + pair * 16);
                add_column<1, 7>(values + kColumns + pair * 16);
                add_column<2, 6>(values + 2 * kColumns + pair * 16);
                add_column<3, 7>(values + 3 * kColumns + pair * 16);
            }
            tile_store<0>(sums, stride);
            tile_store<1>(sums + 16, stride);
            tile_store<2>(sums + 32, stride);
            tile_store<3>(sums + 48, stride);
        }
    }

    int configured_ = 0;
};

}  // namespace octavo::OCTAVO_LEVEL
