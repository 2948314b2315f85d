#include <algorithm>
#include <atomic>
#include <cstring>
#include <type_traits>
#include <vector>

#include "level/interleave.h"
#include "linear.h"
#include "thread_pool.h"

namespace octavo {
namespace {

// A block of activations, which a task reads over and over, stays in L2 while the weights stream through.
constexpr int64_t kRowsPerBlock = 96, kBytesPerBlock = 768 << 10;  // in vectors, and in tiles
constexpr int64_t kTasksPerThread = 8;                             // enough to balance the load
constexpr int kThreadsThatPackAlone = 4;
constexpr int64_t kGroupsWorthAThread = 2;  // to quantise
constexpr int64_t kBytesWorthAThread = 32 << 10;
// In bytes read by one row; a core reads 64 KiB in about three microseconds. To begin a task costs a third of one: the
// first lines of its weights have not been prefetched, and threads wait for each other's tickets.
constexpr int64_t kWorkWorthAThread = 64 << 10, kMostWorkPerTask = 512 << 10;
constexpr int64_t kRowsThatCostNothing = 8;  // more than a core multiplies while it waits for the weights

struct alignas(64) Line {
    char bytes[64];
};

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kKeepsMemory = false;  // what one call leaves behind would hide out-of-bounds reads of the next
#else
constexpr bool kKeepsMemory = true;
#endif

// Rows of activations in the layout that the kernels read. Memory is kept from call to call.
struct PackedRows {
    std::vector<Line> lines;  // aligned, with one spare line at the end: a tile may read one row too many
    std::vector<Line> decoded;  // see ProductTask
    uint64_t call = 0;          // which product and which of its blocks of rows is packed here
    int64_t block = 0;
    uint32_t* units() { return reinterpret_cast<uint32_t*>(lines.data()); }
    void make_room(int64_t rows, int64_t units_per_row) {
        const int64_t needed = (rows * units_per_row * 4 + 63) / 64 + 1;
        if (!kKeepsMemory) lines.clear(), lines.shrink_to_fit();
        if (static_cast<int64_t>(lines.size()) < needed) lines.resize(needed);
    }
    char* decoded_room(int64_t bytes) {
        if (!kKeepsMemory) decoded.clear(), decoded.shrink_to_fit();
        if (static_cast<int64_t>(decoded.size() * sizeof(Line)) < bytes) decoded.resize((bytes + 63) / 64);
        return decoded.data()->bytes;
    }
};

PackedRows& own_rows() {
    static thread_local PackedRows rows;
    return rows;
}

// A number that no other product has: `multiply_packed` is instantiated for several kinds of weight, and a thread tells
// by it whether the rows in its memory are those of the current product.
uint64_t next_call() {
    static std::atomic<uint64_t> calls{0};
    return calls.fetch_add(1, std::memory_order_relaxed) + 1;
}

enum class Packing { copies, quantises };

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Into how many stretches of at most `most` panels to split a weight: the fewest with which threads that are equally
// fast finish together, or as nearly as can be.
int64_t even_stretches(int64_t panels, int64_t most, int64_t threads) {
    const int64_t share = divide_up(panels, threads);
    int64_t best = panels, shortest = panels + 1;
    for (int64_t length = std::min(most, share); length >= 1 && shortest > share; --length) {
        const int64_t stretches = divide_up(panels, length), longest = divide_up(stretches, threads) * length;
        if (longest < shortest) shortest = longest, best = stretches;
    }
    return best;
}

// Splits a product into tasks, each a block of row groups times a stretch of panels: multiply(packed, its first row,
// skipped, group_begin, group_end, panel_begin, panel_end), with rows packed by pack(group, to, its row); for `skipped`
// see ProductTask. If there are only a few threads, each packs blocks for itself: fetching what another core has
// packed, and overwriting what another core has read, takes longer than copying a row. It takes less than quantising a
// row, so they share a single block to quantise. Many threads share all packing. What is shared precedes the products.
template <class Pack, class Multiply>
void multiply_packed(Packing packing, RowGroups groups, int64_t rows_per_block, int64_t units_per_row, int64_t panels,
                     int64_t panel_bytes, const Pack& pack, const Multiply& multiply) {
    if (groups.count == 0 || panels == 0) return;
    const uint64_t call = next_call();
    const int64_t threads = num_threads();
    int64_t blocks = std::min(groups.count, divide_up(groups.rows, rows_per_block));
    if (blocks > 1) blocks = std::min(groups.count, divide_up(blocks, threads) * threads);  // as many for each
    const bool quantise_together =
        packing == Packing::quantises && blocks == 1 && groups.count >= kGroupsWorthAThread * threads;
    const bool alone = threads <= kThreadsThatPackAlone && !quantise_together;
    PackedRows& shared = own_rows();
    if (!alone) {
        shared.make_room(groups.rows, units_per_row);
        const int64_t worth = groups.rows * units_per_row * 4 / kBytesWorthAThread;
        const int64_t pieces = std::clamp<int64_t>(quantise_together ? 2 * threads : worth, 1, groups.count);
        parallel_for(static_cast<int>(pieces), [&](int i) {
            for (int64_t g = groups.count * i / pieces; g < groups.count * (i + 1) / pieces; ++g)
                pack(g, shared, groups.begin(g));
        });
    }
    const int64_t rows = std::max<int64_t>(1, groups.rows / blocks / kRowsThatCostNothing);
    const int64_t panel_work = std::max<int64_t>(1, panel_bytes * rows);
    int64_t stretches = std::clamp<int64_t>(panels * panel_work / kWorkWorthAThread, 1, panels);
    if (blocks == 1)
        stretches = even_stretches(panels, std::max<int64_t>(1, kMostWorkPerTask / panel_work),
                                   std::min(stretches, threads));
    else if (alone)  // with fewer stretches, fewer threads pack the same block
        stretches = std::clamp<int64_t>(kTasksPerThread * threads / blocks, 1, stretches);
    parallel_for(static_cast<int>(blocks * stretches), [&](int i) {
        const int64_t block = i / stretches, stretch = i % stretches;
        const int64_t begin = groups.count * block / blocks, end = groups.count * (block + 1) / blocks;
        const int64_t first_row = alone ? groups.begin(begin) : 0;
        PackedRows& packed = alone ? own_rows() : shared;
        if (alone && (packed.call != call || packed.block != block)) {
            packed.make_room(groups.begin(end) - first_row, units_per_row);
            for (int64_t g = begin; g < end; ++g) pack(g, packed, groups.begin(g) - first_row);
            packed.call = call;
            packed.block = block;
        }
        const int64_t panel = panels * stretch / stretches, next = panels * (stretch + 1) / stretches;
        const int64_t skipped = (threads - 1) * (next - panel);  // threads take stretches in turn
        multiply(packed, first_row, skipped, begin, end, panel, next);
    });
}

int64_t panels_of(const Weight& weight) { return divide_up(weight.outputs, kPanelOutputs); }

constexpr int kMostGroupRows = 32;

// Pointers to the rows of a group; returns their number.
int64_t rows_of(const Matrix& x, RowGroups groups, int64_t group, const char* (&rows)[kMostGroupRows]) {
    const int64_t first = groups.begin(group), count = groups.begin(group + 1) - first;
    for (int64_t r = 0; r < count; ++r) rows[r] = x.row(first + r);
    return count;
}

int64_t panel_bytes(const Weight& weight) {
    if (weight.format == WeightFormat::bf16_coded) return CodedWeight(weight).panel_bytes();
    return packed_bytes(weight.format, kPanelOutputs, weight.inputs);
}

ProductTask make_task(const Weight& weight, const LinearOutput& out, RowGroups groups, int64_t units) {
    ProductTask task{};
    task.weight = weight.packed;
    if (weight.format == WeightFormat::bf16_coded) {
        task.weight += CodedWeight::header_bytes;
        task.coded = CodedWeight(weight).view(weight.packed);
    }
    task.groups = groups;
    task.out = out;
    task.units = static_cast<int>(units);
    return task;
}

// Products with floats, in vectors or in tiles.
void multiply_floats(const Weight& weight, Storage storage, bool in_tiles, const Matrix& x, const LinearOutput& out) {
    const Kernels& level = kernels();
    const bool quantised = is_quantised(weight.format);
    const auto& kernels_by_format = quantised ? level.multiply_in_tiles : level.multiply;
    ProductKernel* const multiply = kernels_by_format[static_cast<int>(weight.format)];
    const bool odd = storage == kBf16 && weight.inputs % 2;
    const int64_t row_bytes = weight.inputs * (storage == kBf16 ? 2 : 4), units = (row_bytes + 3) / 4;
    const int64_t step = in_tiles ? level.tile_units : 1, packed_units = (units + step - 1) / step * step;
    const bool as_it_is = x.rows == 1 && !odd && packed_units == units && reinterpret_cast<uintptr_t>(x.base) % 4 == 0;
    const ProductTask task = make_task(weight, out, RowGroups(x.rows, level.gemm_rows[storage]), units);
    const bool decodes = in_tiles && (quantised || weight.format == WeightFormat::bf16_coded);
    const int64_t decoded_bytes = decodes ? packed_units * kPanelOutputs * 4 : 0;
    const auto pack = [&](int64_t group, PackedRows& packed, int64_t row) {
        if (as_it_is) return;
        const char* rows[kMostGroupRows];
        const int64_t count = rows_of(x, task.groups, group, rows);
        uint32_t* to = packed.units() + row * packed_units;
        if (in_tiles) return level.pack_tile_rows(rows, count, row_bytes, to);
        portable::interleave(rows, count, units - odd, to);
        for (int64_t r = 0; odd && r < count; ++r) {
            uint32_t& last = to[(units - 1) * count + r];
            last = 0;
            std::memcpy(&last, rows[r] + (units - 1) * 4, 2);
        }
    };
    const int64_t rows_per_block =
        in_tiles ? std::max<int64_t>(kBytesPerBlock / (packed_units * 4), level.gemm_rows[storage]) : kRowsPerBlock;
    multiply_packed(Packing::copies, task.groups, rows_per_block, packed_units, panels_of(weight), panel_bytes(weight),
                    pack, [&](PackedRows& packed, int64_t first_row, int64_t skipped, auto... range) {
                        ProductTask own = task;
                        own.skipped = skipped;
                        own.x = as_it_is ? reinterpret_cast<const uint32_t*>(x.base) : packed.units();
                        own.first_row = first_row;
                        if (decoded_bytes) own.decoded = own_rows().decoded_room(decoded_bytes);
                        multiply(own, range...);
                    });
}

void multiply_integers(const Weight& weight, Storage x_storage, const Matrix& x, const LinearOutput& out) {
    const Kernels& level = kernels();
    const QuantLayout& layout = quant_layout(weight.format);
    const int64_t sections = weight.inputs / kSectionInputs, sums = sections * layout.scales_per_section();
    const int64_t units = sections * 9 + sums;  // of a row: 8 of quants, a scale, and sums
    const ProductTask task = make_task(weight, out, RowGroups(x.rows, level.quant_rows), sections);
    const auto parts = [&](PackedRows& packed) {
        uint32_t* from = packed.units();
        const int64_t rows = static_cast<int64_t>(packed.lines.size() * (sizeof(Line) / 4)) / units;
        return QuantRows{from, reinterpret_cast<float*>(from + rows * sections * 8), from + rows * sections * 9};
    };
    const auto pack = [&](int64_t group, PackedRows& packed, int64_t row) {
        const char* rows[kMostGroupRows];
        const int64_t count = rows_of(x, task.groups, group, rows);
        level.quantise_rows[x_storage](layout, rows, static_cast<int>(count), static_cast<int>(x.width),
                                       parts(packed).at(row, sections, sums));
    };
    multiply_packed(Packing::quantises, task.groups, kRowsPerBlock, units, panels_of(weight), panel_bytes(weight), pack,
                    [&](PackedRows& packed, int64_t first_row, int64_t skipped, auto... range) {
                        ProductTask own = task;
                        own.skipped = skipped;
                        own.quants = parts(packed);
                        own.first_row = first_row;
                        level.multiply[static_cast<int>(weight.format)](own, range...);
                    });
}

}  // namespace

void linear(const Weight& weight, Storage x_storage, const Matrix& x, const LinearOutput& out, bool exact) {
    const Kernels& level = kernels();
    const bool quantised = is_quantised(weight.format);
    const bool in_tiles = level.pack_tile_rows && x_storage == kBf16 &&
                          (!quantised || (!exact && x.rows >= level.gemm_quant_rows));
    if (quantised && !in_tiles)
        multiply_integers(weight, x_storage, x, out);
    else
        multiply_floats(weight, x_storage, in_tiles, x, out);
}

}  // namespace octavo
