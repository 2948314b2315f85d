// Speed of the kernels without Python: native_bench [products|attention|pool] [--threads N] [--level NAME]
// [--weight FORMAT] [--exact]
//
// Medians of repeated calls. The calls cycle through more weights than fit into second-level caches, so that these come
// from where they would come from in a model. For the limits of a machine, see `octavo bench cpu`.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "attention.h"
#include "kv_case.h"
#include "linear.h"
#include "thread_pool.h"
#include "weight_case.h"

namespace octavo::test {
namespace {

constexpr int64_t kWeightBytes = 96 << 20;
constexpr double kSecondsEach = 0.15;
std::string g_only_weight;  // products of this format alone

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Times {
    double median, p95, mean, best;
};
template <class Call> Times measure(const Call& call, double length = kSecondsEach) {
    std::vector<double> times;
    call();
    double total = 0;
    for (const double end = seconds() + length; seconds() < end || times.size() < 5;) {
        const double begin = seconds();
        call();
        times.push_back(seconds() - begin);
        total += times.back();
    }
    std::sort(times.begin(), times.end());
    return {times[times.size() / 2], times[times.size() * 95 / 100], total / static_cast<double>(times.size()),
            times.front()};
}

// Memory in huge pages.
class HugePages {
  public:
    explicit HugePages(int64_t bytes)
        : base_(static_cast<char*>(std::aligned_alloc(2 << 20, (bytes + (2 << 20) - 1) >> 21 << 21))) {
#ifdef __linux__
        madvise(base_, bytes, MADV_HUGEPAGE);
#endif
        std::memset(base_, 0, bytes);
    }
    ~HugePages() { std::free(base_); }
    HugePages(const HugePages&) = delete;
    HugePages& operator=(const HugePages&) = delete;
    char* data() const { return base_; }

  private:
    char* base_;
};

// Copies of one weight. Speed does not depend on the numbers, as long as none is subnormal: all scales are 2^-7, and
// all bytes of float weights 0x3f.
struct Weights {
    std::vector<std::unique_ptr<HugePages>> copies;
    int64_t outputs, inputs, bytes;
    WeightFormat format;
    std::size_t next = 0;

    Weights(WeightFormat format, int64_t inputs, int64_t outputs)
        : outputs(outputs), inputs(inputs), bytes(packed_bytes(format, outputs, inputs)), format(format) {
        const int64_t row_bytes = stored_row_bytes(format, inputs);
        std::vector<char> rows(row_bytes * outputs, 0x3f);
        const uint16_t scale = 0x2000;
        if (is_quantised(format)) {
            const QuantLayout& layout = quant_layout(format);
            for (int64_t at = halves_at(format); at < row_bytes * outputs; at += layout.stored_bytes)
                for (int half = 0; half < layout.halves; ++half) std::memcpy(&rows[at + 2 * half], &scale, 2);
        }
        for (int64_t i = 0; i < std::max<int64_t>(1, kWeightBytes / bytes); ++i) {
            copies.push_back(std::make_unique<HugePages>(bytes));
            pack_rows({copies.back()->data(), outputs, inputs, format}, rows.data(), row_bytes, outputs, {0, 1});
        }
    }
    Weight another() { return {copies[next++ % copies.size()]->data(), outputs, inputs, format}; }
};

// Multiplies `rows` rows of ones.
class Product {
  public:
    Product(Weights& weights, int64_t rows)
        : weights_(weights),
          storage_(float_storage(weights.format)),
          rows_(rows),
          stride_(weights.inputs * element_bytes(storage_)),
          out_stride_(weights.outputs * element_bytes(storage_)),
          x_(rows * stride_),
          out_(rows * out_stride_) {
        for (int64_t i = 0; i < rows * weights.inputs; ++i) store(1.0f, x_.data(), i, storage_);
    }
    void operator()() const {
        linear(weights_.another(), storage_, {x_.data(), rows_, weights_.inputs, stride_},
               {out_.data(), out_stride_, weights_.outputs, nullptr, storage_, Epilogue::kPlain}, false);
    }

  private:
    Weights& weights_;
    Storage storage_;
    int64_t rows_, stride_, out_stride_;
    Buffer x_, out_;
};

void products() {
    std::printf("%-12s %6s %16s %10s %8s %10s\n", "weight", "rows", "shape", "us", "GB/s", "GFLOP/s");
    for (const auto& [inputs, outputs] : {std::pair{576, 3072}, {1536, 576}, {4096, 4096}})
        for (int i = 0; i < kNumWeightFormats; ++i) {
            const auto format = static_cast<WeightFormat>(i);
            if (format == WeightFormat::bf16_compressed || inputs % block_inputs(format)) continue;
            if (!g_only_weight.empty() && g_only_weight != kFormatNames[i]) continue;
            Weights weights(format, inputs, outputs);
            for (const int rows : {1, 2, 4, 8, 16, 32, 64, 128, 256}) {
                const Product product(weights, rows);
                const double median = measure([&] { product(); }).median;
                std::printf("%-12s %6d %7d -> %5d %10.1f %8.1f %10.1f\n", kFormatNames[static_cast<int>(format)], rows,
                            inputs, outputs, median * 1e6, static_cast<double>(weights.bytes) / median / 1e9,
                            2.0 * inputs * outputs * rows / median / 1e9);
                std::fflush(stdout);
            }
        }
}

// The keys or the values of one layer: codes that an encoder might have written, none of them subnormal.
class DrawnSide {
  public:
    DrawnSide(Code code, int64_t blocks, int heads, int dim, int block_size)
        : code_(code),
          heads_(heads),
          block_size_(block_size),
          vector_bytes_(code == kCodePlain  ? dim * 2
                        : code == kCodeInt4 ? dim / 2
                                            : dim),
          codes_(blocks * heads * block_size * vector_bytes_),
          scales_(blocks * heads * block_size * 2),
          zeros_(blocks * heads * block_size) {
        const int64_t bytes = blocks * heads * block_size * vector_bytes_, drawn = std::min<int64_t>(bytes, 1 << 20);
        for (int64_t i = 0; i < drawn; ++i) {
            const int low = code == kCodeE4m3 ? 0x28 : code == kCodeE5m2 ? 0x34 : 0;
            const int high = code == kCodeE4m3 ? 0x38 : code == kCodeE5m2 ? 0x3c : 127;
            codes_.data()[i] = static_cast<char>(random_int(low, high) | random_int(0, 1) << 7);
        }
        if (code == kCodePlain)
            for (int64_t i = 0; i < drawn / 2; ++i)
                store(static_cast<float>(random_int(-100, 100)) / 64.0f, codes_.data(), i, kBf16);
        for (int64_t at = drawn; at < bytes; at += drawn)
            std::memcpy(codes_.data() + at, codes_.data(), std::min(drawn, bytes - at));
        const float scale = code == kCodeInt4 ? 0.2f : 0.02f;
        for (int64_t i = 0; i < blocks * heads * block_size; ++i) store(scale, scales_.data(), i, kBf16);
        std::memset(zeros_.data(), 7, blocks * heads * block_size);
    }
    const char* data() const { return codes_.data(); }
    int64_t head_stride() const { return block_size_ * vector_bytes_; }
    int64_t block_stride() const { return heads_ * head_stride(); }
    CodedSide side() const {
        return coded_side(code_, vector_bytes_, heads_, block_size_, scales_.data(), zeros_.data(), nullptr);
    }

  private:
    Code code_;
    int heads_, block_size_;
    int64_t vector_bytes_;
    HugePages codes_, scales_, zeros_;
};

bool g_exact = false;

// Sequences over shuffled blocks of 16: 9 query heads of 64 over 3 KV heads.
void attention() {
    constexpr int kHeads = 9, kKvHeads = 3, kDim = 64, kBlock = 16;
    std::printf("%-20s %-10s %10s %10s %8s %10s\n", "attention", "cache", "us", "best", "GB/s", "GFLOP/s");
    constexpr struct {
        int seqs, context, queries;
    } kCases[] = {{16, 1024, 1}, {64, 4000, 1}, {16, 4000, 5}, {1, 512, 512}, {1, 2048, 2048}, {1, 8192, 2048}};
    for (const auto& [seqs, context, queries] : kCases) {
        const int64_t blocks = int64_t{seqs} * context / kBlock;
        std::vector<int32_t> table, starts(1, 0), contexts(seqs, context);
        std::vector<int64_t> rows;
        for (int32_t block = 1; block <= blocks; ++block) table.push_back(block);
        std::shuffle(table.begin(), table.end(), random_engine());
        for (int seq = 0; seq < seqs; ++seq) {
            starts.push_back(starts.back() + queries);
            rows.push_back(seq);
        }
        const int64_t tokens = starts.back(), row_bytes = kHeads * kDim * 2;
        const Buffer query(tokens * row_bytes), out(tokens * row_bytes);
        fill_normal(query, kBf16);
        for (const Codes& codes : {kPlain, kE4m3, kE5m2, kInt8, kK8V4, kInt4}) {
            const DrawnSide keys(codes.key, blocks + 1, kKvHeads, kDim, kBlock),
                values(codes.value, blocks + 1, kKvHeads, kDim, kBlock);
            AttentionCall call{};
            call.kv = {keys.data(),
                       values.data(),
                       keys.block_stride(),
                       keys.head_stride(),
                       values.block_stride(),
                       values.head_stride(),
                       blocks + 1,
                       kKvHeads,
                       codes.key == kCodePlain ? kDim / 2 : kDim,
                       kDim,
                       kBlock,
                       kBf16,
                       false,
                       keys.side(),
                       values.side()};
            call.query = query.data();
            call.out = out.data();
            call.query_token_stride = call.out_token_stride = row_bytes;
            call.query_head_stride = call.out_head_stride = kDim * 2;
            call.block_tables = table.data();
            call.table_rows = rows.data();
            call.query_start = starts.data();
            call.context_lens = contexts.data();
            call.block_table_stride = call.max_blocks = context / kBlock;
            call.num_tokens = tokens;
            call.scale = 0.125f;
            call.num_seqs = seqs;
            call.num_heads = kHeads;
            call.exact = g_exact;
            const Times times = measure([&] { attend(call); });
            const double median = times.median, seen = queries == 1 ? context : context - (queries - 1) / 2.0;
            const std::string name =
                std::to_string(seqs) + " x " + std::to_string(queries) + " of " + std::to_string(context);
            std::printf("%-20s %-10s %10.1f %10.1f %8.1f %10.1f\n", name.c_str(), codes.name, median * 1e6,
                        times.best * 1e6,
                        static_cast<double>(blocks * (keys.block_stride() + values.block_stride())) / median / 1e9,
                        4.0 * kHeads * kDim * seen * static_cast<double>(tokens) / median / 1e9);
            std::fflush(stdout);
        }
    }
}

void spin_for(double length) {
    for (const double end = seconds() + length; seconds() < end;) {}
}

// A step of 150 rounds of small tasks, 96 us of arithmetic each on one thread, with 0 to 2 other busy processes. Work
// is counted in iterations, not by the clock, because a thread does none while it is preempted.
void pool() {
    constexpr int kRounds = 150, kUnits = 16;
    const auto unit = [](int64_t iterations) {
        volatile float x = 1;
        for (int64_t i = 0; i < iterations; ++i) x = x + 1;
    };
    const double million = measure([&] { unit(1000000); }).median;
    const auto iterations = static_cast<int64_t>(6e-6 / million * 1e6);
    std::printf("%-10s %8s %6s %10s %10s %10s\n", "neighbours", "threads", "tasks", "mean ms", "median ms", "p95 ms");
    for (int busy = 0; busy <= 2; ++busy) {
        std::vector<pid_t> neighbours;
        for (int i = 0; i < busy; ++i) {
            neighbours.push_back(fork());
            if (neighbours.back() == 0)
                for (;;) spin_for(1);
        }
        usleep(100000);
        for (const int threads : {1, 2})
            for (const int tasks : {2, 4, 16}) {
                if (threads == 1 && tasks != 16) continue;
                set_num_threads(threads);
                const Times times = measure(
                    [&] {
                        for (int round = 0; round < kRounds; ++round)
                            parallel_for(tasks, [&](int) { unit(iterations * kUnits / tasks); });
                    },
                    2.0);
                std::printf("%-10d %8d %6d %10.2f %10.2f %10.2f\n", busy, threads, tasks, times.mean * 1e3,
                            times.median * 1e3, times.p95 * 1e3);
                std::fflush(stdout);
            }
        for (const pid_t neighbour : neighbours) {
            kill(neighbour, SIGKILL);
            waitpid(neighbour, nullptr, 0);
        }
    }
}

struct Part {
    const char* name;
    void (*run)();
    bool usual;
};
constexpr Part kParts[] = {{"products", products, true}, {"attention", attention, true}, {"pool", pool, false}};

std::mt19937_64 g_engine{1};

}  // namespace

std::mt19937_64& random_engine() { return g_engine; }

}  // namespace octavo::test

int main(int argc, char** argv) {
    using namespace octavo;
    using namespace octavo::test;
    std::string only;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        const bool has_value = i + 1 < argc;
        if (argument == "--threads" && has_value && std::atoi(argv[i + 1]) > 0) {
            set_num_threads(std::atoi(argv[++i]));
        } else if (argument == "--level" && has_value && isa_from_name(argv[i + 1]) != kNumIsas &&
                   isa_is_supported(isa_from_name(argv[i + 1]))) {
            force_isa(isa_from_name(argv[++i]));
        } else if (argument == "--weight" && has_value) {
            g_only_weight = argv[++i];
        } else if (argument == "--exact") {
            g_exact = true;  // attention only
        } else if (std::any_of(std::begin(kParts), std::end(kParts),
                               [&](const Part& part) { return argument == part.name; })) {
            only = argument;
        } else {
            std::fprintf(stderr,
                         "usage: native_bench [products|attention|pool] [--threads N] "
                         "[--level NAME] [--weight FORMAT] [--exact]\n");
            return 2;
        }
    }
    std::printf("%s, %d threads\n", isa_name(current_isa()), num_threads());
    for (const Part& part : kParts)
        if (only.empty() ? part.usual : only == part.name) part.run();
}
