// Matrix products with packed weights: how weights are packed, and how the work is split among threads.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "ops.h"

namespace octavo {

// A matrix [outputs][inputs] in the kernels' layout: panels of 32 outputs, see gemm.h, compressed.h and quant.h.
struct Weight {
    char* packed;
    int64_t outputs, inputs;
    WeightFormat format;
};

int64_t packed_bytes(WeightFormat, int64_t outputs, int64_t inputs);
int64_t stored_row_bytes(WeightFormat, int64_t inputs);  // of one output in checkpoints and GGUF files
int64_t block_inputs(WeightFormat);                      // what a weight's inputs must be a multiple of

// The layout of a compressed weight: | header | panels | first escape of each panel | escapes |
struct CompressedWeight {
    int64_t panels, pairs;  // pairs of units per panel
    int64_t panel_bytes() const { return pairs * kCompressedPairBytes; }
    static constexpr int64_t header_bytes = 64;
    int64_t escapes_at() const { return header_bytes + panels * panel_bytes() + (panels * 4 + 63) / 64 * 64; }
    int64_t bytes(int64_t num_escapes) const {
        return escapes_at() +
               (num_escapes + panels) * static_cast<int64_t>(sizeof(Escape));  // plus a terminator per panel
    }
    explicit CompressedWeight(const Weight& weight)
        : panels((weight.outputs + kPanelOutputs - 1) / kPanelOutputs), pairs((weight.inputs + 3) / 4) {}
    CompressedPanels view(const char* packed) const {
        return {reinterpret_cast<const uint8_t*>(packed),
                reinterpret_cast<const int32_t*>(packed + header_bytes + panels * panel_bytes()),
                reinterpret_cast<const Escape*>(packed + escapes_at())};
    }
};
// How a packed bf16 weight would be compressed: the 15 consecutive exponents that cover most of it, and the number of
// elements outside them.
constexpr int kMostCompressionBase = 240;
struct CompressionPlan {
    int base;  // code c is exponent base + c; at most kMostCompressionBase
    int64_t num_escapes;
};
CompressionPlan plan_compression(const Weight& weight);
// Throws std::invalid_argument if the plan was made for another weight.
void compress(const Weight& weight, const CompressionPlan& plan, char* to);
// Throws std::invalid_argument unless `bytes` bytes hold what `compress` wrote.
void check_compressed(const Weight& weight, int64_t bytes);
void decompress_row(const Weight& weight, int64_t output, char* to);

// Where a matrix's rows go among the outputs of a fused one: 16 together, the next 16 `step` sixteens further on.
//     step 1   | q ........ | k ... | v ... |      one after the other, each from its own first_output
//     step 2   | gate 0-15 | up 0-15 | gate 16-31 | up 16-31 | ..
struct Placement {
    int64_t first_output, step;
    int64_t output(int64_t row) const { return first_output + row / 16 * 16 * step + row % 16; }
};

// Packs stored rows into `weight`, whose padding must already be zero.
void pack_rows(const Weight& weight, const char* rows, int64_t row_stride, int64_t num_rows, Placement);
// Numbers in bf16 as floats. They may be in the second half of `to`.
void widen(const char* from, int64_t count, float* to);
// Unpacks one output's weights as floats or, unless they are floats, as bf16, for an embedding tied to a packed head.
void unpack_row(const Weight& weight, int64_t output, Storage, char* to);

// out = out.epilogue(x @ weight.T + bias). Unless the weight is quantised, x must have the weight's element type.
// A row's bits depend on that row alone if `exact`; if not, many rows may be multiplied with a quantised weight in
// another way, whose results are equal within rounding.
void linear(const Weight& weight, Storage x_storage, const Matrix& x, const LinearOutput& out, bool exact = true);

struct BiasedWeight {
    Weight weight;
    const char* bias;  // [outputs] in the type of what is computed, or null
};
// Row i of a product with experts is row sources[i] of x times the expert e for which begins[e] <= i < begins[e + 1].
struct RowsByExpert {
    const int32_t* sources;  // null: row i of x
    const int64_t* begins;  // [experts + 1]
};
// The same as `linear` for the rows of each expert, in one round. All experts have the same shape; out.bias is unused.
void linear_by_expert(const std::vector<BiasedWeight>& experts, Storage x_storage, const Matrix& x,
                      const RowsByExpert& rows, const LinearOutput& out, bool exact = true);

}  // namespace octavo
