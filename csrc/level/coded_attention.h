// Attention over coded keys and values (storage/codec/): codes go from blocks into registers, never through a decoded
// copy.
//
// A tile is 64 tokens, as in attention_tile.h. Keys of 16 tokens lie together, codes of one token's dimensions in
// units; values lie token by token, or four tokens of one dimension together:
//
//     fp8    K [dim][16 tokens]              V [token][dim]              floats times float32
//     int8   K [dim / 4][16 tokens][4]       V [token / 4][dim][4]       integers times integers
//     int4   K [dim / 8][16 tokens][4]       V [token / 4][dim / 2][4]
//
// A query is q ≈ s (256 h + l), h and l signed bytes; a tile's weights, times the scales of their tokens' values, are
// w ≈ u (128 h + l), h and l of seven bits, u by the largest of them. So sums of integers are exact, and rounding is
// the query's or the weight's alone (2^-15 of the largest). What becomes of them goes on in float32: scores times their
// token's scale, sums of a tile's values times u. A token that a row does not see weighs zero; nobody reads one that no
// row of a pass sees.
#pragma once

#include "level/attention_tile.h"
#include "level/coded_codes.h"

namespace octavo::OCTAVO_LEVEL {

// What a stored code is a multiple of, beside its scale: e4m3 is decoded as the half whose exponent is 8 less.
constexpr float code_unit(Code code) { return code == kCodeE4m3 ? 256.0f : 1.0f; }

// 32 codes of fp8 -> two vectors, in their order.
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

struct CodedTile {
    const char* key[kVectors];    // of 16 tokens' first dimension
    const char* value[kVectors];  // of the first of 16 tokens
    const char *key_field[kVectors][2], *value_field[kVectors][2];
    int begin;
};
struct CodedTilePair {
    const CodedTile &now, &next;
};

inline CodedTile locate_coded(const AttendTask& task, int begin, int end_position) {
    const LayerKV& kv = *task.kv;
    CodedTile tile;
    tile.begin = begin;
    const int head = task.kv_head;
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
// The same tokens' next head.
inline void next_head(const LayerKV& kv, const CodedTile& tile, CodedTile& next) {
    next.begin = tile.begin;
    for (int v = 0; v < kVectors; ++v) {
        next.key[v] = tile.key[v] + kv.key_head_stride;
        next.value[v] = tile.value[v] + kv.value_head_stride;
        for (int f = 0; f < 2; ++f) {  // a null pointer's stride is 0
            next.key_field[v][f] = tile.key_field[v][f] + kv.key_side.field_head_stride[f];
            next.value_field[v][f] = tile.value_field[v][f] + kv.value_side.field_head_stride[f];
        }
    }
}
inline void ask_fields(const CodedTile& tile, int v) {
    for (int f = 0; f < 2; ++f) {
        if (tile.key_field[v][f]) __builtin_prefetch(tile.key_field[v][f], 0, 2);
        if (tile.value_field[v][f]) __builtin_prefetch(tile.value_field[v][f], 0, 2);
    }
}

inline F16 token_scale(const char* field) { return F16::load(reinterpret_cast<const bf16*>(field)); }

// Scores of rows [0, R) and vectors [first, first + N), not yet times any scale.
template <Code C, int R, int N>
inline void float_scores(const LayerKV& kv, const CodedTilePair& tiles, int first, const uint32_t* query,
                         float* scores) {
    F16 acc[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) acc[r][n] = F16::zero();
    for (int dim = 0; dim < kv.key_units; dim += 2, query += 2 * R) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            F16 even, odd;
            decode32<C>(tiles.now.key[first + n] + dim * 16, even, odd);
            if (dim % 4 == 0) __builtin_prefetch(tiles.next.key[first + n] + dim * 16, 0, 2);
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
}

// The same of integers: products with h and with l, as [h, l][row][64 tokens].
template <Code C, int R, int N>
inline void integer_scores(const LayerKV& kv, const CodedTilePair& tiles, int first, const uint32_t* query,
                           const int32_t* query_zero, uint32_t* scores) {
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
            const U16 codes = U16::load(tiles.now.key[first + n] + unit * 64);
            __builtin_prefetch(tiles.next.key[first + n] + unit * 64, 0, 2);
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
                    high[r][n] = dot_small(high[r][n], first_half, U16::set1(query[2 * r]));
                    low[r][n] = dot_small(low[r][n], first_half, U16::set1(query[2 * r + 1]));
                    high[r][n] = dot_small(high[r][n], second_half, U16::set1(query[2 * (R + r)]));
                    low[r][n] = dot_small(low[r][n], second_half, U16::set1(query[2 * (R + r) + 1]));
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            store(high[r][n], scores + r * kTile + (first + n) * 16);
            store(low[r][n], scores + (R + r) * kTile + (first + n) * 16);
        }
}

// values[r][d ..] = values[r][d ..] * rescale[r] + weights[r] . codes, over tokens [low, high) of the tile.
template <Code C, int R, int N>
inline void float_values(const LayerKV& kv, const CodedTilePair& tiles, int low, int high, int dim,
                         const float* weights, const float* rescale, const Rows& rows, int first_row) {
    F16 acc[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n)
            acc[r][n] = F16::load(rows.values(first_row + r) + dim + n * 16) * F16::set1(rescale[r]);
    const int64_t stride = kv.value_side.code_bytes;
    for (int token = low; token < high;) {
        const int vector = token / 16, stop = min(high, vector * 16 + 16);
        const int64_t offset = (token - vector * 16) * stride + dim;
        const char *from = tiles.now.value[vector] + offset, *next = tiles.next.value[vector] + offset;
        for (; token < stop; ++token, from += stride, next += stride) {
            __builtin_prefetch(next, 0, 2);
            F16 x[N];
            if constexpr (N == 1) {
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
        for (int n = 0; n < N; ++n) acc[r][n].store(rows.values(first_row + r) + dim + n * 16);
}

// What the rows' weights of one tile became as integers: [row]
template <int R> struct Digits {
    float unit[R], zeros[R];  // `zeros`: the weights times their tokens' zero points
};
constexpr float kMostWeight = 16383.0f;

// The same of integers, whose weights lie in scratch.weights as [row][h, l][64 tokens] bytes. Of int4, the dimensions
// in either nibble.
template <Code C, bool Upper, int R, int N>
inline void integer_values(const LayerKV& kv, const CodedTilePair& tiles, int low, int high, int column,
                           const uint32_t* weights, const Digits<R>& digits, const float* rescale, const Rows& rows,
                           int first_row) {
    U16 h[R][N], l[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) h[r][n] = l[r][n] = U16::zero();
    const int64_t stride = kv.value_side.code_bytes * 4;
    for (int quad = low / 4, end = (high + 3) / 4; quad < end;) {
        const int vector = quad / 4, stop = min(end, vector * 4 + 4);
        const int64_t offset = (quad - vector * 4) * stride + column * 4;
        const char *from = tiles.now.value[vector] + offset, *next = tiles.next.value[vector] + offset;
        for (; quad < stop; ++quad, from += stride, next += stride) {
            U16 codes[N];
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                codes[n] = U16::load(from + n * 64);
                if constexpr (!Upper) __builtin_prefetch(next + n * 64, 0, 2);
                if constexpr (Upper) codes[n] = shift_right<4>(codes[n]);
                if constexpr (C == kCodeInt4) codes[n] = codes[n] & U16::set1(0x0f0f0f0fu);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const U16 high_digits = U16::set1(weights[r * kTile + quad]);
                const U16 low_digits = U16::set1(weights[r * kTile + kTile / 4 + quad]);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) {
                    h[r][n] = dot_small(h[r][n], high_digits, codes[n]);
                    l[r][n] = dot_small(l[r][n], low_digits, codes[n]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            F16 sum = F16::from_int(shift_left<7>(h[r][n]) + l[r][n]);
            if constexpr (C == kCodeInt4) sum = sum - F16::set1(digits.zeros[r]);
            float* values = rows.values(first_row + r) + column + n * 16 + (Upper ? kv.value_dim / 2 : 0);
            fma(sum, F16::set1(digits.unit[r]), F16::load(values) * F16::set1(rescale[r])).store(values);
        }
}

// One function for each code and number of rows, not one for each pair of codes: they take most of the time that this
// file compiles.
template <Code K, int R>
[[gnu::noinline]] void all_scores(const LayerKV& kv, const CodedTilePair& tiles, const Visible& visible,
                                  const uint32_t* query, const int32_t* query_zero, float* scores) {
    constexpr int N = kVectorsPerPass == 1 ? 1 : R <= (is_fp8(K) ? 6 : 2) ? 4 : 2;  // what registers hold
    const auto pass = [&]<int M>(int v) {
        if constexpr (is_fp8(K))
            float_scores<K, R, M>(kv, tiles, v, query, scores);
        else
            integer_scores<K, R, M>(kv, tiles, v, query, query_zero, reinterpret_cast<uint32_t*>(scores));
    };
    int v = visible.first_vector;
    if constexpr (N > 1)
        for (; v + N <= visible.end_vector; v += N) pass.template operator()<N>(v);
    for (; v < visible.end_vector; ++v) pass.template operator()<1>(v);
}

template <Code V, int R>
[[gnu::noinline]] void all_float_values(const LayerKV& kv, const CodedTilePair& tiles, const Visible& visible,
                                        const float* weights, const float* rescale, const Rows& rows, int first_row) {
    constexpr int N = kVectorsPerPass;
    int dim = 0;
    for (; dim + N * 16 <= kv.value_dim; dim += N * 16)
        float_values<V, R, N>(kv, tiles, visible.low, visible.high, dim, weights, rescale, rows, first_row);
    if constexpr (N > 1)
        for (; dim < kv.value_dim; dim += 16)
            float_values<V, R, 1>(kv, tiles, visible.low, visible.high, dim, weights, rescale, rows, first_row);
}

template <Code V, bool Upper, int R>
[[gnu::noinline]] void all_integer_values(const LayerKV& kv, const CodedTilePair& tiles, const Visible& visible,
                                          const uint32_t* weights, const Digits<R>& digits, const float* rescale,
                                          const Rows& rows, int first_row) {
    constexpr int N = kVectorsPerPass == 1 ? 1 : R <= 2 ? 4 : 2;
    const int end = static_cast<int>(kv.value_side.code_bytes);
    int column = 0;
    for (; column + N * 16 <= end; column += N * 16)
        integer_values<V, Upper, R, N>(kv, tiles, visible.low, visible.high, column, weights, digits, rescale, rows,
                                       first_row);
    if constexpr (N > 1)
        for (; column < end; column += 16)
            integer_values<V, Upper, R, 1>(kv, tiles, visible.low, visible.high, column, weights, digits, rescale, rows,
                                           first_row);
}

// Scores in float32, from sums over codes: those of integers [h, l][R rows][64 tokens].
template <Code K, int R> class TileScores {
  public:
    TileScores(const AttendTask& task, const CodedTile& tile, const Visible& visible, int head, int first_row,
               const AttendScratch& scratch, const void* sums)
        : scratch_(scratch), row_(head * task.rows_per_head() + first_row), sums_(static_cast<const uint32_t*>(sums)) {
        const F16 head_scale = F16::set1(task.kv->key_side.scale(task.kv_head + head) * code_unit(K));
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            scale_[v] = head_scale, zero_[v] = F16::zero();
            if (v < visible.first_vector || v >= visible.end_vector) continue;
            if constexpr (!is_fp8(K)) scale_[v] = token_scale(tile.key_field[v][0]);
            if constexpr (K == kCodeInt4)
                zero_[v] = F16::from_int(widen(reinterpret_cast<const uint8_t*>(tile.key_field[v][1])));
        }
    }
    F16 operator()(int r, int v) const {
        const uint32_t* at = sums_ + r * kTile + v * 16;
        if constexpr (is_fp8(K)) return F16::load(reinterpret_cast<const float*>(at)) * scale_[v];
        F16 sum = fma(F16::from_int(U16::load(at)), F16::set1(256.0f), F16::from_int(U16::load(at + R * kTile)));
        const int32_t* zero = scratch_.query_zero + 2 * (row_ + r);
        if constexpr (K == kCodeInt4) sum = sum - zero_[v] * F16::set1(static_cast<float>(zero[0] * 256 + zero[1]));
        return sum * F16::set1(scratch_.query_scale[row_ + r]) * scale_[v];
    }

  private:
    const AttendScratch& scratch_;
    int row_;
    const uint32_t* sums_;
    F16 scale_[kVectors], zero_[kVectors];
};

// The weights of a tile as its values are multiplied by them, into scratch.weights; the rows' sums.
template <Code V, int R> class TileWeights {
  public:
    TileWeights(const AttendTask& task, const CodedTile& tile, const Visible& visible, int head, int first_row,
                const Rows& rows, AttendScratch& scratch)
        : task_(task), tile_(tile), visible_(visible), first_row_(first_row), rows_(rows), scratch_(scratch) {
        const F16 head_scale = F16::set1(task.kv->value_side.scale(task.kv_head + head) * code_unit(V));
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            scale_[v] = head_scale, zero_[v] = F16::zero();
            if (v < visible.first_vector || v >= visible.end_vector) continue;
            if constexpr (!is_fp8(V)) scale_[v] = token_scale(tile.value_field[v][0]);
            if constexpr (V == kCodeInt4)
                zero_[v] = F16::from_int(widen(reinterpret_cast<const uint8_t*>(tile.value_field[v][1])));
        }
    }
    // Two vectors of row r from v on, the first pair before the second.
    void add(int r, int v, F16 low, F16 high) {
        add_vector(r, v, low);
        add_vector(r, v + 1, high);
        if (v + 2 == kVectors) finish(r);
    }
    Digits<R> digits;
    float* rescale;  // of the rows, set before

  private:
    void add_vector(int r, int v, F16 weight) {
        sum_ = v == 0 ? weight : sum_ + weight;
        if (v < visible_.first_vector || v >= visible_.end_vector) {
            scaled_[v] = F16::zero();
            return;
        }
        scaled_[v] = weight * scale_[v];
        if constexpr (is_fp8(V)) return;
        if (!visible_.all) {
            // A scale that the row does not see may be no number.
            const TokenRange seen = tokens_seen(task_, tile_.begin, first_row_ + r);
            scaled_[v] = keep_lanes(scaled_[v], seen.low - v * 16, seen.high - v * 16, F16::zero());
        }
        // One that it sees must come out as no number: a sum of integers would hide it.
        sum_ = fma(scaled_[v], F16::zero(), sum_);
    }
    void finish(int r) {
        float* row_sum = rows_.sum(first_row_ + r);
        fma(F16::load(row_sum), F16::set1(rescale[r]), sum_).store(row_sum);
        uint32_t* row = scratch_.weights + r * kTile;
        if constexpr (is_fp8(V)) {
            for (int v = 0; v < kVectors; ++v) scaled_[v].store(reinterpret_cast<float*>(row) + v * 16);
            return;
        }
        constexpr float kMagic = 0x1p23f;  // its last place is 1
        const U16 digit = U16::set1(127);
        const float largest = reduce_max(max(max(scaled_[0], scaled_[1]), max(scaled_[2], scaled_[3])));
        digits.unit[r] = largest * (1.0f / kMostWeight);
        const F16 inverse = F16::set1(largest > 1e-33f ? kMostWeight / largest : 0.0f);
        auto* to = reinterpret_cast<uint8_t*>(row);
        F16 zero = F16::zero();
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            const F16 whole = fma(scaled_[v], inverse, F16::set1(kMagic));
            narrow(shift_right<7>(as_bits(whole)) & digit, to + v * 16);
            narrow(as_bits(whole) & digit, to + kTile + v * 16);
            if constexpr (V == kCodeInt4) zero = fma(whole - F16::set1(kMagic), zero_[v], zero);
        }
        if constexpr (V == kCodeInt4) digits.zeros[r] = reduce_add(zero);
    }

    const AttendTask& task_;
    const CodedTile& tile_;
    const Visible& visible_;
    int first_row_;
    const Rows& rows_;
    AttendScratch& scratch_;
    F16 scale_[kVectors], zero_[kVectors], scaled_[kVectors], sum_;
};

// One tile for rows [first_row, first_row + R). `sums`: of their scores, where they are known already.
template <Code K, Code V, int R>
void coded_rows(const AttendTask& task, const CodedTilePair& tiles, int head, int first_row, const uint32_t* query,
                const Rows& rows, AttendScratch& scratch, const void* sums) {
    const LayerKV& kv = *task.kv;
    const Visible visible = visible_tokens(task, tiles.now.begin, first_row, R);
    if (visible.nothing()) return;
    for (int v = visible.first_vector; v < visible.end_vector; ++v) ask_fields(tiles.next, v);
    if (!sums) {
        all_scores<K, R>(kv, tiles, visible, query,
                         scratch.query_zero + 2 * (head * task.rows_per_head() + first_row), scratch.scores);
        sums = scratch.scores;
    }
    float rescale[R];
    const TileScores<K, R> scores(task, tiles.now, visible, head, first_row, scratch, sums);
    TileWeights<V, R> weights(task, tiles.now, visible, head, first_row, rows, scratch);
    weights.rescale = rescale;
    soften_rows<kF32>(task, tiles.now.begin, visible, first_row, R, rows, rescale, scores, [](int) {},
                      [&](int r, int v, F16 low, F16 high) { weights.add(r, v, low, high); });
    if constexpr (is_fp8(V)) {
        all_float_values<V, R>(kv, tiles, visible, reinterpret_cast<const float*>(scratch.weights), rescale, rows,
                               first_row);
    } else {
        all_integer_values<V, false, R>(kv, tiles, visible, scratch.weights, weights.digits, rescale, rows, first_row);
        if constexpr (V == kCodeInt4)
            all_integer_values<V, true, R>(kv, tiles, visible, scratch.weights, weights.digits, rescale, rows,
                                           first_row);
    }
}

template <Code K, Code V>
void coded_head(const AttendTask& task, const CodedTilePair& tiles, int head, const uint32_t* query, const Rows& rows,
                AttendScratch& scratch) {
    const int num_rows = task.rows_per_head();
    const auto pass = [&](int first, const CodedTilePair& of) {
        const int count = min(num_rows - first, kMaxRows);
        with_constant<kMaxRows>(count, [&](auto constant) {
            coded_rows<K, V, constant>(task, of, head, first, query, rows, scratch, nullptr);
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
        CodedTile ring[2];
        int at = 0;
        ring[0] = locate_coded(task, start, end_position);
        for (int begin = start; begin < end; begin += kTile)
            for (int head = 0; head < task.kv_heads; ++head) {
                const bool last_head = head + 1 == task.kv_heads, last_tile = begin + kTile >= end_position;
                const CodedTile& now = ring[at];
                CodedTile& next = ring[at ^= 1];
                if (!last_head)
                    next_head(kv, now, next);
                else
                    next = last_tile ? now : locate_coded(task, begin + kTile, end_position);
                pass.add(task, {now, next}, head, scratch.query + head * rows_per_head * units,
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
