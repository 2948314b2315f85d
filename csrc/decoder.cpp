#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "thread_pool.h"

namespace octavo {
namespace {

int64_t element_bytes(Storage storage) { return storage == kBf16 ? 2 : 4; }

Matrix columns_of(const Matrix& whole, int64_t first, int64_t width, int64_t element) {
    return {whole.base + first * element, whole.rows, width, whole.stride};
}

}  // namespace

Matrix Decoder::room(Buffer& buffer, int64_t count, int64_t width, Storage storage) const {
    const int64_t stride = width * element_bytes(storage);
    if (static_cast<int64_t>(buffer.size()) < count * stride) buffer.resize(count * stride);
    return {buffer.data(), count, width, stride};
}

// With `columns`, those of a matrix that other ranks write too.
const Matrix& Decoder::make(Register place, int64_t count, int64_t width, const std::optional<Columns>& columns) {
    is_shared_[place] = false;
    if (!columns) return rows_[place] = room(memory_[place], count, width, storage_of(place));
    const int64_t element = element_bytes(shape.storage);
    whole_[place] = share(place, count, columns->all(), element);
    columns_[place] = &*columns;
    return rows_[place] = columns_of(whole_[place], columns->begins[ranks->place().in_all()], width, element);
}

Matrix Decoder::share(int slot, int64_t count, int64_t width, int64_t element) {
    const int64_t stride = width * element;
    return {ranks->next_buffer(slot, count * stride), count, width, stride};
}

// All ranks' columns of a register.
Matrix Decoder::gathered(Register place) {
    ranks->gather(whole_[place], *columns_[place], element_bytes(shape.storage));
    is_shared_[place] = true;
    return rows_[place] = whole_[place];
}

// A register that may be changed in place: a copy of what other ranks read.
const Matrix& Decoder::own(Register place) {
    if (!is_shared_[place]) return rows_[place];
    const Matrix shared = rows_[place];
    const Matrix& own = make(place, shared.rows, shared.width);
    std::memcpy(own.base, shared.base, shared.rows * shared.stride);
    return own;
}

// Products in float32, [rows of x][outputs].
float* Decoder::scores(const Linear& linear, const Matrix& x) {
    const int64_t outputs = linear.outputs();
    if (static_cast<int64_t>(scores_.size()) < x.rows * outputs) scores_.resize(x.rows * outputs);
    const Matrix out{reinterpret_cast<char*>(scores_.data()), x.rows, outputs, outputs * 4};
    multiply(linear, x, out, kF32, kPlain);
    return scores_.data();
}

void Decoder::forward(const DecoderStep& step) {
    wake_threads();
    if (ranks) {
        rows_[kResidual] = share(kResidual, step.num_tokens, shape.hidden, element_bytes(kF32));
        embed(step, rows_[kResidual]);
        ranks->gather_rows(rows_[kResidual], [&](int64_t row) {
            const std::vector<int64_t>& begins = ids.begins;
            return std::upper_bound(begins.begin(), begins.end() - 1, step.token_ids[row]) - begins.begin() - 1;
        });
        is_shared_[kResidual] = true;
    } else {
        embed(step, make(kResidual, step.num_tokens, shape.hidden));
    }
    for (const Instruction& instruction : program)
        std::visit([&](const auto& one) { execute(step, one); }, instruction);
    num_kept_ = step.num_logits;
    logits(0, step.num_now, step.logits);
}

void Decoder::execute(const DecoderStep&, const Norm& norm) {
    const Matrix source = norm.added ? own(norm.source) : rows_[norm.source];
    const Matrix added = norm.added ? rows_[*norm.added] : Matrix{};
    const Storage storage = storage_of(norm.source);
    const Matrix columns = columns_of(source, norm.first, norm.width, element_bytes(storage));
    const bool in_place = norm.source == norm.target && !is_shared_[norm.source];
    const Matrix out = in_place ? columns : make(norm.target, source.rows, norm.width);
    normalise(storage, shape.storage, columns, norm.added ? &added : nullptr, norm.weights, out);
}

void Decoder::execute(const DecoderStep&, const Add& sum) {
    add(storage_of(sum.target), shape.storage, own(sum.target), rows_[sum.source]);
}

void Decoder::execute(const DecoderStep&, const Scale& scaled) {
    scale(storage_of(scaled.place), own(scaled.place), scaled.factor);
}

void Decoder::execute(const DecoderStep&, const Multiply& product) {
    const int64_t outputs = product.linear.outputs();
    const Matrix& out = make(product.target, rows_[product.source].rows,
                             product.epilogue == kPlain ? outputs : outputs / 2, product.columns);
    multiply(product.linear, rows_[product.source], out, shape.storage, product.epilogue);
}

// The heads of a token are rows that their products take apart, as those with experts do.
void Decoder::execute(const DecoderStep&, const MultiplyHeads& product) {
    const Matrix source = rows_[product.source];
    const auto heads = static_cast<int64_t>(product.heads.size());
    const int64_t element = element_bytes(shape.storage), tokens = source.rows;
    const int64_t inputs = product.heads[0].weight.inputs, outputs = product.heads[0].weight.outputs;
    const Matrix by_head{source.base + product.kept * element, tokens * heads, inputs,
                         (product.kept + inputs) * element};
    head_rows_.resize(tokens * heads);
    head_begins_.resize(heads + 1);
    for (int64_t head = 0; head <= heads; ++head) head_begins_[head] = head * tokens;
    for (int64_t head = 0; head < heads; ++head)
        for (int64_t token = 0; token < tokens; ++token)
            head_rows_[head * tokens + token] = static_cast<int32_t>(token * heads + head);
    const Matrix products = room(pairs_memory_, tokens * heads, outputs, shape.storage);
    linear_by_expert(product.heads, shape.storage, by_head, {head_rows_.data(), head_begins_.data()},
                     {products.base, products.stride, outputs, nullptr, shape.storage, kPlain}, exact);
    const Matrix latent = product.latent ? rows_[*product.latent] : Matrix{};
    const int64_t appended = product.latent ? 2 * latent.width - product.kept : 0;
    const Matrix target = make(product.target, tokens, heads * (product.kept + outputs) + appended);
    constexpr int64_t kTokensPerTask = 8;
    parallel_for(static_cast<int>((tokens + kTokensPerTask - 1) / kTokensPerTask), [&](int task) {
        for (int64_t token = task * kTokensPerTask; token < std::min(tokens, (task + 1) * kTokensPerTask); ++token) {
            char* to = target.row(token);
            const auto append = [&](const char* from, int64_t width) {
                std::memcpy(to, from, width * element);
                to += width * element;
            };
            for (int64_t head = 0; head < heads; ++head) {
                append(by_head.row(token * heads + head) - product.kept * element, product.kept);
                append(products.row(head * tokens + token), outputs);
            }
            if (!product.latent) continue;
            append(latent.row(token), latent.width);
            append(latent.row(token) + product.kept * element, latent.width - product.kept);
        }
    });
}

void Decoder::execute(const DecoderStep&, const Activate& activated) {
    activate(shape.storage, activated.activation, activated.parameters.data(), rows_[activated.place]);
}

void Decoder::execute(const DecoderStep& step, const Attend& attend) {
    make(kAttended, step.num_tokens, shape.attended_width(), attend.columns);
    if (step.budgets)
        sink_queries_ = room(sink_memory_, step.num_tokens, int64_t{shape.num_heads} * shape.key_dim, shape.storage);
    rope_write(shape.storage, rotation(step, attend), step.num_tokens);
    octavo::attend(attention(step, attend));
}

void Decoder::execute(const DecoderStep&, const ScaleBySigmoid& scaled) {
    const Matrix& place = own(scaled.place);
    float* factors = scores(scaled.linear, rows_[scaled.source]);
    for (int64_t i = 0; i < place.rows; ++i) factors[i] = 1.0f / (1.0f + std::exp(-factors[i]));
    weighted_sums(shape.storage, place, 1, factors, nullptr, place);
}

// Experts multiply sorted pairs, and each row sums what its pairs gave in an order of its own.
void Decoder::execute(const DecoderStep&, const Mix& mix) {
    const Matrix source = rows_[mix.source];
    pairs_.choose(scores(mix.router, source), mix.bias, source.rows, static_cast<int>(mix.gate_up.size()),
                  mix.choice);
    const Matrix inner = make(kInner, pairs_.count(), mix.gate_up[0].weight.outputs / 2, mix.inner);
    const Matrix outer = room(pairs_memory_, pairs_.count(), mix.down[0].weight.outputs, shape.storage);
    linear_by_expert(mix.gate_up, shape.storage, source, {pairs_.sources(), pairs_.begins()},
                     {inner.base, inner.stride, inner.width, nullptr, shape.storage, mix.epilogue}, exact);
    linear_by_expert(mix.down, shape.storage, mix.inner ? gathered(kInner) : inner, {nullptr, pairs_.begins()},
                     {outer.base, outer.stride, outer.width, nullptr, shape.storage, kPlain}, exact);
    weighted_sums(shape.storage, outer, pairs_.active(), pairs_.weights(0), pairs_.places(0),
                  make(mix.target, source.rows, outer.width, mix.columns));
}

void Decoder::execute(const DecoderStep& step, const KeepRows& keep) {
    const Matrix& all = rows_[keep.place];
    // Queries, keys and values are no longer needed: rows are gathered in their memory.
    const Matrix kept = room(memory_[kQkv], step.num_logits, all.width, storage_of(keep.place));
    for (int64_t i = 0; i < step.num_logits; ++i)
        std::memcpy(kept.row(i), all.row(step.logits_indices[i]), kept.stride);
    std::swap(memory_[keep.place], memory_[kQkv]);
    rows_[keep.place] = kept;
    is_shared_[keep.place] = false;
}

void Decoder::execute(const DecoderStep&, const Gather& gather) { gathered(gather.place); }

void Decoder::logits(int64_t first, int64_t count, float* out) {
    const int64_t stride = shape.hidden * element_bytes(shape.storage);
    const Matrix hidden{memory_[kHidden].data() + first * stride, count, shape.hidden, stride};
    const Matrix rows{reinterpret_cast<char*>(out), count, shape.vocab, shape.vocab * 4};
    if (ranks) {
        const Matrix all = share(kNumRegisters, count, shape.vocab, 4);
        multiply(head, hidden, columns_of(all, first_id(), head.outputs(), 4), kF32, kPlain);
        ranks->gather(all, ids, 4);
        if (!out) return;
        parallel_for(static_cast<int>(count), [&](int i) { std::memcpy(rows.row(i), all.row(i), rows.stride); });
    } else {
        multiply(head, hidden, rows, kF32, kPlain);
    }
    if (shape.logits_scale != 1.0f) scale(kF32, rows, shape.logits_scale);
    if (shape.logits_softcap != 0.0f) softcap(rows, shape.logits_softcap);
}

void Decoder::hidden(int64_t first, int64_t count, float* out) const {
    const int64_t begin = first * shape.hidden, elements = count * shape.hidden;
    if (shape.storage == kF32) {
        std::memcpy(out, memory_[kHidden].data() + begin * 4, elements * 4);
        return;
    }
    widen(memory_[kHidden].data() + begin * 2, elements, out);
}

void Decoder::embed(const DecoderStep& step, const Matrix& residual) const {
    constexpr int64_t kTokensPerTask = 32;
    parallel_for(static_cast<int>((step.num_tokens + kTokensPerTask - 1) / kTokensPerTask), [&](int task) {
        const int64_t end = std::min(step.num_tokens, (task + 1) * kTokensPerTask);
        for (int64_t i = task * kTokensPerTask; i < end; ++i) {
            const int64_t id = step.token_ids[i] - first_id();
            if (ranks && (id < 0 || id >= head.outputs())) continue;
            if (!embedding_rows)
                unpack_row(embedding, id, kF32, residual.row(i));
            else if (shape.storage == kF32)
                std::memcpy(residual.row(i), embedding_rows + id * residual.stride, residual.stride);
            else
                widen(embedding_rows + id * shape.hidden * 2, shape.hidden, reinterpret_cast<float*>(residual.row(i)));
        }
    });
}

// Queries are rotated in place.
RopeTask Decoder::rotation(const DecoderStep& step, const Attend& attend) const {
    const LayerCache& cache = caches[attend.layer];
    const Rotation angles = attend.rotation < 0 ? Rotation{} : step.rotations[attend.rotation];
    RopeTask rope{};
    rope.qkv = rows_[kQkv].base;
    rope.qkv_stride = rows_[kQkv].stride;
    rope.kv = &cache.kv;
    rope.cos = angles.cos;
    rope.sin = angles.sin;
    rope.positions = step.positions;
    rope.slots = step.groups[cache.group].slots;
    rope.query_norm = attend.query_norm;
    rope.key_norm = attend.key_norm;
    rope.num_heads = shape.num_heads;
    rope.key_dim = shape.key_dim;
    rope.rotary_dim = angles.dim;
    rope.rotates_first = attend.rotates_first;
    if (cache.recent_blocks) {
        rope.copies = &cache.copies;
        rope.copies_slots = step.groups[cache.copies_group].slots;
    }
    if (step.budgets && cache.window == 0) {
        rope.sink_queries = sink_queries_.base;
        rope.sink_stride = sink_queries_.stride;
        rope.sink_positions = step.sink_positions;
    }
    return rope;
}

AttentionCall Decoder::attention(const DecoderStep& step, const Attend& attend) const {
    const LayerCache& cache = caches[attend.layer];
    const Matrix &qkv = rows_[kQkv], &attended = rows_[kAttended];
    const GroupTables& tables = step.groups[cache.group];
    const int64_t element = element_bytes(shape.storage);
    AttentionCall call{};
    call.kv = cache.kv;
    call.query = qkv.base;
    call.out = attended.base;
    call.query_token_stride = qkv.stride;
    call.query_head_stride = shape.key_dim * element;
    call.out_token_stride = attended.stride;
    call.out_head_stride = shape.value_dim * element;
    call.block_tables = tables.block_tables;
    call.table_rows = step.table_rows;
    call.query_start = step.query_start;
    call.context_lens = tables.context_lens ? tables.context_lens : step.context_lens;
    call.block_table_stride = tables.stride;
    call.max_blocks = tables.max_blocks;
    call.num_tokens = step.num_tokens;
    call.scale = shape.attention_scale;
    call.softcap = shape.attention_softcap;
    call.sinks = attend.sinks;
    call.num_seqs = static_cast<int>(step.num_seqs);
    call.num_heads = shape.num_heads;
    call.window = cache.window;
    call.group = group;
    call.exact = exact;
    if (step.budgets && cache.window == 0)
        call.sinks_apart = {step.budgets, sink_queries_.base, sink_queries_.stride, step.sink_tokens};
    if (step.mass_begins && cache.window == 0) call.measured = {step.mass_begins, tables.mass};
    if (step.num_read && cache.bounds.bounds) {
        call.sparse = cache.bounds;
        call.sparse.num_read = step.num_read + cache.bounds_index * step.num_seqs;
        call.sparse.num_recent = step.num_recent;
        call.sparse.completed = tables.completed;
        call.sparse.num_completed = tables.num_completed;
    }
    if (cache.recent_blocks) {
        const GroupTables& copies = step.groups[cache.copies_group];
        call.copies = {cache.copies,      copies.block_tables, copies.stride, copies.max_blocks,
                       cache.first_blocks, cache.recent_blocks};
    }
    return call;
}

void Decoder::multiply(const Linear& linear, const Matrix& x, const Matrix& out, Storage storage,
                       Epilogue epilogue) const {
    char* base = out.base;
    for (const BiasedWeight& part : linear.parts) {
        const int64_t width = epilogue == kPlain ? part.weight.outputs : part.weight.outputs / 2;
        octavo::linear(part.weight, shape.storage, x, {base, out.stride, width, part.bias, storage, epilogue}, exact);
        base += width * element_bytes(storage);
    }
}

}  // namespace octavo
