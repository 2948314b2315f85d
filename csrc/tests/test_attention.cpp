// Attention of prompts and decodes over paged blocks, plain or coded.
#include <stdexcept>

#include "attention_case.h"

namespace octavo::test {
namespace {

// The textbook's sums over what the blocks stand for, one query row at a time.
void check_row(const Batch& batch, const Memory& memory, size_t seq, int query, int head) {
    const Sequence s = batch.sequences[seq];
    const int position = s.context - s.queries + query, kv_head = head / batch.group;
    const int low = batch.window ? std::max(0, position - batch.window + 1) : 0;
    const int64_t row = int64_t{memory.start(seq) + query} * batch.heads() + head;
    std::vector<double> q, weights;
    for (int d = 0; d < batch.key_dim; ++d)
        q.push_back(load(memory.query.data(), row * batch.key_dim + d, batch.storage));
    if (batch.code.key == kCodeInt4) rotate(q, false);
    const double sink = memory.sinks[head];
    double top = batch.with_sinks ? sink : -INFINITY, sum = 0;
    for (int token = low; token <= position; ++token) {
        const std::vector<double> key = memory.key(seq, token, kv_head);
        double score = 0;
        for (size_t d = 0; d < q.size(); ++d) score += q[d] * key[d];
        score *= double{batch.scale};
        if (batch.softcap > 0) score = batch.softcap * std::tanh(score / batch.softcap);
        weights.push_back(score);
        top = std::max(top, score);
    }
    for (double& weight : weights) sum += weight = std::exp(weight - top);
    if (batch.with_sinks) sum += std::exp(sink - top);
    std::vector<double> expected(batch.value_dim), sizes(expected.size(), 1e-9);
    for (int token = low; token <= position; ++token) {
        std::vector<double> value = memory.value(seq, token, kv_head);
        if (batch.code.value == kCodeInt4) rotate(value, true);
        for (size_t d = 0; d < value.size(); ++d) {
            expected[d] += weights[token - low] / sum * value[d];
            sizes[d] += weights[token - low] / sum * std::abs(value[d]);
        }
    }
    const double most = *std::max_element(sizes.begin(), sizes.end());
    for (size_t d = 0; d < expected.size(); ++d) {
        // Weights are rounded to the storage type, and so is the result. Scores in float32 err the more the longer
        // keys are. A rotation spreads other errors of one dimension over all of them.
        const double plain = batch.storage == kBf16 ? 0x1p-6 : std::max(batch.key_dim, 256) * 0x1p-23;
        const double bound = batch.plain() ? (sizes[d] + 1e-6) * plain
                                           : most * (batch.storage == kBf16 ? 0x1p-6 : 0x1p-11) +
                                                 std::abs(expected[d]) * rounding(batch.storage);
        CHECK_NEAR(load(memory.out.data(), row * batch.value_dim + static_cast<int64_t>(d), batch.storage), expected[d],
                   bound,
                   "dimension " + std::to_string(d) + " of head " + std::to_string(head) + " of query " +
                       std::to_string(query) + " of sequence " + std::to_string(seq));
    }
}

TEST(attention_agrees_with_float64) {
    for (int i = cases(80); i > 0; --i) {
        set_num_threads(random_int(1, 6));
        const Batch batch(i % 4 < 2);
        const Memory memory(batch);
        AttentionCall call = memory.call();
        call.exact = i % 2 == 0;
        describe_case(batch.describe() + (call.exact ? ", exact" : ""));
        attend(call);
        // Every row would take minutes: some of the last queries' and of the others'.
        for (size_t seq = 0; seq < batch.sequences.size(); ++seq)
            for (int query = 0; query < batch.sequences[seq].queries; ++query)
                for (int head = 0; head < batch.heads(); ++head)
                    if (random_int(0, query + 1 == batch.sequences[seq].queries ? 2 : 20) == 0)
                        check_row(batch, memory, seq, query, head);
    }
}

// The last place of a maximum then counts for more than what a float can hold as a power of two.
TEST(scores_of_any_size_have_finite_weights) {
    for (int i = cases(20); i > 0; --i) {
        Batch batch(true);
        batch.scale = std::ldexp(1.0f, random_int(20, 70));
        batch.softcap = 0.0f;
        set_num_threads(random_int(1, 3));
        describe_case(batch.describe() + ", scale " + std::to_string(batch.scale));
        const Memory memory(batch);
        AttentionCall call = memory.call();
        call.exact = i % 2 == 0;
        attend(call);
        for (int64_t at = 0; at < memory.out.size() / element_bytes(batch.storage); ++at)
            CHECK(std::isfinite(load(memory.out.data(), at, batch.storage)));
    }
}

TEST(attention_has_the_same_bits_on_any_number_of_threads) {
    for (int i = cases(8); i > 0; --i) {
        Batch batch(i % 4 < 2);
        batch.sequences.push_back({random_int(1025, 2100), random_int(1, 3)});  // in several splits
        describe_case(batch.describe());
        const Memory memory(batch);
        AttentionCall call = memory.call();
        call.exact = i % 2 == 0;
        set_num_threads(1);
        attend(call);
        const std::vector<char> expected = memory.output();
        for (int threads : {2, 3, 7}) {
            set_num_threads(threads);
            memory.forget_output();
            attend(call);
            CHECK(memory.output() == expected);
        }
    }
}

// Compares the outputs of a call with those of calls for successive parts of its queries, on other numbers of threads.
// Unless exact, a lone token is computed in another way, so parts have at least two tokens. With tiles, so are a few.
void check_parts(const Batch& batch, Memory& memory, bool exact, const RecentCopies& copies = {}) {
    exact = exact || kernels().pack_tile_rows;
    const auto attend_part = [&](AttentionCall call) {
        call.exact = exact;
        call.copies = copies;
        attend(call);
    };
    set_num_threads(1);
    attend_part(memory.call());
    const std::vector<char> expected = memory.output();
    memory.forget_output();
    set_num_threads(random_int(1, 7));
    describe_case(batch.describe() + (exact ? ", exact" : ""));
    const int queries = batch.sequences[0].queries, least = exact ? 1 : 2;
    for (int first = 0; first < queries;) {
        const int left = queries - first;
        int count = random_int(least, std::max(least, std::min(left, random_bool() ? 1 : 40)));
        if (left - count < least) count = left;
        attend_part(memory.part(first, count));
        first += count;
    }
    CHECK(memory.output() == expected);
}
// Makes the batch one prompt.
void make_prompt(Batch& batch, int context) { batch.sequences = {{context, std::min(context, random_int(2, 60))}}; }
int prompt_context() { return random_int(0, 3) ? random_int(2, 200) : random_int(1025, 1500); }

TEST(attention_has_the_same_bits_in_any_parts_and_on_any_number_of_threads) {
    for (int i = cases(40); i > 0; --i) {
        Batch batch(i % 4 == 0);
        make_prompt(batch, prompt_context());
        Memory memory(batch);
        check_parts(batch, memory, i % 3 != 0);
    }
}

TEST(attention_with_copies_of_recent_blocks_has_the_same_bits_in_any_parts) {
    for (int i = cases(30); i > 0; --i) {
        Batch batch(false);
        batch.code = random_bool() ? kK8V4 : kInt4;
        if (batch.value_dim % 32) batch.value_dim = 64;
        make_prompt(batch, prompt_context());
        Batch in_int8 = batch;
        in_int8.code = kInt8;
        Memory memory(batch), copied(in_int8);
        const AttentionCall call = copied.call();
        check_parts(
            batch, memory, i % 3 != 0,
            {call.kv, call.block_tables, call.block_table_stride, call.max_blocks, random_int(0, 3), random_int(1, 5)});
    }
}

TEST(decodes_of_one_sequence_together_have_the_bits_of_each_alone) {
    for (int i = cases(60); i > 0; --i) {
        Batch batch(i % 3 == 0);
        const bool with_copies = i % 5 == 0 && !batch.plain() && batch.value_dim % 32 == 0;
        if (with_copies) batch.code = random_bool() ? kK8V4 : kInt4;
        make_prompt(batch, prompt_context());
        Batch in_int8 = batch;
        in_int8.code = kInt8;
        Memory memory(batch), copied(in_int8);
        const AttentionCall of_copies = copied.call();
        const bool exact = i % 2 == 0 || kernels().pack_tile_rows;
        const auto attend_to = [&](AttentionCall call) {
            call.exact = exact;
            if (with_copies)
                call.copies = {
                    of_copies.kv, of_copies.block_tables, of_copies.block_table_stride, of_copies.max_blocks, i % 4,
                    1 + i % 3};
            attend(call);
        };
        describe_case(batch.describe() + (exact ? ", exact" : "") + (with_copies ? ", copies" : ""));
        for (int query = 0; query < batch.sequences[0].queries; ++query) attend_to(memory.part(query, 1));
        const std::vector<char> alone = memory.output();
        memory.forget_output();
        set_num_threads(random_int(1, 7));
        attend_to(memory.decodes());
        CHECK(memory.output() == alone);
    }
}

// Values so small that most sums underflow, to zeros of either sign.
TEST(attention_over_tiny_codes_has_the_same_zeros_in_any_parts) {
    for (int i = cases(20); i > 0; --i) {
        Batch batch(false);
        batch.code = random_bool() ? kE4m3 : kE5m2;
        batch.storage = kF32;
        make_prompt(batch, random_int(2, 100));
        Memory memory(batch);
        memory.values.set_head_scales(std::ldexp(1.0f, batch.code.value == kCodeE4m3 ? -148 : -140));
        check_parts(batch, memory, i % 3 != 0);
    }
}

// Queries of one prompt share a pass over its values. What only later ones see must not affect earlier ones, nor must
// what has slid out of a later one's window affect that one. Codes of fp8 are numbers always.
TEST(what_a_query_does_not_see_leaves_its_bits) {
    constexpr float kPoisons[] = {INFINITY, -INFINITY, NAN};
    for (int i = cases(60); i > 0; --i) {
        Batch batch(i % 3 < 2);
        while (is_float8(batch.code.key) || (batch.code.value == kCodeInt4 && batch.value_dim % 32))
            batch.code = random_of(kCodes);
        const int context = random_int(2, 200);
        const int queries = random_int(2, std::min(context, batch.plain() ? 200 : 60));
        batch.sequences = {{context, queries}};
        set_num_threads(random_int(1, 3));
        Memory memory(batch);
        attend(memory.call());
        const std::vector<char> sound = memory.output();
        const int token = random_int(context - queries, context - 1);
        const float poison = random_of(kPoisons);
        describe_case(batch.describe() + ", token " + std::to_string(token) + " is " + std::to_string(poison));
        memory.spoil(0, token, poison);
        memory.forget_output();
        attend(memory.call());
        for (int query = 0; query < queries; ++query)
            CHECK(batch.sees(context - queries + query, token) ||
                  std::memcmp(memory.out.data() + query * batch.row_bytes(), &sound[query * batch.row_bytes()],
                              batch.row_bytes()) == 0);
    }
}

TEST_ONCE(attention_refuses_what_does_not_exist) {
    Batch batch(true);
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
