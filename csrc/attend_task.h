// A piece of a step's attention, for one thread.
#pragma once

#include <cstdint>

#include "layer_kv.h"

namespace octavo {

// Attention is split at multiples of these absolute positions, so that the order in which a token's scores are reduced
// never depends on the batch, the chunk or the threads.
constexpr int kSpan = 64;         // tokens between two updates of the running maximum
constexpr int kSplit = 512;       // tokens per state; states are merged in a binary tree, see StateTree
constexpr int kTreeStates = 24;   // most states waiting to be merged, for 2^31 tokens
constexpr int kMaxTaskRows = 48;  // query rows (tokens x heads) that share one pass over the KV
constexpr int kMaxPromptRows = 384;  // the same for coded keys and values that are decoded once for all rows
constexpr int kMaxHeadDim = 576;  // latents of 512, with the rotated part of keys
constexpr int kRowState = 32;  // floats after a row's weighted values: the sum of weights in 16 lanes, and the maximum

// Which tokens a query reads in which form, if the first blocks and the most recent ones have copies in more bits
// (storage/recent_kv.py): the copies of both, and the layer's own codes between them. kReadsSinks: see `budget`.
enum Reads { kReadsAll, kReadsFirst, kReadsBetween, kReadsRecent, kReadsSinks };

// Of 16 tokens that a row sees, the sum of their weights of attention, relative to 2^max; or of all that it sees.
struct RowMass {
    float sum, max;
};

// Some query tokens of one sequence, with the query heads of some KV heads, over some splits of the context. Rows are
// [kv head][token][query head of the KV head].
struct AttendTask {
    const LayerKV* kv;
    const char* query;  // of the first token and head; strides are in bytes
    char* out;
    int64_t query_token_stride, query_head_stride, out_token_stride, out_head_stride;
    const int32_t* block_table;
    const float* sinks;     // one per query head of the task, or null
    float* partial;         // null: write `out`; otherwise write the state here, [row][value_dim + kRowState]
    float scale, softcap;   // softcap 0: none
    // Of a sequence that keeps `budget` tokens (kv_budget.py), else 0. Tokens from that position on see `window` tokens
    // and the first `sink_tokens`, with queries that are rotated for the sinks' place in the cache.
    int budget, sink_tokens;
    const char* sink_query;  // as `query`, with the same stride of heads; null: no token sees sinks apart
    int64_t sink_token_stride;
    int kv_head, kv_heads;  // first and count
    int group_size;         // query heads of each KV head
    int num_tokens, first_position;
    int window;  // a token sees itself and the window - 1 tokens before it
    int split_begin, split_end;
    int sequence_rows;  // tokens of the sequence that are computed together x query heads of a KV head, of all ranks
    bool exact;   // see AttentionCall
    bool prompt;  // its tokens are a prompt's, even if it has only one of them, and not each a decode's
    Reads reads;
    int first_tokens, recent_blocks;  // unless it reads all
    const LayerKV* copies;            // or null; the task then reads between, and adds what it reads of the copies
    const int32_t* copies_table;
    // If attention is measured, else null: [row] of {each 16 tokens of the context, padding, all tokens}.
    RowMass* mass;
    int64_t mass_stride;
    int states;  // where in AttendScratch its states begin, in floats
    int rows_per_head() const { return num_tokens * group_size; }

    // The first of the most recent tokens of the query at `position`.
    int recent_token(int position) const {
        const int block = position / kv->block_size - recent_blocks + 1;
        return block > 0 ? block * kv->block_size : 0;
    }
    // The tokens that the query at `position` reads are [first_read, end_read). Neither end decreases with positions.
    int first_read(int position) const {
        if (reads == kReadsSinks) return 0;
        const int seen = position >= budget && position - window + 1 > 0 ? position - window + 1 : 0;
        if (reads == kReadsAll || reads == kReadsFirst) return seen;
        const int from = reads == kReadsBetween ? first_tokens : recent_token(position);
        return seen > from ? seen : from;
    }
    int end_read(int position) const {
        if (reads == kReadsAll || reads == kReadsRecent) return position + 1;
        if (reads == kReadsSinks) return position >= budget ? sink_tokens : 0;
        const int recent = recent_token(position);
        return reads == kReadsFirst && first_tokens < recent ? first_tokens : recent;
    }
    // Sets the splits that hold what its tokens read; there may be none.
    void set_splits() {
        const int begin = first_read(first_position), end = end_read(first_position + num_tokens - 1);
        split_begin = begin / kSplit;
        split_end = end > begin ? (end + kSplit - 1) / kSplit : split_begin;
    }
};

// Working memory of one thread. Pages that only longer contexts would need are never touched.
struct alignas(64) AttendScratch {
    uint32_t query[kMaxPromptRows * kMaxHeadDim];  // [row / R][unit][R]; for tiles, [row][unit]
    float scores[16 * kSpan];
    uint32_t weights[16 * kSpan];
    uint32_t values[kSpan / 2 * (kMaxHeadDim + 16)];  // of one span, see tile_attention.h
    float states[kTreeStates * kMaxPromptRows * (kMaxHeadDim + kRowState)];
    float query_scale[kMaxTaskRows];  // of the integer queries of coded_scores.h, and their sums
    int32_t query_zero[kMaxTaskRows * 2];
    // For tile_coded_attention.h, a decoded split and its tokens' scales; for decoded_attention.h, a decoded span and
    // its.
    alignas(64) uint32_t keys[kSplit / 2 * kMaxHeadDim], decoded[kSplit / 2 * kMaxHeadDim];
    float factors[kSplit * 2];
};

}  // namespace octavo
