// Attention of prompts over coded keys and values in tiles, used if their bits may differ from a decode's.
//
// A split of the context is decoded once, into the core's second-level cache, for all the rows of a KV head, and
// multiplied from there as in tile_attention.h, sixteen rows at a time:
//
//     scratch.keys       [tile of 64 tokens][16 tokens][dim / 2][token][2]
//     scratch.decoded    [tile of 64 tokens][16 columns][token / 2][column][2]
//
// Queries (rotated if keys are) and weights (times their token's scale) are rounded to bf16, as for uncoded blocks.
#pragma once

#include "level/coded_attention.h"
#include "level/decoded_rows.h"
#include "level/tile_attention.h"
#include "level/tile_codes.h"

namespace octavo::OCTAVO_LEVEL {

template <Code K, Code V> class CodedTilePasses {
  public:
    ~CodedTilePasses() {
        if (configured_) release_tiles();
    }

    // Packs queries as [row][dim] bf16, with each row in the space of `dim` floats.
    static void pack(const AttendTask& task, int head, uint32_t* packed, AttendScratch&) {
        const int dim = task.kv->key_units;
        for (int r = 0; r < task.rows_per_head(); ++r, packed += dim)
            load_rounded_query<K>(task, head, r, reinterpret_cast<bf16*>(packed));
    }

    void add(const AttendTask& task, const CodedSplit& split, const Rows& rows, AttendScratch& scratch) {
        const int num_rows = task.rows_per_head();
        for (int head = 0; head < task.kv_heads; ++head) {
            decode(task, split, head, scratch);
            const RowGroups groups(num_rows, kTileRows);
            for (int64_t group = 0; group < groups.count; ++group) {
                const int first = static_cast<int>(groups.begin(group));
                add_rows(task, split, head, first, static_cast<int>(groups.begin(group + 1)) - first,
                         Rows{rows.values(head * num_rows), rows.value_dim}, scratch);
            }
        }
    }

    // Reorders columns to dimensions.
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
    static void decode(const AttendTask& task, const CodedSplit& split, int head, AttendScratch& scratch) {
        const LayerKV& kv = *task.kv;
        CodedTile now = locate_coded(task, head, split.begin, split.end_position), next = now;
        uint32_t *keys = scratch.keys, *values = scratch.decoded;
        float* factors = scratch.factors;
        for (int begin = split.begin; begin < split.end; begin += kTile) {
            if (begin + kTile < split.end_position) next = locate_coded(task, head, begin + kTile, split.end_position);
            const Visible visible = visible_tokens(task, begin, 0, task.rows_per_head());
            decode_tile_keys<K>(kv, {now, next}, visible, keys);
            decode_tile_values<V>(kv, {now, next}, visible, values);
            for (int v = visible.first_vector; v < visible.end_vector; ++v) ask_fields(next, v);
            load_factors<K, V>(task, now, head, visible, tile_unit(K), tile_unit(V), factors);
            keys += keys_size(kv), values += values_size(kv), factors += kFactors * kTile;
            now = next;
        }
    }
    // Sizes per tile of the context, in units.
    static int64_t keys_size(const LayerKV& kv) { return int64_t{kv.key_units} * (kTile / 2); }
    static int64_t values_size(const LayerKV& kv) { return int64_t{kv.value_dim} * (kTile / 2); }

    void configure(int rows) {
        if (rows == configured_) return;
        configured_ = rows;
        TileConfig config;
        for (int tile = 0; tile < 6; ++tile) config.set(tile, rows, 64);
        config.set(6, 16, 64);
        config.set(7, 16, 64);
        load_tile_config(config);
    }

    // Rows [first, first + count) of one head over the split.
    void add_rows(const AttendTask& task, const CodedSplit& split, int head, int first, int count, const Rows& rows,
                  AttendScratch& scratch) {
        const LayerKV& kv = *task.kv;
        const int64_t row = head * task.rows_per_head() + first;
        const uint32_t *query = scratch.query + row * kv.key_units, *keys = scratch.keys, *values = scratch.decoded;
        const float* factors = scratch.factors;
        configure(count);
        for (int begin = split.begin; begin < split.end; begin += kTile) {
            const Visible visible = visible_tokens(task, begin, first, count);
            if (!visible.nothing()) {
                score(kv, visible, query, keys, scratch);
                weigh(task, begin, visible, factors, first, count, rows, scratch);
                add_values(kv, visible, first, rows, values, scratch);
            }
            keys += keys_size(kv), values += values_size(kv), factors += kFactors * kTile;
        }
    }

    template <int Sums, int Keys> static void add_score(const void* keys) {
        tile_load<Keys>(keys, 64);
        tile_dot_bf16<Sums, 4, Keys>();
    }
    static void score(const LayerKV& kv, const Visible& visible, const uint32_t* query, const uint32_t* keys,
                      AttendScratch& scratch) {
        const int64_t query_stride = int64_t{kv.key_units} * 4, stride = keys_size(kv) / kVectors;
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

    static void weigh(const AttendTask& task, int begin, const Visible& visible, const float* factors, int first,
                      int count, const Rows& rows, AttendScratch& scratch) {
        float rescale[kTileRows];
        weigh_decoded_rows(task, begin, visible, factors, first, count, rows, scratch, rescale);
        for (int r = 0; r < count; ++r) {
            if (rescale[r] == 1.0f) continue;
            float* values = rows.values(first + r);
            for (int d = 0; d < rows.value_dim; d += 16)
                (F16::load(values + d) * F16::set1(rescale[r])).store(values + d);
        }
    }

    template <int Sums, int Values> static void add_column(const uint32_t* values) {
        tile_load<Values>(values, 64);
        tile_dot_bf16<Sums, 4, Values>();
    }
    static void add_values(const LayerKV& kv, const Visible& visible, int first, const Rows& rows,
                           const uint32_t* values, const AttendScratch& scratch) {
        constexpr int64_t kColumns = kTile / 2 * 16;  // units per sixteen columns
        const int64_t stride = int64_t{rows.stride()} * 4;
        const int begin = visible.low / kTileTokens * (kTileTokens / 2);
        const int end = (visible.high + kTileTokens - 1) / kTileTokens * (kTileTokens / 2);
        float* sums = rows.values(first);
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
