// octavo._native: checks what Python passes, releases the GIL, calls the kernels. Documented in src/octavo/kernels.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "attention.h"
#include "ops.h"
#include "tensor.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

Storage storage_of(const Tensor& tensor, const char* name) {
    if (tensor.dtype == DType::bf16) return kBf16;
    if (tensor.dtype == DType::f32) return kF32;
    require(false, std::string(name) + " must be bfloat16 or float32, got " + tensor.describe());
    return kF32;
}

Matrix matrix(const Tensor& tensor, const char* name, DType dtype) {
    check_rows(tensor, name, 2);
    check_dtype(tensor, name, dtype);
    return {tensor.base, tensor.shape[0], tensor.shape[1], tensor.stride_bytes(0)};
}

void check_dense(const Tensor& tensor, const char* name, DType dtype, std::initializer_list<int64_t> shape) {
    check_shape(tensor, name, shape);
    check_dtype(tensor, name, dtype);
    int64_t expected = 1;
    for (int axis = tensor.ndim; axis-- > 0;) {
        if (tensor.shape[axis] > 1) require(tensor.stride[axis] == expected, std::string(name) + " must be contiguous");
        expected *= tensor.shape[axis];
    }
}

LayerKV layer_kv(const Tensor& key, const Tensor& value) {
    const Storage storage = storage_of(key, "key cache");
    const int64_t pair = storage == kBf16 ? 2 : 1;
    check_shape(key, "key cache", {-1, -1, -1, -1, pair});
    const int64_t heads = key.shape[1], block_size = key.shape[3];
    check_dtype(value, "value cache", key.dtype);
    check_shape(value, "value cache", {key.shape[0], heads, block_size / pair, -1, pair});
    const int64_t value_dim = value.shape[3];
    const auto dense_block = [&](const Tensor& t) {
        return t.stride[4] == 1 && t.stride[3] == pair && t.stride[2] == t.shape[3] * pair;
    };
    require(dense_block(key) && dense_block(value), "key and value cache must be dense within a head of a block");
    require(heads > 0 && block_size % 16 == 0 && block_size > 0,
            "block_size must be a multiple of 16, got " + std::to_string(block_size));
    require(value_dim % 16 == 0 && value_dim > 0 && value_dim <= kMaxHeadDim,
            "value_dim must be a multiple of 16 and at most 256, got " + std::to_string(value_dim));
    require(key.shape[2] > 0 && key.shape[2] * pair <= kMaxHeadDim,
            "key_dim must be at most 256, got " + std::to_string(key.shape[2] * pair));
    LayerKV kv{};
    kv.key = key.base;
    kv.value = value.base;
    kv.key_block_stride = key.stride_bytes(0);
    kv.key_head_stride = key.stride_bytes(1);
    kv.value_block_stride = value.stride_bytes(0);
    kv.value_head_stride = value.stride_bytes(1);
    kv.num_blocks = key.shape[0];
    kv.kv_heads = static_cast<int>(heads);
    kv.key_units = static_cast<int>(key.shape[2]);
    kv.value_dim = static_cast<int>(value_dim);
    kv.block_size = static_cast<int>(block_size);
    kv.storage = storage;
    return kv;
}

void py_attend(const Tensor& key, const Tensor& value, const Tensor& query, const Tensor& out,
               const Tensor& block_tables, const Tensor& query_start, const Tensor& context_lens, float scale,
               int window, float softcap, const Tensor& sinks) {
    AttentionCall call{};
    call.kv = layer_kv(key, value);
    const int pair = call.kv.storage == kBf16 ? 2 : 1;
    check_rows(query, "query", 3);
    check_rows(out, "out", 3);
    check_dtype(query, "query", key.dtype);
    check_dtype(out, "out", key.dtype);
    const int64_t tokens = query.shape[0], heads = query.shape[1];
    check_shape(query, "query", {-1, -1, int64_t{call.kv.key_units} * pair});
    check_shape(out, "out", {tokens, heads, call.kv.value_dim});
    require(heads > 0 && heads % call.kv.kv_heads == 0, "query heads (" + std::to_string(heads) +
            ") must be a multiple of KV heads (" + std::to_string(call.kv.kv_heads) + ")");
    check_rows(block_tables, "block_tables", 2);
    check_dtype(block_tables, "block_tables", DType::i32);
    const int64_t seqs = block_tables.shape[0];
    check_dense(query_start, "query_start", DType::i32, {seqs + 1});
    check_dense(context_lens, "context_lens", DType::i32, {seqs});
    if (!sinks.is_null()) check_dense(sinks, "sinks", DType::f32, {heads});
    require(window >= 0, "window must be positive, or 0 for none, got " + std::to_string(window));
    call.query = query.base;
    call.out = out.base;
    call.query_token_stride = query.stride_bytes(0);
    call.query_head_stride = query.stride_bytes(1);
    call.out_token_stride = out.stride_bytes(0);
    call.out_head_stride = out.stride_bytes(1);
    call.block_tables = block_tables.data<const int32_t>();
    call.query_start = query_start.data<const int32_t>();
    call.context_lens = context_lens.data<const int32_t>();
    call.block_table_stride = block_tables.stride[0];
    call.max_blocks = block_tables.shape[1];
    call.num_tokens = tokens;
    call.sinks = sinks.is_null() ? nullptr : sinks.data<const float>();
    call.scale = scale;
    call.softcap = softcap;
    call.num_seqs = static_cast<int>(seqs);
    call.num_heads = static_cast<int>(heads);
    call.window = window;
    nb::gil_scoped_release release;
    attend(call);
}

void check_range(const int64_t* x, int64_t count, int64_t end, const char* name) {
    for (int64_t i = 0; i < count; ++i)
        if (x[i] < 0 || x[i] >= end)
            require(false, std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(x[i]) +
                               ", must be in [0, " + std::to_string(end) + ")");
}

void py_rope_write(const Tensor& qkv, const Tensor& key, const Tensor& value, const Tensor& cos, const Tensor& sin,
                   const Tensor& positions, const Tensor& slots, const Tensor& query_norm, const Tensor& key_norm,
                   float eps) {
    const LayerKV kv = layer_kv(key, value);
    const Matrix rows = matrix(qkv, "qkv", key.dtype);
    const int key_dim = kv.key_units * (kv.storage == kBf16 ? 2 : 1);
    const int64_t query_width = rows.width - int64_t{kv.kv_heads} * (key_dim + kv.value_dim);
    require(query_width >= 0 && query_width % key_dim == 0,
            "qkv is " + std::to_string(rows.width) + " wide, which is no number of query heads of " +
                std::to_string(key_dim) + " before " + std::to_string(kv.kv_heads) + " KV heads of " +
                std::to_string(key_dim) + " + " + std::to_string(kv.value_dim));
    check_shape(cos, "cos", {-1, -1});
    check_dense(cos, "cos", DType::f32, {cos.shape[0], cos.shape[1]});
    check_dense(sin, "sin", DType::f32, {cos.shape[0], cos.shape[1]});
    require(cos.shape[1] * 2 <= key_dim, "cos has " + std::to_string(cos.shape[1]) + " frequencies, a head of " +
                                             std::to_string(key_dim) + " dimensions rotates at most half as many");
    check_dense(positions, "positions", DType::i64, {rows.rows});
    check_dense(slots, "slots", DType::i64, {rows.rows});
    check_range(positions.data<int64_t>(), rows.rows, cos.shape[0], "positions");
    check_range(slots.data<int64_t>(), rows.rows, kv.num_blocks * kv.block_size, "slots");
    if (!query_norm.is_null()) check_dense(query_norm, "query_norm", key.dtype, {key_dim});
    if (!key_norm.is_null()) check_dense(key_norm, "key_norm", key.dtype, {key_dim});
    RopeTask task{};
    task.qkv = rows.base;
    task.qkv_stride = rows.stride;
    task.kv = &kv;
    task.cos = cos.data<float>();
    task.sin = sin.data<float>();
    task.positions = positions.data<int64_t>();
    task.slots = slots.data<int64_t>();
    task.query_norm = query_norm.base;
    task.key_norm = key_norm.base;
    task.norm_eps = eps;
    task.num_heads = static_cast<int>(query_width / key_dim);
    task.key_dim = key_dim;
    task.rotary_dim = static_cast<int>(cos.shape[1]) * 2;
    nb::gil_scoped_release release;
    rope_write(kv.storage, task, rows.rows);
}

void py_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& out, float eps) {
    const Storage storage = storage_of(x, "x");
    const Matrix rows = matrix(x, "x", x.dtype), normal = matrix(out, "out", x.dtype);
    check_shape(out, "out", {rows.rows, rows.width});
    check_dense(weight, "weight", x.dtype, {rows.width});
    Matrix added{};
    if (!residual.is_null()) {
        added = matrix(residual, "residual", x.dtype);
        check_shape(residual, "residual", {rows.rows, rows.width});
    }
    nb::gil_scoped_release release;
    rms_norm(storage, rows, residual.is_null() ? nullptr : &added, weight.base, normal, eps);
}

void py_gated(const Tensor& gate_up, const Tensor& out, bool gelu) {
    const Storage storage = storage_of(gate_up, "gate_up");
    const Matrix in = matrix(gate_up, "gate_up", gate_up.dtype), rows = matrix(out, "out", gate_up.dtype);
    check_shape(gate_up, "gate_up", {rows.rows, rows.width * 2});
    nb::gil_scoped_release release;
    gated(storage, gelu ? kGeluTanh : kSilu, in, rows);
}

void py_argmax(const Tensor& logits, const Tensor& out) {
    const Storage storage = storage_of(logits, "logits");
    const Matrix rows = matrix(logits, "logits", logits.dtype);
    require(rows.width > 0, "logits has no columns");
    check_dense(out, "out", DType::i64, {rows.rows});
    nb::gil_scoped_release release;
    argmax(storage, rows, out.data<int64_t>());
}

void py_copy_blocks(const Tensor& arena, const Tensor& copies) {
    const Matrix blocks = matrix(arena, "arena", DType::u8);
    require(blocks.rows <= 1 || blocks.stride == blocks.width, "arena must be contiguous");
    check_shape(copies, "copies", {-1, 2});
    check_dense(copies, "copies", DType::i64, {copies.shape[0], 2});
    check_range(copies.data<int64_t>(), copies.shape[0] * 2, blocks.rows, "copies");
    nb::gil_scoped_release release;
    copy_blocks(blocks.base, blocks.width, copies.data<int64_t>(), copies.shape[0]);
}

QuantFormat quant_format(const std::string& name) {
    if (name == "Q4_0") return kQ4_0;
    if (name == "Q4_1") return kQ4_1;
    require(name == "Q8_0", "quantised format '" + name + "' is not one of Q4_0, Q4_1, Q8_0");
    return kQ8_0;
}

int64_t packed_bytes(QuantFormat format, int64_t outputs, int64_t inputs) {
    return (outputs + 15) / 16 * (inputs / 32) * quant_block_bytes(format);
}

void py_pack_quant(const std::string& format_name, const Tensor& blocks, int64_t inputs, const Tensor& packed) {
    const QuantFormat format = quant_format(format_name);
    require(inputs > 0 && inputs % 32 == 0, "inputs must be a multiple of 32, got " + std::to_string(inputs));
    check_shape(blocks, "blocks", {-1, inputs / 32 * gguf_block_bytes(format)});
    check_dense(blocks, "blocks", DType::u8, {blocks.shape[0], blocks.shape[1]});
    check_dense(packed, "packed", DType::u8, {packed_bytes(format, blocks.shape[0], inputs)});
    nb::gil_scoped_release release;
    pack_quant(format, blocks.data<uint8_t>(), blocks.shape[0], inputs, packed.data<uint8_t>());
}

LinearOutput linear_output(const Tensor& out, const Tensor& bias, int64_t rows) {
    const Storage storage = storage_of(out, "out");
    check_rows(out, "out", 2);
    check_shape(out, "out", {rows, -1});
    if (!bias.is_null()) check_dense(bias, "bias", out.dtype, {out.shape[1]});
    return {out.base, out.stride_bytes(0), out.shape[1], bias.base, storage};
}

void py_quant_linear(const std::string& format_name, const Tensor& packed, const Tensor& x, const Tensor& bias,
                     const Tensor& out) {
    const QuantFormat format = quant_format(format_name);
    const Storage storage = storage_of(x, "x");
    const Matrix rows = matrix(x, "x", x.dtype);
    require(rows.width > 0 && rows.width % 32 == 0, "x must be a multiple of 32 wide, got " + x.describe());
    const LinearOutput output = linear_output(out, bias, rows.rows);
    check_dense(packed, "packed", DType::u8, {packed_bytes(format, output.width, rows.width)});
    nb::gil_scoped_release release;
    quant_linear(format, packed.data<uint8_t>(), storage, rows, output);
}

void py_bf16_linear(const Tensor& weight, const Tensor& x, const Tensor& bias, const Tensor& out) {
    const Matrix rows = matrix(x, "x", DType::bf16), weights = matrix(weight, "weight", DType::bf16);
    require(rows.width > 0 && rows.width % 32 == 0, "x must be a multiple of 32 wide, got " + x.describe());
    const LinearOutput output = linear_output(out, bias, rows.rows);
    check_shape(weight, "weight", {output.width, rows.width});
    nb::gil_scoped_release release;
    bf16_linear(weights.base, weights.stride, rows, output);
}

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    for (int isa = 0; isa < kNumIsas; ++isa)
        if (isa_is_supported(static_cast<Isa>(isa))) names.emplace_back(isa_name(static_cast<Isa>(isa)));
    return names;
}

void py_force_isa(const std::string& name) {
    const Isa isa = isa_from_name(name.c_str());
    std::string all, here;
    for (int i = 0; i < kNumIsas; ++i) all += (i ? ", " : "") + std::string(isa_name(static_cast<Isa>(i)));
    for (const std::string& each : supported_isas()) here += (here.empty() ? "" : ", ") + each;
    require(isa != kNumIsas, "instruction set '" + name + "' is not one of " + all);
    require(isa_is_supported(isa), "this CPU has no " + name + "; it has " + here);
    force_isa(isa);
}

void py_set_num_threads(int count) {
    require(count >= 1 && count <= 1024, "num_threads must be between 1 and 1024, got " + std::to_string(count));
    set_num_threads(count);
}

}  // namespace
}  // namespace octavo

NB_MODULE(_native, m) {
    using namespace octavo;
    m.def("attend", &py_attend, "key"_a, "value"_a, "query"_a, "out"_a, "block_tables"_a, "query_start"_a,
          "context_lens"_a, "scale"_a, "window"_a, "softcap"_a, "sinks"_a.none());
    m.def("rope_write", &py_rope_write, "qkv"_a, "key"_a, "value"_a, "cos"_a, "sin"_a, "positions"_a, "slots"_a,
          "query_norm"_a.none(), "key_norm"_a.none(), "eps"_a);
    m.def("rms_norm", &py_rms_norm, "x"_a, "residual"_a.none(), "weight"_a, "out"_a, "eps"_a);
    m.def("gated", &py_gated, "gate_up"_a, "out"_a, "gelu"_a);
    m.def("argmax", &py_argmax, "logits"_a, "out"_a);
    m.def("copy_blocks", &py_copy_blocks, "arena"_a, "copies"_a);
    m.def("pack_quant", &py_pack_quant, "format"_a, "blocks"_a, "inputs"_a, "packed"_a);
    m.def("quant_linear", &py_quant_linear, "format"_a, "packed"_a, "x"_a, "bias"_a.none(), "out"_a);
    m.def("bf16_linear", &py_bf16_linear, "weight"_a, "x"_a, "bias"_a.none(), "out"_a);
    m.def("isa", [] { return std::string(isa_name(current_isa())); });
    m.def("supported_isas", &supported_isas);
    m.def("force_isa", &py_force_isa, "name"_a);
    m.def("num_threads", &num_threads);
    m.def("set_num_threads", &py_set_num_threads, "count"_a);
}
