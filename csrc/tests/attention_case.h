// Batches of sequences over the blocks of kv_case.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "attention.h"
#include "kv_case.h"
#include "thread_pool.h"

namespace octavo::test {

struct Sequence {
    int context, queries;
};

// Sequences have their rows of the tables in reverse order. Block 0 is the null block, which stands for blocks that no
// query of a sequence sees; one block is in no table.
class BlockTables {
  public:
    BlockTables(const std::vector<Sequence>& sequences, int block_size, int window)
        : sequences_(sequences), block_size_(block_size), window_(window), num_blocks_(2), starts_(1, 0) {
        for (const Sequence& s : sequences) {
            num_blocks_ += blocks_of(s);
            stride_ = std::max(stride_, blocks_of(s));
            starts_.push_back(starts_.back() + s.queries);
            contexts_.push_back(s.context);
            rows_.push_back(static_cast<int64_t>(sequences.size() - rows_.size() - 1));
        }
        std::vector<int32_t> free;
        for (int32_t block = 1; block < num_blocks_; ++block) free.push_back(block);
        std::shuffle(free.begin(), free.end(), random_engine());
        entries_.assign(sequences.size() * stride_, 0);
        for (size_t seq = 0; seq < sequences.size(); ++seq)
            for (int64_t index = first_seen(seq) / block_size; index < blocks_of(sequences[seq]); ++index) {
                entry(seq, index) = free.back();
                free.pop_back();
            }
    }

    int64_t num_blocks() const { return num_blocks_; }
    int num_queries() const { return starts_.back(); }
    int start(size_t seq) const { return starts_[seq]; }  // the sequence's first query
    int64_t block(size_t seq, int token) const { return entries_[at(seq, token / block_size_)]; }
    int32_t& entry(size_t seq, int64_t index) { return entries_[at(seq, index)]; }
    // The first token that any query of the sequence sees.
    int first_seen(size_t seq) const {
        const Sequence& s = sequences_[seq];
        return window_ ? std::max(0, s.context - s.queries - window_ + 1) : 0;
    }

    // Leaves the first sequence's queries [first, first + count) alone, with the context that the last one sees.
    void keep_part(int first, int count) {
        contexts_ = {sequences_[0].context - sequences_[0].queries + first + count};
        starts_ = {0, count};
    }

    // Makes each of the first sequence's queries a sequence of one token.
    void take_apart() {
        const auto [context, queries] = sequences_[0];
        contexts_.clear(), starts_ = {0};
        for (int query = 1; query <= queries; ++query) {
            contexts_.push_back(context - queries + query);
            starts_.push_back(query);
        }
        rows_.assign(contexts_.size(), rows_[0]);
    }

    void set(AttentionCall& call) const {
        call.kv.num_blocks = num_blocks_;
        call.block_tables = entries_.data();
        call.table_rows = rows_.data();
        call.query_start = starts_.data();
        call.context_lens = contexts_.data();
        call.block_table_stride = call.max_blocks = stride_;
        call.num_tokens = starts_.back();
        call.num_seqs = static_cast<int>(contexts_.size());
        call.window = window_;
    }

  private:
    int64_t blocks_of(const Sequence& s) const { return (s.context + block_size_ - 1) / block_size_; }
    size_t at(size_t seq, int64_t index) const { return (rows_[seq] * stride_ + index); }

    std::vector<Sequence> sequences_;
    int block_size_, window_;
    int64_t num_blocks_, stride_ = 0;
    std::vector<int32_t> starts_, contexts_, entries_;
    std::vector<int64_t> rows_;
};

// A batch over a shuffled pool, with blocks that are plain or in a random code. What no sequence may read is no number:
// unused blocks, the null block, tokens after a context, blocks that have slid out of a window.
class Batch {
  public:
    Codes code;
    Storage storage;
    int key_dim, value_dim, kv_heads, group, block_size, window;
    float scale, softcap;
    bool with_sinks, latent;
    std::vector<Sequence> sequences;

    explicit Batch(bool plain) {
        constexpr int kPlainKeys[] = {16, 24, 32, 48, 64, 72, 80, 128, 256},
                      kPlainValues[] = {16, 32, 64, 64, 80, 96, 128, 256},
                      kCodedDims[] = {64, 64, 128, 192, 256, 32, 80, 96}, kGroups[] = {1, 2, 3, 4, 7, 8, 20, 50},
                      kBlocks[] = {16, 16, 16, 32, 48, 128}, kWindows[] = {0, 0, 0, 1, 7, 64, 100, 300};
        code = plain ? kPlain : random_of(kCodes);
        storage = static_cast<Storage>(random_int(0, 2) == 0);
        key_dim = plain ? random_of(kPlainKeys) : random_of(kCodedDims);
        do value_dim = plain ? random_of(kPlainValues) : random_int(0, 2) ? key_dim : random_of(kCodedDims);
        while (code.value == kCodeInt4 && value_dim % 32);
        latent = plain && random_int(0, 3) == 0;
        if (latent) key_dim = random_bool() ? 80 : 576, value_dim = key_dim == 80 ? 64 : 512;
        kv_heads = random_int(1, 3);
        group = random_of(kGroups);
        block_size = random_of(kBlocks);
        window = random_of(kWindows);
        // Ten times as large, scores exceed the running maximum by more than a kernel may leave it behind.
        scale = (plain && random_int(0, 3) == 0 ? 10.0f : 1.0f) / std::sqrt(static_cast<float>(key_dim));
        softcap = random_int(0, 3) ? 0.0f : 5.0f;
        with_sinks = random_int(0, 3) == 0;
        for (int i = random_int(1, 3); i > 0; --i) {
            const int context = random_int(0, 7) ? random_int(1, 160) : random_int(500, 1300);
            sequences.push_back({context, random_bool() ? 1 : std::min(context, random_int(0, 40))});
        }
    }
    bool plain() const { return code.key == kCodePlain; }
    int heads() const { return kv_heads * group; }
    // The bytes of a token's output.
    int64_t row_bytes() const { return int64_t{heads()} * value_dim * element_bytes(storage); }
    // Whether the first sequence's query at `position` sees a token.
    bool sees(int position, int token) const { return token <= position && (!window || token > position - window); }
    std::string describe() const {
        std::string text = std::string(code.name) + ", storage " + std::to_string(storage) + " key " +
                           std::to_string(key_dim) + " value " + std::to_string(value_dim) + " kv heads " +
                           std::to_string(kv_heads) + " group " + std::to_string(group) + " block " +
                           std::to_string(block_size) + " window " + std::to_string(window) + " latent " +
                           std::to_string(latent) + " softcap " + std::to_string(softcap) + " sinks " +
                           std::to_string(with_sinks) + " threads " + std::to_string(num_threads());
        for (const Sequence& s : sequences)
            text += ", " + std::to_string(s.queries) + " of " + std::to_string(s.context);
        return text;
    }
};

inline LayerKV layer_of(const Batch& batch, const Side& keys, const Side& values, int64_t blocks) {
    LayerKV kv{};
    kv.key = keys.codes.data();
    kv.value = values.codes.data();
    kv.key_head_stride = keys.head_stride();
    kv.key_block_stride = batch.kv_heads * kv.key_head_stride;
    kv.value_head_stride = values.head_stride();
    kv.value_block_stride = batch.kv_heads * kv.value_head_stride;
    kv.num_blocks = blocks;
    kv.kv_heads = batch.kv_heads;
    kv.key_units = batch.plain() && batch.storage == kBf16 ? batch.key_dim / 2 : batch.key_dim;
    kv.value_dim = batch.value_dim;
    kv.block_size = batch.block_size;
    kv.storage = batch.storage;
    kv.key_side = keys.side();
    kv.value_side = values.side();
    if (batch.latent) {
        kv.latent = true;
        kv.value = kv.key + keys.head_stride() / batch.key_dim * (batch.key_dim - batch.value_dim);
        kv.value_head_stride = kv.key_head_stride;
        kv.value_block_stride = kv.key_block_stride;
    }
    return kv;
}

class Memory {
  public:
    explicit Memory(const Batch& batch)
        : batch_(batch),
          tables_(batch.sequences, batch.block_size, batch.window),
          keys(batch.code.key, batch.storage, true, tables_.num_blocks(), batch.kv_heads, batch.key_dim,
               batch.block_size),
          values(batch.code.value, batch.storage, false, tables_.num_blocks(), batch.kv_heads, batch.value_dim,
                 batch.block_size),
          query(int64_t{tables_.num_queries()} * batch.heads() * batch.key_dim * element_bytes(batch.storage)),
          out(tables_.num_queries() * batch.row_bytes()) {
        // Buffers hold NaN where nothing is written; or infinities.
        if (batch.plain() && random_bool())
            for (const Buffer* buffer : {&keys.codes, &values.codes})
                for (int64_t i = 0; i < buffer->size() / element_bytes(batch.storage); ++i)
                    store(random_bool() ? INFINITY : -INFINITY, buffer->data(), i, batch.storage);
        for (size_t i = 0; i < batch.sequences.size(); ++i) {
            // Half the time, the first block's tokens before the window are not written either.
            const int seen = tables_.first_seen(i);
            for (int token = random_bool() ? seen : seen / batch.block_size * batch.block_size;
                 token < batch.sequences[i].context; ++token)
                for (int head = 0; head < batch.kv_heads; ++head) {
                    keys.draw(block(i, token), head, token % batch.block_size);
                    values.draw(block(i, token), head, token % batch.block_size);
                }
        }
        fill_normal(query, batch.storage, batch.plain() ? 1.0f : 0.05f);
        for (int head = 0; head < batch.heads(); ++head) sinks.push_back(random_normal());
    }
    int64_t block(size_t seq, int token) const { return tables_.block(seq, token); }
    std::vector<double> key(size_t seq, int token, int head) const {
        return keys.decode(block(seq, token), head, token % batch_.block_size);
    }
    std::vector<double> value(size_t seq, int token, int head) const {
        if (!batch_.latent) return values.decode(block(seq, token), head, token % batch_.block_size);
        const std::vector<double> whole = key(seq, token, head);
        return {whole.end() - batch_.value_dim, whole.end()};
    }
    int32_t& table_entry(size_t seq, int64_t index) { return tables_.entry(seq, index); }
    void spoil(size_t seq, int token, float with) {
        for (int head = 0; head < batch_.kv_heads; ++head)
            for (Side* side : {&keys, &values}) side->spoil(block(seq, token), head, token % batch_.block_size, with);
    }
    // The call for the first sequence's queries [first, first + count) alone, with the context that the last one sees.
    AttentionCall part(int first, int count) {
        tables_.keep_part(first, count);
        AttentionCall part = call();
        part.query += first * part.query_token_stride;
        part.out += first * part.out_token_stride;
        return part;
    }
    // The call for the first sequence's queries as decodes.
    AttentionCall decodes() {
        tables_.take_apart();
        return call();
    }
    AttentionCall call() const {
        AttentionCall call{};
        call.kv = layer_of(batch_, keys, values, tables_.num_blocks());
        tables_.set(call);
        call.query = query.data();
        call.out = out.data();
        call.query_head_stride = batch_.key_dim * element_bytes(batch_.storage);
        call.query_token_stride = batch_.heads() * call.query_head_stride;
        call.out_head_stride = batch_.value_dim * element_bytes(batch_.storage);
        call.out_token_stride = batch_.row_bytes();
        call.scale = batch_.scale;
        call.softcap = batch_.softcap;
        call.num_heads = batch_.heads();
        call.sinks = batch_.with_sinks ? sinks.data() : nullptr;
        return call;
    }
    std::vector<char> output() const { return {out.data(), out.data() + out.size()}; }
    void forget_output() const { std::memset(out.data(), 0xff, out.size()); }
    int start(size_t seq) const { return tables_.start(seq); }

  private:
    const Batch& batch_;
    BlockTables tables_;

  public:
    Side keys, values;
    const Buffer query, out;
    std::vector<float> sinks;
};

}  // namespace octavo::test
