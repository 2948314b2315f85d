#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind/arguments.h"
#include "decoder.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

// (format, packed, outputs, inputs, bias)
using PartArguments = std::tuple<std::string, nb::object, int64_t, int64_t, nb::object>;
using LinearArguments = std::vector<PartArguments>;
// Keys, values, group, and how many first and recent blocks are read in them.
using CacheCopies = std::tuple<nb::object, nb::object, int, int, int>;
using CacheArguments = std::tuple<nb::object, nb::object, int, int, std::optional<CacheCopies>>;

// A decoder, and the Python objects whose memory it refers to.
class BoundDecoder {
  public:
    BoundDecoder(const std::string& dtype, int64_t hidden, int64_t inner, int64_t vocab, int num_heads, int kv_heads,
                 int key_dim, int value_dim, float eps, const std::string& activation) {
        require(dtype == "bfloat16" || dtype == "float32", "dtype '" + dtype + "' is not one of bfloat16, float32");
        require(hidden > 0 && inner > 0 && inner % 16 == 0 && vocab > 0,
                "a decoder's inner width must be a multiple of 16, got " + std::to_string(inner));
        require(kv_heads > 0 && num_heads > 0 && num_heads % kv_heads == 0,
                "query heads must be a multiple of KV heads");
        require(key_dim > 0 && key_dim <= kMaxHeadDim && value_dim > 0 && value_dim <= kMaxHeadDim,
                "heads must have 1 to 256 dimensions");
        const Epilogue gate = epilogue_of(activation);
        require(gate != kPlain, "a decoder needs an activation");
        decoder_.shape = {dtype == "bfloat16" ? kBf16 : kF32,
                          hidden,
                          inner,
                          vocab,
                          num_heads,
                          kv_heads,
                          key_dim,
                          value_dim,
                          eps,
                          gate};
    }

    void add_layer(nb::object input_norm, nb::object post_attention_norm, nb::object query_norm, nb::object key_norm,
                   const LinearArguments& qkv, const LinearArguments& output, const LinearArguments& gate_up,
                   const LinearArguments& down) {
        const DecoderShape& s = decoder_.shape;
        DecoderLayer layer{};
        layer.input_norm = vector(input_norm, "input_norm", s.hidden);
        layer.post_attention_norm = vector(post_attention_norm, "post_attention_norm", s.hidden);
        layer.query_norm = query_norm.is_none() ? nullptr : vector(query_norm, "query_norm", s.key_dim);
        layer.key_norm = key_norm.is_none() ? nullptr : vector(key_norm, "key_norm", s.key_dim);
        const int64_t width = int64_t{s.num_heads} * s.key_dim + int64_t{s.kv_heads} * (s.key_dim + s.value_dim);
        layer.qkv = product(qkv, "qkv", width, s.hidden);
        layer.output = product(output, "output", s.hidden, int64_t{s.num_heads} * s.value_dim);
        layer.gate_up = product(gate_up, "gate_up", 2 * s.inner, s.hidden);
        require(layer.gate_up.parts.size() == 1, "gate_up must be one matrix of interleaved gates and ups");
        layer.down = product(down, "down", s.hidden, s.inner);
        decoder_.layers.push_back(std::move(layer));
    }

    // The embedding is plain rows, or one packed matrix.
    void set_ends(nb::object embedding_rows, const LinearArguments& embedding, nb::object final_norm,
                  const LinearArguments& head) {
        const DecoderShape& s = decoder_.shape;
        if (embedding_rows.is_none()) {
            const Linear packed = product(embedding, "embedding", s.vocab, s.hidden);
            require(packed.parts.size() == 1, "the embedding must be one matrix");
            decoder_.embedding = packed.parts[0].weight;
        } else {
            const Tensor rows = tensor(embedding_rows, "embedding");
            check_dense(rows, "embedding", dtype(), {s.vocab, s.hidden});
            decoder_.embedding_rows = rows.base;
        }
        decoder_.final_norm = vector(final_norm, "final_norm", s.hidden);
        decoder_.head = product(head, "head", s.vocab, s.hidden);
    }

    void set_exact(bool exact) { decoder_.exact = exact; }

    // For each layer: keys, values, group, window (0: none), copies or None. Keys and values are tensors, or a coded
    // layer's arguments.
    void set_caches(const std::vector<CacheArguments>& caches) {
        const DecoderShape& s = decoder_.shape;
        require(caches.size() == decoder_.layers.size(), "there are " + std::to_string(decoder_.layers.size()) +
                                                             " layers, got " + std::to_string(caches.size()) +
                                                             " caches");
        std::vector<LayerCache> bound;
        std::vector<nb::object> kept;
        size_t num_groups = 0;
        for (const auto& [key, value, group, window, copied] : caches) {
            kept.push_back(key);
            kept.push_back(value);
            const LayerKV kv = nb::isinstance<nb::tuple>(key) ? coded_cache(key, value) : float_cache(key, value);
            const int key_dim = kv.key_units * (s.storage == kBf16 && !kv.coded() ? 2 : 1);
            require(kv.kv_heads == s.kv_heads && key_dim == s.key_dim && kv.value_dim == s.value_dim,
                    "a cache of " + std::to_string(kv.kv_heads) + " heads of " + std::to_string(key_dim) + " and " +
                        std::to_string(kv.value_dim) + " is not for " + std::to_string(s.kv_heads) + " heads of " +
                        std::to_string(s.key_dim) + " and " + std::to_string(s.value_dim));
            require(group >= 0 && window >= 0, "group and window must not be negative");
            LayerCache cache{kv, group, window};
            num_groups = std::max(num_groups, static_cast<size_t>(group) + 1);
            if (copied) {
                const auto& [keys, values, copies_group, first_blocks, recent_blocks] = *copied;
                kept.push_back(keys);
                kept.push_back(values);
                cache.copies = coded_cache(keys, values);
                check_copies(kv, cache.copies, first_blocks, recent_blocks);
                require(copies_group >= 0, "the copies' group must not be negative");
                cache.copies_group = copies_group;
                cache.first_blocks = first_blocks;
                cache.recent_blocks = recent_blocks;
                num_groups = std::max(num_groups, static_cast<size_t>(copies_group) + 1);
            }
            bound.push_back(cache);
        }
        // Assigned only once every check has passed: after an error, what was bound before stays bound.
        decoder_.caches = std::move(bound);
        kept_caches_ = std::move(kept);
        num_groups_ = num_groups;
    }

    void forward(const Tensor& token_ids, const Tensor& positions, const Tensor& query_start,
                 const Tensor& context_lens, const Tensor& table_rows,
                 const std::vector<std::pair<Tensor, Tensor>>& groups, const Tensor& cos, const Tensor& sin,
                 const Tensor& logits_indices, const Tensor& logits) {
        const DecoderShape& s = decoder_.shape;
        require(!decoder_.layers.empty() && decoder_.final_norm, "the decoder is not complete");
        require(decoder_.caches.size() == decoder_.layers.size(), "the decoder has no caches: call set_caches first");
        DecoderStep step{};
        check_shape(token_ids, "token_ids", {-1});
        step.num_tokens = token_ids.shape[0];
        step.token_ids = indices(token_ids, "token_ids", step.num_tokens, s.vocab);
        step.rotary_dim = check_rotation(cos, sin, s.key_dim);
        step.cos = cos.data<float>();
        step.sin = sin.data<float>();
        step.positions = indices(positions, "positions", step.num_tokens, cos.shape[0]);
        check_shape(context_lens, "context_lens", {-1});
        step.num_seqs = context_lens.shape[0];
        check_dense(context_lens, "context_lens", DType::i32, {step.num_seqs});
        check_dense(query_start, "query_start", DType::i32, {step.num_seqs + 1});
        step.context_lens = context_lens.data<int32_t>();
        step.query_start = query_start.data<int32_t>();
        check_dense(table_rows, "table_rows", DType::i64, {step.num_seqs});
        step.table_rows = table_rows.data<int64_t>();
        const std::vector<GroupTables> tables = group_tables(step, groups);
        step.groups = tables.data();
        check_shape(logits_indices, "logits_indices", {-1});
        step.num_logits = logits_indices.shape[0];
        step.logits_indices = indices(logits_indices, "logits_indices", step.num_logits, step.num_tokens);
        check_shape(logits, "logits", {-1, s.vocab});
        step.num_now = logits.shape[0];
        require(step.num_now <= step.num_logits, "logits has " + std::to_string(step.num_now) + " rows for " +
                                                     std::to_string(step.num_logits) + " logits_indices");
        check_dense(logits, "logits", DType::f32, {step.num_now, s.vocab});
        step.logits = logits.data<float>();
        if (step.num_tokens == 0) return;
        nb::gil_scoped_release release;
        decoder_.forward(step);
    }

    void logits(int64_t first, const Tensor& out) {
        check_kept(first, out, "logits", decoder_.shape.vocab);
        if (out.shape[0] == 0) return;
        nb::gil_scoped_release release;
        decoder_.logits(first, out.shape[0], out.data<float>());
    }

    void hidden(int64_t first, const Tensor& out) {
        check_kept(first, out, "hidden", decoder_.shape.hidden);
        if (out.shape[0] == 0) return;
        nb::gil_scoped_release release;
        decoder_.hidden(first, out.shape[0], out.data<float>());
    }

  private:
    // Checks that `out` [rows][width] asks for rows `first ..` that the last step has kept.
    void check_kept(int64_t first, const Tensor& out, const char* name, int64_t width) const {
        check_shape(out, name, {-1, width});
        check_dense(out, name, DType::f32, {out.shape[0], width});
        const int64_t rows = out.shape[0], kept = decoder_.num_kept();
        // Not `first + rows`, which could wrap around.
        require(first >= 0 && first <= kept && rows <= kept - first,
                std::to_string(rows) + " rows from " + std::to_string(first) + " of the last step's " +
                    std::to_string(kept) + " are wanted");
    }

    // The groups' tables, once it is certain that every slot exists in every cache of its group.
    std::vector<GroupTables> group_tables(const DecoderStep& step,
                                          const std::vector<std::pair<Tensor, Tensor>>& groups) const {
        require(groups.size() >= num_groups_, "the caches have " + std::to_string(num_groups_) +
                                                  " groups, got tables of " + std::to_string(groups.size()));
        std::vector<GroupTables> tables;
        for (const auto& [table, slots] : groups) {
            check_rows(table, "block_tables", 2);
            check_dtype(table, "block_tables", DType::i32);
            check_range(step.table_rows, step.num_seqs, table.shape[0], "table_rows");
            check_dense(slots, "slot_mapping", DType::i64, {step.num_tokens});
            tables.push_back({table.data<int32_t>(), table.stride[0], table.shape[1], slots.data<int64_t>()});
        }
        for (const LayerCache& cache : decoder_.caches) {
            const int64_t num_slots = cache.kv.num_blocks * cache.kv.block_size;
            check_range(tables[cache.group].slots, step.num_tokens, num_slots, "slot_mapping");
            if (cache.recent_blocks)
                check_range(tables[cache.copies_group].slots, step.num_tokens,
                            cache.copies.num_blocks * cache.copies.block_size, "slot_mapping");
        }
        return tables;
    }

    LayerKV float_cache(const nb::object& key_object, const nb::object& value_object) const {
        Tensor key, value;
        require(borrow_tensor(key_object.ptr(), &key) && borrow_tensor(value_object.ptr(), &value),
                "key and value cache must be dense CPU tensors");
        const LayerKV kv = layer_kv(key, value);
        check_dtype(key, "key cache", dtype());
        return kv;
    }
    LayerKV coded_cache(const nb::object& keys, const nb::object& values) const {
        return coded_layer_kv(nb::cast<CodedArguments>(keys), nb::cast<CodedArguments>(values), dtype());
    }

    DType dtype() const { return decoder_.shape.storage == kBf16 ? DType::bf16 : DType::f32; }

    // Keeps the object, and hence its memory, alive as long as the decoder.
    Tensor tensor(const nb::object& object, const char* name) {
        Tensor view;
        require(borrow_tensor(object.ptr(), &view), std::string(name) + " must be a dense CPU tensor");
        kept_.push_back(object);
        return view;
    }
    const char* vector(const nb::object& object, const char* name, int64_t width) {
        const Tensor view = tensor(object, name);
        check_dense(view, name, dtype(), {width});
        return view.base;
    }
    Linear product(const LinearArguments& parts, const char* name, int64_t outputs, int64_t inputs) {
        Linear linear;
        for (const auto& [format, packed, part_outputs, part_inputs, bias] : parts) {
            const Weight weight = weight_of(format, tensor(packed, name), part_outputs, part_inputs);
            require(part_inputs == inputs, std::string(name) + " must have " + std::to_string(inputs) +
                                               " inputs, got " + std::to_string(part_inputs));
            require(is_quantised(weight.format) || (float_storage(weight.format) == kBf16) == (dtype() == DType::bf16),
                    std::string(name) + " must have the decoder's dtype, got " + format);
            linear.parts.push_back({weight, bias.is_none() ? nullptr : vector(bias, name, part_outputs)});
        }
        require(linear.outputs() == outputs, std::string(name) + " must have " + std::to_string(outputs) +
                                                 " outputs, got " + std::to_string(linear.outputs()));
        return linear;
    }
    static const int64_t* indices(const Tensor& tensor, const char* name, int64_t count, int64_t end) {
        check_dense(tensor, name, DType::i64, {count});
        check_range(tensor.data<int64_t>(), count, end, name);
        return tensor.data<int64_t>();
    }

    Decoder decoder_;
    std::vector<nb::object> kept_, kept_caches_;
    size_t num_groups_ = 0;
};

}  // namespace

void bind_decoder(nb::module_& m) {
    nb::class_<BoundDecoder>(m, "Decoder")
        .def(nb::init<const std::string&, int64_t, int64_t, int64_t, int, int, int, int, float, const std::string&>(),
             "dtype"_a, "hidden"_a, "inner"_a, "vocab"_a, "num_heads"_a, "kv_heads"_a, "key_dim"_a, "value_dim"_a,
             "eps"_a, "activation"_a)
        .def("logits", &BoundDecoder::logits, "first"_a, "out"_a)
        .def("hidden", &BoundDecoder::hidden, "first"_a, "out"_a)
        .def("add_layer", &BoundDecoder::add_layer, "input_norm"_a, "post_attention_norm"_a, "query_norm"_a.none(),
             "key_norm"_a.none(), "qkv"_a, "output"_a, "gate_up"_a, "down"_a)
        .def("set_ends", &BoundDecoder::set_ends, "embedding_rows"_a.none(), "embedding"_a, "final_norm"_a, "head"_a)
        .def("set_exact", &BoundDecoder::set_exact, "exact"_a)
        .def("set_caches", &BoundDecoder::set_caches, "caches"_a)
        .def("forward", &BoundDecoder::forward, "token_ids"_a, "positions"_a, "query_start"_a, "context_lens"_a,
             "table_rows"_a, "groups"_a, "cos"_a, "sin"_a, "logits_indices"_a, "logits"_a);
}

}  // namespace octavo
