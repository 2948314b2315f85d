#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstring>

#include "bind/arguments.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

constexpr const char* kFormatNames[kNumWeightFormats] = {"bfloat16", "float32", "compressed bfloat16",
                                                         "Q4_0",     "Q4_1",    "Q5_0",
                                                         "Q5_1",     "Q8_0",    "Q2_K",
                                                         "Q3_K",     "Q4_K",    "Q5_K",
                                                         "Q6_K",     "IQ4_NL",  "IQ4_XS",
                                                         "MXFP4"};

WeightFormat weight_format(const std::string& name) {
    return static_cast<WeightFormat>(index_of(name, "weight format", kFormatNames));
}

void check_size(const std::string& name, WeightFormat format, int64_t outputs, int64_t inputs) {
    require(outputs > 0 && inputs > 0,
            "a weight must have outputs and inputs, got " + std::to_string(outputs) + " x " + std::to_string(inputs));
    require(inputs % block_inputs(format) == 0, "inputs of a " + name + " weight must be a multiple of " +
                                                    std::to_string(block_inputs(format)) + ", got " +
                                                    std::to_string(inputs));
    require(inputs <= 1 << 24 && outputs <= int64_t{1} << 32,
            "a weight of " + std::to_string(outputs) + " x " + std::to_string(inputs) + " is too large");
}

int64_t checked_packed_bytes(const std::string& name, int64_t outputs, int64_t inputs) {
    const WeightFormat format = weight_format(name);
    check_size(name, format, outputs, inputs);
    require(format != WeightFormat::bf16_compressed, "how large a compressed weight is depends on what it holds");
    return packed_bytes(format, outputs, inputs);
}

void py_pack_rows(const std::string& format, const Tensor& packed, int64_t outputs, int64_t inputs, const Tensor& rows,
                  int64_t first_output, int64_t step) {
    const Weight weight = weight_of(format, packed, outputs, inputs);
    require(weight.format != WeightFormat::bf16_compressed,
            "rows are put into a bfloat16 weight, which is compressed then");
    const DType dtype = is_quantised(weight.format)             ? DType::u8
                        : float_storage(weight.format) == kBf16 ? DType::bf16
                                                                : DType::f32;
    const Matrix stored = matrix(rows, "rows", dtype);
    check_shape(rows, "rows", {-1, stored_row_bytes(weight.format, inputs) / dtype_bytes(dtype)});
    require(
        step >= 1 && step <= 64 && first_output >= 0 && (step == 1 || first_output % 16 == 0),
        "rows cannot be placed from output " + std::to_string(first_output) + " in steps of " + std::to_string(step));
    // Bounded one by one, since their sum could wrap around.
    require(first_output <= outputs && stored.rows <= outputs, std::to_string(stored.rows) + " rows from output " +
                                                                   std::to_string(first_output) + " do not fit " +
                                                                   std::to_string(outputs) + " outputs");
    const Placement place{first_output, step};
    require(stored.rows == 0 || place.output(stored.rows - 1) < outputs,
            "rows end at output " + std::to_string(place.output(stored.rows - 1)) + " of " + std::to_string(outputs));
    nb::gil_scoped_release release;
    pack_rows(weight, stored.base, stored.stride, stored.rows, place);
}

// How the weight would be compressed: the base of its exponents, the number of escapes, and the size in bytes.
std::tuple<int, int64_t, int64_t> py_plan_compression(const Tensor& packed, int64_t outputs, int64_t inputs) {
    const Weight weight = weight_of("bfloat16", packed, outputs, inputs);
    nb::gil_scoped_release release;
    const CompressionPlan plan = plan_compression(weight);
    return {plan.base, plan.num_escapes, CompressedWeight(weight).bytes(plan.num_escapes)};
}

void py_compress(const Tensor& packed, int64_t outputs, int64_t inputs, int base, int64_t num_escapes,
                 const Tensor& out) {
    const Weight weight = weight_of("bfloat16", packed, outputs, inputs);
    require(base >= 0 && base <= kMostCompressionBase && num_escapes >= 0 && num_escapes <= outputs * inputs,
            "a weight of " + std::to_string(outputs) + " x " + std::to_string(inputs) +
                " cannot be compressed from exponent " + std::to_string(base) + " with " + std::to_string(num_escapes) +
                " escapes");
    check_dense(out, "out", DType::u8, {CompressedWeight(weight).bytes(num_escapes)});
    nb::gil_scoped_release release;
    compress(weight, {base, num_escapes}, out.base);
}

// In several threads, so that first touch spreads the pages over their memory nodes.
void py_copy_packed(const Tensor& from, const Tensor& to) {
    check_dense(from, "from", DType::u8, {-1});
    check_dense(to, "to", DType::u8, {from.shape[0]});
    constexpr int64_t kPiece = 2 << 20;  // a huge page
    nb::gil_scoped_release release;
    parallel_for(static_cast<int>((from.shape[0] + kPiece - 1) / kPiece), [&](int i) {
        std::memcpy(to.base + i * kPiece, from.base + i * kPiece, std::min(kPiece, from.shape[0] - i * kPiece));
    });
}

void py_unpack_rows(const std::string& format, const Tensor& packed, int64_t outputs, int64_t inputs, const Tensor& ids,
                    const Tensor& out) {
    const Weight weight = weight_of(format, packed, outputs, inputs);
    const Storage storage = storage_of(out, "out");
    const Matrix rows = matrix(out, "out", out.dtype);
    check_shape(out, "out", {-1, inputs});
    require(storage == kF32 || weight.format != WeightFormat::f32,
            "out must be float32 if the weight is, got " + out.describe());
    const int64_t* each = indices(ids, "ids", rows.rows, outputs);
    nb::gil_scoped_release release;
    // One task wakes no thread, but computes with subnormal numbers, even if its thread flushes them.
    parallel_for(1, [&](int) {
        for (int64_t i = 0; i < rows.rows; ++i) unpack_row(weight, each[i], storage, rows.row(i));
    });
}

void py_linear(const std::string& format, const Tensor& packed, int64_t outputs, const Tensor& x, const Tensor& bias,
               const Tensor& out, const std::string& activation, bool exact) {
    const Storage x_storage = storage_of(x, "x"), out_storage = storage_of(out, "out");
    const Matrix rows = matrix(x, "x", x.dtype), results = matrix(out, "out", out.dtype);
    const Weight weight = weight_of(format, packed, outputs, rows.width);
    const Epilogue epilogue = epilogue_of(activation);
    require(is_quantised(weight.format) || float_storage(weight.format) == x_storage,
            "x must have the weight's dtype, " + format + ", got " + x.describe());
    require(epilogue == kPlain || outputs % 32 == 0,
            "a gated product needs a multiple of 32 outputs, got " + std::to_string(outputs));
    check_shape(out, "out", {rows.rows, epilogue == kPlain ? outputs : outputs / 2});
    if (!bias.is_null()) check_dense(bias, "bias", out.dtype, {outputs});
    const LinearOutput output{results.base, results.stride, results.width, bias.base, out_storage, epilogue};
    nb::gil_scoped_release release;
    linear(weight, x_storage, rows, output, exact);
}

}  // namespace

Weight weight_of(const std::string& format, const Tensor& packed, int64_t outputs, int64_t inputs) {
    const Weight weight{packed.base, outputs, inputs, weight_format(format)};
    check_size(format, weight.format, outputs, inputs);
    const bool compressed = weight.format == WeightFormat::bf16_compressed;
    check_dense(packed, "packed", DType::u8, {compressed ? -1 : packed_bytes(weight.format, outputs, inputs)});
    if (compressed) check_compressed(weight, packed.shape[0]);
    return weight;
}

void bind_linear(nb::module_& m) {
    m.def("packed_bytes", &checked_packed_bytes, "format"_a, "outputs"_a, "inputs"_a);
    m.def("pack_rows", &py_pack_rows, "format"_a, "packed"_a, "outputs"_a, "inputs"_a, "rows"_a, "first_output"_a,
          "step"_a);
    m.def("plan_compression", &py_plan_compression, "packed"_a, "outputs"_a, "inputs"_a);
    m.def("compress", &py_compress, "packed"_a, "outputs"_a, "inputs"_a, "base"_a, "num_escapes"_a, "out"_a);
    m.def("copy_packed", &py_copy_packed, "source"_a, "target"_a);
    m.def("unpack_rows", &py_unpack_rows, "format"_a, "packed"_a, "outputs"_a, "inputs"_a, "ids"_a, "out"_a);
    m.def("linear", &py_linear, "format"_a, "packed"_a, "outputs"_a, "x"_a, "bias"_a.none(), "out"_a, "activation"_a,
          "exact"_a);
}

}  // namespace octavo
