// One step's attention, split into tasks.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "sparse_reads.h"

namespace octavo {

// The copies of a coded layer's first blocks and most recent ones, see `Reads`; recent_blocks 0: there are none.
struct RecentCopies {
    LayerKV kv;
    const int32_t* block_tables;
    int64_t block_table_stride, max_blocks;
    int first_blocks, recent_blocks;
};

// Sequences that keep the first tokens and the last ones, see AttendTask; without `budgets` there are none.
struct SinkReads {
    const int32_t* budgets;  // of each sequence, in tokens; 0: it keeps all
    const char* query;       // [tokens][heads][key_dim], used for tokens that see sinks apart
    int64_t token_stride;    // bytes; heads have the stride of AttentionCall::query
    int sink_tokens;
};

// Sequences whose attention is measured. The share that a block's tokens have of a row's attention in a head is raised
// to the fourth power and added to the block's entry of `mass`, in units of 1 / kMassUnit: the sums of integers do not
// depend on their order.
constexpr double kMassUnit = 1 << 24;
struct MassReads {
    const int64_t* begins;  // of each sequence's blocks in `mass`; -1: it is not measured
    int64_t* mass;          // null: none is
};

struct AttentionCall {
    LayerKV kv;
    RecentCopies copies;
    SinkReads sinks_apart;
    SparseReads sparse;  // of sequences with one new token
    MassReads measured;
    const char* query;
    char* out;
    int64_t query_token_stride, query_head_stride, out_token_stride, out_head_stride;  // bytes
    const int32_t *block_tables, *query_start, *context_lens;
    const int64_t* table_rows;  // for each sequence, its row of block_tables
    int64_t block_table_stride, max_blocks, num_tokens;
    const float* sinks;
    float scale, softcap;
    int num_seqs, num_heads, window;  // window 0: none
    int group = 0;  // query heads of a KV head, if several ranks have them; 0: as num_heads says
    // If true, a token's bits depend on its context alone. If false, a level with tiles may compute many rows in tiles
    // and few in vectors, whichever is faster.
    bool exact = true;
};

// Throws std::invalid_argument, with the numbers, if the batch names tokens or blocks that do not exist.
void attend(const AttentionCall& call);

}  // namespace octavo
