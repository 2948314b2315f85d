// The driver of attention: it packs a task's queries, walks the spans of its splits, and merges the splits' states.
//
// A pass says what is done with a span:
//
//     pass                  blocks    are multiplied
//     RowPasses             plain     in vectors                                 plain_attention.h
//     TilePasses            plain     in matrix tiles                            tile_attention.h
//     CodedRowPasses        coded     as codes, in vectors                       coded_attention.h
//     DecodedRowPasses      coded     in vectors, once decoded to bf16           decoded_attention.h
//     CodedTilePasses       coded     in matrix tiles, once decoded to bf16      tile_coded_attention.h
//
// A pass packs a head's queries (`pack`) and adds a split of the context to the rows' state (`add`).
#pragma once

#include "level/attention_softmax.h"
#include "level/interleave.h"

namespace octavo::OCTAVO_LEVEL {

// 64 tokens of one KV head, in four pieces of 16 that may be in different blocks.
struct Span {
    const char* key[kVectors];    // of the 16 tokens' first unit
    const char* value[kVectors];  // of the first of 16 tokens
    const char *key_field[kVectors][2], *value_field[kVectors][2];  // of coded layers, see CodedSide
    int begin;  // absolute position of the span's first token
};
struct SpanPair {
    const Span &now, &next;
};

inline Span locate(const AttendTask& task, int head, int begin, int end_position) {
    const LayerKV& kv = *task.kv;
    const int64_t key_bytes = kv.coded() ? kv.key_side.code_bytes : 4;
    const int64_t value_bytes = kv.coded()  ? kv.value_side.code_bytes
                                : kv.latent ? 4
                                            : kv.value_dim * int64_t{kv.storage == kBf16 ? 2 : 4};
    Span span;
    span.begin = begin;
    head += task.kv_head;
    for (int v = 0; v < kVectors; ++v) {
        const int position = begin + v * 16 < end_position ? begin + v * 16 : begin;  // never past the table
        const int64_t block = task.block_table[position / kv.block_size], offset = position % kv.block_size;
        span.key[v] = kv.key + block * kv.key_block_stride + head * kv.key_head_stride + offset * key_bytes;
        span.value[v] = kv.value + block * kv.value_block_stride + head * kv.value_head_stride + offset * value_bytes;
        for (int f = 0; f < 2; ++f) {
            span.key_field[v][f] = kv.key_side.at(f, block, head, offset);
            span.value_field[v][f] = kv.value_side.at(f, block, head, offset);
        }
    }
    return span;
}
// The next head of the same tokens.
inline void next_head(const LayerKV& kv, const Span& span, Span& next) {
    next.begin = span.begin;
    for (int v = 0; v < kVectors; ++v) {
        next.key[v] = span.key[v] + kv.key_head_stride;
        next.value[v] = span.value[v] + kv.value_head_stride;
        for (int f = 0; f < 2; ++f) {  // a null pointer's stride is 0
            next.key_field[v][f] = span.key_field[v][f] + kv.key_side.field_head_stride[f];
            next.value_field[v][f] = span.value_field[v][f] + kv.value_side.field_head_stride[f];
        }
    }
}

// The tokens of one split that a task reads, from a multiple of kSpan on, and the end of the task's context.
struct Split {
    int begin, end, end_position;
};

// Calls body(head, spans) for each span of a split and each KV head: all the heads of a few blocks one after the other,
// as they are adjacent in memory. The last span is its own next one.
template <class Body>
[[gnu::always_inline]] inline void each_span(const AttendTask& task, const Split& split, const Body& body) {
    Span ring[2];
    int at = 0;
    ring[0] = locate(task, 0, split.begin, split.end_position);
    for (int begin = split.begin; begin < split.end; begin += kSpan)
        for (int head = 0; head < task.kv_heads; ++head) {
            const Span& now = ring[at];
            Span& next = ring[at ^= 1];
            if (head + 1 < task.kv_heads)
                next_head(*task.kv, now, next);
            else
                next = begin + kSpan < split.end_position ? locate(task, 0, begin + kSpan, split.end_position) : now;
            body(head, SpanPair{now, next});
        }
}

inline const char* query_row(const AttendTask& task, int head, int row) {
    return task.query + row / task.group_size * task.query_token_stride +
           (head * task.group_size + row % task.group_size) * task.query_head_stride;
}

// Packs the `units` units of each row of a head as [group of kMaxRows rows][unit][row in group], where broadcasts are
// read sequentially. load(row, row in group, from) sets where the row is: `from` has `Streams` pointers, whose units
// alternate in the packed row.
template <int Streams, class Load>
inline void pack_groups(int num_rows, int units, uint32_t* packed, const Load& load) {
    for (int first = 0; first < num_rows; first += kMaxRows) {
        const int count = min(num_rows - first, kMaxRows);
        const char* from[kMaxRows * Streams];
        for (int r = 0; r < count; ++r) load(first + r, r, from + r * Streams);
        with_constant<kMaxRows>(
            count, [&](auto constant) { interleave_rows<constant * Streams>(from, units / Streams, packed); });
        packed += units * count;
    }
}

// Calls body(first row, number of rows, their queries) for groups of up to kMaxRows rows packed in `units` units each.
template <class Body>
[[gnu::always_inline]] inline void each_group(int num_rows, int units, const uint32_t* query, const Body& body) {
    for (int first = 0; first < num_rows; first += kMaxRows) {
        const int count = min(num_rows - first, kMaxRows);
        body(first, count, query);
        query += units * count;
    }
}

void attend(const AttendTask& task, AttendScratch& scratch);  // in level/attend.h

// Adds what the rows see of a part of the context that is read in another way. It has states of its own:
//
//     scratch.states    | total | of the part | states being merged |
inline void add_part(AttendTask part, Reads reads, const Rows& total, AttendScratch& scratch) {
    const int num_rows = part.kv_heads * part.rows_per_head(), size = num_rows * total.stride();
    part.copies = nullptr;
    part.sink_query = nullptr;
    part.partial = total.base + size;
    part.states = 2 * size;
    part.reads = reads;
    part.set_splits();
    if (part.split_begin == part.split_end) return;
    attend(part, scratch);
    total.merge(Rows{part.partial, total.value_dim}, num_rows);
}

// Adds the sinks, which are seen by other queries.
inline void add_sinks(const AttendTask& task, const LayerKV* kv, const int32_t* block_table, const Rows& total,
                      AttendScratch& scratch) {
    AttendTask part = task;
    part.kv = kv;
    part.block_table = block_table;
    part.query = task.sink_query;
    part.query_token_stride = task.sink_token_stride;
    add_part(part, kReadsSinks, total, scratch);
}

// Adds the copies, which are in another code than the layer's own codes.
inline void add_copies(const AttendTask& task, const Rows& total, AttendScratch& scratch) {
    AttendTask part = task;
    part.kv = task.copies;
    part.block_table = task.copies_table;
    add_part(part, kReadsFirst, total, scratch);
    add_part(part, kReadsRecent, total, scratch);
}

// Writes the output of rows whose state over the task's splits is complete.
inline void finish_rows(const AttendTask& task, const Rows& total, AttendScratch& scratch) {
    const bool copied = task.copies && task.first_tokens >= task.sink_tokens;
    if (task.sink_query && !copied) add_sinks(task, task.kv, task.block_table, total, scratch);
    if (task.kv->value_side.code == kCodeInt4)
        for (int r = 0; r < task.kv_heads * task.rows_per_head(); ++r)
            rotate_head_back(total.values(r), task.kv->value_dim);
    if (task.copies) add_copies(task, total, scratch);
    if (task.sink_query && copied) add_sinks(task, task.copies, task.copies_table, total, scratch);
    if (task.kv->storage == kBf16)
        write_rows<bf16>(task, total);
    else
        write_rows<float>(task, total);
}

template <class Pass> void attend_by(const AttendTask& task, AttendScratch& scratch, Pass pass) {
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
        const int begin = max(split * kSplit, first_seen) / kSpan * kSpan;
        const int end = end_position - split * kSplit < kSplit ? end_position : (split + 1) * kSplit;
        rows.clear(num_rows);
        pass.add(task, {begin, end, end_position}, rows, scratch);
        tree.add(split);
    }
    const Rows total = tree.total();
    if (task.partial)
        __builtin_memcpy(task.partial, total.base, sizeof(float) * num_rows * total.stride());
    else
        finish_rows(task, total, scratch);
}

inline void merge(const AttendTask& task, int first_node, int count, AttendScratch& scratch) {
    const int num_rows = task.kv_heads * task.rows_per_head(), value_dim = task.kv->value_dim;
    StateTree tree(scratch.states, num_rows, value_dim);
    const int64_t size = int64_t{num_rows} * (value_dim + kRowState);
    for (int i = 0; i < count; ++i) {
        __builtin_memcpy(tree.next().base, task.partial + i * size, size * sizeof(float));
        tree.add(first_node + i);
    }
    finish_rows(task, tree.total(), scratch);
}

}  // namespace octavo::OCTAVO_LEVEL
