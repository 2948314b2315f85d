// Attention of prompts and decodes over paged blocks.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "attention.h"
#include "block_tables.h"
#include "harness.h"
#include "thread_pool.h"

namespace octavo::test {
namespace {

// A batch over a shuffled pool of blocks. What no sequence may read holds NaN or infinities: unused blocks, the null
// block, tokens after a context, blocks that have slid out of a window.
class Batch {
  public:
    Storage storage;
    int key_dim, value_dim, kv_heads, group, block_size, window;
    float scale, softcap;
    bool with_sinks;
    std::vector<Sequence> sequences;

    int heads() const { return kv_heads * group; }
    int pair() const { return storage == kBf16 ? 2 : 1; }
    int element() const { return element_bytes(storage); }
    int64_t key_head() const { return int64_t{key_dim} * block_size * element(); }
    int64_t value_head() const { return int64_t{value_dim} * block_size * element(); }
    int64_t key_index(int64_t token, int dim) const {  // within a head of a block, in elements
        return (int64_t{dim / pair()} * block_size + token) * pair() + dim % pair();
    }
    int64_t value_index(int64_t token, int dim) const {
        return token / pair() * value_dim * pair() + int64_t{dim} * pair() + token % pair();
    }
    std::string describe() const {
        std::string text = "storage " + std::to_string(storage) + " key " + std::to_string(key_dim) + " value " +
                           std::to_string(value_dim) + " kv heads " + std::to_string(kv_heads) + " group " +
                           std::to_string(group) + " block " + std::to_string(block_size) + " window " +
                           std::to_string(window) + " softcap " + std::to_string(softcap) + " sinks " +
                           std::to_string(with_sinks) + " threads " + std::to_string(num_threads());
        return text + test::describe(sequences);
    }
};

Batch draw_batch() {
    constexpr int kKeyDims[] = {16, 24, 32, 48, 64, 72, 80, 128, 256},
                  kValueDims[] = {16, 32, 64, 64, 80, 96, 128, 256};
    constexpr int kGroups[] = {1, 2, 3, 4, 5, 7, 8, 50}, kBlocks[] = {16, 16, 16, 32, 48, 128},
                  kWindows[] = {0, 0, 0, 1, 7, 64, 100, 300};
    Batch batch{};
    batch.storage = static_cast<Storage>(random_int(0, 1));
    batch.key_dim = random_of(kKeyDims);
    batch.value_dim = random_of(kValueDims);
    batch.kv_heads = random_int(1, 3);
    batch.group = random_of(kGroups);
    batch.block_size = random_of(kBlocks);
    batch.window = random_of(kWindows);
    // Ten times as large, scores exceed the running maximum by more than a kernel may leave it behind.
    batch.scale = (random_int(0, 3) ? 1.0f : 10.0f) / std::sqrt(static_cast<float>(batch.key_dim));
    batch.softcap = random_int(0, 3) ? 0.0f : 5.0f;
    batch.with_sinks = random_int(0, 3) == 0;
    for (int i = random_int(1, 4); i > 0; --i) {
        const int context = random_int(0, 7) ? random_int(1, 160) : random_int(500, 1300);
        batch.sequences.push_back({context, random_bool() ? 1 : std::min(context, random_int(0, 40))});
    }
    return batch;
}

class Memory {
  public:
    explicit Memory(const Batch& batch)
        : batch_(batch),
          tables_(batch.sequences, batch.block_size, batch.window),
          key(tables_.num_blocks() * batch.kv_heads * batch.key_head()),
          value(tables_.num_blocks() * batch.kv_heads * batch.value_head()),
          query(int64_t{tables_.num_queries()} * batch.heads() * batch.key_dim * batch.element()),
          out(int64_t{tables_.num_queries()} * batch.heads() * batch.value_dim * batch.element()) {
        // Infinities, or NaN (0xff everywhere), where nothing is written.
        if (random_bool())
            for (const Buffer* buffer : {&key, &value})
                for (int64_t i = 0; i < buffer->size() / batch.element(); ++i)
                    store(random_bool() ? INFINITY : -INFINITY, buffer->data(), i, batch.storage);
        for (size_t seq = 0; seq < batch.sequences.size(); ++seq) {
            // Half the time, the first block's tokens before the window are not written either.
            const int seen = tables_.first_seen(seq);
            for (int token = random_bool() ? seen : seen / batch.block_size * batch.block_size;
                 token < batch.sequences[seq].context; ++token)
                write_token(seq, token);
        }
        fill_normal(query, batch.storage);
        for (int head = 0; head < batch.heads(); ++head) sinks_.push_back(random_normal());
    }

    float& sink(int head) { return sinks_[static_cast<size_t>(head)]; }
    float key_at(size_t seq, int token, int head, int dim) const {
        return load(key.data() + block(seq, token, head, batch_.key_head()),
                    batch_.key_index(token % batch_.block_size, dim), batch_.storage);
    }
    float value_at(size_t seq, int token, int head, int dim) const {
        return load(value.data() + block(seq, token, head, batch_.value_head()),
                    batch_.value_index(token % batch_.block_size, dim), batch_.storage);
    }
    void poison(size_t seq, int token, float with) {
        for (int head = 0; head < batch_.kv_heads; ++head) {
            for (int dim = 0; dim < batch_.key_dim; ++dim)
                store(with, key.data() + block(seq, token, head, batch_.key_head()),
                      batch_.key_index(token % batch_.block_size, dim), batch_.storage);
            for (int dim = 0; dim < batch_.value_dim; ++dim)
                store(with, value.data() + block(seq, token, head, batch_.value_head()),
                      batch_.value_index(token % batch_.block_size, dim), batch_.storage);
        }
    }

    // The call for the whole batch.
    AttentionCall call() const {
        AttentionCall call{};
        const int64_t element = batch_.element();
        call.kv = {key.data(),
                   value.data(),
                   batch_.kv_heads * batch_.key_head(),
                   batch_.key_head(),
                   batch_.kv_heads * batch_.value_head(),
                   batch_.value_head(),
                   tables_.num_blocks(),
                   batch_.kv_heads,
                   batch_.key_dim / batch_.pair(),
                   batch_.value_dim,
                   batch_.block_size,
                   batch_.storage};
        call.query = query.data();
        call.out = out.data();
        call.query_head_stride = batch_.key_dim * element;
        call.query_token_stride = batch_.heads() * call.query_head_stride;
        call.out_head_stride = batch_.value_dim * element;
        call.out_token_stride = batch_.heads() * call.out_head_stride;
        tables_.set(call);
        call.sinks = batch_.with_sinks ? sinks_.data() : nullptr;
        call.scale = batch_.scale;
        call.softcap = batch_.softcap;
        call.num_heads = batch_.heads();
        return call;
    }

    int start(size_t seq) const { return tables_.start(seq); }
    int32_t& table_entry(size_t seq, int64_t block) { return tables_.entry(seq, block); }

  private:
    const Batch& batch_;
    BlockTables tables_;
    std::vector<float> sinks_;

  public:
    const Buffer key, value, query, out;

  private:
    int64_t block(size_t seq, int token, int head, int64_t head_bytes) const {
        return (tables_.block(seq, token) * batch_.kv_heads + head) * head_bytes;
    }
    void write_token(size_t seq, int token) {
        for (int head = 0; head < batch_.kv_heads; ++head) {
            for (int dim = 0; dim < batch_.key_dim; ++dim)
                store(random_normal(), key.data() + block(seq, token, head, batch_.key_head()),
                      batch_.key_index(token % batch_.block_size, dim), batch_.storage);
            for (int dim = 0; dim < batch_.value_dim; ++dim)
                store(random_normal(), value.data() + block(seq, token, head, batch_.value_head()),
                      batch_.value_index(token % batch_.block_size, dim), batch_.storage);
        }
    }
};

// Compares with the textbook's sums, one query row at a time.
void check_rows(const Batch& batch, Memory& memory) {
    for (size_t seq = 0; seq < batch.sequences.size(); ++seq) {
        const Sequence s = batch.sequences[seq];
        for (int query = 0; query < s.queries; ++query)
            for (int head = 0; head < batch.heads(); ++head) {
                // Every row would take minutes: only the first, the last and some in between.
                if (query != 0 && query + 1 != s.queries && random_int(0, 9)) continue;
                const int position = s.context - s.queries + query, kv_head = head / batch.group;
                const int low = batch.window ? std::max(0, position - batch.window + 1) : 0;
                const int64_t row = int64_t{memory.start(seq) + query} * batch.heads() + head;
                std::vector<double> weights;
                double top = batch.with_sinks ? memory.sink(head) : -INFINITY, sum = 0;
                for (int token = low; token <= position; ++token) {
                    double score = 0;
                    for (int dim = 0; dim < batch.key_dim; ++dim)
                        score += double{load(memory.query.data(), row * batch.key_dim + dim, batch.storage)} *
                                 memory.key_at(seq, token, kv_head, dim);
                    score *= batch.scale;
                    if (batch.softcap > 0) score = batch.softcap * std::tanh(score / batch.softcap);
                    weights.push_back(score);
                    top = std::max(top, score);
                }
                for (double& weight : weights) sum += weight = std::exp(weight - top);
                if (batch.with_sinks) sum += std::exp(memory.sink(head) - top);
                for (int dim = 0; dim < batch.value_dim; ++dim) {
                    double expected = 0, size = 1e-6;
                    for (int token = low; token <= position; ++token) {
                        const double term =
                            weights[static_cast<size_t>(token - low)] / sum * memory.value_at(seq, token, kv_head, dim);
                        expected += term;
                        size += std::abs(term);
                    }
                    const float got = load(memory.out.data(), row * batch.value_dim + dim, batch.storage);
                    // Weights are rounded to the storage type, and so is the result.
                    CHECK_NEAR(got, expected, size * (batch.storage == kBf16 ? 0x1p-6 : 0x1p-15),
                               "dimension " + std::to_string(dim) + " of head " + std::to_string(head) + " of query " +
                                   std::to_string(query) + " of sequence " + std::to_string(seq));
                }
            }
    }
}

TEST(attention_agrees_with_float64) {
    for (int i = cases(40); i > 0; --i) {
        set_num_threads(random_int(1, 6));
        const Batch batch = draw_batch();
        Memory memory(batch);
        AttentionCall call = memory.call();
        call.exact = i % 2 == 0;
        describe_case(batch.describe() + (call.exact ? ", exact" : ""));
        attend(call);
        check_rows(batch, memory);
    }
}

// The last place of a maximum then counts for more than what a float can hold as a power of two.
TEST(scores_of_any_size_have_finite_weights) {
    for (int i = cases(20); i > 0; --i) {
        Batch batch = draw_batch();
        batch.scale = std::ldexp(1.0f, random_int(20, 70));
        batch.softcap = 0.0f;
        set_num_threads(random_int(1, 3));
        describe_case(batch.describe() + ", scale " + std::to_string(batch.scale));
        const Memory memory(batch);
        AttentionCall call = memory.call();
        call.exact = i % 2 == 0;
        attend(call);
        for (int64_t at = 0; at < memory.out.size() / batch.element(); ++at)
            CHECK(std::isfinite(load(memory.out.data(), at, batch.storage)));
    }
}

TEST(attention_has_the_same_bits_on_any_number_of_threads) {
    for (int i = cases(8); i > 0; --i) {
        Batch batch = draw_batch();
        batch.sequences.push_back({random_int(1025, 2100), random_int(1, 3)});  // in several splits
        describe_case(batch.describe());
        const Memory memory(batch);
        AttentionCall call = memory.call();
        call.exact = i % 2 == 0;
        set_num_threads(1);
        attend(call);
        const std::vector<char> expected(memory.out.data(), memory.out.data() + memory.out.size());
        for (int threads : {2, 3, 7}) {
            set_num_threads(threads);
            std::memset(memory.out.data(), 0xff, static_cast<size_t>(memory.out.size()));
            attend(call);
            CHECK(std::memcmp(memory.out.data(), expected.data(), expected.size()) == 0);
        }
    }
}

// Queries of one prompt share a pass over its values. What only later ones see must not affect earlier ones, nor must
// what has slid out of a later one's window affect that one.
TEST(what_a_query_does_not_see_leaves_its_bits) {
    constexpr float kPoisons[] = {INFINITY, -INFINITY, NAN};
    for (int i = cases(40); i > 0; --i) {
        Batch batch = draw_batch();
        const int context = random_int(2, 200);
        batch.sequences = {{context, random_int(2, context)}};
        set_num_threads(random_int(1, 3));
        Memory memory(batch);
        attend(memory.call());
        const std::vector<char> sound(memory.out.data(), memory.out.data() + memory.out.size());
        const int queries = batch.sequences[0].queries;
        const int token = random_int(context - queries, context - 1);
        const float poison = random_of(kPoisons);
        describe_case(batch.describe() + ", token " + std::to_string(token) + " is " + std::to_string(poison));
        memory.poison(0, token, poison);
        std::memset(memory.out.data(), 0xff, static_cast<size_t>(memory.out.size()));
        attend(memory.call());
        const int64_t row_bytes = int64_t{batch.heads()} * batch.value_dim * batch.element();
        for (int query = 0; query < queries; ++query) {
            const int position = context - queries + query;
            if (token <= position && (!batch.window || token > position - batch.window)) continue;
            CHECK(std::memcmp(memory.out.data() + query * row_bytes, &sound[static_cast<size_t>(query * row_bytes)],
                              static_cast<size_t>(row_bytes)) == 0);
        }
    }
}

TEST_ONCE(attention_refuses_what_does_not_exist) {
    Batch batch = draw_batch();
    batch.window = 0;
    batch.sequences = {{40, 3}, {50, 1}};
    const auto message = [](const AttentionCall& call) -> std::string {
        try {
            attend(call);
        } catch (const std::invalid_argument& error) {
            return error.what();
        }
        return "";
    };
    Memory memory(batch);
    CHECK(message(memory.call()).empty());
    AttentionCall call = memory.call();
    call.max_blocks = 0;
    CHECK(message(call).find("its table has 0") != std::string::npos);
    call = memory.call();
    call.num_tokens = 3;
    CHECK(message(call).find("tokens 3 to 4 of 3") != std::string::npos);
    memory.table_entry(1, 0) = 1000000;
    CHECK(message(memory.call()).find("refers to block 1000000") != std::string::npos);
    memory.table_entry(1, 0) = -1;
    CHECK(message(memory.call()).find("refers to block -1") != std::string::npos);
}

}  // namespace
}  // namespace octavo::test
