// Attention over coded keys and values (storage/codec/) in vectors: codes are decoded from blocks into registers,
// without a decoded copy in memory.
#pragma once

#include "level/coded_scores.h"
#include "level/coded_values.h"

namespace octavo::OCTAVO_LEVEL {

// One tile for rows [first_row, first_row + R).
template <Code K, Code V, int R>
void coded_rows(const AttendTask& task, const CodedTilePair& tiles, int head, int first_row, const uint32_t* query,
                const Rows& rows, AttendScratch& scratch) {
    const LayerKV& kv = *task.kv;
    const Visible visible = visible_tokens(task, tiles.now.begin, first_row, R);
    if (visible.nothing()) return;
    for (int v = visible.first_vector; v < visible.end_vector; ++v) ask_fields(tiles.next, v);
    all_scores<K, R>(kv, tiles, visible, query, scratch.query_zero + 2 * (head * task.rows_per_head() + first_row),
                     scratch.scores);
    float rescale[R];
    const TileScores<K, R> scores(task, tiles.now, visible, head, first_row, scratch);
    TileWeights<V, R> weights(task, tiles.now, visible, head, first_row, rows, scratch);
    soften_rows<kF32>(task, tiles.now.begin, visible, first_row, R, rows, rescale, scores, [](int) {},
                      [&](int r, int v, F16 low, F16 high, float rescale) { weights.add(r, v, low, high, rescale); });
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
            coded_rows<K, V, constant>(task, of, head, first, query, rows, scratch);
        });
        query += task.kv->key_units * count;
    };
    pass(0, tiles);
    if (num_rows <= kMaxRows) return;
    const CodedTilePair asked{tiles.now, tiles.now};  // prefetching once is enough
    for (int first = kMaxRows; first < num_rows; first += kMaxRows) pass(first, asked);
}

// The tokens of one split that a task reads, and the end of the task's context.
struct CodedSplit {
    int begin, end, end_position;
};

// A split of the context in vectors: all the heads of a few blocks one after the other, as they are adjacent in memory.
template <Code K, Code V> struct CodedRowPasses {
    static void pack(const AttendTask& task, int head, uint32_t* query, AttendScratch& scratch) {
        pack_coded_query(task, head, query, scratch);
    }
    static void add(const AttendTask& task, const CodedSplit& split, const Rows& rows, AttendScratch& scratch) {
        const LayerKV& kv = *task.kv;
        const int rows_per_head = task.rows_per_head();
        CodedTile ring[2];
        int at = 0;
        ring[0] = locate_coded(task, 0, split.begin, split.end_position);
        for (int begin = split.begin; begin < split.end; begin += kTile)
            for (int head = 0; head < task.kv_heads; ++head) {
                const bool last_head = head + 1 == task.kv_heads, last_tile = begin + kTile >= split.end_position;
                const CodedTile& now = ring[at];
                CodedTile& next = ring[at ^= 1];
                if (!last_head)
                    next_head(kv, now, next);
                else
                    next = last_tile ? now : locate_coded(task, 0, begin + kTile, split.end_position);
                coded_head<K, V>(task, {now, next}, head, scratch.query + head * rows_per_head * kv.key_units,
                                 Rows{rows.values(head * rows_per_head), rows.value_dim}, scratch);
            }
    }
    static void finish(const AttendTask&, const Rows&) {}
};

template <class Pass> void attend_coded_by(const AttendTask& task, AttendScratch& scratch, Pass pass) {
    const LayerKV& kv = *task.kv;
    const int num_rows = task.kv_heads * task.rows_per_head();
    StateTree tree(scratch.states + task.states, num_rows, kv.value_dim);
    if (task.split_begin == task.split_end)
        tree.next().clear(num_rows);
    else
        for (int head = 0; head < task.kv_heads; ++head)
            pass.pack(task, head, scratch.query + head * task.rows_per_head() * kv.key_units, scratch);
    const int first_seen = task.first_read(task.first_position);
    const int end_position = task.end_read(task.first_position + task.num_tokens - 1);
    for (int split = task.split_begin; split < task.split_end; ++split) {
        const Rows rows = tree.next();
        const int begin = max(split * kSplit, first_seen) / kTile * kTile;
        const int end = end_position - split * kSplit < kSplit ? end_position : (split + 1) * kSplit;
        rows.clear(num_rows);
        pass.add(task, {begin, end, end_position}, rows, scratch);
        tree.add(split);
    }
    const Rows total = tree.total();
    pass.finish(task, total);
    if (task.partial)
        __builtin_memcpy(task.partial, total.base, sizeof(float) * num_rows * total.stride());
    else if (kv.storage == kBf16)
        finish_rows<kBf16>(task, total, scratch);
    else
        finish_rows<kF32>(task, total, scratch);
}

}  // namespace octavo::OCTAVO_LEVEL
