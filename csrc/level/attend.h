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

void attend(const AttendTask& task, AttendScratch& scratch) {
    const LayerKV& kv = *task.kv;
    if (!kv.coded()) {
#ifdef OCTAVO_TILES
        if (kv.storage == kBf16 && keys_fill_tiles(kv) && (task.exact || (task.prompt && task.num_tokens > 1)))
            return attend_by(task, scratch, TilePasses(kv.value_dim, scratch));
#endif
        if (kv.storage == kBf16) return attend_by(task, scratch, RowPasses<kBf16>{});
        return attend_by(task, scratch, RowPasses<kF32>{});
    }
    // Codes are decoded once for all rows of a prompt's task. Those of a lone token are multiplied as they are, which
    // is faster, unless prompts must have the same bits.
    if (!decodes_to_bf16(kv) || !(task.prompt || task.exact)) return attend_by(task, scratch, CodedRowPasses{});
#ifdef OCTAVO_TILES
    if (codes_fill_tiles(kv)) return attend_by(task, scratch, CodedTilePasses{});
#endif
    attend_by(task, scratch, DecodedRowPasses(kv));
}

}  // namespace octavo::OCTAVO_LEVEL
