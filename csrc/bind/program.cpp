#include "bind/program.h"

#include <algorithm>

namespace nb = nanobind;

namespace octavo {
namespace {

Register register_of(const std::string& name) {
    return static_cast<Register>(index_of(name, "register", kRegisterNames));
}

// A register in the dtype of activations.
Register activations_of(const std::string& name) {
    const Register place = register_of(name);
    require(place != kResidual, "the residual is in float32: only norms read it, and only sums and factors change it");
    return place;
}

}  // namespace

DecoderProgram::DecoderProgram(const std::string& dtype, int64_t hidden, int64_t vocab, int num_heads, int kv_heads,
                               int key_dim, int value_dim, float attention_scale, float attention_softcap,
                               float logits_scale, float logits_softcap)
    : contents_(hidden) {
    require(dtype == "bfloat16" || dtype == "float32", "dtype '" + dtype + "' is not one of bfloat16, float32");
    require(hidden > 0 && vocab > 0, "a decoder must have columns and a vocabulary");
    require(kv_heads > 0 && num_heads > 0 && num_heads % kv_heads == 0, "query heads must be a multiple of KV heads");
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

void DecoderProgram::add_norm(const std::string& source_name, const std::string& target_name,
                              const std::optional<NormArguments>& weights, const std::optional<std::string>& added_name,
                              int64_t first, int64_t width) {
    const Register source = register_of(source_name), target = activations_of(target_name);
    const int64_t columns = contents_.width(source);
    require(first >= 0 && width > 0 && first <= columns - width && (source == target || width == columns),
            "a norm of columns " + std::to_string(first) + " to " + std::to_string(first + width) + " of " +
                std::to_string(columns));
    Norm norm{source, target, {}, {kNoNorm, nullptr, nullptr, 0.0f}, first, width};
    if (weights) norm.weights = norm_of(*weights, "norm", width);
    if (added_name) {
        norm.added = activations_of(*added_name);
        require(width == columns, "what is added needs a norm of whole rows");
        contents_.check_alike(source, *norm.added);
    }
    contents_.set(target, columns, contents_.kept(source));
    decoder_.program.emplace_back(norm);
}

void DecoderProgram::add_sum(const std::string& target, const std::string& source) {
    const Add add{register_of(target), activations_of(source)};
    contents_.check_alike(add.target, add.source);
    decoder_.program.emplace_back(add);
}

void DecoderProgram::add_scale(const std::string& place, float factor) {
    const Scale scale{register_of(place), factor};
    contents_.width(scale.place);
    decoder_.program.emplace_back(scale);
}

void DecoderProgram::add_product(const LinearArguments& parts, const std::string& source, const std::string& target,
                                 const std::string& gate, const ColumnArguments& columns) {
    Multiply multiply{product(parts, "weight"), activations_of(source), activations_of(target), epilogue_of(gate), {}};
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

void DecoderProgram::add_heads(const LinearArguments& heads, const std::string& source, const std::string& target,
                               int64_t kept, const std::optional<std::string>& latent) {
    MultiplyHeads multiply{product(heads, "heads").parts, activations_of(source), activations_of(target), kept, {}};
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
        multiply.latent = activations_of(*latent);
        require(contents_.width(*multiply.latent) > kept &&
                    contents_.kept(*multiply.latent) == contents_.kept(multiply.source),
                *latent + " has other rows than " + source + ", or too few columns");
        width += 2 * contents_.width(*multiply.latent) - kept;
    }
    contents_.set(multiply.target, width, contents_.kept(multiply.source));
    decoder_.program.emplace_back(std::move(multiply));
}

void DecoderProgram::add_activation(const std::string& place, const std::string& activation,
                                    const std::vector<float>& parameters) {
    Activate activate{activations_of(place), activation_of(activation), {}};
    contents_.width(activate.place);
    const std::size_t count = activate.activation == kXielu ? kXieluParameters : 0;
    require(parameters.size() == count, activation + " must have " + std::to_string(count) + " parameters, got " +
                                            std::to_string(parameters.size()));
    std::copy(parameters.begin(), parameters.end(), activate.parameters.begin());
    decoder_.program.emplace_back(activate);
}

void DecoderProgram::add_attention(int rotation, const std::optional<NormArguments>& query_norm,
                                   const std::optional<NormArguments>& key_norm, bool rotates_first,
                                   const nb::object& sinks, const ColumnArguments& columns) {
    const DecoderShape& s = decoder_.shape;
    contents_.check_width(kQkv, s.qkv_width(), "attention");
    require(!contents_.kept(kQkv), "attention needs every row of qkv");
    require(rotation >= -1, "rotation must be an index or -1, got " + std::to_string(rotation));
    Attend attend{num_layers_++, rotation, {}, {}, rotates_first, nullptr, columns_of(columns, s.attended_width())};
    if (!sinks.is_none()) attend.sinks = floats(sinks, "sinks", s.num_heads);
    if (query_norm) attend.query_norm = norm_of(*query_norm, "query_norm", s.key_dim);
    if (key_norm) attend.key_norm = norm_of(*key_norm, "key_norm", s.key_dim);
    num_rotations_ = std::max(num_rotations_, static_cast<size_t>(rotation + 1));
    set(kAttended, s.attended_width(), false, attend.columns);
    decoder_.program.emplace_back(attend);
}

void DecoderProgram::add_scale_by_sigmoid(const LinearArguments& parts, const std::string& source,
                                          const std::string& place) {
    const ScaleBySigmoid gate{product(parts, "gate"), activations_of(source), activations_of(place)};
    contents_.check_width(gate.source, gate.linear.parts[0].weight.inputs, "gate");
    require(gate.linear.outputs() == 1, "a gate has one output, got " + std::to_string(gate.linear.outputs()));
    require(contents_.kept(gate.source) == contents_.kept(gate.place), place + " and " + source + " differ in rows");
    decoder_.program.emplace_back(gate);
}

void DecoderProgram::add_mixture(const LinearArguments& router, const nb::object& bias, const ChoiceArguments& choice,
                                 const LinearArguments& gate_up, const LinearArguments& down, const std::string& source,
                                 const std::string& target, const std::string& gate,
                                 const ColumnArguments& inner_columns, const ColumnArguments& columns) {
    const int64_t experts = static_cast<int64_t>(gate_up.size());
    const auto [active, normalised, sigmoid, corrected, scale, groups, active_groups] = choice;
    Mix mix{product(router, "router"),
            nullptr,
            {active, normalised, sigmoid, corrected, scale, groups, active_groups},
            product(gate_up, "experts").parts,
            product(down, "experts").parts,
            activations_of(source),
            activations_of(target),
            epilogue_of(gate),
            {},
            {}};
    require(mix.epilogue != kPlain && mix.source != kInner && mix.target != kInner,
            "experts are gated, and use the register inner themselves");
    require(mix.router.outputs() == experts && static_cast<int64_t>(mix.down.size()) == experts,
            "a router of " + std::to_string(mix.router.outputs()) + " experts, and products of " +
                std::to_string(experts) + " and " + std::to_string(mix.down.size()));
    require(groups >= 1 && experts % groups == 0 && active_groups >= 1 && active_groups <= groups,
            std::to_string(active_groups) + " of " + std::to_string(groups) + " groups of " + std::to_string(experts) +
                " experts are active");
    require(active >= 1 && active <= experts / groups * active_groups,
            std::to_string(active) + " of " + std::to_string(experts / groups * active_groups) + " experts are active");
    contents_.check_width(mix.source, mix.router.parts[0].weight.inputs, "router");
    contents_.check_width(mix.source, mix.gate_up[0].weight.inputs, "experts");
    require(mix.gate_up[0].weight.outputs % 32 == 0, "experts need a multiple of 16 gates");
    const int64_t own = mix.gate_up[0].weight.outputs / 2, hidden = mix.down[0].weight.outputs;
    mix.inner = columns_of(inner_columns, own);
    mix.columns = columns_of(columns, hidden);
    const int64_t inner = mix.inner ? mix.inner->all() : own;
    require(mix.columns || hidden == decoder_.shape.hidden, "experts with " + std::to_string(hidden) +
                                                                " outputs in a model of " +
                                                                std::to_string(decoder_.shape.hidden) + " columns");
    for (const BiasedWeight& one : mix.gate_up)
        require(one.weight.outputs == 2 * own && one.weight.inputs == mix.gate_up[0].weight.inputs,
                "an expert with " + std::to_string(one.weight.outputs) + " gates and ups for " + std::to_string(inner) +
                    " inputs, which must be a multiple of 16");
    for (const BiasedWeight& one : mix.down)
        require(one.weight.outputs == hidden && one.weight.inputs == inner,
                "an expert of [" + std::to_string(one.weight.outputs) + ", " + std::to_string(one.weight.inputs) +
                    "], not [" + std::to_string(hidden) + ", " + std::to_string(inner) + "]");
    if (!bias.is_none()) mix.bias = floats(bias, "router bias", experts);
    contents_.set(kInner, 0, false);
    set(mix.target, hidden, contents_.kept(mix.source), mix.columns);
    decoder_.program.emplace_back(std::move(mix));
}

void DecoderProgram::keep_rows(const std::string& name) {
    const Register place = register_of(name);
    const int64_t width = contents_.width(place);
    require(!contents_.kept(place), name + " has only the rows that become logits already");
    require(place != kQkv, "the rows of qkv are all needed");
    contents_.set(kQkv, 0, false);
    contents_.set(place, width, true);
    decoder_.program.emplace_back(KeepRows{place});
}

void DecoderProgram::add_gather(const std::string& name) {
    const Register place = activations_of(name);
    require(whole_width_[place] > 0, name + " has no columns of other ranks");
    contents_.set(place, whole_width_[place], contents_.kept(place));
    whole_width_[place] = 0;
    decoder_.program.emplace_back(Gather{place});
}

void DecoderProgram::set_ranks(const std::shared_ptr<Ranks>& ranks, const std::vector<int64_t>& ids, int group) {
    kept_ranks_ = ranks;
    decoder_.ranks = ranks.get();
    decoder_.ids = own_columns(ids);
    require(decoder_.ids.all() == decoder_.shape.vocab,
            "ranks have " + std::to_string(decoder_.ids.all()) + " ids of " + std::to_string(decoder_.shape.vocab));
    decoder_.group = group;
}

void DecoderProgram::set_ends(nb::object embedding_rows, const LinearArguments& embedding,
                              const LinearArguments& head) {
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
    decoder_.head = product(head, "head", DType::f32);
    check_size(decoder_.head, "head", own_vocab(head));
    complete_ = true;
}

Tensor DecoderProgram::tensor(const nb::object& object, const char* name) {
    Tensor view;
    require(borrow_tensor(object.ptr(), &view), std::string(name) + " must be a dense CPU tensor");
    kept_.push_back(object);
    return view;
}

const float* DecoderProgram::floats(const nb::object& object, const char* name, int64_t count) {
    return dense<float>(tensor(object, name), name, {count});
}

NormWeights DecoderProgram::norm_of(const NormArguments& arguments, const char* name, int64_t width) {
    const auto& [weight, bias, eps, centred] = arguments;
    const Tensor added = bias.is_none() ? Tensor{} : tensor(bias, name);
    return norm_weights(tensor(weight, name), added, eps, centred, name, dtype(), width);
}

Linear DecoderProgram::product(const LinearArguments& parts, const char* name) { return product(parts, name, dtype()); }

Linear DecoderProgram::product(const LinearArguments& parts, const char* name, DType biases) {
    require(!parts.empty(), std::string(name) + " has no matrix");
    const int64_t inputs = std::get<3>(parts[0]);
    Linear linear;
    for (const auto& [format, packed, part_outputs, part_inputs, bias] : parts) {
        const Weight weight = weight_of(format, tensor(packed, name), part_outputs, part_inputs);
        require(part_inputs == inputs, std::string(name) + " must have " + std::to_string(inputs) + " inputs, got " +
                                           std::to_string(part_inputs));
        require(is_quantised(weight.format) || (float_storage(weight.format) == kBf16) == (dtype() == DType::bf16),
                std::string(name) + " must have the decoder's dtype, got " + format);
        linear.parts.push_back({weight, nullptr});
        if (bias.is_none()) continue;
        const Tensor added = tensor(bias, name);
        check_dense(added, name, biases, {part_outputs});
        linear.parts.back().bias = added.base;
    }
    return linear;
}

int64_t DecoderProgram::own_vocab(const LinearArguments& head) const {
    int64_t outputs = 0;
    for (const PartArguments& part : head) outputs += std::get<2>(part);
    const int64_t own = decoder_.ranks ? own_width(decoder_.ids) : decoder_.shape.vocab;
    require(outputs == own, "a head for " + std::to_string(outputs) + " ids, not " + std::to_string(own));
    return outputs;
}

std::optional<Columns> DecoderProgram::columns_of(const ColumnArguments& columns, int64_t width) const {
    if (!columns) return {};
    require(decoder_.ranks != nullptr, "columns are for ranks: call set_ranks first");
    const Columns all = own_columns(*columns);
    require(own_width(all) == width, std::to_string(width) + " columns, not " + std::to_string(own_width(all)));
    return all;
}

Columns DecoderProgram::own_columns(const std::vector<int64_t>& begins) const {
    const RankPlace& place = decoder_.ranks->place();
    require(static_cast<int64_t>(begins.size()) == int64_t{place.count} * place.machines + 1 && begins[0] == 0 &&
                std::is_sorted(begins.begin(), begins.end()),
            "columns must begin at 0, and have a begin for each rank and an end");
    return {begins};
}

int64_t DecoderProgram::own_width(const Columns& columns) const {
    const int rank = decoder_.ranks->place().in_all();
    return columns.begins[rank + 1] - columns.begins[rank];
}

void DecoderProgram::set(Register place, int64_t width, bool kept, const std::optional<Columns>& columns) {
    contents_.set(place, width, kept);
    whole_width_[place] = columns ? columns->all() : 0;
}

void DecoderProgram::check_size(const Linear& linear, const char* name, int64_t vocab) const {
    const int64_t outputs = linear.outputs(), inputs = linear.parts[0].weight.inputs;
    require(outputs == vocab && inputs == decoder_.shape.hidden,
            std::string(name) + " must be [" + std::to_string(vocab) + ", " + std::to_string(decoder_.shape.hidden) +
                "], got [" + std::to_string(outputs) + ", " + std::to_string(inputs) + "]");
}

}  // namespace octavo
