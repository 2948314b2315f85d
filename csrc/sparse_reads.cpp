#include "sparse_reads.h"

#include <algorithm>
#include <bit>
#include <functional>

#include "attention.h"
#include "thread_pool.h"

namespace octavo {
namespace {

constexpr int kBoundedPerTask = 16, kScoredPerTask = 256, kScoredTogether = 64;  // blocks

void bound_completed(const AttentionCall& call) {
    const SparseReads& sparse = call.sparse;
    const auto bound = kernels().bound_keys[call.kv.storage];
    const int64_t tasks = (sparse.num_completed + kBoundedPerTask - 1) / kBoundedPerTask;
    parallel_for(static_cast<int>(tasks), [&](int task) {
        const int64_t end = std::min<int64_t>(sparse.num_completed, int64_t{task + 1} * kBoundedPerTask);
        for (int64_t i = int64_t{task} * kBoundedPerTask; i < end; ++i)
            for (int head = 0; head < call.kv.kv_heads; ++head) {
                const int64_t block = sparse.completed[i];
                bound(call.kv, block, head, sparse.bounds + block * sparse.block_stride + head * sparse.head_stride);
            }
    });
}

// Larger for a higher score, and for an earlier block of the same score.
uint64_t rank_of(float score, int index) {
    const auto bits = std::bit_cast<uint32_t>(score);
    const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
    return uint64_t{ordered} << 32 | static_cast<uint32_t>(~index);
}
int index_of(uint64_t rank) { return static_cast<int>(~static_cast<uint32_t>(rank)); }

struct Scored {  // blocks [begin, end) of a sequence and a KV head, and where the scores of its first head begin
    int seq, head, begin, end;
    int64_t scores;
};

}  // namespace

void ChosenBlocks::choose(const AttentionCall& call) {
    const SparseReads& sparse = call.sparse;
    const int size = call.kv.block_size, heads = call.kv.kv_heads, group = call.num_heads / heads;
    begins_.assign(call.num_seqs, -1);
    num_read_.assign(call.num_seqs, 0);
    if (!sparse.bounds) return;
    bound_completed(call);
    std::vector<Scored> rows, pieces;
    int64_t num_scores = 0, num_chosen = 0;
    for (int seq = 0; seq < call.num_seqs; ++seq) {
        const int blocks = (call.context_lens[seq] + size - 1) / size, read = sparse.num_read[seq];
        if (read == 0 || read >= blocks) continue;
        begins_[seq] = num_chosen;
        num_read_[seq] = read;
        num_chosen += int64_t{heads} * read;
        const int end = blocks - sparse.num_recent[seq];
        for (int begin = 1; begin < end; begin += kScoredPerTask)
            pieces.push_back({seq, 0, begin, std::min(end, begin + kScoredPerTask), num_scores});
        for (int head = 0; head < heads; ++head, num_scores += blocks)
            rows.push_back({seq, head, 1, end, num_scores});
    }
    tables_.resize(num_chosen);
    if (static_cast<int64_t>(scores_.size()) < num_scores) scores_.resize(num_scores);
    const auto table_of = [&](int seq) { return call.block_tables + call.table_rows[seq] * call.block_table_stride; };

    parallel_for(static_cast<int>(pieces.size()), [&](int index) {
        const Scored& piece = pieces[index];
        const int blocks = (call.context_lens[piece.seq] + size - 1) / size;
        BoundsTask task{};
        task.block_stride = sparse.block_stride;
        task.query_head_stride = call.query_head_stride;
        task.group_size = group;
        task.key_dim = call.kv.key_dim();
        for (int begin = piece.begin; begin < piece.end; begin += kScoredTogether) {
            task.blocks = table_of(piece.seq) + begin;
            task.count = std::min(piece.end - begin, kScoredTogether);
            for (int head = 0; head < heads; ++head) {  // a block's heads are adjacent in memory
                task.bounds = sparse.bounds + head * sparse.head_stride;
                task.query = call.query + call.query_start[piece.seq] * call.query_token_stride +
                             int64_t{head} * group * call.query_head_stride;
                task.scores = scores_.data() + piece.scores + int64_t{head} * blocks + begin;
                kernels().score_bounds[call.kv.storage](task);
            }
        }
    });
    parallel_for(static_cast<int>(rows.size()), [&](int index) {
        const Scored& row = rows[index];
        static thread_local std::vector<uint64_t> ranks;
        ranks.clear();
        for (int i = row.begin; i < row.end; ++i) ranks.push_back(rank_of(scores_[row.scores + i], i));
        const int read = num_read_[row.seq], recent = sparse.num_recent[row.seq], best = read - 1 - recent;
        std::nth_element(ranks.begin(), ranks.begin() + best, ranks.end(), std::greater<>());
        std::sort(ranks.begin(), ranks.begin() + best,
                  [](uint64_t a, uint64_t b) { return index_of(a) < index_of(b); });
        const int32_t* table = table_of(row.seq);
        int32_t* to = tables_.data() + begins_[row.seq] + int64_t{row.head} * read;
        *to++ = table[0];
        for (int i = 0; i < best; ++i) *to++ = table[index_of(ranks[i])];
        std::copy_n(table + row.end, recent, to);
    });
}

}  // namespace octavo
