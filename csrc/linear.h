// Matrix products with packed weights: how they are packed, and how the work is cut among threads.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "ops.h"

namespace octavo {

enum class WeightFormat : uint8_t { bf16, f32, bf16_coded, q4_0, q4_1, q8_0 };

inline bool is_quantised(WeightFormat format) { return format >= WeightFormat::q4_0; }
// Of what is not quantised: the elements, and the activations that they multiply.
inline Storage float_storage(WeightFormat format) { return format == WeightFormat::f32 ? kF32 : kBf16; }
inline QuantFormat quant_format(WeightFormat format) {
    return static_cast<QuantFormat>(static_cast<int>(format) - static_cast<int>(WeightFormat::q4_0));
}

// A matrix [outputs][inputs] in the kernels' order: panels of 32 outputs (gemm.h, coded.h), or tiles of 16 (quant.h).
struct Weight {
    char* packed;
    int64_t outputs, inputs;
    WeightFormat format;
};

int64_t packed_bytes(WeightFormat, int64_t outputs, int64_t inputs);
int64_t stored_row_bytes(WeightFormat, int64_t inputs);  // as checkpoints and GGUF files hold one output

// How a coded weight lies in memory: | header | panels | first escape of each panel | escapes |
struct CodedWeight {
    int64_t panels, pairs;  // of units, in a panel
    int64_t panel_bytes() const { return pairs * kCodedPairBytes; }
    static constexpr int64_t header_bytes = 64;
    int64_t escapes_at() const { return header_bytes + panels * panel_bytes() + (panels * 4 + 63) / 64 * 64; }
    int64_t bytes(int64_t num_escapes) const {
        return escapes_at() +
               (num_escapes + panels) * static_cast<int64_t>(sizeof(Escape));  // and an end for each panel
    }
    explicit CodedWeight(const Weight& weight)
        : panels((weight.outputs + kPanelOutputs - 1) / kPanelOutputs), pairs((weight.inputs + 3) / 4) {}
    CodedPanels view(const char* packed) const {
        return {reinterpret_cast<const uint8_t*>(packed),
                reinterpret_cast<const int32_t*>(packed + header_bytes + panels * panel_bytes()),
                reinterpret_cast<const Escape*>(packed + escapes_at())};
    }
};
// How a packed bf16 weight would be coded: its 15 commonest neighbouring exponents, and what is beside them.
struct CodingPlan {
    int base;  // code c is exponent base + c
    int64_t num_escapes;
};
CodingPlan plan_coding(const Weight& weight);
// Throws std::invalid_argument where the plan is another weight's.
void encode(const Weight& weight, const CodingPlan& plan, char* to);
// Throws std::invalid_argument unless `bytes` bytes hold what `encode` wrote.
void check_coded(const Weight& weight, int64_t bytes);
void decode_row(const Weight& weight, int64_t output, char* to);

// Where a matrix' rows go among the outputs of a fused one: 16 together, then `step` sixteens further on.
//     step 1   | q ........ | k ... | v ... |      one after the other, first_output apart
//     step 2   | gate 0-15 | up 0-15 | gate 16-31 | up 16-31 | ..
struct Placement {
    int64_t first_output, step;
    int64_t output(int64_t row) const { return first_output + row / 16 * 16 * step + row % 16; }
};

// Deal stored rows into `weight`, of which the padding must be zero already.
void pack_rows(const Weight& weight, const char* rows, int64_t row_stride, int64_t num_rows, Placement);
// One output's inputs as floats or bf16: an embedding tied to a packed head.
void unpack_row(const Weight& weight, int64_t output, Storage, char* to);

// out = x @ weight.T + bias through out.epilogue. Unless the weight is quantised, x holds what the weight does.
// A row's bits depend on nothing but the row. Not so, unless `exact`, where the weight is quantised: many rows may be
// multiplied another way, within rounding.
void linear(const Weight& weight, Storage x_storage, const Matrix& x, const LinearOutput& out, bool exact = true);

}  // namespace octavo
