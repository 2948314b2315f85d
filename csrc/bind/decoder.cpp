#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>

#include "bind/arguments.h"
#include "decoder.h"
#include "rank_steps.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

// (format, packed, outputs, inputs, bias)
using PartArguments = std::tuple<std::string, nb::object, int64_t, int64_t, nb::object>;
using LinearArguments = std::vector<PartArguments>;
// Keys, values, group, and how many first and recent blocks are read in them.
using CacheCopies = std::tuple<nb::object, nb::object, int, int, int>;
using CacheArguments = std::tuple<nb::object, nb::object, int, int, std::optional<CacheCopies>, nb::object>;

// active, normalised, sigmoid, corrected, scale, groups, active_groups
using ChoiceArguments = std::tuple<int, bool, bool, bool, float, int, int>;

// The first column that this rank computes, and how many all ranks compute.
using ColumnArguments = std::optional<std::pair<int64_t, int64_t>>;

// Weight, bias or None, eps, whether it is centred.
using NormArguments = std::tuple<nb::object, nb::object, float, bool>;

int64_t num_bounded(const std::vector<LayerCache>& caches) {
    return std::count_if(caches.begin(), caches.end(), [](const LayerCache& cache) { return cache.bounds.bounds; });
}

constexpr const char* kRegisterNames[kNumRegisters] = {"residual", "hidden", "branch", "qkv", "attended", "inner"};

Register register_of(const std::string& name) {
    for (int place = 0; place < kNumRegisters; ++place)
        if (name == kRegisterNames[place]) return static_cast<Register>(place);
    require(false, "register '" + name + "' is not one of residual, hidden, branch, qkv, attended, inner");
    return kResidual;
}

// What the registers hold after the instructions so far, so that no program can read what is not there.
class Contents {
  public:
    explicit Contents(int64_t hidden) { set(kResidual, hidden, false); }
    int64_t width(Register place) const {
        require(widths_[place] > 0, std::string(kRegisterNames[place]) + " is read before it is written");
        return widths_[place];
    }
    bool kept(Register place) const { return kept_[place]; }  // whether only rows that become logits are left
    void set(Register place, int64_t width, bool kept) {
        widths_[place] = width;
        kept_[place] = kept;
    }
    void check_width(Register place, int64_t expected, const char* what) const {
        require(width(place) == expected, std::string(what) + " is for " + std::to_string(expected) + " columns, " +
                                              kRegisterNames[place] + " has " + std::to_string(width(place)));
    }
    void check_alike(Register a, Register b) const {
        require(width(a) == width(b) && kept_[a] == kept_[b],
                std::string(kRegisterNames[a]) + " and " + kRegisterNames[b] + " differ in rows or columns");
    }

  private:
    int64_t widths_[kNumRegisters] = {};
    bool kept_[kNumRegisters] = {};
};

// A decoder, and the Python objects whose memory it refers to.
class BoundDecoder {
  public:
    BoundDecoder(const std::string& dtype, int64_t hidden, int64_t vocab, int num_heads, int kv_heads, int key_dim,
                 int value_dim, float attention_scale, float attention_softcap, float logits_scale,
                 float logits_softcap)
        : contents_(hidden) {
        require(dtype == "bfloat16" || dtype == "float32", "dtype '" + dtype + "' is not one of bfloat16, float32");
        require(hidden > 0 && vocab > 0, "a decoder must have columns and a vocabulary");
        require(kv_heads > 0 && num_heads > 0 && num_heads % kv_heads == 0,
                "query heads must be a multiple of KV heads");
        require(key_dim > 0 && key_dim <= kMaxHeadDim && value_dim > 0 && value_dim <= kMaxHeadDim,
                "heads must have 1 to " + std::to_string(kMaxHeadDim) + " dimensions");
        require(attention_scale > 0, "attention_scale must be positive, got " + std::to_string(attention_scale));
        decoder_.shape = {dtype == "bfloat16" ? kBf16 : kF32,
                          hidden,
                          vocab,
                          num_heads,
                          kv_heads,
                          key_dim,
                          value_dim,
                          attention_scale,
                          attention_softcap,
                          logits_scale,
                          logits_softcap};
    }

    void add_norm(const std::string& source_name, const std::string& target_name, const NormArguments& weights,
                  const std::optional<std::string>& added_name, int64_t first, int64_t width) {
        const Register source = register_of(source_name), target = register_of(target_name);
        const int64_t columns = contents_.width(source);
        require(first >= 0 && width > 0 && first <= columns - width && (source == target || width == columns),
                "a norm of columns " + std::to_string(first) + " to " + std::to_string(first + width) + " of " +
                    std::to_string(columns));
        Norm norm{source, target, {}, norm_of(weights, "norm", width), first, width};
        if (added_name) {
            norm.added = register_of(*added_name);
            require(width == columns, "what is added needs a norm of whole rows");
            contents_.check_alike(source, *norm.added);
        }
        contents_.set(target, columns, contents_.kept(source));
        decoder_.program.emplace_back(norm);
    }

    void add_sum(const std::string& target, const std::string& source) {
        const Add add{register_of(target), register_of(source)};
        contents_.check_alike(add.target, add.source);
        decoder_.program.emplace_back(add);
    }

    void add_scale(const std::string& place, float factor) {
        const Scale scale{register_of(place), factor};
        contents_.width(scale.place);
        decoder_.program.emplace_back(scale);
    }

    void add_product(const LinearArguments& parts, const std::string& source, const std::string& target,
                     const std::string& gate, const ColumnArguments& columns) {
        Multiply multiply{product(parts, "weight"), register_of(source), register_of(target), epilogue_of(gate), {}};
        require(multiply.source != multiply.target, "a product cannot replace its own input, " + source);
        contents_.check_width(multiply.source, multiply.linear.parts[0].weight.inputs, "weight");
        int64_t width = multiply.linear.outputs();
        if (multiply.epilogue != kPlain) {
            require(multiply.linear.parts.size() == 1 && width % 32 == 0,
                    "a gated product needs one matrix with a multiple of 32 outputs, got " +
                        std::to_string(multiply.linear.parts.size()) + " with " + std::to_string(width));
            width /= 2;
        }
        multiply.columns = columns_of(columns, width);
        set(multiply.target, width, contents_.kept(multiply.source), multiply.columns);
        decoder_.program.emplace_back(std::move(multiply));
    }

    // heads: the product of each.
    void add_heads(const LinearArguments& heads, const std::string& source, const std::string& target, int64_t kept,
                   const std::optional<std::string>& latent) {
        MultiplyHeads multiply{product(heads, "heads").parts, register_of(source), register_of(target), kept, {}};
        const Weight& first = multiply.heads[0].weight;
        const auto count = static_cast<int64_t>(multiply.heads.size());
        require(kept >= 0, "a head cannot keep " + std::to_string(kept) + " columns");
        require(multiply.source != multiply.target, "a product cannot replace its own input, " + source);
        for (const BiasedWeight& one : multiply.heads)
            require(one.weight.outputs == first.outputs && one.weight.inputs == first.inputs &&
                        one.weight.format == first.format,
                    "the products of heads must have the same shape and format");
        contents_.check_width(multiply.source, count * (kept + first.inputs), "heads");
        int64_t width = count * (kept + first.outputs);
        if (latent) {
            multiply.latent = register_of(*latent);
            require(contents_.width(*multiply.latent) > kept &&
                        contents_.kept(*multiply.latent) == contents_.kept(multiply.source),
                    *latent + " has other rows than " + source + ", or too few columns");
            width += 2 * contents_.width(*multiply.latent) - kept;
        }
        contents_.set(multiply.target, width, contents_.kept(multiply.source));
        decoder_.program.emplace_back(std::move(multiply));
    }

    void add_activation(const std::string& place, const std::string& activation) {
        const Activate activate{register_of(place), activation_of(activation)};
        contents_.width(activate.place);
        decoder_.program.emplace_back(activate);
    }

    // `rotation`: index of the step's rotations, or -1.
    void add_attention(int rotation, const std::optional<NormArguments>& query_norm,
                       const std::optional<NormArguments>& key_norm, const nb::object& sinks,
                       const ColumnArguments& columns) {
        const DecoderShape& s = decoder_.shape;
        contents_.check_width(kQkv, s.qkv_width(), "attention");
        require(!contents_.kept(kQkv), "attention needs every row of qkv");
        require(rotation >= -1, "rotation must be an index or -1, got " + std::to_string(rotation));
        Attend attend{num_layers_++, rotation, {}, {}, nullptr, columns_of(columns, s.attended_width())};
        if (!sinks.is_none()) attend.sinks = floats(sinks, "sinks", s.num_heads);
        if (query_norm) attend.query_norm = norm_of(*query_norm, "query_norm", s.key_dim);
        if (key_norm) attend.key_norm = norm_of(*key_norm, "key_norm", s.key_dim);
        num_rotations_ = std::max(num_rotations_, static_cast<size_t>(rotation + 1));
        set(kAttended, s.attended_width(), false, attend.columns);
        decoder_.program.emplace_back(attend);
    }

    void add_scale_by_sigmoid(const LinearArguments& parts, const std::string& source, const std::string& place) {
        const ScaleBySigmoid gate{product(parts, "gate"), register_of(source), register_of(place)};
        contents_.check_width(gate.source, gate.linear.parts[0].weight.inputs, "gate");
        require(gate.linear.outputs() == 1, "a gate has one output, got " + std::to_string(gate.linear.outputs()));
        require(contents_.kept(gate.source) == contents_.kept(gate.place),
                place + " and " + source + " differ in rows");
        decoder_.program.emplace_back(gate);
    }

    // gate_up and down: the products of each expert.
    void add_mixture(const LinearArguments& router, const nb::object& bias, const ChoiceArguments& choice,
                     const LinearArguments& gate_up, const LinearArguments& down, const std::string& source,
                     const std::string& target, const std::string& gate, const ColumnArguments& inner_columns,
                     const ColumnArguments& columns) {
        const int64_t experts = static_cast<int64_t>(gate_up.size());
        const auto [active, normalised, sigmoid, corrected, scale, groups, active_groups] = choice;
        Mix mix{product(router, "router"),
                nullptr,
                {active, normalised, sigmoid, corrected, scale, groups, active_groups},
                product(gate_up, "experts").parts,
                product(down, "experts").parts,
                register_of(source),
                register_of(target),
                epilogue_of(gate),
                {},
                {}};
        require(mix.epilogue != kPlain && mix.source != kInner && mix.target != kInner,
                "experts are gated, and use the register inner themselves");
        require(mix.router.outputs() == experts && static_cast<int64_t>(mix.down.size()) == experts,
                "a router of " + std::to_string(mix.router.outputs()) + " experts, and products of " +
                    std::to_string(experts) + " and " + std::to_string(mix.down.size()));
        require(groups >= 1 && experts % groups == 0 && active_groups >= 1 && active_groups <= groups,
                std::to_string(active_groups) + " of " + std::to_string(groups) + " groups of " +
                    std::to_string(experts) + " experts are active");
        require(active >= 1 && active <= experts / groups * active_groups,
                std::to_string(active) + " of " + std::to_string(experts / groups * active_groups) +
                    " experts are active");
        contents_.check_width(mix.source, mix.router.parts[0].weight.inputs, "router");
        contents_.check_width(mix.source, mix.gate_up[0].weight.inputs, "experts");
        require(mix.gate_up[0].weight.outputs % 32 == 0, "experts need a multiple of 16 gates");
        const int64_t own = mix.gate_up[0].weight.outputs / 2, hidden = mix.down[0].weight.outputs;
        mix.inner = columns_of(inner_columns, own);
        mix.columns = columns_of(columns, hidden);
        const int64_t inner = mix.inner ? mix.inner->all : own;
        require(mix.columns || hidden == decoder_.shape.hidden,
                "experts with " + std::to_string(hidden) + " outputs in a model of " +
                    std::to_string(decoder_.shape.hidden) + " columns");
        for (const BiasedWeight& one : mix.gate_up)
            require(one.weight.outputs == 2 * own && one.weight.inputs == mix.gate_up[0].weight.inputs,
                    "an expert with " + std::to_string(one.weight.outputs) + " gates and ups for " +
                        std::to_string(inner) + " inputs, which must be a multiple of 16");
        for (const BiasedWeight& one : mix.down)
            require(one.weight.outputs == hidden && one.weight.inputs == inner,
                    "an expert of [" + std::to_string(one.weight.outputs) + ", " + std::to_string(one.weight.inputs) +
                        "], not [" + std::to_string(hidden) + ", " + std::to_string(inner) + "]");
        if (!bias.is_none()) mix.bias = floats(bias, "router bias", experts);
        contents_.set(kInner, 0, false);
        set(mix.target, hidden, contents_.kept(mix.source), mix.columns);
        decoder_.program.emplace_back(std::move(mix));
    }

    void keep_rows(const std::string& name) {
        const Register place = register_of(name);
        const int64_t width = contents_.width(place);
        require(!contents_.kept(place), name + " has only the rows that become logits already");
        require(place != kQkv, "the rows of qkv are all needed");
        contents_.set(kQkv, 0, false);
        contents_.set(place, width, true);
        decoder_.program.emplace_back(KeepRows{place});
    }

    void add_gather(const std::string& name) {
        const Register place = register_of(name);
        require(whole_width_[place] > 0, name + " has no columns of other ranks");
        contents_.set(place, whole_width_[place], contents_.kept(place));
        whole_width_[place] = 0;
        decoder_.program.emplace_back(Gather{place});
    }

    // `first_id`: where this rank's share of the vocabulary begins, from embedding and head.
    void set_ranks(const std::shared_ptr<Ranks>& ranks, int64_t first_id) {
        require(first_id >= 0 && first_id < decoder_.shape.vocab,
                "the vocabulary has no id " + std::to_string(first_id));
        kept_ranks_ = ranks;
        decoder_.ranks = ranks.get();
        decoder_.first_id = first_id;
    }

    // The embedding is plain rows, or one packed matrix.
    void set_ends(nb::object embedding_rows, const LinearArguments& embedding, const LinearArguments& head) {
        const DecoderShape& s = decoder_.shape;
        contents_.check_width(kHidden, s.hidden, "head");
        require(contents_.kept(kHidden), "the program must end with the rows that become logits");
        if (embedding_rows.is_none()) {
            const Linear packed = product(embedding, "embedding");
            require(packed.parts.size() == 1, "the embedding must be one matrix");
            decoder_.embedding = packed.parts[0].weight;
            check_size(packed, "embedding", own_vocab(head));
        } else {
            const Tensor rows = tensor(embedding_rows, "embedding");
            check_dense(rows, "embedding", dtype(), {own_vocab(head), s.hidden});
            decoder_.embedding_rows = rows.base;
        }
        decoder_.head = product(head, "head");
        check_size(decoder_.head, "head", own_vocab(head));
        complete_ = true;
    }

    void set_exact(bool exact) { decoder_.exact = exact; }

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
                 const std::optional<SparseArguments>& sparse) {
        const DecoderShape& s = decoder_.shape;
        require(complete_, "the decoder is not complete");
        require(decoder_.caches.size() == num_layers_, "the decoder has no caches: call set_caches first");
        DecoderStep step{};
        check_shape(token_ids, "token_ids", {-1});
        step.num_tokens = token_ids.shape[0];
        step.token_ids = indices(token_ids, "token_ids", step.num_tokens, s.vocab);
        check_dense(positions, "positions", DType::i64, {step.num_tokens});
        step.positions = positions.data<int64_t>();
        const std::vector<Rotation> angles = rotation_tables(step, rotations);
        step.rotations = angles.data();
        step.num_rotations = static_cast<int64_t>(angles.size());
        check_shape(context_lens, "context_lens", {-1});
        step.num_seqs = context_lens.shape[0];
        check_dense(context_lens, "context_lens", DType::i32, {step.num_seqs});
        check_dense(query_start, "query_start", DType::i32, {step.num_seqs + 1});
        step.context_lens = context_lens.data<int32_t>();
        step.query_start = query_start.data<int32_t>();
        check_dense(table_rows, "table_rows", DType::i64, {step.num_seqs});
        step.table_rows = table_rows.data<int64_t>();
        if (!budgets.is_null()) {
            check_budgets(budgets, step.num_seqs, sink_tokens);
            check_dense(sink_positions, "sink_positions", DType::i64, {step.num_tokens});
            for (const auto& [cos, sin] : rotations)
                check_range(sink_positions.data<int64_t>(), step.num_tokens, cos.shape[0], "sink_positions");
            step.budgets = budgets.data<int32_t>();
            step.sink_positions = sink_positions.data<int64_t>();
            step.sink_tokens = sink_tokens;
        }
        std::vector<GroupTables> tables = group_tables(step, groups);
        if (sparse) add_sparse(*sparse, step, tables);
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
            check_shape(blocks, name, {-1, -1});
            check_dense(blocks, name, DType::u8, {blocks.shape[0], blocks.shape[1]});
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

    void add_sparse(const SparseArguments& sparse, DecoderStep& step, std::vector<GroupTables>& tables) const {
        const auto& [num_read, num_recent, completed] = sparse;
        require(!decoder_.ranks, "sparse reads are not split among ranks");
        check_sparse(num_read, num_recent, num_bounded(decoder_.caches), step.num_seqs);
        require(completed.size() == tables.size(), "completed must name blocks of each group");
        for (size_t group = 0; group < tables.size(); ++group) {
            for (const LayerCache& cache : decoder_.caches)
                if (static_cast<size_t>(cache.group) == group) check_completed(completed[group], cache.kv.num_blocks);
            tables[group].completed = completed[group].data<const int32_t>();
            tables[group].num_completed = completed[group].shape[0];
        }
        step.num_read = num_read.data<const int32_t>();
        step.num_recent = num_recent.data<const int32_t>();
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
    const float* floats(const nb::object& object, const char* name, int64_t count) {
        const Tensor view = tensor(object, name);
        check_dense(view, name, DType::f32, {count});
        return view.data<float>();
    }
    NormWeights norm_of(const NormArguments& arguments, const char* name, int64_t width) {
        const auto& [weight, bias, eps, centred] = arguments;
        const Tensor added = bias.is_none() ? Tensor{} : tensor(bias, name);
        return norm_weights(tensor(weight, name), added, eps, centred, name, dtype(), width);
    }
    Linear product(const LinearArguments& parts, const char* name) {
        require(!parts.empty(), std::string(name) + " has no matrix");
        const int64_t inputs = std::get<3>(parts[0]);
        Linear linear;
        for (const auto& [format, packed, part_outputs, part_inputs, bias] : parts) {
            const Weight weight = weight_of(format, tensor(packed, name), part_outputs, part_inputs);
            require(part_inputs == inputs, std::string(name) + " must have " + std::to_string(inputs) +
                                               " inputs, got " + std::to_string(part_inputs));
            require(is_quantised(weight.format) || (float_storage(weight.format) == kBf16) == (dtype() == DType::bf16),
                    std::string(name) + " must have the decoder's dtype, got " + format);
            linear.parts.push_back({weight, bias.is_none() ? nullptr : vector(bias, name, part_outputs)});
        }
        return linear;
    }
    // How much of the vocabulary the head covers: all of it, or a rank's share.
    int64_t own_vocab(const LinearArguments& head) const {
        int64_t outputs = 0;
        for (const PartArguments& part : head) outputs += std::get<2>(part);
        const int64_t all = decoder_.shape.vocab;
        require(decoder_.ranks ? decoder_.first_id + outputs <= all : outputs == all,
                "a head for " + std::to_string(outputs) + " ids from " + std::to_string(decoder_.first_id) + " of " +
                    std::to_string(all));
        return outputs;
    }
    std::optional<Columns> columns_of(const ColumnArguments& columns, int64_t width) const {
        if (!columns) return {};
        const auto& [first, all] = *columns;
        require(decoder_.ranks != nullptr, "columns are for ranks: call set_ranks first");
        require(first >= 0 && first <= all - width, std::to_string(width) + " columns from " + std::to_string(first) +
                                                        " of " + std::to_string(all));
        return Columns{first, all};
    }
    // A register that is about to be written; only `gather` may follow if other ranks have the other columns.
    void set(Register place, int64_t width, bool kept, const std::optional<Columns>& columns) {
        contents_.set(place, width, kept);
        whole_width_[place] = columns ? columns->all : 0;
    }
    // Checks that a matrix maps rows of the model's width to the vocabulary.
    void check_size(const Linear& linear, const char* name, int64_t vocab) const {
        const int64_t outputs = linear.outputs(), inputs = linear.parts[0].weight.inputs;
        require(outputs == vocab && inputs == decoder_.shape.hidden,
                std::string(name) + " must be [" + std::to_string(vocab) + ", " +
                    std::to_string(decoder_.shape.hidden) + "], got [" + std::to_string(outputs) + ", " +
                    std::to_string(inputs) + "]");
    }
    static const int64_t* indices(const Tensor& tensor, const char* name, int64_t count, int64_t end) {
        check_dense(tensor, name, DType::i64, {count});
        check_range(tensor.data<int64_t>(), count, end, name);
        return tensor.data<int64_t>();
    }

    Decoder decoder_;
    Contents contents_;
    std::shared_ptr<Ranks> kept_ranks_;
    int64_t whole_width_[kNumRegisters] = {};  // of what must be gathered
    std::vector<nb::object> kept_, kept_caches_;
    size_t num_layers_ = 0, num_rotations_ = 0, num_groups_ = 0;
    bool complete_ = false;
};

}  // namespace

void bind_ranks(nb::module_& m) {
    using Ids = std::vector<std::pair<int64_t, int64_t>>;
    m.def("rank_memory_bytes", [](int64_t message_bytes, int64_t slot_bytes, int64_t logits_bytes) {
        return Ranks::bytes({message_bytes, kNumRegisters + 1, slot_bytes, logits_bytes});
    });
    m.def("step_message_bytes", &step_message_bytes, "num_tokens"_a, "num_seqs"_a, "num_groups"_a, "max_blocks"_a,
          "rotation_bytes"_a);
    nb::class_<Ranks>(m, "Ranks")
        .def(
            "__init__",
            [](Ranks* self, int file, int64_t message_bytes, int64_t slot_bytes, int64_t logits_bytes, int rank,
               int count, double timeout_seconds) {
                require(count >= 1 && count <= kMostRanks && rank >= 0 && rank < count,
                        "rank " + std::to_string(rank) + " of " + std::to_string(count) + ", at most " +
                            std::to_string(kMostRanks));
                new (self) Ranks(file, {message_bytes, kNumRegisters + 1, slot_bytes, logits_bytes}, rank, count,
                                 timeout_seconds);
            },
            "file"_a, "message_bytes"_a, "slot_bytes"_a, "logits_bytes"_a, "rank"_a, "count"_a, "timeout_seconds"_a)
        .def(
            "copy",
            [](Ranks& ranks, bool from_host, bool to_host, const Ids& ids) {
                send_copies(ranks, from_host ? kOnHost : kOnDevice, to_host ? kOnHost : kOnDevice, ids);
            },
            "from_host"_a, "to_host"_a, "ids"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("stop", &send_stop)
        .def("meet", &Ranks::meet, nb::call_guard<nb::gil_scoped_release>())
        .def("fail", &Ranks::fail, "reason"_a)
        .def("reset", &Ranks::reset)
        .def_rw("timeout_seconds", &Ranks::timeout_seconds)
        .def_prop_ro("failure", &Ranks::failure);
}

void bind_decoder(nb::module_& m) {
    bind_ranks(m);
    nb::class_<BoundDecoder>(m, "Decoder")
        .def(nb::init<const std::string&, int64_t, int64_t, int, int, int, int, float, float, float, float>(),
             "dtype"_a, "hidden"_a, "vocab"_a, "num_heads"_a, "kv_heads"_a, "key_dim"_a, "value_dim"_a,
             "attention_scale"_a, "attention_softcap"_a, "logits_scale"_a, "logits_softcap"_a)
        .def("norm", &BoundDecoder::add_norm, "source"_a, "target"_a, "weights"_a, "added"_a.none(), "first"_a,
             "width"_a)
        .def("add", &BoundDecoder::add_sum, "target"_a, "source"_a)
        .def("scale", &BoundDecoder::add_scale, "place"_a, "factor"_a)
        .def("multiply", &BoundDecoder::add_product, "parts"_a, "source"_a, "target"_a, "gate"_a,
             "columns"_a.none() = nb::none())
        .def("multiply_heads", &BoundDecoder::add_heads, "heads"_a, "source"_a, "target"_a, "kept"_a, "latent"_a.none())
        .def("activate", &BoundDecoder::add_activation, "place"_a, "activation"_a)
        .def("attend", &BoundDecoder::add_attention, "rotation"_a, "query_norm"_a.none(), "key_norm"_a.none(),
             "sinks"_a.none(), "columns"_a.none() = nb::none())
        .def("scale_by_sigmoid", &BoundDecoder::add_scale_by_sigmoid, "parts"_a, "source"_a, "place"_a)
        .def("mix", &BoundDecoder::add_mixture, "router"_a, "bias"_a.none(), "choice"_a,
             "gate_up"_a, "down"_a, "source"_a, "target"_a, "gate"_a, "inner_columns"_a.none() = nb::none(),
             "columns"_a.none() = nb::none())
        .def("gather", &BoundDecoder::add_gather, "place"_a)
        .def("set_ranks", &BoundDecoder::set_ranks, "ranks"_a, "first_id"_a)
        .def("follow", &BoundDecoder::follow, "device"_a, "host"_a)
        .def("keep_rows", &BoundDecoder::keep_rows, "place"_a)
        .def("set_ends", &BoundDecoder::set_ends, "embedding_rows"_a.none(), "embedding"_a, "head"_a)
        .def("logits", &BoundDecoder::logits, "first"_a, "out"_a)
        .def("hidden", &BoundDecoder::hidden, "first"_a, "out"_a)
        .def("set_exact", &BoundDecoder::set_exact, "exact"_a)
        .def("set_caches", &BoundDecoder::set_caches, "caches"_a)
        .def("forward", &BoundDecoder::forward, "token_ids"_a, "positions"_a, "query_start"_a, "context_lens"_a,
             "table_rows"_a, "groups"_a, "rotations"_a, "logits_indices"_a, "logits"_a, "budgets"_a.none() = nb::none(),
             "sink_positions"_a.none() = nb::none(), "sink_tokens"_a = 1, "sparse"_a.none() = nb::none());
}

}  // namespace octavo
