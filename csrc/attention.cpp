#include "attention.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "thread_pool.h"

namespace octavo {
namespace {

// An item is a task over all its splits. An item with a long context becomes several tasks, each of them a node of the
// tree that merges the states of splits (StateTree); the tree is the same however many tasks there are. The task that
// finishes last merges the nodes:
//
//     item   | split 0 | split 1 | split 2 | split 3 | split 4 |
//     tasks  |      node 0       |      node 1       | node 2  |  -> ((0, 1), (2, 3)), 4
//
// The thread that plans writes little of each item; the thread that computes it makes its AttendTask (task_of).
struct Item {
    int seq, head, kv_head, kv_heads, group_size;  // the first query head, and the KV heads that it is of
    int begin, num_tokens;                         // counted from the sequence's first new token
    int split_begin, split_end, num_tasks;
    int64_t first_partial;  // index of a PartialLine; -1: a single task
    RowMass* mass;          // null: not measured
    int64_t rows() const { return int64_t{kv_heads} * num_tokens * group_size; }
};

struct Slice {
    int item, split_begin, split_end;
};

struct alignas(64) PartialLine {
    float values[16];
};

struct Measured {
    int seq;
    size_t item_begin, item_end;
};

struct Plan {
    std::vector<Item> items;
    std::vector<Slice> slices;
    std::vector<PartialLine> partial;
    std::vector<Measured> measured;
    std::vector<RowMass> masses;
    ChosenBlocks chosen;
    std::unique_ptr<std::atomic<int>[]> finished;
    size_t finished_capacity = 0;
};

constexpr int kNoWindow = 1 << 30;
constexpr int kTasksPerThread = 8;  // enough to balance the load, few enough that taking one costs nothing
constexpr int kItemsPerThread = 4;  // when fewer items mean less work in total
constexpr int kMostCopiedRows = 192;  // of plain bf16 in matrix tiles; with more, the rows' states leave the caches

int budget_of(const AttentionCall& call, int seq) {
    return call.sinks_apart.budgets ? call.sinks_apart.budgets[seq] : 0;
}

// How many tokens before a token and with it it sees at most, apart from sinks.
int window_of(const AttentionCall& call, int seq) {
    if (const int budget = budget_of(call, seq)) return budget - call.sinks_apart.sink_tokens;
    return call.window ? std::min(call.window, kNoWindow) : kNoWindow;
}

void check_sequence(const AttentionCall& call, int seq) {
    const int begin = call.query_start[seq], end = call.query_start[seq + 1], context_len = call.context_lens[seq];
    const auto fail = [&](const std::string& what) {
        throw std::invalid_argument("attention: sequence " + std::to_string(seq) + " " + what);
    };
    if (begin < 0 || end < begin || end > call.num_tokens)  // before any difference, which could wrap around
        fail("has tokens " + std::to_string(begin) + " to " + std::to_string(end) + " of " +
             std::to_string(call.num_tokens));
    const int query_len = end - begin;
    if (context_len < query_len)
        fail("has " + std::to_string(query_len) + " new tokens but a context of " + std::to_string(context_len));
    if (query_len == 0) return;
    if (call.sparse.bounds) {
        const int read = call.sparse.num_read[seq];
        if (read && query_len > 1)
            fail("reads " + std::to_string(read) + " blocks for " + std::to_string(query_len) + " new tokens");
    }
    const int64_t blocks = (int64_t{context_len} + call.kv.block_size - 1) / call.kv.block_size;
    // Blocks outside a window are not read.
    const int window = window_of(call, seq), unseen = context_len - query_len - window + 1;
    const int64_t first_block = unseen > 0 ? unseen / call.kv.block_size : 0;
    const auto check_table = [&](const int32_t* tables, int64_t stride, int64_t max_blocks, int64_t num_blocks) {
        if (blocks > max_blocks)
            fail("needs " + std::to_string(blocks) + " blocks for " + std::to_string(context_len) +
                 " tokens, its table has " + std::to_string(max_blocks));
        const int32_t* table = tables + call.table_rows[seq] * stride;
        uint32_t largest = static_cast<uint32_t>(table[0]);
        for (int64_t i = first_block; i < blocks; ++i) largest = std::max(largest, static_cast<uint32_t>(table[i]));
        if (largest >= num_blocks)
            fail("refers to block " + std::to_string(static_cast<int32_t>(largest)) + " of " +
                 std::to_string(num_blocks));
    };
    check_table(call.block_tables, call.block_table_stride, call.max_blocks, call.kv.num_blocks);
    const RecentCopies& copies = call.copies;
    if (copies.recent_blocks)
        check_table(copies.block_tables, copies.block_table_stride, copies.max_blocks, copies.kv.num_blocks);
}

// How a sequence's queries are divided into items.
struct Shape {
    int tokens;    // per item
    int kv_heads;  // per item
    int members;   // query heads of a KV head per item: all of them, unless the group is larger than a task
};

// The most rows of an item of several tokens. If blocks are decoded, or their values copied for matrix tiles, once for
// all rows of an item, there should be only as many items as keep every thread busy.
int64_t item_rows(const AttentionCall& call, bool prompt) {
    const bool decoded = decodes_to_bf16(call.kv);
    const bool copied = !call.kv.coded() && call.kv.storage == kBf16 && kernels().pack_tile_rows;
    if ((!decoded && !copied) || !(prompt || call.exact)) return kMaxTaskRows;
    const int64_t fair = call.num_tokens * call.num_heads / (int64_t{num_threads()} * kItemsPerThread);
    return std::clamp<int64_t>(fair, kMaxTaskRows, decoded ? kMaxPromptRows : kMostCopiedRows);
}

Shape choose_shape(const AttentionCall& call, int query_len, int context_len, bool prompt, bool much_context) {
    const int group = call.num_heads / call.kv.kv_heads;
    const int parts = (group + kMaxTaskRows - 1) / kMaxTaskRows, members = (group + parts - 1) / parts;
    // A prompt reads a KV head once for as many rows as fit. A decode takes all the heads of a block together, which
    // are adjacent in memory, unless that would leave threads without work, or a head's part of a block is so long
    // that the hardware prefetches more of it than we do.
    const bool long_runs = call.kv.block_size > kSpan && context_len >= 2 * kSplit;
    if (parts == 1 && much_context && !long_runs && int64_t{query_len} * call.num_heads <= kMaxTaskRows)
        return {query_len, call.kv.kv_heads, members};
    return {std::max(1, static_cast<int>(item_rows(call, prompt)) / members), 1, members};
}

// How many sequences from this one on are successive tokens of one text, which read the same blocks: a decode with the
// drafted tokens that it verifies. A task may have several of them, and each has the bits that it has alone.
int num_together(const AttentionCall& call, int seq) {
    if (call.sinks_apart.budgets || call.sparse.bounds || call.measured.mass) return 1;
    const auto follows = [&](int next) {
        return call.query_start[next + 1] - call.query_start[next] == 1 &&
               call.table_rows[next] == call.table_rows[seq] &&
               call.context_lens[next] == call.context_lens[seq] + next - seq;
    };
    int end = seq;
    while (end < call.num_seqs && follows(end)) ++end;
    return std::max(1, end - seq);
}

// Whether the contexts have enough splits to keep every thread busy, however many heads a task takes.
bool has_much_context(const AttentionCall& call, const ChosenBlocks& chosen) {
    int64_t splits = 0;
    for (int seq = 0; seq < call.num_seqs; seq += num_together(call, seq)) {
        const int budget = budget_of(call, seq);
        const int context_len = chosen.num_tokens(seq, call.context_lens[seq], call.kv.block_size);
        splits += (int64_t{budget ? std::min(budget, context_len) : context_len} + kSplit - 1) / kSplit;
    }
    return splits >= 4 * num_threads();
}

// What the tasks of a sequence have in common.
AttendTask task_of(const AttentionCall& call, int seq) {
    AttendTask task{};
    task.kv = &call.kv;
    task.query_token_stride = call.query_token_stride;
    task.query_head_stride = call.query_head_stride;
    task.out_token_stride = call.out_token_stride;
    task.out_head_stride = call.out_head_stride;
    task.block_table = call.block_tables + call.table_rows[seq] * call.block_table_stride;
    task.scale = call.scale;
    task.softcap = call.softcap;
    task.window = window_of(call, seq);
    task.budget = budget_of(call, seq);
    task.sink_tokens = call.sinks_apart.sink_tokens;
    task.sink_token_stride = call.sinks_apart.token_stride;
    const int group = call.group ? call.group : call.num_heads / call.kv.kv_heads;
    task.sequence_rows = (call.query_start[seq + num_together(call, seq)] - call.query_start[seq]) * group;
    task.exact = call.exact;
    task.prompt = call.query_start[seq + 1] - call.query_start[seq] > 1;
    if (const RecentCopies& copies = call.copies; copies.recent_blocks) {
        task.reads = kReadsBetween;
        task.first_tokens = copies.first_blocks * call.kv.block_size;
        task.recent_blocks = copies.recent_blocks;
        task.copies = &copies.kv;
        task.copies_table = copies.block_tables + call.table_rows[seq] * copies.block_table_stride;
    }
    return task;
}

// The number of tokens that a sequence attends to, the new ones included.
int context_of(const AttentionCall& call, const Plan& plan, int seq) {
    return plan.chosen.num_tokens(seq, call.context_lens[seq], call.kv.block_size);
}

int64_t mass_stride(const AttentionCall& call, int seq) {
    return (int64_t{call.context_lens[seq]} + kSpan - 1) / kSpan * (kSpan / 16) + 1;
}

AttendTask task_of(const AttentionCall& call, const Plan& plan, const Item& item) {
    const int query_begin = call.query_start[item.seq], query_len = call.query_start[item.seq + 1] - query_begin;
    const int context_len = context_of(call, plan, item.seq);
    const int64_t token = int64_t{query_begin} + item.begin;
    AttendTask task = task_of(call, item.seq);
    if (const int32_t* table = plan.chosen.table(item.seq, item.kv_head)) task.block_table = table;
    task.kv_head = item.kv_head;
    task.kv_heads = item.kv_heads;
    task.group_size = item.group_size;
    task.sinks = call.sinks ? call.sinks + item.head : nullptr;
    task.num_tokens = item.num_tokens;
    task.first_position = context_len - query_len + item.begin;
    task.split_begin = item.split_begin;
    task.split_end = item.split_end;
    task.query = call.query + token * call.query_token_stride + item.head * call.query_head_stride;
    if (task.budget && context_len > task.budget)
        task.sink_query =
            call.sinks_apart.query + token * task.sink_token_stride + item.head * call.query_head_stride;
    task.out = call.out + token * call.out_token_stride + item.head * call.out_head_stride;
    task.mass = item.mass;
    task.mass_stride = mass_stride(call, item.seq);
    return task;
}

// The items of `count` sequences that are computed together.
void add_items(const AttentionCall& call, Plan& plan, int seq, int count, bool much_context) {
    const int query_len = call.query_start[seq + count] - call.query_start[seq];
    const int context_len = context_of(call, plan, seq) + count - 1;
    const int group = call.num_heads / call.kv.kv_heads;
    AttendTask task = task_of(call, seq);
    Shape shape = choose_shape(call, query_len, context_len, task.prompt, much_context);
    if (plan.chosen.table(seq, 0)) shape.kv_heads = 1;  // each reads other blocks
    // A head's tasks follow each other, so that its keys and values are still in a cache; of these, the last tokens see
    // the most context and come first, so that no thread is left with a long task at the end.
    for (int kv_head = 0; kv_head < call.kv.kv_heads; kv_head += shape.kv_heads)
        for (int member = 0; member < group; member += shape.members)
            for (int end = query_len; end > 0; end -= shape.tokens) {
                const int begin = std::max(0, end - shape.tokens);
                task.num_tokens = end - begin;
                task.first_position = context_len - query_len + begin;
                task.set_splits();
                plan.items.push_back({seq, kv_head * group + member, kv_head, shape.kv_heads,
                                      std::min(shape.members, group - member), begin, end - begin, task.split_begin,
                                      task.split_end, 1, -1, nullptr});
            }
}

int64_t state_lines(const Item& item, const LayerKV& kv) { return item.rows() * ((kv.value_dim + kRowState) / 16); }

// Cuts items into nodes of a power-of-two number of splits; returns that number.
int cut(Plan& plan, const LayerKV& kv) {
    int64_t splits = 0;
    for (const Item& item : plan.items) splits += item.split_end - item.split_begin;
    const int64_t fair = std::max<int64_t>(1, splits / (int64_t{num_threads()} * kTasksPerThread));
    const auto most = static_cast<int>(std::bit_floor(static_cast<uint64_t>(fair)));
    int64_t lines = 0;
    for (int index = 0; index < static_cast<int>(plan.items.size()); ++index) {
        Item& item = plan.items[index];
        const int first = item.split_begin / most, last = std::max(item.split_begin, item.split_end - 1) / most;
        if (num_threads() == 1 || first == last) {
            plan.slices.push_back({index, item.split_begin, item.split_end});
            continue;
        }
        item.num_tasks = last - first + 1;
        item.first_partial = lines;
        lines += item.num_tasks * state_lines(item, kv);
        for (int node = first; node <= last; ++node)
            plan.slices.push_back(
                {index, std::max(node * most, item.split_begin), std::min((node + 1) * most, item.split_end)});
    }
    if (static_cast<int64_t>(plan.partial.size()) < lines) plan.partial.resize(lines);
    if (plan.finished_capacity < plan.items.size()) {
        plan.finished_capacity = plan.items.size() * 2;
        plan.finished = std::make_unique<std::atomic<int>[]>(plan.finished_capacity);
    }
    for (size_t i = 0; i < plan.items.size(); ++i) plan.finished[i].store(0, std::memory_order_relaxed);
    return most;
}

// Gives the items of measured sequences room for their rows' masses.
void make_room_for_masses(const AttentionCall& call, Plan& plan) {
    int64_t size = 0;
    for (const Measured& measured : plan.measured)
        for (size_t i = measured.item_begin; i < measured.item_end; ++i)
            size += plan.items[i].rows() * mass_stride(call, measured.seq);
    plan.masses.assign(size, {0.0f, 0.0f});
    RowMass* next = plan.masses.data();
    for (const Measured& measured : plan.measured)
        for (size_t i = measured.item_begin; i < measured.item_end; ++i) {
            plan.items[i].mass = next;
            next += plan.items[i].rows() * mass_stride(call, measured.seq);
        }
}

// Adds the fourth powers of the rows' shares of attention to the mass of blocks.
void add_masses(const AttentionCall& call, const Plan& plan) {
    constexpr int kBlocksPerTask = 256;
    const int vectors = call.kv.block_size / 16;
    for (const Measured& measured : plan.measured) {
        const int blocks = (call.context_lens[measured.seq] + call.kv.block_size - 1) / call.kv.block_size;
        int64_t* const mass = call.measured.mass + call.measured.begins[measured.seq];
        parallel_for((blocks + kBlocksPerTask - 1) / kBlocksPerTask, [&](int piece) {
            const int begin = piece * kBlocksPerTask, end = std::min(blocks, begin + kBlocksPerTask);
            for (size_t i = measured.item_begin; i < measured.item_end; ++i) {
                const int64_t stride = mass_stride(call, measured.seq);
                for (int64_t row = 0; row < plan.items[i].rows(); ++row) {
                    const RowMass* of_row = plan.items[i].mass + row * stride;
                    const auto [sum, max] = of_row[stride - 1];
                    const int last = static_cast<int>(stride) - 1;
                    float known = max;
                    double factor = kMassUnit / sum;
                    for (int block = begin; block < end; ++block) {
                        double share = 0;
                        for (int v = block * vectors; v < std::min(last, (block + 1) * vectors); ++v) {
                            if (of_row[v].sum == 0) continue;  // of what the row does not see, there is no maximum
                            if (of_row[v].max != known) {
                                known = of_row[v].max;
                                factor = std::exp2(double{known} - max) * kMassUnit / sum;
                            }
                            share += of_row[v].sum * factor;
                        }
                        if (share > 0 && share <= 2 * kMassUnit) {  // no NaN
                            const double square = share * (share / kMassUnit);
                            mass[block] += std::llrint(square * (square / kMassUnit));
                        }
                    }
                }
            }
        });
    }
}

AttendScratch& thread_scratch() {
    static thread_local std::unique_ptr<AttendScratch> scratch;
    if (!scratch) scratch = std::make_unique_for_overwrite<AttendScratch>();
    return *scratch;
}

}  // namespace

void attend(const AttentionCall& call) {
    static thread_local Plan plan;  // its vectors keep their memory from step to step
    plan.items.clear();
    plan.slices.clear();
    plan.measured.clear();
    for (int seq = 0; seq < call.num_seqs; ++seq) check_sequence(call, seq);
    plan.chosen.choose(call);
    const bool much_context = has_much_context(call, plan.chosen);
    for (int seq = 0, count; seq < call.num_seqs; seq += count) {
        const size_t first = plan.items.size();
        add_items(call, plan, seq, count = num_together(call, seq), much_context);
        if (call.measured.mass && call.measured.begins[seq] >= 0)
            plan.measured.push_back({seq, first, plan.items.size()});
    }
    if (!plan.measured.empty()) make_room_for_masses(call, plan);
    const int node_splits = cut(plan, call.kv);

    const Kernels& level = kernels();
    Plan& shared = plan;
    parallel_for(static_cast<int>(shared.slices.size()), [&](int index) {
        const Slice slice = shared.slices[index];
        const Item& item = shared.items[slice.item];
        AttendTask task = task_of(call, shared, item);
        task.split_begin = slice.split_begin;
        task.split_end = slice.split_end;
        AttendScratch& scratch = thread_scratch();
        if (item.first_partial < 0) return level.attend(task, scratch);

        const int first_node = item.split_begin / node_splits;
        const auto state_of = [&](int node) {
            return shared.partial[item.first_partial + (node - first_node) * state_lines(item, call.kv)].values;
        };
        task.partial = state_of(slice.split_begin / node_splits);
        level.attend(task, scratch);
        if (shared.finished[slice.item].fetch_add(1, std::memory_order_acq_rel) + 1 < item.num_tasks) return;
        task.partial = state_of(first_node);
        level.merge(task, first_node, item.num_tasks, scratch);
    });
    if (!plan.measured.empty()) add_masses(call, plan);
}

}  // namespace octavo
