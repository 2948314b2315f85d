// Selects the attention kernel for a task.
#pragma once

#include "level/attention_tile.h"
#include "level/coded_attention.h"
#include "level/decoded_attention.h"
#ifdef OCTAVO_TILES
#include "level/tile_attention.h"
#include "level/tile_coded_attention.h"
#endif

namespace octavo::OCTAVO_LEVEL {

template <Storage S> void attend(const AttendTask& task, AttendScratch& scratch) {
#ifdef OCTAVO_TILES
    if constexpr (S == kBf16)
        if (keys_fill_tiles(*task.kv) && (task.exact || task.num_tokens > 1))
            return attend_by<S>(task, scratch, TilePasses(task.kv->value_dim, scratch));
#endif
    attend_by<S>(task, scratch, RowPasses<S>{});
}

// Codes are decoded once for all rows of a prompt's task. Those of a lone token are multiplied as they are, which is
// faster, unless prompts must have the same bits.
template <Code K, Code V> void attend_coded(const AttendTask& task, AttendScratch& scratch) {
    if (!decodes_to_bf16(*task.kv) || !(task.prompt || task.exact))
        return attend_coded_by(task, scratch, CodedRowPasses<K, V>{});
#ifdef OCTAVO_TILES
    if (codes_fill_tiles(*task.kv)) return attend_coded_by(task, scratch, CodedTilePasses<K, V>{});
#endif
    attend_coded_by(task, scratch, DecodedRowPasses<K, V>(*task.kv));
}

inline void attend_any_code(const AttendTask& task, AttendScratch& scratch) {
    switch (task.kv->key_side.code) {
        case kCodeE4m3: return attend_coded<kCodeE4m3, kCodeE4m3>(task, scratch);
        case kCodeE5m2: return attend_coded<kCodeE5m2, kCodeE5m2>(task, scratch);
        case kCodeInt4: return attend_coded<kCodeInt4, kCodeInt4>(task, scratch);
        default:
            if (task.kv->value_side.code == kCodeInt4) return attend_coded<kCodeInt8, kCodeInt4>(task, scratch);
            return attend_coded<kCodeInt8, kCodeInt8>(task, scratch);
    }
}

// Copies lie in another form than the layer's own codes, so they have states of their own, in the room behind `total`:
//
//     scratch.states    | total | of the copies | states being merged |
inline void add_copies(const AttendTask& task, const Rows& total, AttendScratch& scratch) {
    const int num_rows = task.kv_heads * task.rows_per_head(), size = num_rows * total.stride();
    AttendTask part = task;
    part.kv = task.copies;
    part.block_table = task.copies_table;
    part.copies = nullptr;
    part.partial = total.base + size;
    part.states = 2 * size;
    const Reads both[] = {kReadsFirst, kReadsRecent};
    for (const Reads reads : both) {
        part.reads = reads;
        part.set_splits();
        if (part.split_begin == part.split_end) continue;
        attend_any_code(part, scratch);
        total.merge(Rows{part.partial, total.value_dim}, num_rows);
    }
}

}  // namespace octavo::OCTAVO_LEVEL
