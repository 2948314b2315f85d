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

using Quad [[gnu::vector_size(16)]] = uint32_t;

// Four units of four rows -> [unit][row], a unit `stride` after the one before.
inline void transpose_quads(const char* const* rows, int64_t unit, uint32_t* to, int64_t stride) {
    Quad row[4];
    for (int r = 0; r < 4; ++r) std::memcpy(&row[r], rows[r] + unit * 4, sizeof(Quad));
    const Quad low01 = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5);
    const Quad high01 = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7);
    const Quad low23 = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5);
    const Quad high23 = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
    const Quad units[4] = {
        __builtin_shufflevector(low01, low23, 0, 1, 4, 5), __builtin_shufflevector(low01, low23, 2, 3, 6, 7),
        __builtin_shufflevector(high01, high23, 0, 1, 4, 5), __builtin_shufflevector(high01, high23, 2, 3, 6, 7)};
    for (int u = 0; u < 4; ++u) std::memcpy(to + u * stride, &units[u], sizeof(Quad));
}

// rows of `units` units -> [unit][row]
template <int R> void interleave_rows(const char* const* rows, int64_t units, uint32_t* packed) {
    int64_t unit = 0;
    for (; unit + 4 <= units; unit += 4) {
        int r = 0;
        for (; r + 4 <= R; r += 4) transpose_quads(rows + r, unit, packed + unit * R + r, R);
        for (; r < R; ++r)
            for (int64_t u = unit; u < unit + 4; ++u) std::memcpy(packed + u * R + r, rows[r] + u * 4, 4);
    }
    for (; unit < units; ++unit)
        for (int r = 0; r < R; ++r) std::memcpy(packed + unit * R + r, rows[r] + unit * 4, 4);
}
void interleave(const char* const* rows, int64_t count, int64_t units, uint32_t* packed) {
    switch (count) {
        case 1: return interleave_rows<1>(rows, units, packed);
        case 2: return interleave_rows<2>(rows, units, packed);
        case 3: return interleave_rows<3>(rows, units, packed);
        case 4: return interleave_rows<4>(rows, units, packed);
        case 5: return interleave_rows<5>(rows, units, packed);
        case 6: return interleave_rows<6>(rows, units, packed);
        case 7: return interleave_rows<7>(rows, units, packed);
        case 8: return interleave_rows<8>(rows, units, packed);
        case 9: return interleave_rows<9>(rows, units, packed);
        case 10: return interleave_rows<10>(rows, units, packed);
        case 11: return interleave_rows<11>(rows, units, packed);
        case 12: return interleave_rows<12>(rows, units, packed);
    }
}
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
    uint32_t* packed = scratch<uint32_t, 1>(x.rows * blocks * 8);
    float* scales = scratch<float, 2>(x.rows * blocks * 2);
    float* sums = scales + x.rows * blocks;
    QuantTask task{};
    task.weight = reinterpret_cast<const uint8_t*>(weight.packed);
    task.quants = packed;
    task.scales = scales;
    task.sums = sums;
    task.groups = RowGroups(x.rows, level.quant_rows);
    task.out = out;
    task.tiles = (weight.outputs + 15) / 16;
    task.blocks = static_cast<int>(blocks);
    parallel_groups(task.groups, x.rows * x.width * 2, [&](int64_t group) {
        const int64_t first = task.groups.begin(group), count = task.groups.begin(group + 1) - first;
        int8_t* quants = scratch<int8_t, 3>(count * x.width);
        float* each = scratch<float, 4>(count * blocks * 2);
        const char *rows[kMostGroupRows], *row_scales[kMostGroupRows], *row_sums[kMostGroupRows];
        for (int64_t r = 0; r < count; ++r) {
            float *scale = each + r * blocks, *sum = each + (count + r) * blocks;
            level.quantise_row[x_storage](x.row(first + r), static_cast<int>(x.width), format == kQ4_1,
                                          quants + r * x.width, scale, sum);
            rows[r] = reinterpret_cast<const char*>(quants + r * x.width);
            row_scales[r] = reinterpret_cast<const char*>(scale);
            row_sums[r] = reinterpret_cast<const char*>(sum);
        }
        interleave(rows, count, blocks * 8, packed + first * blocks * 8);
        interleave(row_scales, count, blocks, reinterpret_cast<uint32_t*>(scales + first * blocks));
        interleave(row_sums, count, blocks, reinterpret_cast<uint32_t*>(sums + first * blocks));
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
