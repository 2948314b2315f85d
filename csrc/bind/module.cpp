// octavo._native: checks what Python passes, releases the GIL, calls the kernels. Documented in src/octavo/kernels/.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "attention.h"
#include "bind/arguments.h"
#include "bind/tensor.h"
#include "ops.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

// Keys, values, block tables, and how many first and recent blocks are read in them.
using CopiesToRead = std::tuple<SideArguments, SideArguments, Tensor, int, int>;
// Keys, values and slots.
using CopiesToWrite = std::tuple<SideArguments, SideArguments, Tensor>;

// Queries for the sinks, budgets, and the number of sinks.
using SinksApart = std::tuple<Tensor, Tensor, int>;

// Bounds, and the blocks read of each sequence (SparseArguments).
using SparseLayer = std::tuple<Tensor, SparseArguments>;

RecentCopies copies_of(const LayerKV& kv, const CopiesToRead& copied, const Tensor& block_tables, DType dtype) {
    const auto& [keys, values, tables, first_blocks, recent_blocks] = copied;
    check_rows(tables, "copies' block_tables", 2);
    check_dtype(tables, "copies' block_tables", DType::i32);
    require(tables.shape[0] == block_tables.shape[0], "copies must have as many rows of block_tables");
    const RecentCopies copies{layer_kv(keys, values, dtype),
                              tables.data<int32_t>(),
                              tables.stride[0],
                              tables.shape[1],
                              first_blocks,
                              recent_blocks};
    check_copies(kv, copies.kv, first_blocks, recent_blocks);
    return copies;
}

SinkReads sinks_of(const SinksApart& apart, const Tensor& query, int64_t num_seqs) {
    const auto& [sink_query, budgets, sink_tokens] = apart;
    check_rows(sink_query, "sink_query", 3);
    check_dtype(sink_query, "sink_query", query.dtype);
    check_shape(sink_query, "sink_query", {query.shape[0], query.shape[1], query.shape[2]});
    require(sink_query.stride[1] == query.stride[1], "heads of sink_query must lie as those of query");
    check_budgets(budgets, num_seqs, sink_tokens);
    return {budgets.data<int32_t>(), sink_query.base, sink_query.stride_bytes(0), sink_tokens};
}

SparseReads sparse_of(const LayerKV& kv, const SparseLayer& sparse, int64_t num_seqs) {
    const auto& [bounds, reads] = sparse;
    const auto& [num_read, num_recent, completed] = reads;
    check_sparse(num_read, num_recent, 1, num_seqs);
    require(completed.size() == 1, "sparse reads are of one group");
    check_completed(completed[0], kv.num_blocks);
    SparseReads of_layer = bounds_of(kv, bounds);
    of_layer.num_read = num_read.data<int32_t>();
    of_layer.num_recent = num_recent.data<int32_t>();
    of_layer.completed = completed[0].data<int32_t>();
    of_layer.num_completed = completed[0].shape[0];
    return of_layer;
}

void py_attend(const SideArguments& keys, const SideArguments& values, const Tensor& query, const Tensor& out,
               const Tensor& block_tables, const Tensor& table_rows, const Tensor& query_start,
               const Tensor& context_lens, float scale, int window, float softcap, const Tensor& sinks, bool exact,
               const std::optional<CopiesToRead>& copied, const std::optional<SinksApart>& apart,
               const std::optional<SparseLayer>& sparse, const std::optional<MassArguments>& measured) {
    storage_of(query, "query");
    const LayerKV kv = layer_kv(keys, values, query.dtype);
    AttentionCall call{};
    call.kv = kv;
    const DType dtype = kv.storage == kBf16 ? DType::bf16 : DType::f32;
    check_rows(query, "query", 3);
    check_rows(out, "out", 3);
    check_dtype(query, "query", dtype);
    check_dtype(out, "out", dtype);
    const int64_t tokens = query.shape[0], heads = query.shape[1];
    check_shape(query, "query", {-1, -1, kv.key_dim()});
    check_shape(out, "out", {tokens, heads, call.kv.value_dim});
    require(heads > 0 && heads % call.kv.kv_heads == 0, "query heads (" + std::to_string(heads) +
                                                            ") must be a multiple of KV heads (" +
                                                            std::to_string(call.kv.kv_heads) + ")");
    check_rows(block_tables, "block_tables", 2);
    check_dtype(block_tables, "block_tables", DType::i32);
    call.context_lens = dense<int32_t>(context_lens, "context_lens", {-1});
    const int64_t seqs = context_lens.shape[0];
    call.table_rows = indices(table_rows, "table_rows", seqs, block_tables.shape[0]);
    call.query_start = dense<int32_t>(query_start, "query_start", {seqs + 1});
    if (!sinks.is_null()) call.sinks = dense<float>(sinks, "sinks", {heads});
    require(scale > 0, "scale must be positive, got " + std::to_string(scale));
    require(window >= 0, "window must be positive, or 0 for none, got " + std::to_string(window));
    call.query = query.base;
    call.out = out.base;
    call.query_token_stride = query.stride_bytes(0);
    call.query_head_stride = query.stride_bytes(1);
    call.out_token_stride = out.stride_bytes(0);
    call.out_head_stride = out.stride_bytes(1);
    call.block_tables = block_tables.data<int32_t>();
    call.block_table_stride = block_tables.stride[0];
    call.max_blocks = block_tables.shape[1];
    call.num_tokens = tokens;
    call.scale = scale;
    call.softcap = softcap;
    call.num_seqs = static_cast<int>(seqs);
    call.num_heads = static_cast<int>(heads);
    call.window = window;
    call.exact = exact;
    if (copied) call.copies = copies_of(kv, *copied, block_tables, dtype);
    require(window == 0 || !(apart || sparse || measured),
            "budgets, sparse reads and measured attention are of layers without a window");
    if (apart) call.sinks_apart = sinks_of(*apart, query, seqs);
    if (sparse) call.sparse = sparse_of(kv, *sparse, seqs);
    if (measured) {
        require(!sparse, "attention is not measured with sparse reads");
        check_measured(*measured, 1, context_lens, kv.block_size);
        call.measured = {std::get<0>(*measured).data<int64_t>(), std::get<1>(*measured).data<int64_t>()};
    }
    nb::gil_scoped_release release;
    attend(call);
}

void py_rope_write(const Tensor& qkv, const SideArguments& keys, const SideArguments& values, const Tensor& cos,
                   const Tensor& sin, const Tensor& positions, const Tensor& slots, const Tensor& query_norm,
                   const Tensor& key_norm, float eps, const std::optional<CopiesToWrite>& copied) {
    storage_of(qkv, "qkv");
    const LayerKV kv = layer_kv(keys, values, qkv.dtype);
    const DType dtype = kv.storage == kBf16 ? DType::bf16 : DType::f32;
    const Matrix rows = matrix(qkv, "qkv", dtype);
    const int key_dim = kv.key_dim();
    const int64_t query_width = rows.width - int64_t{kv.kv_heads} * (key_dim + kv.value_dim);
    require(query_width >= 0 && query_width % key_dim == 0,
            "qkv is " + std::to_string(rows.width) + " wide, which is no number of query heads of " +
                std::to_string(key_dim) + " before " + std::to_string(kv.kv_heads) + " KV heads of " +
                std::to_string(key_dim) + " + " + std::to_string(kv.value_dim));
    RopeTask task{};
    task.rotary_dim = check_rotation(cos, sin, key_dim);
    task.positions = indices(positions, "positions", rows.rows, cos.shape[0]);
    task.slots = indices(slots, "slots", rows.rows, kv.num_blocks * kv.block_size);
    task.qkv = rows.base;
    task.qkv_stride = rows.stride;
    task.kv = &kv;
    task.cos = cos.data<float>();
    task.sin = sin.data<float>();
    task.query_norm = norm_weights(query_norm, {}, eps, false, "query_norm", dtype, key_dim);
    task.key_norm = norm_weights(key_norm, {}, eps, false, "key_norm", dtype, key_dim);
    task.num_heads = static_cast<int>(query_width / key_dim);
    task.key_dim = key_dim;
    LayerKV copies{};
    if (copied) {
        const auto& [copied_keys, copied_values, copies_slots] = *copied;
        copies = layer_kv(copied_keys, copied_values, dtype);
        check_copies(kv, copies, 0, 1);
        task.copies = &copies;
        task.copies_slots = indices(copies_slots, "copies' slots", rows.rows, copies.num_blocks * copies.block_size);
    }
    nb::gil_scoped_release release;
    rope_write(kv.storage, task, rows.rows);
}

void py_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& out, float eps) {
    const Storage storage = storage_of(x, "x");
    const Matrix rows = matrix(x, "x", x.dtype), normal = matrix(out, "out", x.dtype);
    check_shape(out, "out", {rows.rows, rows.width});
    const NormWeights norm = norm_weights(weight, {}, eps, false, "weight", x.dtype, rows.width);
    Matrix added{};
    if (!residual.is_null()) {
        added = matrix(residual, "residual", x.dtype);
        check_shape(residual, "residual", {rows.rows, rows.width});
    }
    nb::gil_scoped_release release;
    normalise(storage, storage, rows, residual.is_null() ? nullptr : &added, norm, normal);
}

void py_gated(const Tensor& gate_up, const Tensor& out, const std::string& activation) {
    const Storage storage = storage_of(gate_up, "gate_up");
    const Matrix in = matrix(gate_up, "gate_up", gate_up.dtype), rows = matrix(out, "out", gate_up.dtype);
    check_shape(gate_up, "gate_up", {rows.rows, rows.width * 2});
    const Activation of_gates = gate_of(activation);
    nb::gil_scoped_release release;
    gated(storage, of_gates, in, rows);
}

void py_argmax(const Tensor& logits, const Tensor& out) {
    const Storage storage = storage_of(logits, "logits");
    const Matrix rows = matrix(logits, "logits", logits.dtype);
    require(rows.width > 0, "logits has no columns");
    int64_t* const found = dense<int64_t>(out, "out", {rows.rows});
    nb::gil_scoped_release release;
    argmax(storage, rows, found);
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
    require(isa_is_supported(isa), "this CPU has no " + name + ", or Octavo was built without it; it can use " + here);
    force_isa(isa);
}

void py_set_num_threads(int count) {
    require_threads(count);
    set_num_threads(count);
}

}  // namespace
}  // namespace octavo

NB_MODULE(_native, m) {
    using namespace octavo;
    nb::set_leak_warnings(false);  // an engine that lives until Python exits is not a leak
    m.def("attend", &py_attend, "keys"_a, "values"_a, "query"_a, "out"_a, "block_tables"_a, "table_rows"_a,
          "query_start"_a, "context_lens"_a, "scale"_a, "window"_a, "softcap"_a, "sinks"_a.none(), "exact"_a,
          "copies"_a.none(), "apart"_a.none(), "sparse"_a.none(), "measured"_a.none());
    m.def("rope_write", &py_rope_write, "qkv"_a, "keys"_a, "values"_a, "cos"_a, "sin"_a, "positions"_a, "slots"_a,
          "query_norm"_a.none(), "key_norm"_a.none(), "eps"_a, "copies"_a.none());
    m.def("rms_norm", &py_rms_norm, "x"_a, "residual"_a.none(), "weight"_a, "out"_a, "eps"_a);
    m.def("gated", &py_gated, "gate_up"_a, "out"_a, "activation"_a);
    m.def("argmax", &py_argmax, "logits"_a, "out"_a);
    bind_linear(m);
    bind_ranks(m);
    bind_decoder(m);
    bind_sampling(m);
    bind_vocabulary(m);
    m.def("isa", [] { return std::string(isa_name(current_isa())); });
    m.def("supported_isas", &supported_isas);
    m.def("force_isa", &py_force_isa, "name"_a);
    m.def("num_threads", &num_threads);
    m.def("set_num_threads", &py_set_num_threads, "count"_a);
}
