// Attention over coded keys and values (storage/codec/): codes go from blocks into registers, never through a decoded
// copy.
//
// A tile is 64 tokens, as in attention_tile.h. Keys of 16 tokens lie together, codes of one token's dimensions in
// units; values lie token by token:
//
//     fp8    K [dim][16 tokens]              floats times float32 queries
//     int8   K [dim / 4][16 tokens][4]       integers times integers: a query is q ≈ s (256 h + l), h and l signed
//     int4   K [dim / 8][16 tokens][4]       bytes, which is 15 bits: sums are exact, rounding is the query's alone
//
// Scores are multiplied by their token's scale, weights by that of their token's value, in float32, and so are sums of
// values. A token that a row does not see weighs zero; nobody reads one that no row of a pass sees.
#pragma once

#include "level/attention_tile.h"
#include "level/coded_codes.h"

namespace octavo::OCTAVO_LEVEL {

// What a stored code is a multiple of, beside its scale: e4m3 is decoded as the half whose exponent is 8 less.
constexpr float code_unit(Code code) { return code == kCodeE4m3 ? 256.0f : 1.0f; }

// 32 codes -> two vectors, in their order.
template <Code C> inline void decode32(const char* p, F16& low, F16& high) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(p);
    if constexpr (C == kCodeE4m3)
        load_e4m3(bytes, low, high);
    else if constexpr (C == kCodeE5m2)
        load_e5m2(bytes, low, high);
    else {
        low = F16::from_int(widen_signed(bytes));
        high = F16::from_int(widen_signed(bytes + 16));
    }
}

template <Code C> inline F16 decode16(const char* p) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(p);
    if constexpr (C == kCodeE4m3)
        return load_e4m3(bytes);
    else if constexpr (C == kCodeE5m2)
        return load_e5m2(bytes);
    else
        return F16::from_int(widen_signed(bytes));
}

struct CodedTile {
    const char* key[kVectors];    // of 16 tokens' first dimension
    const char* value[kVectors];  // of the first of 16 tokens
    const char *key_field[kVectors][2], *value_field[kVectors][2];
    int begin;
};
struct CodedTilePair {
    CodedTile now, next;
};

inline CodedTile locate_coded(const AttendTask& task, int head, int begin, int end_position) {
    const LayerKV& kv = *task.kv;
    CodedTile tile;
    tile.begin = begin;
    head += task.kv_head;
    for (int v = 0; v < kVectors; ++v) {
        const int position = begin + v * 16 < end_position ? begin + v * 16 : begin;  // never past the table
        const int64_t block = task.block_table[position / kv.block_size], offset = position % kv.block_size;
        tile.key[v] =
            kv.key + block * kv.key_block_stride + head * kv.key_head_stride + offset * kv.key_side.code_bytes;
        tile.value[v] =
            kv.value + block * kv.value_block_stride + head * kv.value_head_stride + offset * kv.value_side.code_bytes;
        for (int f = 0; f < 2; ++f) {
            tile.key_field[v][f] = kv.key_side.at(f, block, head, offset);
            tile.value_field[v][f] = kv.value_side.at(f, block, head, offset);
        }
    }
    return tile;
}

// Scores of rows [0, R) and vectors [first, first + N), times the queries' scales but not yet their tokens'.
template <Code C, int R, int N>
inline void coded_scores(const LayerKV& kv, const CodedTilePair& tiles, int first, const uint32_t* query,
                         const float* query_scale, const int32_t* query_zero, float* scores) {
    const char* key[N];
    const char* next[N];
    for (int n = 0; n < N; ++n) key[n] = tiles.now.key[first + n], next[n] = tiles.next.key[first + n];
    if constexpr (is_fp8(C)) {
        F16 acc[R][N];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) acc[r][n] = F16::zero();
        for (int dim = 0; dim < kv.key_units; dim += 2, query += 2 * R) {
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                F16 even, odd;
                decode32<C>(key[n] + dim * 16, even, odd);
                if (dim % 4 == 0) __builtin_prefetch(next[n] + dim * 16, 0, 2);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    acc[r][n] = fma(even, F16::set1(bits_to_float(query[r])), acc[r][n]);
                    acc[r][n] = fma(odd, F16::set1(bits_to_float(query[R + r])), acc[r][n]);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) acc[r][n].store(scores + r * kTile + (first + n) * 16);
    } else {
        U16 high[R][N], low[R][N];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                // Codes of int8 are multiplied as bytes 128 larger.
                high[r][n] = U16::set1(static_cast<uint32_t>(C == kCodeInt8 ? query_zero[2 * r] * -128 : 0));
                low[r][n] = U16::set1(static_cast<uint32_t>(C == kCodeInt8 ? query_zero[2 * r + 1] * -128 : 0));
            }
        constexpr int kParts = C == kCodeInt8 ? 1 : 2;
        const int units = kv.key_units / (4 * kParts);
        for (int unit = 0; unit < units; ++unit, query += kParts * 2 * R) {
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                const U16 codes = U16::load(key[n] + unit * 64);
                __builtin_prefetch(next[n] + unit * 64, 0, 2);
                if constexpr (C == kCodeInt8) {
                    const U16 bytes = codes ^ U16::set1(0x80808080u);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        high[r][n] = dot_bytes(high[r][n], bytes, U16::set1(query[2 * r]));
                        low[r][n] = dot_bytes(low[r][n], bytes, U16::set1(query[2 * r + 1]));
                    }
                } else {
                    const U16 mask = U16::set1(0x0f0f0f0fu);
                    const U16 first_half = codes & mask, second_half = shift_right<4>(codes) & mask;
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        high[r][n] = dot_nibbles(high[r][n], first_half, U16::set1(query[2 * r]));
                        low[r][n] = dot_nibbles(low[r][n], first_half, U16::set1(query[2 * r + 1]));
                        high[r][n] = dot_nibbles(high[r][n], second_half, U16::set1(query[2 * (R + r)]));
                        low[r][n] = dot_nibbles(low[r][n], second_half, U16::set1(query[2 * (R + r) + 1]));
                    }
                }
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            F16 zero = F16::zero();
            if constexpr (C == kCodeInt4)
                zero = F16::from_int(
                    widen(reinterpret_cast<const uint8_t*>(tiles.now.key_field[first + n][1])));
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                F16 sum = fma(F16::from_int(high[r][n]), F16::set1(256.0f), F16::from_int(low[r][n]));
                if constexpr (C == kCodeInt4)
                    sum = sum - zero * F16::set1(static_cast<float>(query_zero[2 * r] * 256 + query_zero[2 * r + 1]));
                (sum * F16::set1(query_scale[r])).store(scores + r * kTile + (first + n) * 16);
            }
        }
    }
}

// values[r][d ..] = values[r][d ..] * rescale[r] - zeros[r] + weights[r] . codes, over tokens [low, high) of the tile.
template <Code C, int R, int N>
inline void coded_values(const LayerKV& kv, const CodedTilePair& tiles, int low, int high, int dim,
                         const float* weights, const float* rescale, const float* zeros, const Rows& rows,
                         int first_row) {
    // Vectors of the accumulators: of int4, N / 2 from either half of the dimensions.
    const int half = kv.value_dim / 2;
    const auto place = [&](int n) { return C == kCodeInt4 ? dim + n / 2 * 16 + n % 2 * half : dim + n * 16; };
    F16 acc[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            acc[r][n] = F16::load(rows.values(first_row + r) + place(n)) * F16::set1(rescale[r]);
            if constexpr (C == kCodeInt4) acc[r][n] = acc[r][n] - F16::set1(zeros[r]);
        }
    const int64_t stride = kv.value_side.code_bytes;
    for (int token = low; token < high;) {
        const int vector = token / 16, stop = min(high, vector * 16 + 16);
        const int64_t offset = (token - vector * 16) * stride + dim;
        const char *from = tiles.now.value[vector] + offset, *next = tiles.next.value[vector] + offset;
        for (; token < stop; ++token, from += stride, next += stride) {
            __builtin_prefetch(next, 0, 2);
            F16 x[N];
            if constexpr (C == kCodeInt4) {
#pragma GCC unroll 4
                for (int n = 0; n < N; n += 2) {
                    const U16 bytes = widen(reinterpret_cast<const uint8_t*>(from) + n / 2 * 16);
                    x[n] = F16::from_int(bytes & U16::set1(15));
                    x[n + 1] = F16::from_int(shift_right<4>(bytes));
                }
            } else if constexpr (N == 1) {
                x[0] = decode16<C>(from);
            } else {
#pragma GCC unroll 4
                for (int n = 0; n < N; n += 2) decode32<C>(from + n * 16, x[n], x[n + 1]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const F16 w = F16::set1(weights[r * kTile + token]);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) acc[r][n] = fma(x[n], w, acc[r][n]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) acc[r][n].store(rows.values(first_row + r) + place(n));
}

// One function for each code and number of rows, not one for each pair of codes: they take most of the time that this
// file compiles.
template <Code K, int R>
[[gnu::noinline]] void all_scores(const LayerKV& kv, const CodedTilePair& tiles, const Visible& visible,
                                  const uint32_t* query, const float* query_scale, const int32_t* query_zero,
                                  float* scores) {
    constexpr int N = kVectorsPerPass == 1 ? 1 : is_fp8(K) || R <= 3 ? 4 : 2;  // what registers hold
    int v = visible.first_vector;
    if constexpr (N > 1)
        for (; v + N <= visible.end_vector; v += N)
            coded_scores<K, R, N>(kv, tiles, v, query, query_scale, query_zero, scores);
    for (; v < visible.end_vector; ++v)
        coded_scores<K, R, 1>(kv, tiles, v, query, query_scale, query_zero, scores);
}

template <Code V, int R>
[[gnu::noinline]] void all_values(const LayerKV& kv, const CodedTilePair& tiles, const Visible& visible,
                                  const float* weights, const float* rescale, const float* zeros, const Rows& rows,
                                  int first_row) {
    const int low = visible.low, high = visible.high;
    constexpr int N = V == kCodeInt4 ? (kVectorsPerPass == 1 ? 2 : 4) : kVectorsPerPass;
    constexpr int kStep = V == kCodeInt4 ? N / 2 * 16 : N * 16, kLeast = V == kCodeInt4 ? 2 : 1;
    const int end = V == kCodeInt4 ? kv.value_dim / 2 : kv.value_dim;
    int dim = 0;
    for (; dim + kStep <= end; dim += kStep)
        coded_values<V, R, N>(kv, tiles, low, high, dim, weights, rescale, zeros, rows, first_row);
    if constexpr (N > kLeast)
        for (; dim < end; dim += 16)
            coded_values<V, R, kLeast>(kv, tiles, low, high, dim, weights, rescale, zeros, rows, first_row);
}

inline F16 token_scale(const char* field) { return F16::load(reinterpret_cast<const bf16*>(field)); }

// One tile for rows [first_row, first_row + R).
template <Code K, Code V, int R>
void coded_rows(const AttendTask& task, const CodedTilePair& tiles, int head, int first_row, const uint32_t* query,
                const Rows& rows, AttendScratch& scratch) {
    const LayerKV& kv = *task.kv;
    const Visible visible = visible_tokens(task, tiles.now.begin, first_row, R);
    if (visible.nothing()) return;
    const int row = head * task.rows_per_head() + first_row;
    all_scores<K, R>(kv, tiles, visible, query, scratch.query_scale + row, scratch.query_zero + 2 * row,
                     scratch.scores);
    const float head_scale = kv.key_side.scale(task.kv_head + head) * code_unit(K);
    for (int v = visible.first_vector; v < visible.end_vector; ++v) {
        __builtin_prefetch(tiles.next.key_field[v][0], 0, 2);
        F16 scale = F16::set1(head_scale);
        if constexpr (!is_fp8(K)) scale = token_scale(tiles.now.key_field[v][0]);
        for (int r = 0; r < R; ++r) {
            float* scores = scratch.scores + r * kTile + v * 16;
            (F16::load(scores) * scale).store(scores);
        }
    }
    TilePair place;
    place.now.begin = tiles.now.begin;
    float rescale[R], zeros[R] = {};
    weigh_rows<kF32, false>(task, place, visible, first_row, R, rows, scratch, rescale);
    auto* weights = reinterpret_cast<float*>(scratch.weights);
    const F16 value_scale = F16::set1(kv.value_side.scale(task.kv_head + head) * code_unit(V));
    for (int r = 0; r < R; ++r) {
        const TokenRange seen = tokens_seen(task, tiles.now.begin, first_row + r);
        F16 sum = F16::zero(), zero = F16::zero();
        for (int v = 0; v < kVectors; ++v) {
            float* of = weights + r * kTile + v * 16;
            const F16 weight = F16::load(of);
            sum = sum + weight;
            if (v < visible.first_vector || v >= visible.end_vector) continue;
            F16 scaled = weight * value_scale;
            if constexpr (!is_fp8(V)) scaled = weight * token_scale(tiles.now.value_field[v][0]);
            // A scale that the row does not see may be no number.
            if (seen.low > v * 16 || seen.high < v * 16 + 16)
                scaled = keep_lanes(scaled, seen.low - v * 16, seen.high - v * 16, F16::zero());
            scaled.store(of);
            if constexpr (V == kCodeInt4)
                zero = fma(scaled, F16::from_int(widen(reinterpret_cast<const uint8_t*>(tiles.now.value_field[v][1]))),
                           zero);
        }
        if constexpr (V == kCodeInt4) zeros[r] = reduce_add(zero);
        float* row_sum = rows.sum(first_row + r);
        fma(F16::load(row_sum), F16::set1(rescale[r]), sum).store(row_sum);
    }
    all_values<V, R>(kv, tiles, visible, weights, rescale, zeros, rows, first_row);
}

template <Code K, Code V>
void coded_head(const AttendTask& task, const CodedTilePair& tiles, int head, const uint32_t* query, const Rows& rows,
                AttendScratch& scratch) {
    const int num_rows = task.rows_per_head();
    const auto pass = [&](int first, const CodedTilePair& of) {
        const int count = min(num_rows - first, kMaxRows);
        with_constant<kMaxRows>(count, [&](auto constant) {
            coded_rows<K, V, constant>(task, of, head, first, query, rows, scratch);
        });
        query += task.kv->key_units * count;
    };
    pass(0, tiles);
    if (num_rows <= kMaxRows) return;
    const CodedTilePair asked{tiles.now, tiles.now};  // one asking is enough
    for (int first = kMaxRows; first < num_rows; first += kMaxRows) pass(first, asked);
}

// A query row as float32, rotated where keys are.
inline void load_query(const AttendTask& task, int head, int row, float* to) {
    const LayerKV& kv = *task.kv;
    const char* from = query_row(task, head, row);
    for (int d = 0; d < kv.key_units; d += 16)
        (kv.storage == kBf16 ? F16::load(reinterpret_cast<const bf16*>(from) + d)
                             : F16::load(reinterpret_cast<const float*>(from) + d))
            .store(to + d);
    if (kv.key_side.code == kCodeInt4) rotate_head(to, kv.key_units);
}

// q ≈ scale (256 h + l).
inline float split_query(const float* query, int dim, int8_t* high, int8_t* low) {
    const U16 size = U16::set1(0x7fffffffu);
    F16 most = F16::zero();
    for (int d = 0; d < dim; d += 16) most = max(most, as_float(as_bits(F16::load(query + d)) & size));
    const float largest = reduce_max(most);
    const float scale = largest / 32512.0f;
    const F16 inverse = F16::set1(scale > 1e-37f ? 1.0f / scale : 0.0f);
    for (int d = 0; d < dim; d += 16) {
        const F16 whole = F16::load(query + d) * inverse;
        round_to_int8(whole * F16::set1(1.0f / 256.0f), high + d);
        const F16 upper = F16::from_int(widen_signed(reinterpret_cast<const uint8_t*>(high + d)));
        const F16 rest = whole - upper * F16::set1(256.0f);
        round_to_int8(min(rest, F16::set1(127.0f)), low + d);
    }
    // What is no number must come out as none: a sum over bytes would hide it.
    float check = 0.0f;
    for (int d = 0; d < dim; ++d) check += query[d] * 0.0f;
    return scale + check;
}

// [group of kMaxRows rows][dim][row] floats, or [group][dim / 4][row][2] four bytes of h and of l.
inline void pack_coded_query(const AttendTask& task, int head, uint32_t* packed, AttendScratch& scratch) {
    const LayerKV& kv = *task.kv;
    const int dim = kv.key_units, num_rows = task.rows_per_head();
    float query[kMaxHeadDim];
    for (int first = 0; first < num_rows; first += kMaxRows, packed += dim * kMaxRows) {
        const int count = min(num_rows - first, kMaxRows);
        for (int r = 0; r < count; ++r) {
            load_query(task, head, first + r, query);
            if (is_fp8(kv.key_side.code)) {
                for (int d = 0; d < dim; ++d) packed[d * count + r] = float_bits(query[d]);
                continue;
            }
            int8_t high[kMaxHeadDim], low[kMaxHeadDim];
            const int row = head * num_rows + first + r;
            scratch.query_scale[row] = split_query(query, dim, high, low);
            int32_t sums[2] = {0, 0};
            for (int d = 0; d < dim; ++d) sums[0] += high[d], sums[1] += low[d];
            scratch.query_zero[2 * row] = sums[0];
            scratch.query_zero[2 * row + 1] = sums[1];
            for (int unit = 0; unit < dim / 4; ++unit) {
                __builtin_memcpy(packed + (unit * count + r) * 2, high + unit * 4, 4);
                __builtin_memcpy(packed + (unit * count + r) * 2 + 1, low + unit * 4, 4);
            }
        }
    }
}

// All rows of one KV head over one tile of the context, in vectors.
template <Code K, Code V> struct CodedRowPasses {
    static void pack(const AttendTask& task, int head, uint32_t* query, AttendScratch& scratch) {
        pack_coded_query(task, head, query, scratch);
    }
    static void begin_split(const AttendTask&, AttendScratch&) {}
    static void add(const AttendTask& task, const CodedTilePair& tiles, int head, const uint32_t* query,
                    const Rows& rows, AttendScratch& scratch) {
        coded_head<K, V>(task, tiles, head, query, rows, scratch);
    }
    static void end_split(const AttendTask&, const Rows&, const AttendScratch&) {}
    static void finish(const AttendTask&, const Rows&) {}
};

template <class Pass> void attend_coded_by(const AttendTask& task, AttendScratch& scratch, Pass pass) {
    const LayerKV& kv = *task.kv;
    const int rows_per_head = task.rows_per_head(), units = kv.key_units;
    for (int head = 0; head < task.kv_heads; ++head)
        pass.pack(task, head, scratch.query + head * rows_per_head * units, scratch);
    StateTree tree(scratch.states, task.kv_heads * rows_per_head, kv.value_dim);
    const int end_position = task.first_position + task.num_tokens;
    const int first_seen = max(task.first_position - task.window + 1, 0);
    for (int split = task.split_begin; split < task.split_end; ++split) {
        const Rows rows = tree.next();
        const int start = max(split * kSplit, first_seen) / kTile * kTile;
        const int end = end_position - split * kSplit < kSplit ? end_position : (split + 1) * kSplit;
        rows.clear(task.kv_heads * rows_per_head);
        pass.begin_split(task, scratch);
        CodedTilePair tiles;
        tiles.next = locate_coded(task, 0, start, end_position);
        for (int begin = start; begin < end; begin += kTile)
            for (int head = 0; head < task.kv_heads; ++head) {
                const bool last_head = head + 1 == task.kv_heads, last_tile = begin + kTile >= end_position;
                tiles.now = tiles.next;
                if (!last_head || !last_tile)
                    tiles.next =
                        locate_coded(task, last_head ? 0 : head + 1, last_head ? begin + kTile : begin, end_position);
                pass.add(task, tiles, head, scratch.query + head * rows_per_head * units,
                         Rows{rows.values(head * rows_per_head), rows.value_dim}, scratch);
            }
        pass.end_split(task, rows, scratch);
        tree.add(split);
    }
    const Rows total = tree.total();
    pass.finish(task, total);
    if (task.partial)
        __builtin_memcpy(task.partial, total.base, sizeof(float) * task.kv_heads * rows_per_head * total.stride());
    else if (kv.storage == kBf16)
        write_rows<kBf16>(task, total);
    else
        write_rows<kF32>(task, total);
}

}  // namespace octavo::OCTAVO_LEVEL
