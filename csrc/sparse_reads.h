// Which blocks a layer reads of sequences that read few of them (kv_budget.py).
#pragma once

#include <cstdint>
#include <vector>

#include "layer_kv.h"

namespace octavo {

struct AttentionCall;

// Without `bounds`, every sequence reads all of its blocks.
struct SparseReads {
    char* bounds;  // of each block's keys: [block][kv_head][largest, smallest][key_dim], in the storage type
    int64_t block_stride, head_stride;  // bytes
    const int32_t* num_read;    // blocks that each sequence reads; 0: all
    const int32_t* num_recent;  // the last ones among them, which it always reads, as it does the first one
    const int32_t* completed;   // blocks whose bounds are to be computed first
    int64_t num_completed;
};

// The chosen blocks of a step's sequences, in the order of the text, so that attention reads them like a shorter text.
class ChosenBlocks {
  public:
    // Computes the bounds of completed blocks, and chooses: for each KV head those in which one of its queries may
    // score highest. The call must have been checked.
    void choose(const AttentionCall& call);
    // Null if the sequence reads all of its blocks.
    const int32_t* table(int seq, int kv_head) const {
        return begins_[seq] < 0 ? nullptr : tables_.data() + begins_[seq] + int64_t{kv_head} * num_read_[seq];
    }
    // How many tokens they hold, of a context so long.
    int num_tokens(int seq, int context_len, int block_size) const {
        return begins_[seq] < 0 ? context_len : (num_read_[seq] - 1) * block_size + (context_len - 1) % block_size + 1;
    }

  private:
    std::vector<int64_t> begins_;  // of each sequence in tables_, or -1
    std::vector<int> num_read_;
    std::vector<int32_t> tables_;  // [sequence][kv_head][chosen blocks]
    std::vector<float> scores_;    // [sequence][kv_head][blocks]
};

}  // namespace octavo
