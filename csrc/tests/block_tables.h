// The block tables of a batch of sequences over a shuffled pool of blocks.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "attention.h"
#include "harness.h"

namespace octavo::test {

struct Sequence {
    int context, queries;
};

inline std::string describe(const std::vector<Sequence>& sequences) {
    std::string text;
    for (const Sequence& s : sequences) text += ", " + std::to_string(s.queries) + " of " + std::to_string(s.context);
    return text;
}

// Sequences have their rows of the tables in reverse order. Block 0 is the null block, which stands for blocks that no
// query of a sequence sees; one block is in no table.
class BlockTables {
  public:
    BlockTables(const std::vector<Sequence>& sequences, int block_size, int window)
        : sequences_(sequences), block_size_(block_size), window_(window), num_blocks_(2), starts_(1, 0) {
        for (const Sequence& s : sequences) {
            num_blocks_ += blocks_of(s);
            stride_ = std::max(stride_, blocks_of(s));
            starts_.push_back(starts_.back() + s.queries);
            contexts_.push_back(s.context);
            rows_.push_back(static_cast<int64_t>(sequences.size() - rows_.size() - 1));
        }
        std::vector<int32_t> free;
        for (int32_t block = 1; block < num_blocks_; ++block) free.push_back(block);
        std::shuffle(free.begin(), free.end(), random_engine());
        entries_.assign(sequences.size() * static_cast<size_t>(stride_), 0);
        for (size_t seq = 0; seq < sequences.size(); ++seq)
            for (int64_t index = first_seen(seq) / block_size; index < blocks_of(sequences[seq]); ++index) {
                entry(seq, index) = free.back();
                free.pop_back();
            }
    }

    int64_t num_blocks() const { return num_blocks_; }
    int num_queries() const { return starts_.back(); }
    int start(size_t seq) const { return starts_[seq]; }  // the sequence's first query
    int64_t block(size_t seq, int token) const { return entries_[at(seq, token / block_size_)]; }
    int32_t& entry(size_t seq, int64_t index) { return entries_[at(seq, index)]; }
    // The first token that any query of the sequence sees.
    int first_seen(size_t seq) const {
        const Sequence& s = sequences_[seq];
        return window_ ? std::max(0, s.context - s.queries - window_ + 1) : 0;
    }

    // Leaves the first sequence's queries [first, first + count) alone, with the context that the last one sees.
    void keep_part(int first, int count) {
        contexts_ = {sequences_[0].context - sequences_[0].queries + first + count};
        starts_ = {0, count};
    }

    void set(AttentionCall& call) const {
        call.kv.num_blocks = num_blocks_;
        call.block_tables = entries_.data();
        call.table_rows = rows_.data();
        call.query_start = starts_.data();
        call.context_lens = contexts_.data();
        call.block_table_stride = call.max_blocks = stride_;
        call.num_tokens = starts_.back();
        call.num_seqs = static_cast<int>(contexts_.size());
        call.window = window_;
    }

  private:
    int64_t blocks_of(const Sequence& s) const { return (s.context + block_size_ - 1) / block_size_; }
    size_t at(size_t seq, int64_t index) const { return static_cast<size_t>(rows_[seq] * stride_ + index); }

    std::vector<Sequence> sequences_;
    int block_size_, window_;
    int64_t num_blocks_, stride_ = 0;
    std::vector<int32_t> starts_, contexts_, entries_;
    std::vector<int64_t> rows_;
};

}  // namespace octavo::test
