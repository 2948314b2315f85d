// What one layer of a model asks of many threads, counted on any machine: native_counts [Q4_0|bf16]
//
// The drivers (ops.cpp, ops_linear.cpp, attention.cpp) run as they are, with kernels that only count the bytes they
// would read. Their rounds are shared out by the pool's own code (task_shares.h), over atomics that count, while a
// serial scheduler plays the threads: it always lets the one continue that has read least. So the counts are exact, and
// the same on every machine:
//
//     rounds       that wait for all threads
//     atomic       operations that lock a line: exchanges and additions
//     transfers    accesses to a line of the pool's of which the thread has no copy
//     busiest      how often the threads that write one line take turns, which follow each other
//     shared       lines of the pool's that more than one thread wrote
//     weights, activations, KV    bytes that products and attention read, of packed rows once for each task
//
// The last columns model a socket (`kModelled`): `bytes` and `sums` are the microseconds that reading and multiplying
// take, which overlap, `waits` those of the threads for each other, and `layer` the larger of the first two and the
// third.
#include <algorithm>
#include <bitset>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "attention.h"
#include "compiled_levels.h"
#include "linear.h"
#include "ops.h"
#include "task_shares.h"
#include "thread_pool.h"

namespace octavo {
namespace {

int g_threads = 1, g_thread = 0;  // how many are played, and which one runs

struct Counts {
    int64_t rounds, tasks, atomics, transfers, leader, weights, activations, kv;
    int64_t read() const { return weights + activations + kv; }
};
Counts g_counts{};

// Assumed, not measured: a socket with eight channels of DDR5-4800 (307 GB/s at most), of which a core fetches what its
// buffers for misses allow (10 to 20 GB/s); products as measured on one core of Zen 5
// (benchmarks/results/amd_zen5/kernels.md); and a line that moves from one core to another (40 to 150 ns on a socket:
// David, Guerraoui, Trigonakis, "Everything you always wanted to know about synchronization", SOSP 2013).
struct Modelled {
    double socket_gb_s = 250, core_gb_s = 12, core_gop_s = 650, transfer_ns = 80;
};
constexpr Modelled kModelled;

// A cache line: who has a copy, and what has happened to it.
struct Line {
    std::bitset<256> holders, writers;
    int64_t turns = 0;
    int writer = -1;
};
std::map<uintptr_t, Line> g_lines;

template <class T> class Counted {
  public:
    Counted(T value) : value_(value) {}
    T load(std::memory_order = {}) const {
        touch().holders.set(g_thread);
        return value_;
    }
    void store(T value, std::memory_order = {}) {
        write();
        value_ = value;
    }
    bool compare_exchange_weak(T& expected, T wanted, std::memory_order, std::memory_order) {
        ++g_counts.atomics;
        write();
        const bool same = value_ == expected;
        expected = value_;
        if (same) value_ = wanted;
        return same;
    }

  private:
    Line& touch() const {
        Line& line = g_lines[reinterpret_cast<uintptr_t>(this) / 64];
        const bool transferred = line.holders.any() && !line.holders.test(g_thread);
        g_counts.transfers += transferred;
        g_counts.leader += transferred && g_thread == 0;
        return line;
    }
    void write() {
        Line& line = touch();
        line.turns += line.writer >= 0 && line.writer != g_thread;
        line.writer = g_thread;
        line.holders.reset();
        line.holders.set(g_thread);
        line.writers.set(g_thread);
    }
    T value_;
};

using Shares = TaskShares<Counted>;
auto g_shares = std::make_unique<Shares>();

}  // namespace

// What thread_pool.cpp defines.
int num_threads() { return g_threads; }
void set_num_threads(int count) { g_threads = count; }
int hardware_threads() { return g_threads; }
void wake_threads() {}

namespace detail {
void run_tasks(int num_tasks, TaskFunction task, void* context) {
    g_counts.tasks += num_tasks;
    if (num_tasks == 1 || g_threads == 1) {
        for (int i = 0; i < num_tasks; ++i) task(context, i);
        return;
    }
    ++g_counts.rounds;
    struct Player {
        Shares::Terms terms;
        Shares::Visit visit;
        int64_t read;
        bool ended;
    };
    g_thread = 0;
    g_shares->open(task, context, num_tasks, g_threads);
    std::vector<Player> players;
    for (g_thread = 0; g_thread < g_threads; ++g_thread) players.push_back({g_shares->terms(), {g_thread}, 0, false});
    for (;;) {
        Player* next = nullptr;
        for (Player& player : players)
            if (!player.ended && (!next || player.read < next->read)) next = &player;
        if (!next) break;
        g_thread = next->visit.self;
        const Shares::Taken taken = g_shares->next(next->terms, next->visit);
        next->ended = taken.count == 0;
        const int64_t before = g_counts.read();
        for (int i = 0; i < taken.count; ++i) task(context, taken.first + i * next->terms.threads);
        next->read += g_counts.read() - before + taken.count;
    }
    g_thread = 0;
    if (!g_shares->all_done(players[0].terms)) std::abort();
}
}  // namespace detail

namespace {

const Kernels& fastest_level() {
    constexpr struct {
        Isa isa;
        const Kernels* table;
    } kCompiled[] = {OCTAVO_COMPILED_LEVELS};
    const auto table_of = [&](Isa isa) -> const Kernels* {
        for (const auto& level : kCompiled)
            if (level.isa == isa) return level.table;
        return nullptr;
    };
    static const auto find = table_of;
    return *table_of(fastest_isa([](Isa isa) { return find(isa) != nullptr && cpu_supports(isa); }));
}

template <WeightFormat F>
void count_product(const ProductTask& task, int64_t group_begin, int64_t group_end, int64_t panel_begin,
                   int64_t panel_end) {
    const int64_t inputs = is_quantised(F) ? int64_t{task.units} * kSectionInputs : int64_t{task.units} * 2;
    const int64_t rows = task.groups.begin(group_end) - task.groups.begin(group_begin);
    g_counts.weights += (panel_end - panel_begin) * packed_bytes(F, kPanelOutputs, inputs);
    g_counts.activations += rows * task.units * (is_quantised(F) && !task.x ? 40 : 4);
}

void count_attention(const AttendTask& task, AttendScratch&) {
    const int end = std::min(task.end_read(task.first_position + task.num_tokens - 1), task.split_end * kSplit);
    const int64_t tokens = end - std::max(task.first_read(task.first_position), task.split_begin * kSplit);
    g_counts.kv += tokens * task.kv_heads * (task.kv->key_dim() + task.kv->value_dim) * 2;
}

Kernels counting_level() {
    Kernels level = fastest_level();
    level.attend = count_attention;
    level.merge = [](const AttendTask&, int, int, AttendScratch&) {};
    level.rope_write[kBf16] = [](const RopeTask&, int64_t, int64_t) {};
    level.normalise[kF32][kBf16][kRmsNorm] = [](char*, const char*, const NormWeights&, char*, int) {};
    level.quantise_rows[kBf16] = [](const QuantLayout&, const char* const*, int, int, const QuantRows&) {};
    if (level.pack_tile_rows) level.pack_tile_rows = [](const char* const*, int64_t, int64_t, uint32_t*) {};
    for (ProductKernel** products : {level.multiply, level.multiply_in_tiles}) {
        products[static_cast<int>(WeightFormat::bf16)] = count_product<WeightFormat::bf16>;
        products[static_cast<int>(WeightFormat::q4_0)] = count_product<WeightFormat::q4_0>;
    }
    return level;
}

constexpr int64_t kHidden = 4096, kInner = 14336;
constexpr int kHeads = 32, kKvHeads = 8, kDim = 128, kBlock = 16;
constexpr int64_t kQkv = (kHeads + 2 * kKvHeads) * kDim;
constexpr double kLayerWeights = kHidden * (kQkv + kHidden + 3 * kInner);

// One layer with the shapes of Llama 3's 8B: `seqs` sequences of `queries` new tokens each, of `context`.
void play_layer(WeightFormat format, int seqs, int queries, int context) {
    const int64_t rows = int64_t{seqs} * queries, blocks = (context + kBlock - 1) / kBlock;
    // Nothing is read: a weight's or a row's memory is only an address.
    static std::vector<char> memory;
    if (static_cast<int64_t>(memory.size()) < rows * kInner * 2) memory.resize(static_cast<size_t>(rows * kInner * 2));
    const auto matrix = [&](int64_t width) { return Matrix{memory.data(), rows, width, width * 2}; };
    const Matrix hidden = matrix(kHidden), qkv = matrix(kQkv), inner = matrix(kInner);
    const auto multiply = [&](int64_t inputs, int64_t outputs, const Matrix& x, const Matrix& out, Epilogue epilogue) {
        linear({memory.data(), outputs, inputs, format}, kBf16, x,
               {out.base, out.stride, out.width, nullptr, kBf16, epilogue}, false);
    };
    const NormWeights norm{kRmsNorm, memory.data(), nullptr, 1e-5f};
    LayerKV kv{};
    kv.key = kv.value = memory.data();
    kv.num_blocks = blocks;
    kv.kv_heads = kKvHeads;
    kv.key_units = kDim / 2;
    kv.value_dim = kDim;
    kv.block_size = kBlock;
    kv.storage = kBf16;
    std::vector<int64_t> slots, table_rows(static_cast<size_t>(seqs), 0);
    std::vector<int32_t> table, starts(1, 0), contexts(static_cast<size_t>(seqs), context);
    for (int64_t i = 0; i < rows; ++i) slots.push_back(seqs > 1 ? i * kBlock : i);
    for (int32_t block = 0; block < blocks; ++block) table.push_back(block);
    for (int seq = 0; seq < seqs; ++seq) starts.push_back(starts.back() + queries);

    normalise(kF32, kBf16, hidden, &hidden, norm, hidden);
    multiply(kHidden, kQkv, hidden, qkv, kPlain);
    RopeTask rope{};
    rope.kv = &kv;
    rope.slots = slots.data();
    rope.num_heads = kHeads;
    rope.key_dim = kDim;
    rope_write(kBf16, rope, rows);
    AttentionCall call{};
    call.kv = kv;
    call.block_tables = table.data();
    call.table_rows = table_rows.data();
    call.query_start = starts.data();
    call.context_lens = contexts.data();
    call.block_table_stride = call.max_blocks = blocks;
    call.num_tokens = rows;
    call.scale = 1.0f;
    call.num_seqs = seqs;
    call.num_heads = kHeads;
    call.exact = false;
    attend(call);
    multiply(kHidden, kHidden, hidden, hidden, kPlain);
    normalise(kF32, kBf16, hidden, &hidden, norm, hidden);
    multiply(kHidden, 2 * kInner, hidden, inner, kSiluGate);
    multiply(kInner, kHidden, inner, hidden, kPlain);
}

}  // namespace

// What dispatch.cpp defines.
bool isa_is_supported(Isa) { return true; }
Isa current_isa() { return kNumIsas; }
void force_isa(Isa) {}
const Kernels& kernels() {
    static const Kernels level = counting_level();
    return level;
}

}  // namespace octavo

int main(int argc, char** argv) {
    using namespace octavo;
    const std::string name = argc > 1 ? argv[1] : "Q4_0";
    if (argc > 2 || (name != "Q4_0" && name != "bf16")) {
        std::fprintf(stderr, "usage: native_counts [Q4_0|bf16]\n");
        return 2;
    }
    const WeightFormat format = name == "bf16" ? WeightFormat::bf16 : WeightFormat::q4_0;
    std::printf("a layer of an 8B in %s, at the level %s\n", name.c_str(), kernels().name);
    std::printf("%-15s %8s %7s %6s %8s %10s %8s %7s %10s %12s %8s %8s %8s %8s %8s\n", "new tokens", "threads", "rounds",
                "tasks", "atomic", "transfers", "busiest", "shared", "weights MB", "activ. MB", "KV MB", "bytes us",
                "sums us", "waits us", "layer us");
    constexpr struct {
        int seqs, queries, context;
    } kCases[] = {{1, 1, 1024}, {8, 1, 1024}, {64, 1, 1024}, {1, 512, 512}, {1, 2048, 2048}, {1, 8192, 8192}};
    for (const auto& [seqs, queries, context] : kCases)
        for (const int threads : {1, 2, 8, 16, 32, 64, 128}) {
            set_num_threads(threads);
            play_layer(format, seqs, queries, context);  // so that lines are where they are in any later layer
            g_counts = {};
            for (auto& [_, line] : g_lines) line.turns = 0, line.writers.reset();
            play_layer(format, seqs, queries, context);
            int64_t busiest = 0, shared = 0;
            for (const auto& [_, line] : g_lines) {
                busiest = std::max(busiest, line.turns);
                shared += line.writers.count() > 1;
            }
            const auto mb = [](int64_t bytes) { return static_cast<double>(bytes) / 1e6; };
            // What follows each other: the turns on one line, and what the leader fetches. Activations stay in caches.
            const double waits = static_cast<double>(busiest + g_counts.leader) * kModelled.transfer_ns / 1e3;
            const double bytes = mb(g_counts.weights + g_counts.kv) * 1e3 /
                                 std::min(kModelled.socket_gb_s, threads * kModelled.core_gb_s);
            const double sums = 2.0 * seqs * queries * kLayerWeights / 1e3 / (threads * kModelled.core_gop_s);
            std::printf("%5d x %-7d %8d %7lld %6lld %8lld %10lld %8lld %7lld %10.1f %12.1f %8.1f", seqs, queries,
                        threads, static_cast<long long>(g_counts.rounds), static_cast<long long>(g_counts.tasks),
                        static_cast<long long>(g_counts.atomics), static_cast<long long>(g_counts.transfers),
                        static_cast<long long>(busiest), static_cast<long long>(shared), mb(g_counts.weights),
                        mb(g_counts.activations), mb(g_counts.kv));
            std::printf(" %8.0f %8.0f %8.0f %8.0f\n", bytes, sums, waits, std::max(bytes, sums) + waits);
            std::fflush(stdout);
        }
}
