// Attention of several rows over coded keys and values in tiles.
//
// A split of the context is decoded once (decode_span.h), into the core's second-level cache, for all the rows of a KV
// head, and multiplied from there as in tile_attention.h, sixteen rows at a time.
//
// Queries (rotated if keys are) and weights (times their token's scale) are rounded to bf16, as for uncoded blocks.
#pragma once

#include "level/coded_attention.h"
#include "level/decoded_rows.h"
#include "level/decode_span.h"
#include "level/tile_attention.h"

namespace octavo::OCTAVO_LEVEL {

class CodedTilePasses : MatrixTiles<false> {
  public:
    // Packs queries as [row][dim] bf16, with each row in the space of `dim` floats.
    static void pack(const AttendTask& task, int head, uint32_t* packed, AttendScratch&) {
        const int dim = task.kv->key_units;
        for (int r = 0; r < task.rows_per_head(); ++r, packed += dim)
            load_rounded_query(task, head, r, reinterpret_cast<bf16*>(packed));
    }

    void add(const AttendTask& task, const Split& split, const Rows& rows, AttendScratch& scratch) {
        const int num_rows = task.rows_per_head();
        for (int head = 0; head < task.kv_heads; ++head) {
            decode(task, split, head, scratch);
            const RowGroups groups(num_rows, kTileRows);
            for (int64_t group = 0; group < groups.count; ++group) {
                const int first = static_cast<int>(groups.begin(group));
                add_rows(task, split, head, first, static_cast<int>(groups.begin(group + 1)) - first,
                         rows.from(head * num_rows), scratch);
            }
        }
    }

  private:
    static void decode(const AttendTask& task, const Split& split, int head, AttendScratch& scratch) {
        const LayerKV& kv = *task.kv;
        Span now = locate(task, head, split.begin, split.end_position), next = now;
        uint32_t *keys = scratch.keys, *values = scratch.decoded;
        float* factors = scratch.factors;
        for (int begin = split.begin; begin < split.end; begin += kSpan) {
            if (begin + kSpan < split.end_position) next = locate(task, head, begin + kSpan, split.end_position);
            const Visible visible = visible_tokens(task, begin, 0, task.rows_per_head());
            decode_to_plain(kv, {now, next}, visible, keys, values);
            load_factors(task, now, head, visible, factors);
            keys += keys_size(kv), values += values_size(kv), factors += kFactors * kSpan;
            now = next;
        }
    }
    // Sizes per span of the context, in units.
    static int64_t keys_size(const LayerKV& kv) { return int64_t{kv.key_units} * (kSpan / 2); }
    static int64_t values_size(const LayerKV& kv) { return int64_t{kv.value_dim} * (kSpan / 2); }

    // Rows [first, first + count) of one head over the split.
    void add_rows(const AttendTask& task, const Split& split, int head, int first, int count, const Rows& rows,
                  AttendScratch& scratch) {
        const LayerKV& kv = *task.kv;
        const int64_t row = head * task.rows_per_head() + first;
        const uint32_t *query = scratch.query + row * kv.key_units, *keys = scratch.keys, *values = scratch.decoded;
        const float* factors = scratch.factors;
        configure(count);
        for (int begin = split.begin; begin < split.end; begin += kSpan) {
            const Visible visible = visible_tokens(task, begin, first, count);
            if (!visible.nothing()) {
                Span span{};
                for (int v = 0; v < kVectors; ++v)
                    span.key[v] = reinterpret_cast<const char*>(keys + v * keys_size(kv) / kVectors);
                score<false>({span, span}, visible, kv.key_units / 2, 64, query, kv.key_units, scratch.scores);
                float rescale[kTileRows];
                weigh_decoded_rows(task, begin, visible, factors, first, count, rows, scratch, rescale);
                rescale_rows(rows, first, count, rows.value_dim, rescale);
                for (int column = 0; column < kv.value_dim; column += 64)
                    add_columns<4>(scratch.weights, values + column, kv.value_dim, visible,
                                   rows.values(first) + column, int64_t{rows.stride()} * 4);
            }
            keys += keys_size(kv), values += values_size(kv), factors += kFactors * kSpan;
        }
    }
};

}  // namespace octavo::OCTAVO_LEVEL
