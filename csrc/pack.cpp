// Packs weights into the kernels' layout, and unpacks them a row at a time.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "level/simd/common.h"
#include "linear.h"
#include "thread_pool.h"

namespace octavo {
namespace {

int gguf_block_bytes(QuantFormat format) { return format == kQ4_0 ? 18 : format == kQ4_1 ? 20 : 34; }

int64_t units_per_output(const Weight& weight) {
    return float_storage(weight.format) == kBf16 ? (weight.inputs + 1) / 2 : weight.inputs;
}

// Sixteen units of sixteen outputs at a time, so that cache lines of the packed weight are written whole.
void pack_floats(const Weight& weight, const char* rows, int64_t row_stride, int64_t begin, int64_t end_row,
                 Placement place) {
    const int64_t units = units_per_output(weight), row_bytes = stored_row_bytes(weight.format, weight.inputs);
    for (int64_t first = begin; first < end_row; first += 16) {
        const int64_t count = std::min<int64_t>(16, end_row - first);
        for (int64_t unit = 0; unit < units; unit += 16)
            for (int64_t r = 0; r < count; ++r) {
                const int64_t output = place.output(first + r), panel = output / kPanelOutputs;
                uint32_t block[16] = {};
                std::memcpy(block, rows + (first + r) * row_stride + unit * 4,
                            std::min<int64_t>(64, row_bytes - unit * 4));
                uint32_t* to = reinterpret_cast<uint32_t*>(weight.packed) + (panel * units + unit) * kPanelOutputs +
                               output % kPanelOutputs;
                const int64_t end = std::min<int64_t>(16, units - unit);
                for (int64_t u = 0; u < end; ++u) to[u * kPanelOutputs] = block[u];
            }
    }
}

// An infinite or NaN scale would turn into finite garbage when integers are added to its exponent.
void check_scale(const char* from, int64_t row, int64_t block) {
    uint16_t half;
    std::memcpy(&half, from, 2);
    if ((half & 0x7c00) == 0x7c00)
        throw std::invalid_argument("row " + std::to_string(row) + " has a scale in block " + std::to_string(block) +
                                    " that is infinite or not a number: the weight is damaged");
}

void pack_quants(const Weight& weight, const char* rows, int64_t row_stride, int64_t begin, int64_t end,
                 Placement place) {
    const QuantFormat format = quant_format(weight.format);
    const int64_t blocks = weight.inputs / 32, from_bytes = gguf_block_bytes(format);
    const int header = format == kQ4_1 ? 4 : 2, quads = format == kQ8_0 ? 8 : 4;
    const uint32_t flip = format == kQ8_0 ? 0x80808080u : 0;  // signed to unsigned
    for (int64_t row = begin; row < end; ++row) {
        const int64_t output = place.output(row), lane = output % kPanelOutputs;
        const char* from = rows + row * row_stride;
        char* to = weight.packed + output / kPanelOutputs * blocks * quant_block_bytes(format);
        for (int64_t block = 0; block < blocks; ++block, from += from_bytes, to += quant_block_bytes(format)) {
            check_scale(from, row, block);
            if (format == kQ4_1) check_scale(from + 2, row, block);
            std::memcpy(to + lane * 2, from, 2);
            if (format == kQ4_1) std::memcpy(to + kPanelOutputs * 2 + lane * 2, from + 2, 2);
            char* vectors = to + header * kPanelOutputs + lane * 4;
            for (int quad = 0; quad < quads; ++quad) {
                uint32_t bytes;
                std::memcpy(&bytes, from + header + quad * 4, 4);
                bytes ^= flip;
                std::memcpy(vectors + quad * kPanelOutputs * 4, &bytes, 4);
            }
        }
    }
}

void store(float value, Storage storage, int64_t index, char* to) {
    const portable::bf16 half = portable::float_to_bf16(value);
    if (storage == kBf16)
        std::memcpy(to + index * 2, &half, 2);
    else
        std::memcpy(to + index * 4, &value, 4);
}

void unpack_quants(const Weight& weight, int64_t output, Storage storage, char* to) {
    const QuantFormat format = quant_format(weight.format);
    const int64_t blocks = weight.inputs / 32, lane = output % kPanelOutputs;
    const int header = format == kQ4_1 ? 4 : 2;
    const char* from = weight.packed + output / kPanelOutputs * blocks * quant_block_bytes(format);
    for (int64_t block = 0; block < blocks; ++block, from += quant_block_bytes(format)) {
        uint16_t halves[2] = {};
        std::memcpy(&halves[0], from + lane * 2, 2);
        if (format == kQ4_1) std::memcpy(&halves[1], from + kPanelOutputs * 2 + lane * 2, 2);
        const float scale = portable::half_to_float(halves[0]), minimum = portable::half_to_float(halves[1]);
        const auto* vectors = reinterpret_cast<const uint8_t*>(from + header * kPanelOutputs + lane * 4);
        for (int i = 0; i < 32; ++i) {
            const int byte = format == kQ8_0 ? i : i % 16;
            const int bits = vectors[byte / 4 * kPanelOutputs * 4 + byte % 4];
            const int quant =
                format == kQ8_0 ? bits - 128 : (i < 16 ? bits & 15 : bits >> 4) - (format == kQ4_0 ? 8 : 0);
            const float product = static_cast<float>(quant) * scale;
            store(format == kQ4_1 ? product + minimum : product, storage, block * 32 + i, to);
        }
    }
}

}  // namespace

int64_t stored_row_bytes(WeightFormat format, int64_t inputs) {
    if (is_quantised(format)) return inputs / 32 * gguf_block_bytes(quant_format(format));
    return inputs * (float_storage(format) == kBf16 ? 2 : 4);
}

int64_t packed_bytes(WeightFormat format, int64_t outputs, int64_t inputs) {
    const int64_t panels = (outputs + kPanelOutputs - 1) / kPanelOutputs;
    if (is_quantised(format)) return panels * (inputs / 32) * quant_block_bytes(quant_format(format));
    const Weight weight{nullptr, outputs, inputs, format};
    return panels * kPanelOutputs * units_per_output(weight) * 4;
}

void pack_rows(const Weight& weight, const char* rows, int64_t row_stride, int64_t num_rows, Placement place) {
    // With several threads, first touch spreads the pages over the threads' memory nodes.
    constexpr int64_t kRowsPerTask = 64;  // a multiple of sixteen
    const int64_t tasks = (num_rows + kRowsPerTask - 1) / kRowsPerTask;
    parallel_for(static_cast<int>(tasks), [&](int task) {
        const int64_t first = task * kRowsPerTask, end = std::min(num_rows, first + kRowsPerTask);
        if (is_quantised(weight.format))
            pack_quants(weight, rows, row_stride, first, end, place);
        else
            pack_floats(weight, rows, row_stride, first, end, place);
    });
}

void unpack_row(const Weight& weight, int64_t output, Storage storage, char* to) {
    if (is_quantised(weight.format)) return unpack_quants(weight, output, storage, to);
    if (weight.format == WeightFormat::bf16_coded) return decode_row(weight, output, to);
    const int64_t units = units_per_output(weight);
    const char* from = weight.packed + (output / kPanelOutputs * units * kPanelOutputs + output % kPanelOutputs) * 4;
    const int64_t row_bytes = stored_row_bytes(weight.format, weight.inputs);
    for (int64_t unit = 0; unit < units; ++unit)
        std::memcpy(to + unit * 4, from + unit * kPanelOutputs * 4, std::min<int64_t>(4, row_bytes - unit * 4));
}

}  // namespace octavo
