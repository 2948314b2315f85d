#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "level/simd/common.h"
#include "thread_pool.h"

namespace octavo {
namespace {

int64_t element_bytes(Storage storage) { return storage == kBf16 ? 2 : 4; }

}  // namespace

Matrix Decoder::rows(Buffer& buffer, int64_t count, int64_t width) {
    const int64_t stride = width * element_bytes(shape.storage);
    if (static_cast<int64_t>(buffer.size()) < count * stride) buffer.resize(count * stride);
    return {buffer.data(), count, width, stride};
}

void Decoder::forward(const DecoderStep& step) {
    wake_threads();
    run(step);
}

void Decoder::run(const DecoderStep& step) {
    const int64_t tokens = step.num_tokens;
    Matrix residual = rows(residual_, tokens, shape.hidden), hidden = rows(hidden_, tokens, shape.hidden);
    Matrix attended = rows(attended_, tokens, int64_t{shape.num_heads} * shape.value_dim);
    const Storage storage = shape.storage;
    embed(step, residual);
    rms_norm(storage, residual, nullptr, layers[0].input_norm, hidden, shape.eps);
    for (std::size_t index = 0; index < layers.size(); ++index) {
        const DecoderLayer& layer = layers[index];
        const bool last = index + 1 == layers.size();
        attend(step, index, hidden, attended);
        if (last) {
            // Every key and value is stored by now: only the rows that become logits need the rest.
            keep_rows(step, attended, qkv_);
            keep_rows(step, residual, attended_);
            hidden = rows(hidden_, step.num_logits, shape.hidden);
        }
        multiply(layer.output, attended, hidden, storage, kPlain);
        rms_norm(storage, residual, &hidden, layer.post_attention_norm, hidden, shape.eps);
        const Matrix gated = rows(gated_, residual.rows, shape.inner);
        multiply(layer.gate_up, hidden, gated, storage, shape.activation);
        multiply(layer.down, gated, hidden, storage, kPlain);
        rms_norm(storage, residual, &hidden, last ? final_norm : layers[index + 1].input_norm, hidden, shape.eps);
    }
    num_kept_ = step.num_logits;
    logits(0, step.num_now, step.logits);
}

void Decoder::logits(int64_t first, int64_t count, float* out) {
    const int64_t stride = shape.hidden * element_bytes(shape.storage);
    const Matrix hidden{hidden_.data() + first * stride, count, shape.hidden, stride};
    multiply(head, hidden, {reinterpret_cast<char*>(out), count, shape.vocab, shape.vocab * 4}, kF32, kPlain);
}

void Decoder::hidden(int64_t first, int64_t count, float* out) const {
    const int64_t begin = first * shape.hidden, elements = count * shape.hidden;
    if (shape.storage == kF32) {
        std::memcpy(out, hidden_.data() + begin * 4, elements * 4);
        return;
    }
    for (int64_t i = 0; i < elements; ++i) {
        portable::bf16 value;
        std::memcpy(&value, hidden_.data() + (begin + i) * 2, sizeof value);
        out[i] = portable::bf16_to_float(value);
    }
}

void Decoder::embed(const DecoderStep& step, const Matrix& residual) {
    constexpr int64_t kTokensPerTask = 32;
    parallel_for(static_cast<int>((step.num_tokens + kTokensPerTask - 1) / kTokensPerTask), [&](int task) {
        const int64_t end = std::min(step.num_tokens, (task + 1) * kTokensPerTask);
        for (int64_t i = task * kTokensPerTask; i < end; ++i) {
            const int64_t id = step.token_ids[i];
            if (embedding_rows)
                std::memcpy(residual.row(i), embedding_rows + id * residual.stride, residual.stride);
            else
                unpack_row(embedding, id, shape.storage, residual.row(i));
        }
    });
}

// `qkv` is rotated in place.
RopeTask Decoder::rotation(const DecoderStep& step, std::size_t index, const Matrix& qkv) const {
    const DecoderLayer& layer = layers[index];
    const LayerCache& cache = caches[index];
    RopeTask rope{};
    rope.qkv = qkv.base;
    rope.qkv_stride = qkv.stride;
    rope.kv = &cache.kv;
    rope.cos = step.cos;
    rope.sin = step.sin;
    rope.positions = step.positions;
    rope.slots = step.groups[cache.group].slots;
    rope.query_norm = layer.query_norm;
    rope.key_norm = layer.key_norm;
    rope.norm_eps = shape.eps;
    rope.num_heads = shape.num_heads;
    rope.key_dim = shape.key_dim;
    rope.rotary_dim = step.rotary_dim;
    if (cache.recent_blocks) {
        rope.copies = &cache.copies;
        rope.copies_slots = step.groups[cache.copies_group].slots;
    }
    return rope;
}

AttentionCall Decoder::attention(const DecoderStep& step, std::size_t index, const Matrix& qkv,
                                 const Matrix& attended) const {
    const LayerCache& cache = caches[index];
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
    call.context_lens = step.context_lens;
    call.block_table_stride = tables.stride;
    call.max_blocks = tables.max_blocks;
    call.num_tokens = step.num_tokens;
    call.scale = 1.0f / std::sqrt(static_cast<float>(shape.key_dim));
    call.num_seqs = static_cast<int>(step.num_seqs);
    call.num_heads = shape.num_heads;
    call.window = cache.window;
    call.exact = exact;
    if (cache.recent_blocks) {
        const GroupTables& copies = step.groups[cache.copies_group];
        call.copies = {cache.copies,      copies.block_tables, copies.stride, copies.max_blocks,
                       cache.first_blocks, cache.recent_blocks};
    }
    return call;
}

void Decoder::attend(const DecoderStep& step, std::size_t index, const Matrix& hidden, const Matrix& attended) {
    const Linear& projection = layers[index].qkv;
    const Matrix qkv = rows(qkv_, step.num_tokens, projection.outputs());
    multiply(projection, hidden, qkv, shape.storage, kPlain);
    rope_write(shape.storage, rotation(step, index, qkv), step.num_tokens);
    octavo::attend(attention(step, index, qkv, attended));
}

// Copies the rows that become logits to `spare`, whose contents are no longer needed, and points `matrix` to them.
void Decoder::keep_rows(const DecoderStep& step, Matrix& matrix, Buffer& spare) {
    const Matrix kept = rows(spare, step.num_logits, matrix.width);
    for (int64_t i = 0; i < step.num_logits; ++i)
        std::memcpy(kept.row(i), matrix.row(step.logits_indices[i]), kept.stride);
    matrix = kept;
}

void Decoder::multiply(const Linear& linear, const Matrix& x, const Matrix& out, Storage storage, Epilogue epilogue) {
    char* base = out.base;
    for (const Linear::Part& part : linear.parts) {
        const int64_t width = epilogue == kPlain ? part.weight.outputs : part.weight.outputs / 2;
        octavo::linear(part.weight, shape.storage, x, {base, out.stride, width, part.bias, storage, epilogue}, exact);
        base += width * element_bytes(storage);
    }
}

}  // namespace octavo
