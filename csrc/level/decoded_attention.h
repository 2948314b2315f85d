// Attention over coded keys and values that are decoded to bf16 first: a tile of one KV head into the core's
// first-level cache, once for all rows of the task, and then multiplied in vectors as plain blocks are (see
// attention_tile.h). Queries (rotated if keys are) and weights (times their token's scale) are rounded to bf16, as for
// plain blocks.
#pragma once

#include "level/coded_attention.h"
#include "level/decoded_rows.h"
#include "level/decoded_tile.h"

namespace octavo::OCTAVO_LEVEL {

// One decoded tile for rows [first_row, first_row + R).
template <int R>
[[gnu::noinline]] void decoded_rows(const AttendTask& task, const LayerKV& kv, const TilePair& tiles, int first_row,
                                    const uint32_t* query, const Rows& rows, AttendScratch& scratch) {
    const Visible visible = visible_tokens(task, tiles.now.begin, first_row, R);
    if (visible.nothing()) return;
    score_rows<kBf16, R, false>(kv, tiles, visible, query, scratch.scores);
    float rescale[R];
    weigh_decoded_rows(task, tiles.now.begin, visible, scratch.factors, first_row, R, rows, scratch, rescale);
    // What a row does not see has weight zero, and decoded values are finite.
    const int begin_unit = visible.low / 2, end_unit = (visible.high + 1) / 2;
    all_values<kBf16, R, false>(kv, tiles, begin_unit, end_unit, scratch.weights, rescale, rows, first_row);
}

template <Code K, Code V> class DecodedRowPasses {
  public:
    explicit DecodedRowPasses(const LayerKV& kv) : decoded_(kv) {
        decoded_.key_units = kv.key_units / 2;
        decoded_.block_size = 16;
    }

    // Packs queries as pack_query does, with each row in the space of `key_units` floats.
    static void pack(const AttendTask& task, int head, uint32_t* packed, AttendScratch&) {
        const int dim = task.kv->key_units, num_rows = task.rows_per_head();
        bf16 query[kMaxHeadDim];
        for (int first = 0; first < num_rows; first += kMaxRows, packed += dim / 2 * kMaxRows) {
            const int count = min(num_rows - first, kMaxRows);
            for (int r = 0; r < count; ++r) {
                load_rounded_query<K>(task, head, first + r, query);
                for (int unit = 0; unit < dim / 2; ++unit)
                    __builtin_memcpy(&packed[unit * count + r], query + unit * 2, 4);
            }
        }
    }

    void add(const AttendTask& task, const CodedSplit& split, const Rows& rows, AttendScratch& scratch) const {
        const LayerKV& kv = *task.kv;
        const int num_rows = task.rows_per_head();
        CodedTile now = locate_coded(task, 0, split.begin, split.end_position), next;
        for (int begin = split.begin; begin < split.end; begin += kTile)
            for (int head = 0; head < task.kv_heads; ++head, now = next) {
                const bool last_head = head + 1 == task.kv_heads, last_tile = begin + kTile >= split.end_position;
                if (!last_head)
                    next_head(kv, now, next);
                else
                    next = last_tile ? now : locate_coded(task, 0, begin + kTile, split.end_position);
                const Visible visible = visible_tokens(task, begin, 0, num_rows);
                if (visible.nothing()) continue;
                decode_to_plain<K, V>(kv, {now, next}, visible, scratch.keys, scratch.decoded);
                load_factors<K, V>(task, now, head, visible, code_unit(K), code_unit(V), scratch.factors);
                add_head(task, begin, scratch.query + head * num_rows * kv.key_units,
                         Rows{rows.values(head * num_rows), rows.value_dim}, scratch);
            }
    }

    static void finish(const AttendTask&, const Rows&) {}

  private:
    // All rows of one head over the decoded tile.
    void add_head(const AttendTask& task, int begin, const uint32_t* query, const Rows& rows,
                  AttendScratch& scratch) const {
        Tile tile;
        tile.begin = begin;
        for (int v = 0; v < kVectors; ++v) {
            tile.key[v] = reinterpret_cast<const char*>(scratch.keys + v * 16 * decoded_.key_units);
            tile.value[v] = reinterpret_cast<const char*>(scratch.decoded + v * 8 * decoded_.value_dim);
        }
        const int num_rows = task.rows_per_head();
        for (int first = 0; first < num_rows; first += kMaxRows) {
            const int count = min(num_rows - first, kMaxRows);
            with_constant<kMaxRows>(count, [&](auto constant) {
                decoded_rows<constant>(task, decoded_, {tile, tile}, first, query, rows, scratch);
            });
            query += decoded_.key_units * count;
        }
    }

    LayerKV decoded_;
};

}  // namespace octavo::OCTAVO_LEVEL
