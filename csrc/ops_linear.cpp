#include <algorithm>
#include <atomic>
#include <cstring>
#include <type_traits>
#include <vector>

#include "level/interleave.h"
#include "linear.h"
#include "thread_pool.h"
#include "tile_blocks.h"

namespace octavo {
namespace {

// A block of activations, which a task reads over and over, stays in L2 while the weights stream through.
// In tiles that holds for a block of inputs: 256 rows of 512. A panel is dequantised for each block of rows, which
// takes as long as the products of 80 rows; yet blocks of 512 rows were slower.
constexpr int64_t kRowsPerBlock = 96, kTileRowsPerBlock = 256;
constexpr int64_t kTasksPerThread = 8;                             // enough to balance the load
constexpr int kThreadsThatPackAlone = 4;
constexpr int64_t kGroupsWorthAThread = 2;  // to quantise
constexpr int64_t kBytesWorthAThread = 32 << 10;
// In bytes read by one row; a core reads 64 KiB in about three microseconds. To begin a task costs a third of one: the
// first lines of its weights have not been prefetched.
constexpr int64_t kWorkWorthAThread = 64 << 10, kMostWorkPerTask = 512 << 10;
constexpr int64_t kRowsToDecode = 12;  // fewest rows of a task that decodes a quantised panel once for all
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
    void make_room(int64_t rows, int64_t room_per_row) {
        const int64_t needed = (rows * room_per_row * 4 + 63) / 64 + 1;
        if (!kKeepsMemory) lines.clear(), lines.shrink_to_fit();
        if (static_cast<int64_t>(lines.size()) < needed) lines.resize(needed);
    }
    // Packs groups [begin, end) of a product, unless they are here already.
    template <class Product>
    void fill(const Product& product, uint64_t of_call, int64_t of_block, int64_t begin, int64_t end) {
        if (call == of_call && block == of_block) return;
        make_room(product.groups().begin(end) - product.groups().begin(begin), product.room_per_row);
        for (int64_t g = begin; g < end; ++g) product.pack(g, *this, begin, end, 0);
        call = of_call;
        block = of_block;
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

// A number unique to the round: a thread compares it to see whether the rows in its memory are those of this round.
uint64_t next_call() {
    static std::atomic<uint64_t> calls{0};
    return calls.fetch_add(1, std::memory_order_relaxed) + 1;
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Into how many stretches of at most `most` panels to split a weight, each for every block of rows: the fewest with
// which threads that are equally fast finish together, or as nearly as can be. For several blocks an eighth more time
// will do, because more stretches read the activations more often.
int64_t even_stretches(int64_t panels, int64_t most, int64_t threads, int64_t blocks = 1) {
    const int64_t share = divide_up(panels * blocks, threads), enough = blocks == 1 ? share : share + share / 8;
    int64_t best = panels, shortest = panels * blocks + 1;
    for (int64_t length = std::min({most, share, panels}); length >= 1 && shortest > enough; --length) {
        const int64_t stretches = divide_up(panels, length);
        const int64_t longest = divide_up(stretches * blocks, threads) * length;
        if (longest < shortest) shortest = longest, best = stretches;
    }
    return best;
}

int64_t panel_bytes(const Weight& weight) {
    if (weight.format == WeightFormat::bf16_compressed) return CompressedWeight(weight).panel_bytes();
    return packed_bytes(weight.format, kPanelOutputs, weight.inputs);
}

// A product with one weight: how its rows are packed and multiplied at the current level, as floats, in vectors or in
// tiles, or as integers. The rows are all of x, or those that `order` names.
class Product {
  public:
    Product(const Weight& weight, Storage storage, const Matrix& x, const int32_t* order, int64_t rows,
            const LinearOutput& out, bool exact)
        : weight_(weight), x_(x), order_(order), storage_(storage) {
        const bool quantised = is_quantised(weight.format);
        const bool odd = storage == kBf16 && weight.inputs % 2;
        in_tiles_ = level_.pack_tile_rows && storage == kBf16 &&
                    (!quantised || (!exact && rows >= level_.gemm_quant_rows));
        quantises = quantised && !in_tiles_;
        const auto& kernels_by_format = in_tiles_ ? level_.multiply_in_tiles : level_.multiply;
        kernel_ = kernels_by_format[static_cast<int>(weight.format)];
        panels = divide_up(weight.outputs, kPanelOutputs);
        panel_bytes = octavo::panel_bytes(weight);
        task_.weight = weight.packed;
        if (weight.format == WeightFormat::bf16_compressed) {
            task_.weight += CompressedWeight::header_bytes;
            task_.compressed = CompressedWeight(weight).view(weight.packed);
        }
        task_.groups = RowGroups(rows, quantises   ? level_.quant_rows
                                       : in_tiles_ ? kTileGroupRows
                                                   : level_.gemm_rows);
        task_.out = out;
        if (quantises) {
            task_.units = static_cast<int>(weight.inputs / kSectionInputs);
            parts_ = quant_layout(weight.format).scales_per_section();
            units_per_row = int64_t{task_.units} * (9 + parts_);  // 8 of quants, a scale, and sums
            room_per_row = QuantRows::row_room(task_.units, parts_);
            rows_per_block = kRowsPerBlock;
            return;
        }
        const int64_t row_bytes = weight.inputs * (storage == kBf16 ? 2 : 4), units = (row_bytes + 3) / 4;
        const int64_t step = in_tiles_ ? level_.tile_units : 1;
        task_.units = static_cast<int>(units);
        room_per_row = units_per_row = (units + step - 1) / step * step;
        const char* only = rows == 1 ? row(0) : nullptr;
        if (only && !odd && units_per_row == units && reinterpret_cast<uintptr_t>(only) % 4 == 0)
            as_it_is_ = reinterpret_cast<const uint32_t*>(only);
        rows_per_block = in_tiles_ ? kTileRowsPerBlock : kRowsPerBlock;
    }

    bool quantises;
    int64_t panels, panel_bytes, units_per_row, rows_per_block;
    int64_t room_per_row;  // units, with those of remainders, which few rows have
    RowGroups groups() const { return task_.groups; }
    // Tells a row, as it is packed, from other rows: a negative number.
    int64_t id_of(int64_t row_index) const {
        return -(static_cast<int64_t>(reinterpret_cast<intptr_t>(row(row_index))) * kNumWeightFormats +
                 static_cast<int64_t>(weight_.format));
    }

    // Packs a group of a block, groups [begin, end), which is in `packed` from row `at` on.
    void pack(int64_t group, PackedRows& packed, int64_t begin, int64_t end, int64_t at) const {
        if (as_it_is_) return;
        const char* rows[kTileGroupRows];
        const int64_t first = task_.groups.begin(group), count = task_.groups.begin(group + 1) - first;
        for (int64_t r = 0; r < count; ++r) rows[r] = row(first + r);
        const int64_t row_in_block = first - task_.groups.begin(begin), row_in_packed = at + row_in_block;
        if (quantises)
            return level_.quantise_rows[storage_](quant_layout(weight_.format), rows, static_cast<int>(count),
                                                  static_cast<int>(x_.width),
                                                  quants(packed).at(row_in_packed, task_.units, parts_));
        const int64_t row_bytes = weight_.inputs * (storage_ == kBf16 ? 2 : 4), units = task_.units;
        if (in_tiles_) {
            const int64_t block_rows = task_.groups.begin(end) - task_.groups.begin(begin);
            const int64_t block_units = tile_block_steps(units_per_row / level_.tile_units) * level_.tile_units;
            for (int64_t unit = 0; unit < units_per_row; unit += block_units) {
                const int64_t count_units = std::min(block_units, units_per_row - unit);
                level_.pack_tile_rows(
                    rows, count, std::min(count_units * 4, row_bytes - unit * 4),
                    packed.units() + at * units_per_row + unit * block_rows + row_in_block * count_units);
                for (int64_t r = 0; r < count; ++r) rows[r] += block_units * 4;
            }
            return;
        }
        uint32_t* to = packed.units() + row_in_packed * units_per_row;
        const bool odd = row_bytes % 4 != 0;
        portable::interleave(rows, count, units - odd, to);
        for (int64_t r = 0; odd && r < count; ++r) {
            uint32_t& last = to[(units - 1) * count + r];
            last = 0;
            std::memcpy(&last, rows[r] + (units - 1) * 4, 2);
        }
    }

    // For `skipped` see ProductTask; the block's groups are in `packed` from row `at` on.
    void multiply(PackedRows& packed, int64_t at, int64_t skipped, int64_t group_begin, int64_t group_end,
                  int64_t panel_begin, int64_t panel_end) const {
        ProductTask task = task_;
        task.skipped = skipped;
        task.first_row = task_.groups.begin(group_begin);
        if (quantises)
            task.quants = quants(packed).at(at, task_.units, parts_);
        else
            task.x = as_it_is_ ? as_it_is_ : packed.units() + at * units_per_row;
        if (in_tiles_)
            task.decoded = own_rows().decoded_room(tile_room(group_end - group_begin));
        else if (quantises && task.groups.begin(group_end) - task.first_row >= kRowsToDecode)
            task.decoded = own_rows().decoded_room(task.units * quant_layout(weight_.format).decoded_bytes());
        kernel_(task, group_begin, group_end, panel_begin, panel_end);
    }

  private:
    const char* row(int64_t index) const { return x_.row(order_ ? order_[index] : index); }
    QuantRows quants(PackedRows& packed) const {
        const int64_t words = static_cast<int64_t>(packed.lines.size() * (sizeof(Line) / 4));
        return QuantRows::in(packed.units(), words / room_per_row, task_.units, parts_);
    }

    const Kernels& level_ = kernels();
    Weight weight_;
    Matrix x_;
    const int32_t* order_;
    Storage storage_;
    bool in_tiles_;
    ProductKernel* kernel_;
    ProductTask task_{};
    int64_t parts_ = 0;
    const uint32_t* as_it_is_ = nullptr;
};

// How many panels a task multiplies with a block of `rows` rows, if threads have enough to do: it reads its activations
// once, and twice as many bytes of weights.
int64_t panels_worth(const Product& product, int64_t rows) {
    return divide_up(2 * rows * product.units_per_row * 4, std::max<int64_t>(1, product.panel_bytes));
}

// Splits a product into tasks, each a block of row groups times a stretch of panels. If there are only a few threads,
// each packs blocks for itself: fetching what another core has packed, and overwriting what another core has read,
// takes longer than copying a row. It takes less than quantising a row, so they share a single block to quantise. Many
// threads share all packing. What is shared precedes the products.
void multiply_packed(const Product& product) {
    const RowGroups groups = product.groups();
    const int64_t panels = product.panels;
    if (groups.count == 0 || panels == 0) return;
    const uint64_t call = next_call();
    const int64_t threads = num_threads();
    int64_t blocks = std::min(groups.count, divide_up(groups.rows, product.rows_per_block));
    const bool quantise_together =
        product.quantises && blocks == 1 && groups.count >= kGroupsWorthAThread * threads;
    const bool alone = threads <= kThreadsThatPackAlone && !quantise_together;
    if (alone && blocks > 1)  // as many for each
        blocks = std::min(groups.count, divide_up(blocks, threads) * threads);
    PackedRows& shared = own_rows();
    if (!alone) {
        shared.make_room(groups.rows, product.room_per_row);
        const int64_t worth = groups.rows * product.units_per_row * 4 / kBytesWorthAThread;
        const int64_t pieces = std::clamp<int64_t>(quantise_together ? 2 * threads : worth, 1, groups.count);
        parallel_for(static_cast<int>(pieces), [&](int i) {
            for (int64_t g = groups.count * i / pieces; g < groups.count * (i + 1) / pieces; ++g) {
                const int64_t block = ((g + 1) * blocks - 1) / groups.count, begin = groups.count * block / blocks;
                product.pack(g, shared, begin, groups.count * (block + 1) / blocks, groups.begin(begin));
            }
        });
    }
    const int64_t rows = std::max<int64_t>(1, groups.rows / blocks / kRowsThatCostNothing);
    const int64_t panel_work = std::max<int64_t>(1, product.panel_bytes * rows);
    int64_t stretches = std::clamp<int64_t>(panels * panel_work / kWorkWorthAThread, 1, panels);
    if (blocks == 1)
        stretches = even_stretches(panels, std::max<int64_t>(1, kMostWorkPerTask / panel_work),
                                   std::min(stretches, threads));
    else if (alone)  // with fewer stretches, fewer threads pack the same block
        stretches = std::clamp<int64_t>(kTasksPerThread * threads / blocks, 1, stretches);
    else
        stretches = even_stretches(panels, panels_worth(product, groups.rows / blocks), threads, blocks);
    parallel_for(static_cast<int>(blocks * stretches), [&](int i) {
        // Threads that share what is packed multiply the same panels at a time, which are then read once.
        const int64_t block = alone ? i / stretches : i % blocks, stretch = alone ? i % stretches : i / blocks;
        const int64_t begin = groups.count * block / blocks, end = groups.count * (block + 1) / blocks;
        PackedRows& packed = alone ? own_rows() : shared;
        if (alone) packed.fill(product, call, block, begin, end);
        const int64_t panel = panels * stretch / stretches, next = panels * (stretch + 1) / stretches;
        const int64_t skipped = (threads - 1) * (next - panel);  // threads take stretches in turn
        product.multiply(packed, alone ? 0 : groups.begin(begin), skipped, begin, end, panel, next);
    });
}

// A block of one product's rows times some of its panels.
struct Piece {
    const Product* product;
    int64_t block, group_begin, group_end, panel_begin, panel_end;
};

// Splits products of a few rows each, as those with experts are, into tasks of one round. Each thread packs rows for
// itself.
void multiply_packed(const std::vector<Product>& products) {
    const int64_t threads = num_threads();
    int64_t all_blocks = 0;
    const auto num_blocks = [](const Product& product) {
        return std::min(product.groups().count, divide_up(product.groups().rows, product.rows_per_block));
    };
    for (const Product& product : products) all_blocks += num_blocks(product);
    if (all_blocks == 0) return;
    const int64_t most_stretches = divide_up(kTasksPerThread * threads, all_blocks);
    std::vector<Piece> pieces;
    int64_t index = 0;
    for (const Product& product : products) {
        const RowGroups groups = product.groups();
        const int64_t blocks = num_blocks(product), panels = product.panels;
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t begin = groups.count * block / blocks, end = groups.count * (block + 1) / blocks;
            const int64_t rows = groups.begin(end) - groups.begin(begin);
            const int64_t work = panels * product.panel_bytes * std::max<int64_t>(1, rows / kRowsThatCostNothing);
            const int64_t stretches =
                std::clamp<int64_t>(work / kWorkWorthAThread, 1, std::min(panels, most_stretches));
            // Products of the same single row share what is packed.
            const int64_t id = rows == 1 ? product.id_of(groups.begin(begin)) : index++;
            for (int64_t i = 0; i < stretches; ++i)
                pieces.push_back({&product, id, begin, end, panels * i / stretches, panels * (i + 1) / stretches});
        }
    }
    const uint64_t call = next_call();
    parallel_for(static_cast<int>(pieces.size()), [&](int i) {
        const Piece& piece = pieces[i];
        PackedRows& packed = own_rows();
        packed.fill(*piece.product, call, piece.block, piece.group_begin, piece.group_end);
        piece.product->multiply(packed, 0, 0, piece.group_begin, piece.group_end, piece.panel_begin, piece.panel_end);
    });
}

}  // namespace

void linear(const Weight& weight, Storage x_storage, const Matrix& x, const LinearOutput& out, bool exact) {
    multiply_packed(Product(weight, x_storage, x, nullptr, x.rows, out, exact));
}

void linear_by_expert(const std::vector<BiasedWeight>& experts, Storage x_storage, const Matrix& x,
                      const RowsByExpert& rows, const LinearOutput& out, bool exact) {
    std::vector<Product> products;
    for (std::size_t expert = 0; expert < experts.size(); ++expert) {
        const int64_t first = rows.begins[expert], count = rows.begins[expert + 1] - first;
        if (count == 0) continue;
        LinearOutput own = out;
        own.base += first * out.stride;
        own.bias = experts[expert].bias;
        const Matrix from{rows.sources ? x.base : x.row(first), x.rows, x.width, x.stride};
        products.emplace_back(experts[expert].weight, x_storage, from, rows.sources ? rows.sources + first : nullptr,
                              count, own, exact);
    }
    multiply_packed(products);
}

}  // namespace octavo
