#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bind/program.h"
#include "rank_steps.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

// Keys, values, group, and how many first and recent blocks are read in them.
using CacheCopies = std::tuple<nb::object, nb::object, int, int, int>;
using CacheArguments = std::tuple<nb::object, nb::object, int, int, std::optional<CacheCopies>, nb::object>;

int64_t num_bounded(const std::vector<LayerCache>& caches) {
    return std::count_if(caches.begin(), caches.end(), [](const LayerCache& cache) { return cache.bounds.bounds; });
}

// The same with caches, for steps.
class BoundDecoder : public DecoderProgram {
  public:
    using DecoderProgram::DecoderProgram;

    // For each layer: keys, values, group, window (0: none), copies or None, bounds or None. Keys and values are
    // tensors, or a coded layer's arguments.
    void set_caches(const std::vector<CacheArguments>& caches) {
        const DecoderShape& s = decoder_.shape;
        require(caches.size() == num_layers_, "there are " + std::to_string(num_layers_) + " layers, got " +
                                                  std::to_string(caches.size()) + " caches");
        std::vector<LayerCache> bound;
        std::vector<nb::object> kept;
        size_t num_groups = 0;
        for (const auto& [key, value, group, window, copied, bounds] : caches) {
            kept.push_back(key);
            kept.push_back(value);
            const LayerKV kv = cache_of(key, value);
            const int key_dim = kv.key_dim();
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
                cache.copies = cache_of(keys, values);
                check_copies(kv, cache.copies, first_blocks, recent_blocks);
                require(copies_group >= 0, "the copies' group must not be negative");
                cache.copies_group = copies_group;
                cache.first_blocks = first_blocks;
                cache.recent_blocks = recent_blocks;
                num_groups = std::max(num_groups, static_cast<size_t>(copies_group) + 1);
            }
            if (!bounds.is_none()) {
                Tensor view;
                require(borrow_tensor(bounds.ptr(), &view), "bounds must be a dense CPU tensor");
                kept.push_back(bounds);
                cache.bounds = bounds_of(kv, view);
                cache.bounds_index = num_bounded(bound);
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
                 const std::vector<std::pair<Tensor, Tensor>>& groups,
                 const std::vector<std::pair<Tensor, Tensor>>& rotations, const Tensor& logits_indices,
                 const Tensor& logits, const Tensor& budgets, const Tensor& sink_positions, int sink_tokens,
                 const std::optional<SparseArguments>& sparse, const std::vector<Tensor>& kept,
                 const std::optional<MassArguments>& measured) {
        const DecoderShape& s = decoder_.shape;
        require(complete_, "the decoder is not complete");
        require(decoder_.caches.size() == num_layers_, "the decoder has no caches: call set_caches first");
        DecoderStep step{};
        step.token_ids = indices(token_ids, "token_ids", -1, s.vocab);
        step.num_tokens = token_ids.shape[0];
        step.positions = dense<int64_t>(positions, "positions", {step.num_tokens});
        const std::vector<Rotation> angles = rotation_tables(step, rotations);
        step.rotations = angles.data();
        step.num_rotations = static_cast<int64_t>(angles.size());
        step.context_lens = dense<int32_t>(context_lens, "context_lens", {-1});
        step.num_seqs = context_lens.shape[0];
        step.query_start = dense<int32_t>(query_start, "query_start", {step.num_seqs + 1});
        step.table_rows = dense<int64_t>(table_rows, "table_rows", {step.num_seqs});
        if (!budgets.is_null()) {
            check_budgets(budgets, step.num_seqs, sink_tokens);
            step.budgets = budgets.data<int32_t>();
            step.sink_positions = dense<int64_t>(sink_positions, "sink_positions", {step.num_tokens});
            step.sink_tokens = sink_tokens;
            for (const auto& [cos, sin] : rotations)
                check_range(step.sink_positions, step.num_tokens, cos.shape[0], "sink_positions");
        }
        std::vector<GroupTables> tables = group_tables(step, groups);
        if (sparse) add_sparse(*sparse, step, tables);
        if (!kept.empty()) add_kept(kept, context_lens, tables);
        if (measured) add_measured(*measured, kept, context_lens, step, tables);
        step.groups = tables.data();
        step.logits_indices = indices(logits_indices, "logits_indices", -1, step.num_tokens);
        step.num_logits = logits_indices.shape[0];
        step.logits = dense<float>(logits, "logits", {-1, s.vocab});
        step.num_now = logits.shape[0];
        require(step.num_now <= step.num_logits, "logits has " + std::to_string(step.num_now) + " rows for " +
                                                     std::to_string(step.num_logits) + " logits_indices");
        if (step.num_tokens == 0) return;
        nb::gil_scoped_release release;
        together([&] { send_step(*decoder_.ranks, decoder_, step); }, [&] { decoder_.forward(step); });
    }

    void logits(int64_t first, const Tensor& out) {
        check_kept(first, out, "logits", decoder_.shape.vocab);
        if (out.shape[0] == 0) return;
        nb::gil_scoped_release release;
        together([&] { send_logits(*decoder_.ranks, first, out.shape[0]); },
                 [&] { decoder_.logits(first, out.shape[0], out.data<float>()); });
    }

    // Does what rank 0 sends, until it sends a stop. uint8 [blocks][bytes] of the cache and of host memory.
    void follow(const Tensor& device, const Tensor& host) {
        require(complete_ && decoder_.ranks, "the decoder is not complete, or has no ranks");
        require(decoder_.caches.size() == num_layers_, "the decoder has no caches: call set_caches first");
        const auto memory = [](const Tensor& blocks, const char* name) {
            check_dense(blocks, name, DType::u8, {-1, -1});
            return BlockMemory{blocks.base, blocks.shape[0], blocks.shape[1]};
        };
        const BlockMemory places[2] = {memory(device, "device"), memory(host, "host")};
        nb::gil_scoped_release release;
        octavo::follow(decoder_, places);
    }

    void hidden(int64_t first, const Tensor& out) {
        check_kept(first, out, "hidden", decoder_.shape.hidden);
        if (out.shape[0] == 0) return;
        nb::gil_scoped_release release;
        decoder_.hidden(first, out.shape[0], out.data<float>());
    }

  private:
    // What one rank has begun, all must finish: if this one cannot, the others must not wait for it.
    template <class Send, class Compute> void together(Send&& send, Compute&& compute) {
        if (!decoder_.ranks) return compute();
        send();
        try {
            compute();
        } catch (const std::exception& error) {
            decoder_.ranks->fail(std::string("rank 0: ") + error.what());
            throw;
        }
    }

    // Checks that `out` [rows][width] asks for rows `first ..` that the last step has kept.
    void check_kept(int64_t first, const Tensor& out, const char* name, int64_t width) const {
        check_dense(out, name, DType::f32, {-1, width});
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
            tables.push_back({table.data<int32_t>(), table.stride[0], table.shape[1],
                              dense<int64_t>(slots, "slot_mapping", {step.num_tokens})});
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

    void add_sparse(const SparseArguments& sparse, DecoderStep& step, std::vector<GroupTables>& tables) const {
        const auto& [num_read, num_recent, completed] = sparse;
        require(!decoder_.ranks, "sparse reads are not split among ranks");
        check_sparse(num_read, num_recent, num_bounded(decoder_.caches), step.num_seqs);
        require(completed.size() == tables.size(), "completed must name blocks of each group");
        for (size_t group = 0; group < tables.size(); ++group) {
            for (const LayerCache& cache : decoder_.caches)
                if (static_cast<size_t>(cache.group) == group) check_completed(completed[group], cache.kv.num_blocks);
            tables[group].completed = completed[group].data<int32_t>();
            tables[group].num_completed = completed[group].shape[0];
        }
        step.num_read = num_read.data<int32_t>();
        step.num_recent = num_recent.data<int32_t>();
    }

    // The tokens in the tables of groups that have freed blocks; null for a group that has not.
    void add_kept(const std::vector<Tensor>& kept, const Tensor& context_lens, std::vector<GroupTables>& tables) const {
        require(!decoder_.ranks, "sequences that have let go of blocks are not split among ranks");
        require(kept.size() == tables.size(), "kept must have the tokens of each group");
        for (size_t group = 0; group < tables.size(); ++group) {
            if (kept[group].is_null()) continue;
            const int32_t* tokens = dense<int32_t>(kept[group], "kept", {context_lens.shape[0]});
            const int32_t* all = context_lens.data<int32_t>();
            for (int64_t i = 0; i < context_lens.shape[0]; ++i)
                require(tokens[i] <= all[i], "sequence " + std::to_string(i) + " keeps " + std::to_string(tokens[i]) +
                                                 " of " + std::to_string(all[i]) + " tokens");
            tables[group].context_lens = tokens;
        }
    }

    void add_measured(const MassArguments& measured, const std::vector<Tensor>& kept, const Tensor& context_lens,
                      DecoderStep& step, std::vector<GroupTables>& tables) const {
        require(!decoder_.ranks, "the attention of ranks is not measured");
        const auto& [begins, mass] = measured;
        const int64_t num_groups = static_cast<int64_t>(tables.size());
        for (const LayerCache& cache : decoder_.caches) {
            if (cache.window) continue;
            const bool lets_go = !kept.empty() && !kept[cache.group].is_null();
            check_measured(measured, num_groups, lets_go ? kept[cache.group] : context_lens, cache.kv.block_size);
        }
        step.mass_begins = begins.data<int64_t>();
        for (int64_t group = 0; group < num_groups; ++group)
            tables[group].mass = mass.data<int64_t>() + group * mass.stride[0];
    }

    // The tables of angles, once it is certain that they have every position.
    std::vector<Rotation> rotation_tables(const DecoderStep& step,
                                          const std::vector<std::pair<Tensor, Tensor>>& rotations) const {
        require(rotations.size() >= num_rotations_, "the layers have " + std::to_string(num_rotations_) +
                                                        " rotations, got " + std::to_string(rotations.size()));
        std::vector<Rotation> tables;
        for (const auto& [cos, sin] : rotations) {
            const int dim = check_rotation(cos, sin, decoder_.shape.key_dim);
            check_range(step.positions, step.num_tokens, cos.shape[0], "positions");
            tables.push_back({cos.data<float>(), sin.data<float>(), dim});
        }
        return tables;
    }

    LayerKV cache_of(const nb::object& keys, const nb::object& values) const {
        SideArguments sides[2];
        require(nb::try_cast(keys, sides[0]) && nb::try_cast(values, sides[1]),
                "key and value cache must be dense CPU tensors, or in a codec");
        const LayerKV kv = layer_kv(sides[0], sides[1], dtype());
        require(kv.storage == decoder_.shape.storage, std::string("key cache must be ") + dtype_name(dtype()));
        return kv;
    }

    std::vector<nb::object> kept_caches_;
    size_t num_groups_ = 0;
};

}  // namespace

void bind_decoder(nb::module_& m) {
    nb::class_<BoundDecoder>(m, "Decoder")
        .def(nb::init<const std::string&, int64_t, int64_t, int, int, int, int, float, float, float, float>(),
             "dtype"_a, "hidden"_a, "vocab"_a, "num_heads"_a, "kv_heads"_a, "key_dim"_a, "value_dim"_a,
             "attention_scale"_a, "attention_softcap"_a, "logits_scale"_a, "logits_softcap"_a)
        .def("norm", &BoundDecoder::add_norm, "source"_a, "target"_a, "weights"_a.none(), "added"_a.none(), "first"_a,
             "width"_a)
        .def("add", &BoundDecoder::add_sum, "target"_a, "source"_a)
        .def("scale", &BoundDecoder::add_scale, "place"_a, "factor"_a)
        .def("multiply", &BoundDecoder::add_product, "parts"_a, "source"_a, "target"_a, "gate"_a,
             "columns"_a.none() = nb::none())
        .def("multiply_heads", &BoundDecoder::add_heads, "heads"_a, "source"_a, "target"_a, "kept"_a, "latent"_a.none())
        .def("activate", &BoundDecoder::add_activation, "place"_a, "activation"_a, "parameters"_a)
        .def("attend", &BoundDecoder::add_attention, "rotation"_a, "query_norm"_a.none(), "key_norm"_a.none(),
             "rotates_first"_a, "sinks"_a.none(), "columns"_a.none() = nb::none())
        .def("scale_by_sigmoid", &BoundDecoder::add_scale_by_sigmoid, "parts"_a, "source"_a, "place"_a)
        .def("mix", &BoundDecoder::add_mixture, "router"_a, "bias"_a.none(), "choice"_a, "gate_up"_a, "down"_a,
             "source"_a, "target"_a, "gate"_a, "inner_columns"_a.none() = nb::none(), "columns"_a.none() = nb::none())
        .def("gather", &BoundDecoder::add_gather, "place"_a)
        .def("set_ranks", &BoundDecoder::set_ranks, "ranks"_a, "ids"_a, "group"_a)
        .def("follow", &BoundDecoder::follow, "device"_a, "host"_a)
        .def("keep_rows", &BoundDecoder::keep_rows, "place"_a)
        .def("set_ends", &BoundDecoder::set_ends, "embedding_rows"_a.none(), "embedding"_a, "head"_a)
        .def("logits", &BoundDecoder::logits, "first"_a, "out"_a)
        .def("hidden", &BoundDecoder::hidden, "first"_a, "out"_a)
        .def("set_exact", &BoundDecoder::set_exact, "exact"_a)
        .def("set_caches", &BoundDecoder::set_caches, "caches"_a)
        .def("forward", &BoundDecoder::forward, "token_ids"_a, "positions"_a, "query_start"_a, "context_lens"_a,
             "table_rows"_a, "groups"_a, "rotations"_a, "logits_indices"_a, "logits"_a, "budgets"_a.none() = nb::none(),
             "sink_positions"_a.none() = nb::none(), "sink_tokens"_a = 1, "sparse"_a.none() = nb::none(),
             "kept"_a = std::vector<Tensor>{}, "measured"_a.none() = nb::none());
}

}  // namespace octavo
