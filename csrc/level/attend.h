// Selects the attention kernel for a task.
#pragma once

#include "level/coded_attention.h"
#include "level/decoded_attention.h"
#include "level/plain_attention.h"
#ifdef OCTAVO_TILES
#include "level/tile_attention.h"
#include "level/tile_coded_attention.h"
#endif

namespace octavo::OCTAVO_LEVEL {

#ifdef OCTAVO_TILES
// Whether there are rows enough for matrix tiles to be faster than vectors, if either will do. Vectors multiply codes
// of integers as they are, tiles only what is decoded. How rows are split into tasks, and heads among ranks, must not
// matter.
inline bool fills_tiles(const AttendTask& task) {
    const Code code = task.kv->key_side.code;
    return task.sequence_rows > (code == kCodeInt8 || code == kCodeInt4 ? 8 : 4);
}
#endif

void attend(const AttendTask& task, AttendScratch& scratch) {
    const LayerKV& kv = *task.kv;
    if (!kv.coded()) {
#ifdef OCTAVO_TILES
        if (kv.storage == kBf16 && keys_fill_tiles(kv) && (task.exact || fills_tiles(task)))
            return attend_by(task, scratch, TilePasses(kv.value_dim, scratch));
#endif
        if (kv.storage == kBf16) return attend_by(task, scratch, RowPasses<kBf16>{});
        return attend_by(task, scratch, RowPasses<kF32>{});
    }
    if (!decodes_to_bf16(kv)) return attend_by(task, scratch, CodedRowPasses{});
#ifdef OCTAVO_TILES
    if (codes_fill_tiles(kv) && (task.exact || task.prompt || fills_tiles(task)))
        return attend_by(task, scratch, CodedTilePasses{});
#endif
    // Codes are decoded once for all rows of a prompt's task. Those of a decode are multiplied as they are, which is
    // faster, unless prompts must have the same bits.
    if (task.exact || task.prompt) return attend_by(task, scratch, DecodedRowPasses(kv));
    attend_by(task, scratch, CodedRowPasses{});
}

}  // namespace octavo::OCTAVO_LEVEL
