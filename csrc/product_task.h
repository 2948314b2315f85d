// A piece of a product with packed weights, for one thread.
#pragma once

#include <cstdint>

#include "storage.h"

namespace octavo {

// clang-format off
enum class WeightFormat : uint8_t {
    bf16, f32, bf16_compressed,
    q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4
};
// clang-format on
constexpr int kNumWeightFormats = 16;
constexpr bool is_quantised(WeightFormat format) { return format >= WeightFormat::q4_0; }
// For formats that are not quantised: the type of the elements, and of the activations that they multiply.
constexpr Storage float_storage(WeightFormat format) { return format == WeightFormat::f32 ? kF32 : kBf16; }

constexpr int kPanelOutputs = 32;
constexpr int kSectionInputs = 32;  // of quantised weights, and of activations that share a scale

// Bytes for each output of a section that multiply its scale and minimum.
enum class Factors {
    none,
    scale_and_minimum,  // one for each
    two_scales,         // signed, one for the first 16 inputs and one for the others
    two_pairs,          // the same, each with a scale in its low half and a minimum in its high one
    one_scale,          // signed
    exponent            // no factor but the scale itself: byte e is 2^(e - 127), and 0 is zero
};

// The numbers that codes of four bits stand for.
enum class Codebook { none, iq4, e2m1 };
constexpr int8_t kCodebooks[][16] = {
    {},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},  // twice those of E2M1
};

// A quantised format of GGUF: the weight of quant q is scale * (q - zero) + minimum, where q is stored, or is a number
// of the codebook plus the zero. See quant_panels.h for the panels.
struct QuantLayout {
    int inputs, stored_bytes;  // of a block in a file
    int low, high;             // a quant's bits, or its code's, in each of two planes
    int halves;                // numbers in fp16 for each output of a block: a scale, and a minimum if there are two
    Factors factors;
    int zero;
    Codebook codebook = Codebook::none;

    constexpr bool has_minimums() const { return halves == 2; }
    constexpr int quant_bits() const {
        return codebook == Codebook::none ? low + high : codebook == Codebook::iq4 ? 8 : 5;
    }
    // Single bytes would put the planes between cache lines: those of a block's sections are in its header.
    constexpr bool factors_in_header() const { return factors == Factors::one_scale || factors == Factors::exponent; }
    constexpr int factor_bytes() const { return factors == Factors::none ? 0 : factors_in_header() ? 1 : 2; }
    constexpr int scales_per_section() const {
        return factors == Factors::two_scales || factors == Factors::two_pairs ? 2 : 1;
    }
    constexpr int stored_sections() const { return inputs / kSectionInputs; }
    // Of a block of a panel: those of a block in a file, or as many as fill a line of the header. The last block may
    // have fewer.
    constexpr int sections() const { return factors == Factors::exponent ? 2 : stored_sections(); }
    constexpr int header_bytes() const {
        return (halves * 2 + (factors_in_header() ? sections() : 0)) * kPanelOutputs;
    }
    // The place of a section's factors and planes.
    template <class Byte> constexpr Byte* factors_of(Byte* header, int section, Byte* section_bytes) const {
        return factors_in_header() ? header + (halves * 2 + section) * kPanelOutputs : section_bytes;
    }
    constexpr int planes_at() const { return factors_in_header() ? 0 : factor_bytes() * kPanelOutputs; }
    constexpr int section_bytes() const { return planes_at() + (low + high) * kSectionInputs / 8 * kPanelOutputs; }
    // Of a section whose quants are bytes, and whose scales and minimums are floats.
    constexpr int decoded_bytes() const {
        return (kSectionInputs + scales_per_section() * (has_minimums() ? 2 : 1) * 4) * kPanelOutputs;
    }
    constexpr int block_bytes() const { return header_bytes() + sections() * section_bytes(); }  // of a panel
    constexpr int64_t panel_bytes(int64_t all_sections) const {
        return (all_sections + sections() - 1) / sections() * header_bytes() + all_sections * section_bytes();
    }
};
constexpr QuantLayout kQuantLayouts[] = {
    {32, 18, 4, 0, 1, Factors::none, 8},                 // Q4_0
    {32, 20, 4, 0, 2, Factors::none, 0},                 // Q4_1
    {32, 22, 4, 1, 1, Factors::none, 16},                // Q5_0
    {32, 24, 4, 1, 2, Factors::none, 0},                 // Q5_1
    {32, 34, 8, 0, 1, Factors::none, 128},               // Q8_0
    {256, 84, 2, 0, 2, Factors::two_pairs, 0},           // Q2_K
    {256, 110, 2, 1, 1, Factors::two_scales, 4},         // Q3_K
    {256, 144, 4, 0, 2, Factors::scale_and_minimum, 0},  // Q4_K
    {256, 176, 4, 1, 2, Factors::scale_and_minimum, 0},  // Q5_K
    {256, 210, 4, 2, 1, Factors::two_scales, 32},        // Q6_K
    {32, 18, 4, 0, 1, Factors::none, 128, Codebook::iq4},         // IQ4_NL
    {256, 136, 4, 0, 1, Factors::one_scale, 128, Codebook::iq4},  // IQ4_XS
    {32, 17, 4, 0, 0, Factors::exponent, 12, Codebook::e2m1},     // MXFP4
};
constexpr const QuantLayout& quant_layout(WeightFormat format) {
    return kQuantLayouts[static_cast<int>(format) - static_cast<int>(WeightFormat::q4_0)];
}

// Splits the rows of a product into groups of at most `most` rows, as evenly as possible.
struct RowGroups {
    int64_t rows, count;
    RowGroups() = default;
    RowGroups(int64_t rows, int64_t most) : rows(rows), count((rows + most - 1) / most) {}
    int64_t begin(int64_t group) const { return rows * group / count; }
};

// A gate turns pairs of 16 sums, | gate | up |, into 16 outputs. Gates come in the order of Activation, then others.
enum Epilogue { kPlain, kSiluGate, kGeluTanhGate, kGeluGate, kReluGate, kRelu2Gate, kClampedSwiGlu };

struct LinearOutput {
    char* base;
    int64_t stride;  // bytes
    int64_t width;
    const char* bias;  // [sums] in `storage`, or null
    Storage storage;
    Epilogue epilogue;
};

// A weight that the codes of compressed.h cannot represent. Each panel's list ends with an escape for a unit that does
// not exist.
struct Escape {
    uint32_t unit;
    uint16_t element, bits;  // which of the unit's 64 elements: output * 2 + input
};
constexpr int kCompressedPairBytes = 192;  // for two units
// Which byte of a compressed unit holds an element.
constexpr int compressed_position(int element) { return element % 32 / 8 * 16 + element / 32 * 8 + element % 8; }
struct CompressedPanels {
    const uint8_t* tables;        // exponent bits of the high bytes by code (16), then of the low bytes (16)
    const int32_t* first_escape;  // [panels]
    const Escape* escapes;
};

constexpr int64_t kRemaindersPerRow = 2, kMostQuantRows = 8;
constexpr int64_t sections_with_remainders(int64_t units) {
    return units + (units < kRemaindersPerRow * kMostQuantRows ? units : kRemaindersPerRow * kMostQuantRows);
}

// Quantised activations, see quant.h. The R rows of a group are interleaved. There is room for the remainders that all
// rows of a group could have.
struct QuantRows {
    uint32_t* quants;     // [rows / R][sections * 8][R]
    float* scales;        // [rows / R][sections][R]
    uint32_t* sums;       // [rows / R][sums][R]: initial integer sum, or the float that multiplies the minimum
    int32_t* remainders;  // [rows / R][sections R]: how many a group has, and of which sections
    // From a group's first row on. A section has `parts` sums, one for each scale of its weights.
    QuantRows at(int64_t row, int64_t units, int64_t parts) const {
        const int64_t sections = row * sections_with_remainders(units);
        return {quants + sections * 8, scales + sections, sums + sections * parts, remainders + sections};
    }
    // Those at `from`, which has room for `rows` rows.
    static QuantRows in(uint32_t* from, int64_t rows, int64_t units, int64_t parts) {
        const int64_t sections = rows * sections_with_remainders(units);
        uint32_t* sums = from + sections * 9;
        return {from, reinterpret_cast<float*>(from + sections * 8), sums,
                reinterpret_cast<int32_t*>(sums + sections * parts)};
    }
    static int64_t row_room(int64_t units, int64_t parts) { return sections_with_remainders(units) * (10 + parts); }
};

struct ProductTask {
    const char* weight;  // packed
    CompressedPanels compressed;  // if the weight is
    const uint32_t* x;   // packed floats, see gemm.h; or
    QuantRows quants;    // if they are multiplied as integers
    int64_t first_row;   // the row that x begins with
    RowGroups groups;
    LinearOutput out;
    int64_t skipped;  // panels between the task's and those that its thread is likely to multiply next
    int units;        // of 32 bits in an output's floats; or sections
    char* decoded;    // room to decode a panel, or some of its tile steps; null if that would not be worth it
};

}  // namespace octavo
