#include <algorithm>
#include <cstring>
#include <vector>

#include "linear.h"
#include "thread_pool.h"

namespace octavo {
namespace {

constexpr int64_t kGroupsPerTask = 8;        // their activations stay in L2 while the weights pass
constexpr int64_t kWorkPerTask = 64 << 10;   // in bytes read by one row: about three microseconds
constexpr int64_t kRowsThatCostNothing = 8;  // more of them than a core multiplies while it waits for their weights

// A buffer that keeps its memory from call to call, in the calling thread.
template <class T, int Tag> T* scratch(int64_t count) {
    static thread_local std::vector<T> buffer;
    if (static_cast<int64_t>(buffer.size()) < count) buffer.resize(count);
    return buffer.data();
}

// Calls body(group_begin, group_end, panel_begin, panel_end), weights of one stretch of rows after the other.
template <class Body>
void parallel_panels(RowGroups groups, int64_t panels, int64_t panel_bytes, const Body& body) {
    if (groups.count == 0 || panels == 0) return;
    const int64_t blocks = (groups.count + kGroupsPerTask - 1) / kGroupsPerTask;
    const int64_t rows = std::max<int64_t>(1, groups.rows / blocks / kRowsThatCostNothing);
    const int64_t stretches = std::clamp<int64_t>(panels * panel_bytes * rows / kWorkPerTask, 1, panels);
    parallel_for(static_cast<int>(blocks * stretches), [&](int i) {
        const int64_t block = i / stretches, stretch = i % stretches;
        body(groups.count * block / blocks, groups.count * (block + 1) / blocks, panels * stretch / stretches,
             panels * (stretch + 1) / stretches);
    });
}

// Calls body(group) for every group, in threads where that pays.
template <class Body> void parallel_groups(RowGroups groups, int64_t bytes, const Body& body) {
    constexpr int64_t kBytesWorthAThread = 32 << 10;
    const int64_t pieces = std::clamp<int64_t>(bytes / kBytesWorthAThread, 1, groups.count);
    parallel_for(static_cast<int>(pieces), [&](int i) {
        for (int64_t g = groups.count * i / pieces; g < groups.count * (i + 1) / pieces; ++g) body(g);
    });
}

#include "interleave.h"
constexpr int kMostGroupRows = 12;

void gemm(const Weight& weight, const Matrix& x, const LinearOutput& out) {
    const Kernels& level = kernels();
    const Storage storage = float_storage(weight.format);
    const bool odd = storage == kBf16 && weight.inputs % 2;
    GemmTask task{};
    task.weight = weight.packed;
    task.groups = RowGroups(x.rows, level.gemm_rows);
    task.out = out;
    task.units = static_cast<int>(storage == kBf16 ? (weight.inputs + 1) / 2 : weight.inputs);
    const int64_t units = task.units;
    if (x.rows == 1 && !odd && reinterpret_cast<uintptr_t>(x.base) % 4 == 0) {
        task.x = reinterpret_cast<const uint32_t*>(x.base);
    } else {
        uint32_t* packed = scratch<uint32_t, 0>(x.rows * units);
        task.x = packed;
        parallel_groups(task.groups, x.rows * units * 4, [&](int64_t group) {
            const int64_t first = task.groups.begin(group), count = task.groups.begin(group + 1) - first;
            const char* rows[kMostGroupRows];
            for (int64_t r = 0; r < count; ++r) rows[r] = x.row(first + r);
            uint32_t* to = packed + first * units;
            interleave(rows, count, units - odd, to);
            for (int64_t r = 0; odd && r < count; ++r) {
                uint32_t& last = to[(units - 1) * count + r];
                last = 0;
                std::memcpy(&last, rows[r] + (units - 1) * 4, 2);
            }
        });
    }
    const int64_t panels = (weight.outputs + kPanelOutputs - 1) / kPanelOutputs, panel_bytes = units * kPanelOutputs * 4;
    if (weight.format == WeightFormat::bf16_coded) {
        const CodedWeight coded(weight);
        task.weight += CodedWeight::header_bytes;
        task.coded = coded.view(weight.packed);
        return parallel_panels(task.groups, panels, coded.panel_bytes(),
                               [&](auto... range) { level.gemm_coded(task, range...); });
    }
    parallel_panels(task.groups, panels, panel_bytes, [&](auto... range) { level.gemm[storage](task, range...); });
}

void quant_linear(const Weight& weight, Storage x_storage, const Matrix& x, const LinearOutput& out) {
    const Kernels& level = kernels();
    const QuantFormat format = quant_format(weight.format);
    const int64_t blocks = weight.inputs / 32;
    uint32_t* packed = scratch<uint32_t, 1>(x.rows * blocks * (8 + 2));
    QuantTask task{};
    task.weight = reinterpret_cast<const uint8_t*>(weight.packed);
    task.x = {packed, packed + x.rows * blocks * 8, packed + x.rows * blocks * 9, scratch<float, 2>(x.rows)};
    task.groups = RowGroups(x.rows, level.quant_rows);
    task.out = out;
    task.tiles = (weight.outputs + 15) / 16;
    task.blocks = static_cast<int>(blocks);
    parallel_groups(task.groups, x.rows * x.width * 2, [&](int64_t group) {
        const int64_t first = task.groups.begin(group), count = task.groups.begin(group + 1) - first;
        const char* rows[kMostGroupRows];
        for (int64_t r = 0; r < count; ++r) rows[r] = x.row(first + r);
        level.quantise_rows[x_storage](format, rows, static_cast<int>(count), static_cast<int>(x.width),
                                       task.x.at(first, blocks));
    });
    parallel_panels(task.groups, (task.tiles + 1) / 2, 2 * blocks * quant_block_bytes(format),
                    [&](auto... range) { level.quant_linear[format](task, range...); });
}

}  // namespace

void linear(const Weight& weight, Storage x_storage, const Matrix& x, const LinearOutput& out) {
    if (is_quantised(weight.format)) quant_linear(weight, x_storage, x, out);
    else gemm(weight, x, out);
}

}  // namespace octavo
