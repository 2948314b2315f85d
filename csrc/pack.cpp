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

// A block of a GGUF file, taken apart.
struct StoredBlock {
    uint16_t halves[2];      // scale, minimum
    uint8_t factors[2 * 8];  // [section][2]
    alignas(64) uint8_t quants[256];
};

constexpr uint16_t kSign = 0x8000;

void split_nibbles(const uint8_t* from, int count, uint8_t* low, uint8_t* high) {
    for (int i = 0; i < count; ++i) {
        low[i] = from[i] & 15;
        high[i] = from[i] >> 4;
    }
}

// Adds bits of 32 quants, which are at bit `shift` of as many bytes, at bit `to` of the quants.
void add_bits(const uint8_t* from, int shift, int mask, int to, uint8_t* quants) {
    for (int i = 0; i < 32; ++i) quants[i] |= static_cast<uint8_t>((from[i] >> shift & mask) << to);
}

// Q4_K and Q5_K: eight pairs of scale and minimum, six bits each, in twelve bytes.
void read_pairs(const uint8_t* from, uint8_t* pairs) {
    for (int i = 0; i < 4; ++i) {
        pairs[2 * i] = from[i] & 63;
        pairs[2 * i + 1] = from[4 + i] & 63;
        pairs[8 + 2 * i] = static_cast<uint8_t>((from[8 + i] & 15) | from[i] >> 6 << 4);
        pairs[8 + 2 * i + 1] = static_cast<uint8_t>(from[8 + i] >> 4 | from[4 + i] >> 6 << 4);
    }
}

// Q3_K: sixteen scales of six bits, plus 32, in twelve bytes.
void read_scales(const uint8_t* from, uint8_t* scales) {
    for (int i = 0; i < 16; ++i) {
        const int low = i < 8 ? from[i] & 15 : from[i - 8] >> 4, high = from[8 + i % 4] >> i / 4 * 2 & 3;
        scales[i] = static_cast<uint8_t>((low | high << 4) - 32);
    }
}

template <WeightFormat F> void read_block(const uint8_t* from, StoredBlock& to) {
    using enum WeightFormat;
    constexpr QuantLayout layout = quant_layout(F);
    uint8_t* quants = to.quants;
    // At the end of a block that has its quants first.
    constexpr bool last = F == q2_k || F == q3_k || F == q6_k, fifths = F == q5_0 || F == q5_1;
    std::memcpy(to.halves, last ? from + layout.stored_bytes - 2 * layout.halves : from, 2 * layout.halves);
    const uint8_t* rest = from + 2 * layout.halves;
    if constexpr (F == q4_0 || F == q4_1 || fifths)
        split_nibbles(rest + (fifths ? 4 : 0), 16, quants, quants + 16);
    if constexpr (fifths)  // bit i is the fifth bit of quant i
        for (int byte = 0; byte < 4; ++byte) {
            uint64_t eight;
            std::memcpy(&eight, quants + 8 * byte, 8);
            eight |= (((uint64_t{rest[byte]} * 0x0101010101010101 & 0x8040201008040201) + 0x7f7f7f7f7f7f7f7f) >> 3) &
                     0x1010101010101010;
            std::memcpy(quants + 8 * byte, &eight, 8);
        }
    if constexpr (F == q8_0)  // signed to unsigned
        for (int i = 0; i < 32; ++i) quants[i] = rest[i] ^ 0x80;
    if constexpr (layout.inputs == 256 && layout.has_minimums()) to.halves[1] ^= kSign;  // they are subtracted
    if constexpr (F == q2_k || F == q3_k) {
        const uint8_t* low = F == q2_k ? from + 16 : from + 32;
        std::memset(quants, 0, 256);
        for (int run = 0; run < 8; ++run) {
            add_bits(low + run / 4 * 32, run % 4 * 2, 3, 0, quants + 32 * run);
            if constexpr (F == q3_k) add_bits(from, run, 1, 2, quants + 32 * run);
        }
        if constexpr (F == q2_k) std::memcpy(to.factors, from, 16);
        if constexpr (F == q3_k) read_scales(from + 96, to.factors);
    }
    if constexpr (F == q4_k || F == q5_k) {
        read_pairs(rest, to.factors);
        const uint8_t *high = rest + 12, *low = F == q5_k ? high + 32 : high;
        for (int pair = 0; pair < 4; ++pair, low += 32, quants += 64) {
            split_nibbles(low, 32, quants, quants + 32);
            if constexpr (F == q5_k) {
                add_bits(high, 2 * pair, 1, 4, quants);
                add_bits(high, 2 * pair + 1, 1, 4, quants + 32);
            }
        }
    }
    if constexpr (F == q6_k) {
        const uint8_t *low = from, *high = from + 128;
        std::memcpy(to.factors, from + 192, 16);
        for (int half = 0; half < 2; ++half, low += 64, high += 32, quants += 128) {
            split_nibbles(low, 64, quants, quants + 64);
            for (int run = 0; run < 4; ++run) add_bits(high, 2 * run, 3, 4, quants + 32 * run);
        }
    }
}

// An infinite or NaN scale would turn into finite garbage when integers are added to its exponent.
void check_halves(const StoredBlock& block, int count, int64_t row, int64_t index) {
    for (int i = 0; i < count; ++i)
        if ((block.halves[i] & 0x7c00) == 0x7c00)
            throw std::invalid_argument("row " + std::to_string(row) + " has a scale in block " +
                                        std::to_string(index) +
                                        " that is infinite or not a number: the weight is damaged");
}

// Bits [from, from + Bits) of a section's quants, four to a quad -> an output's words in a plane.
template <int Bits> void put_plane(const uint32_t* quads, int from, char* to) {
    constexpr uint32_t mask = 0x01010101u * ((1u << Bits) - 1);
    uint32_t words[Bits] = {};
    for (int j = 0; j < 8; ++j) words[j % Bits] |= (quads[j] >> from & mask) << j / Bits * Bits;
    for (int word = 0; word < Bits; ++word) std::memcpy(to + word * kPanelOutputs * 4, &words[word], 4);
}

template <WeightFormat F>
void pack_quants(const Weight& weight, const char* rows, int64_t row_stride, int64_t begin, int64_t end,
                 Placement place) {
    constexpr QuantLayout layout = quant_layout(F);
    const int64_t blocks = weight.inputs / layout.inputs;
    // Sixteen rows at a time, so that cache lines of the packed weight are written whole.
    for (int64_t first = begin; first < end; first += 16)
        for (int64_t index = 0; index < blocks; ++index)
            for (int64_t row = first; row < std::min(first + 16, end); ++row) {
                const int64_t output = place.output(row), lane = output % kPanelOutputs;
                char* to = weight.packed + (output / kPanelOutputs * blocks + index) * layout.block_bytes();
                StoredBlock block;
                read_block<F>(reinterpret_cast<const uint8_t*>(rows) + row * row_stride + index * layout.stored_bytes,
                              block);
                check_halves(block, layout.halves, row, index);
                for (int i = 0; i < layout.halves; ++i)
                    std::memcpy(to + (i * kPanelOutputs + lane) * 2, &block.halves[i], 2);
                to += layout.header_bytes();
                for (int section = 0; section < layout.sections(); ++section, to += layout.section_bytes()) {
                    for (int i = 0; i < layout.factor_bytes(); ++i)
                        to[i * kPanelOutputs + lane] = static_cast<char>(block.factors[section * 2 + i]);
                    char* planes = to + layout.planes_at() + lane * 4;
                    uint32_t quads[8];
                    std::memcpy(quads, block.quants + section * kSectionInputs, sizeof quads);
                    put_plane<layout.low>(quads, 0, planes);
                    if constexpr (layout.high > 0)
                        put_plane<layout.high>(quads, layout.low, planes + layout.low * kPanelOutputs * 4);
                }
            }
}

using PackQuants = void(const Weight&, const char* rows, int64_t row_stride, int64_t begin, int64_t end, Placement);
constexpr PackQuants* kPackQuants[] = {  // in the order of WeightFormat
    pack_quants<WeightFormat::q4_0>, pack_quants<WeightFormat::q4_1>, pack_quants<WeightFormat::q5_0>,
    pack_quants<WeightFormat::q5_1>, pack_quants<WeightFormat::q8_0>, pack_quants<WeightFormat::q2_k>,
    pack_quants<WeightFormat::q3_k>, pack_quants<WeightFormat::q4_k>, pack_quants<WeightFormat::q5_k>,
    pack_quants<WeightFormat::q6_k>};

void store(float value, Storage storage, int64_t index, char* to) {
    const portable::bf16 half = portable::float_to_bf16(value);
    if (storage == kBf16)
        std::memcpy(to + index * 2, &half, 2);
    else
        std::memcpy(to + index * 4, &value, 4);
}

// Quant `input` of a section, from its output's word of a plane.
int plane_bits(const uint8_t* plane, int bits, int input) {
    const int quad = input / 4, word = quad % bits;
    return plane[word * kPanelOutputs * 4 + input % 4] >> quad / bits * bits & ((1 << bits) - 1);
}

void unpack_quants(const Weight& weight, int64_t output, Storage storage, char* to) {
    const QuantLayout& layout = quant_layout(weight.format);
    const int64_t blocks = weight.inputs / layout.inputs, lane = output % kPanelOutputs;
    const auto* from = reinterpret_cast<const uint8_t*>(weight.packed) +
                       output / kPanelOutputs * blocks * layout.block_bytes();
    for (int64_t input = 0; input < weight.inputs; from += layout.block_bytes()) {
        float halves[2] = {};
        for (int i = 0; i < layout.halves; ++i) {
            uint16_t half;
            std::memcpy(&half, from + (i * kPanelOutputs + lane) * 2, 2);
            halves[i] = portable::half_to_float(half);
        }
        const uint8_t* section = from + layout.header_bytes();
        for (int s = 0; s < layout.sections(); ++s, section += layout.section_bytes())
            for (int i = 0; i < kSectionInputs; ++i, ++input) {
                const uint8_t* low = section + layout.planes_at() + lane * 4;
                int quant = plane_bits(low, layout.low, i) - layout.zero;
                if (layout.high)
                    quant += plane_bits(low + layout.low * kPanelOutputs * 4, layout.high, i) << layout.low;
                float scale = halves[0], minimum = halves[1];
                const uint8_t first = section[lane], second = section[kPanelOutputs + lane];
                const uint8_t own = i < 16 ? first : second;
                if (layout.factors == Factors::scale_and_minimum) {
                    scale *= static_cast<float>(first);
                    minimum *= static_cast<float>(second);
                } else if (layout.factors == Factors::two_scales) {
                    scale *= static_cast<float>(static_cast<int8_t>(own));
                } else if (layout.factors == Factors::two_pairs) {
                    scale *= static_cast<float>(own & 15);
                    minimum *= static_cast<float>(own >> 4);
                }
                const float product = static_cast<float>(quant) * scale;
                store(layout.has_minimums() ? product + minimum : product, storage, input, to);
            }
    }
}

}  // namespace

int64_t stored_row_bytes(WeightFormat format, int64_t inputs) {
    if (is_quantised(format)) return inputs / quant_layout(format).inputs * quant_layout(format).stored_bytes;
    return inputs * (float_storage(format) == kBf16 ? 2 : 4);
}

int64_t packed_bytes(WeightFormat format, int64_t outputs, int64_t inputs) {
    const int64_t panels = (outputs + kPanelOutputs - 1) / kPanelOutputs;
    if (is_quantised(format)) return panels * (inputs / block_inputs(format)) * quant_layout(format).block_bytes();
    const Weight weight{nullptr, outputs, inputs, format};
    return panels * kPanelOutputs * units_per_output(weight) * 4;
}

int64_t block_inputs(WeightFormat format) { return is_quantised(format) ? quant_layout(format).inputs : 1; }

void pack_rows(const Weight& weight, const char* rows, int64_t row_stride, int64_t num_rows, Placement place) {
    // With several threads, first touch spreads the pages over the threads' memory nodes.
    constexpr int64_t kRowsPerTask = 64;  // a multiple of sixteen
    const int64_t tasks = (num_rows + kRowsPerTask - 1) / kRowsPerTask;
    const auto pack = is_quantised(weight.format)
                          ? kPackQuants[static_cast<int>(weight.format) - static_cast<int>(WeightFormat::q4_0)]
                          : pack_floats;
    parallel_for(static_cast<int>(tasks), [&](int task) {
        const int64_t first = task * kRowsPerTask, end = std::min(num_rows, first + kRowsPerTask);
        pack(weight, rows, row_stride, first, end, place);
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
