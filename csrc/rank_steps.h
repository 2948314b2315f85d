// What rank 0 sends to the others: steps, and blocks to copy.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "decoder.h"
#include "ranks.h"

namespace octavo {

// Memory of whole blocks: the cache's, or the host's for swapped blocks.
struct BlockMemory {
    char* base;
    int64_t num_blocks, block_bytes;
};
enum BlockPlace { kOnDevice, kOnHost };

// Copies blocks (from, to), as if all were read before any is written.
void copy_blocks(const BlockMemory& from, const BlockMemory& to, const std::vector<std::pair<int64_t, int64_t>>& ids);

// Rank 0: throws std::invalid_argument if a message is too long.
// `rotation_bytes`: of the angles of one token, in all rotations.
int64_t step_message_bytes(int64_t num_tokens, int64_t num_seqs, int64_t num_groups, int64_t max_blocks,
                           int64_t rotation_bytes);
void send_step(Ranks& ranks, const Decoder& decoder, const DecoderStep& step);
void send_logits(Ranks& ranks, int64_t first, int64_t count);
// Returns when every rank of this machine has copied its share of the blocks.
void send_copies(Ranks& ranks, BlockPlace from, BlockPlace to, const std::vector<std::pair<int64_t, int64_t>>& ids);

// The others: does what rank 0 sends, until something throws; then all ranks fail. `places` are the device's and the
// host's memory.
void follow(Decoder& decoder, const BlockMemory (&places)[2]);

}  // namespace octavo
