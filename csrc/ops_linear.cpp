#include <algorithm>
#include <cstring>
#include <vector>

#include "ops.h"
#include "thread_pool.h"

namespace octavo {
namespace {

constexpr int64_t kBytesWorthAThread = 65536;  // about two microseconds, what waking a team costs

// Calls body(begin, end) over tiles of 16 outputs.
template <class Body> void parallel_tiles(int64_t outputs, int64_t weight_bytes, int64_t rows, const Body& body) {
    const int64_t tiles = (outputs + 15) / 16;
    if (tiles == 0 || rows == 0) return;
    const int64_t worth = weight_bytes * rows / kBytesWorthAThread;
    const int64_t pieces = std::clamp<int64_t>(worth, 1, std::min<int64_t>(tiles, int64_t{num_threads()} * 4));
    parallel_for(static_cast<int>(pieces), [&](int i) { body(tiles * i / pieces, tiles * (i + 1) / pieces); });
}

}  // namespace

int gguf_block_bytes(QuantFormat format) { return format == kQ4_0 ? 18 : format == kQ4_1 ? 20 : 34; }

void pack_quant(QuantFormat format, const uint8_t* blocks, int64_t outputs, int64_t inputs, uint8_t* packed) {
    const int64_t per_output = inputs / 32, from_bytes = gguf_block_bytes(format);
    const int header = format == kQ4_1 ? 4 : 2, quads = format == kQ8_0 ? 8 : 4;
    const uint8_t flip = format == kQ8_0 ? 0x80 : 0;  // signed to unsigned
    const int64_t tiles = (outputs + 15) / 16;
    std::memset(packed, 0, tiles * per_output * quant_block_bytes(format));
    for (int64_t output = 0; output < outputs; ++output)
        for (int64_t block = 0; block < per_output; ++block) {
            const uint8_t* from = blocks + (output * per_output + block) * from_bytes;
            uint8_t* to = packed + (output / 16 * per_output + block) * quant_block_bytes(format);
            const int64_t lane = output % 16;
            std::memcpy(to + lane * 2, from, 2);
            if (format == kQ4_1) std::memcpy(to + 32 + lane * 2, from + 2, 2);
            uint8_t* vectors = to + header * 16 + lane * 4;
            for (int byte = 0; byte < quads * 4; ++byte)
                vectors[byte / 4 * 64 + byte % 4] = from[header + byte] ^ flip;
        }
}

void quant_linear(QuantFormat format, const uint8_t* packed, Storage x_storage, const Matrix& x,
                  const LinearOutput& out) {
    static thread_local std::vector<int8_t> quants;
    static thread_local std::vector<float> scales;
    const int64_t blocks = x.width / 32;
    quants.resize(x.rows * x.width);
    scales.resize(x.rows * blocks * 2);
    QuantLinearTask task{};
    task.weight = packed;
    task.quants = quants.data();
    task.scales = scales.data();
    task.sums = scales.data() + x.rows * blocks;
    task.out = out;
    task.blocks = static_cast<int>(blocks);
    task.rows = static_cast<int>(x.rows);
    const Kernels& level = kernels();
    int8_t* all_quants = quants.data();
    float* all_scales = scales.data();
    const auto quantise = [&](int64_t row) {
        float* row_scales = all_scales + row * blocks;
        level.quantise_row[x_storage](x.row(row), static_cast<int>(x.width), all_quants + row * x.width, row_scales,
                                      row_scales + x.rows * blocks);
    };
    constexpr int64_t kRowsPerTask = 16;
    if (x.rows <= kRowsPerTask)
        for (int64_t row = 0; row < x.rows; ++row) quantise(row);
    else
        parallel_for(static_cast<int>((x.rows + kRowsPerTask - 1) / kRowsPerTask), [&](int i) {
            for (int64_t row = i * kRowsPerTask; row < std::min(x.rows, (i + 1) * kRowsPerTask); ++row) quantise(row);
        });
    const int64_t weight_bytes = out.width * blocks * quant_block_bytes(format) / 16;
    parallel_tiles(out.width, weight_bytes, x.rows,
                   [&](int64_t begin, int64_t end) { level.quant_linear[format](task, begin, end); });
}

void bf16_linear(const char* weight, int64_t weight_stride, const Matrix& x, const LinearOutput& out) {
    Bf16LinearTask task{};
    task.x = x.base;
    task.weight = weight;
    task.x_stride = x.stride;
    task.weight_stride = weight_stride;
    task.out = out;
    task.inputs = static_cast<int>(x.width);
    task.rows = static_cast<int>(x.rows);
    const auto kernel = kernels().bf16_linear;
    parallel_tiles(out.width, out.width * x.width * 2, x.rows,
                   [&](int64_t begin, int64_t end) { kernel(task, begin, end); });
}

}  // namespace octavo
