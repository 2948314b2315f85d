// Packs weights into the kernels' layout, and unpacks them a row at a time.
#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

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
    uint8_t factors[2 * 8];  // [section][factor_bytes()]
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

// IQ4_XS: eight scales of six bits, plus 32: the upper two bits in two bytes, the lower four in four.
void read_signed_scales(const uint8_t* from, uint8_t* scales) {
    for (int i = 0; i < 8; ++i) {
        const int low = from[2 + i / 2] >> i % 2 * 4 & 15, high = from[i / 4] >> i % 4 * 2 & 3;
        scales[i] = static_cast<uint8_t>((low | high << 4) - 32);
    }
}

// MXFP4: a number of E8M0, for numbers twice as large. Where half of it is subnormal, weights are taken as zero.
uint8_t halved_exponent(uint8_t stored) { return stored == 0 ? uint8_t{0} : static_cast<uint8_t>(stored - 1); }

template <WeightFormat F> void read_block(const uint8_t* from, StoredBlock& to) {
    using enum WeightFormat;
    constexpr QuantLayout layout = quant_layout(F);
    uint8_t* quants = to.quants;
    // At the end of a block that has its quants first.
    constexpr bool last = F == q2_k || F == q3_k || F == q6_k, fifths = F == q5_0 || F == q5_1;
    std::memcpy(to.halves, last ? from + layout.stored_bytes - 2 * layout.halves : from, 2 * layout.halves);
    const uint8_t* rest = from + 2 * layout.halves;
    if constexpr (F == q4_0 || F == q4_1 || fifths || F == iq4_nl)
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
    if constexpr (F == iq4_xs) {
        read_signed_scales(rest, to.factors);
        for (int run = 0; run < 8; ++run)
            split_nibbles(rest + 6 + 16 * run, 16, quants + 32 * run, quants + 32 * run + 16);
    }
    if constexpr (F == mxfp4) {
        to.factors[0] = halved_exponent(from[0]);
        split_nibbles(from + 1, 16, quants, quants + 16);
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
template <WeightFormat F> void check_scales(const StoredBlock& block, int64_t row, int64_t index) {
    constexpr QuantLayout layout = quant_layout(F);
    bool damaged = layout.factors == Factors::exponent && block.factors[0] == halved_exponent(255);
    for (int i = 0; i < layout.halves; ++i) damaged |= (block.halves[i] & 0x7c00) == 0x7c00;
    if (damaged)
        throw std::invalid_argument("row " + std::to_string(row) + " has a scale in block " + std::to_string(index) +
                                    " that is infinite or not a number: the weight is damaged");
}

// Bits [from, from + Bits) of a section's quants, four to a quad -> an output's words in a plane.
template <int Bits> void put_plane(const uint32_t* quads, int from, char* to) {
    constexpr uint32_t mask = 0x01010101u * ((1u << Bits) - 1);
    uint32_t words[Bits] = {};
    for (int j = 0; j < 8; ++j) words[j % Bits] |= (quads[j] >> from & mask) << j / Bits * Bits;
    for (int word = 0; word < Bits; ++word) std::memcpy(to + word * kPanelOutputs * 4, &words[word], 4);
}

// The place of a section in a panel.
template <class Byte> struct SectionPlace {
    Byte *header, *factors, *planes;
    SectionPlace(const QuantLayout& layout, Byte* panel, int64_t index) {
        const auto in_block = static_cast<int>(index % layout.sections());
        header = panel + index / layout.sections() * layout.block_bytes();
        Byte* section = header + layout.header_bytes() + in_block * layout.section_bytes();
        factors = layout.factors_of(header, in_block, section);
        planes = section + layout.planes_at();
    }
};

template <WeightFormat F>
void pack_quants(const Weight& weight, const char* rows, int64_t row_stride, int64_t begin, int64_t end,
                 Placement place) {
    constexpr QuantLayout layout = quant_layout(F);
    const int64_t blocks = weight.inputs / layout.inputs;
    const int64_t panel_bytes = layout.panel_bytes(weight.inputs / kSectionInputs);
    // Sixteen rows at a time, so that cache lines of the packed weight are written whole.
    for (int64_t first = begin; first < end; first += 16)
        for (int64_t index = 0; index < blocks; ++index)
            for (int64_t row = first; row < std::min(first + 16, end); ++row) {
                const int64_t output = place.output(row), lane = output % kPanelOutputs;
                char* panel = weight.packed + output / kPanelOutputs * panel_bytes;
                StoredBlock block;
                read_block<F>(reinterpret_cast<const uint8_t*>(rows) + row * row_stride + index * layout.stored_bytes,
                              block);
                check_scales<F>(block, row, index);
                for (int section = 0; section < layout.stored_sections(); ++section) {
                    const SectionPlace<char> to(layout, panel, index * layout.stored_sections() + section);
                    for (int i = 0; section == 0 && i < layout.halves; ++i)
                        std::memcpy(to.header + (i * kPanelOutputs + lane) * 2, &block.halves[i], 2);
                    for (int i = 0; i < layout.factor_bytes(); ++i)
                        to.factors[i * kPanelOutputs + lane] =
                            static_cast<char>(block.factors[section * layout.factor_bytes() + i]);
                    char* planes = to.planes + lane * 4;
                    uint32_t quads[8];
                    std::memcpy(quads, block.quants + section * kSectionInputs, sizeof quads);
                    put_plane<layout.low>(quads, 0, planes);
                    if constexpr (layout.high > 0)
                        put_plane<layout.high>(quads, layout.low, planes + layout.low * kPanelOutputs * 4);
                }
            }
}

// The reverse of put_plane: adds an output's bits to its quads.
template <int Bits> void add_plane(const uint8_t* from, int to, uint32_t* quads) {
    constexpr uint32_t mask = 0x01010101u * ((1u << Bits) - 1);
    uint32_t words[Bits];
    for (int word = 0; word < Bits; ++word) std::memcpy(&words[word], from + word * kPanelOutputs * 4, 4);
    for (int j = 0; j < 8; ++j) quads[j] |= (words[j % Bits] >> j / Bits * Bits & mask) << to;
}

// Of a section's `half`, sixteen inputs.
void apply_factors(Factors kind, const uint8_t (&factors)[2], int half, float& scale, float& minimum) {
    switch (kind) {
        case Factors::none:
            return;
        case Factors::scale_and_minimum:
            scale *= static_cast<float>(factors[0]);
            minimum *= static_cast<float>(factors[1]);
            return;
        case Factors::two_scales:
            scale *= static_cast<float>(static_cast<int8_t>(factors[half]));
            return;
        case Factors::two_pairs:
            scale *= static_cast<float>(factors[half] & 15);
            minimum *= static_cast<float>(factors[half] >> 4);
            return;
        case Factors::one_scale:
            scale *= static_cast<float>(static_cast<int8_t>(factors[0]));
            return;
        case Factors::exponent:
            scale = portable::bits_to_float(uint32_t{factors[0]} << 23);
            return;
    }
}

template <WeightFormat F> void unpack_quants(const Weight& weight, int64_t output, Storage storage, char* to) {
    constexpr QuantLayout layout = quant_layout(F);
    const int64_t sections = weight.inputs / kSectionInputs, lane = output % kPanelOutputs;
    const auto* panel = reinterpret_cast<const uint8_t*>(weight.packed) +
                        output / kPanelOutputs * layout.panel_bytes(sections);
    for (int64_t index = 0; index < sections; ++index) {
        const SectionPlace<const uint8_t> from(layout, panel, index);
        float halves[2] = {};
        for (int i = 0; i < layout.halves; ++i) {
            uint16_t half;
            std::memcpy(&half, from.header + (i * kPanelOutputs + lane) * 2, 2);
            halves[i] = portable::half_to_float(half);
        }
        const uint8_t factors[2] = {from.factors[lane],
                                    from.factors[(layout.factor_bytes() > 1 ? kPanelOutputs : 0) + lane]};
        uint32_t quads[8] = {};
        const uint8_t* planes = from.planes + lane * 4;
        add_plane<layout.low>(planes, 0, quads);
        if constexpr (layout.high > 0)
            add_plane<layout.high>(planes + layout.low * kPanelOutputs * 4, layout.low, quads);
        uint8_t quants[kSectionInputs];
        std::memcpy(quants, quads, sizeof quants);
        float values[kSectionInputs];
        for (int half = 0; half < 2; ++half) {
            float scale = halves[0], minimum = halves[1];
            apply_factors(layout.factors, factors, half, scale, minimum);
            for (int i = half * 16; i < half * 16 + 16; ++i) {
                int quant = quants[i] - layout.zero;
                if constexpr (layout.codebook != Codebook::none)
                    quant = kCodebooks[static_cast<int>(layout.codebook)][quants[i]];
                const float product = static_cast<float>(quant) * scale;
                values[i] = layout.has_minimums() ? product + minimum : product;
            }
        }
        if (storage == kF32) {
            std::memcpy(to + index * sizeof values, values, sizeof values);
            continue;
        }
        portable::bf16 rounded[kSectionInputs];
        for (int i = 0; i < kSectionInputs; ++i) rounded[i] = portable::float_to_bf16(values[i]);
        std::memcpy(to + index * sizeof rounded, rounded, sizeof rounded);
    }
}

// What is done to weights of a quantised format.
struct QuantFunctions {
    void (*pack)(const Weight&, const char* rows, int64_t row_stride, int64_t begin, int64_t end, Placement);
    void (*unpack)(const Weight&, int64_t output, Storage, char* to);
};
constexpr int kFirstQuantised = static_cast<int>(WeightFormat::q4_0);
constexpr auto kQuantFunctions = []<int... I>(std::integer_sequence<int, I...>) {
    return std::array{QuantFunctions{pack_quants<static_cast<WeightFormat>(kFirstQuantised + I)>,
                                     unpack_quants<static_cast<WeightFormat>(kFirstQuantised + I)>}...};
}(std::make_integer_sequence<int, kNumWeightFormats - kFirstQuantised>{});

const QuantFunctions& quant_functions(WeightFormat format) {
    return kQuantFunctions[static_cast<int>(format) - kFirstQuantised];
}

}  // namespace

int64_t stored_row_bytes(WeightFormat format, int64_t inputs) {
    if (is_quantised(format)) return inputs / quant_layout(format).inputs * quant_layout(format).stored_bytes;
    return inputs * (float_storage(format) == kBf16 ? 2 : 4);
}

int64_t packed_bytes(WeightFormat format, int64_t outputs, int64_t inputs) {
    const int64_t panels = (outputs + kPanelOutputs - 1) / kPanelOutputs;
    if (is_quantised(format)) return panels * quant_layout(format).panel_bytes(inputs / kSectionInputs);
    const Weight weight{nullptr, outputs, inputs, format};
    return panels * kPanelOutputs * units_per_output(weight) * 4;
}

int64_t block_inputs(WeightFormat format) { return is_quantised(format) ? quant_layout(format).inputs : 1; }

void pack_rows(const Weight& weight, const char* rows, int64_t row_stride, int64_t num_rows, Placement place) {
    // With several threads, first touch spreads the pages over the threads' memory nodes.
    constexpr int64_t kRowsPerTask = 64;  // a multiple of sixteen
    const int64_t tasks = (num_rows + kRowsPerTask - 1) / kRowsPerTask;
    const auto pack = is_quantised(weight.format) ? quant_functions(weight.format).pack : pack_floats;
    parallel_for(static_cast<int>(tasks), [&](int task) {
        const int64_t first = task * kRowsPerTask, end = std::min(num_rows, first + kRowsPerTask);
        pack(weight, rows, row_stride, first, end, place);
    });
}

void widen(const char* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; ++i) {
        portable::bf16 value;
        std::memcpy(&value, from + i * 2, sizeof value);
        to[i] = portable::bf16_to_float(value);
    }
}

void unpack_row(const Weight& weight, int64_t output, Storage storage, char* to) {
    if (is_quantised(weight.format)) return quant_functions(weight.format).unpack(weight, output, storage, to);
    if (storage != float_storage(weight.format)) {
        char* const half = to + weight.inputs * 2;
        unpack_row(weight, output, kBf16, half);
        return widen(half, weight.inputs, reinterpret_cast<float*>(to));
    }
    if (weight.format == WeightFormat::bf16_compressed) return decompress_row(weight, output, to);
    const int64_t units = units_per_output(weight);
    const char* from = weight.packed + (output / kPanelOutputs * units * kPanelOutputs + output % kPanelOutputs) * 4;
    const int64_t row_bytes = stored_row_bytes(weight.format, weight.inputs);
    for (int64_t unit = 0; unit < units; ++unit)
        std::memcpy(to + unit * 4, from + unit * kPanelOutputs * 4, std::min<int64_t>(4, row_bytes - unit * 4));
}

}  // namespace octavo
