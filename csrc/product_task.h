// A piece of a product with packed weights, for one thread.
#pragma once

#include <cstdint>

#include "storage.h"

namespace octavo {

enum QuantFormat { kQ4_0, kQ4_1, kQ8_0, kNumQuantFormats };
constexpr int kPanelOutputs = 32;
// Bytes of a panel's outputs x 32 inputs, see quant.h.
constexpr int quant_block_bytes(QuantFormat format) {
    return format == kQ4_0 ? 64 + 512 : format == kQ4_1 ? 128 + 512 : 64 + 1024;
}

// Splits the rows of a product into groups of at most `most` rows, as evenly as possible.
struct RowGroups {
    int64_t rows, count;
    RowGroups() = default;
    RowGroups(int64_t rows, int64_t most) : rows(rows), count((rows + most - 1) / most) {}
    int64_t begin(int64_t group) const { return rows * group / count; }
};

// A gate turns pairs of 16 sums, | gate | up |, into 16 outputs. Gates are in the order of Activation.
enum Epilogue { kPlain, kSiluGate, kGeluTanhGate, kGeluGate, kReluGate };

struct LinearOutput {
    char* base;
    int64_t stride;  // bytes
    int64_t width;
    const char* bias;  // [sums] in `storage`, or null
    Storage storage;
    Epilogue epilogue;
};

// A weight that the codes of coded.h cannot represent. Each panel's list ends with an escape for a unit that does not
// exist.
struct Escape {
    uint32_t unit;
    uint16_t element, bits;  // which of the unit's 64 elements: output * 2 + input
};
constexpr int kCodedPairBytes = 192;  // for two units
// Which byte of a coded unit holds an element.
constexpr int coded_position(int element) { return element % 32 / 8 * 16 + element / 32 * 8 + element % 8; }
struct CodedPanels {
    const uint8_t* tables;        // exponent bits of the high bytes by code (16), then of the low bytes (16)
    const int32_t* first_escape;  // [panels]
    const Escape* escapes;
};

struct GemmTask {
    const uint32_t* x;   // packed, see gemm.h
    int64_t first_row;   // the row that x begins with
    const char* weight;  // packed
    CodedPanels coded;   // if the weight is coded
    RowGroups groups;
    LinearOutput out;
    int64_t skipped;     // panels between the task's and those that its thread is likely to multiply next
    int units;
    char* decoded;  // room for two panels of whole tile steps, to decode weights that are not bf16 panels
};
// Quantised activations, see quant.h. The R rows of a group are interleaved.
struct QuantRows {
    uint32_t* quants;  // [rows / R][blocks * 8][R]
    float* scales;     // [rows / R][blocks][R]
    uint32_t* sums;    // [rows / R][blocks][R]: initial integer sum, or the float that multiplies the minimum
    QuantRows at(int64_t row, int64_t blocks) const {
        return {quants + row * blocks * 8, scales + row * blocks, sums + row * blocks};
    }
};
struct QuantTask {
    const uint8_t* weight;
    QuantRows x;
    int64_t first_row;  // the row that x begins with
    RowGroups groups;
    LinearOutput out;
    int64_t skipped;  // panels between the task's and those that its thread is likely to multiply next
    int blocks;
};

}  // namespace octavo
