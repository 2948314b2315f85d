// Attention over coded keys and values.
#include "coded_case.h"

namespace octavo::test {
namespace {

// The textbook's sums over what the codes stand for, one query row at a time.
void check_row(const Batch& batch, const Memory& memory, size_t seq, int query, int head) {
    const Sequence s = batch.sequences[seq];
    const int position = s.context - s.queries + query, kv_head = head / batch.group;
    const int low = batch.window ? std::max(0, position - batch.window + 1) : 0;
    const int64_t row = int64_t{memory.start(seq) + query} * batch.heads() + head;
    std::vector<double> q, weights;
    for (int d = 0; d < batch.key_dim; ++d)
        q.push_back(load(memory.query.data(), row * batch.key_dim + d, batch.storage));
    if (batch.code.key == kCodeInt4) rotate(q, false);
    double top = -INFINITY, sum = 0;
    for (int token = low; token <= position; ++token) {
        const std::vector<double> key = memory.keys.decode(memory.block(seq, token), kv_head, token % batch.block_size);
        double score = 0;
        for (size_t d = 0; d < q.size(); ++d) score += q[d] * key[d];
        score /= std::sqrt(static_cast<double>(batch.key_dim));
        if (batch.softcap > 0) score = batch.softcap * std::tanh(score / batch.softcap);
        weights.push_back(score);
        top = std::max(top, score);
    }
    for (double& weight : weights) sum += weight = std::exp(weight - top);
    std::vector<double> expected(static_cast<size_t>(batch.value_dim)), sizes(expected.size(), 1e-9);
    for (int token = low; token <= position; ++token) {
        const std::vector<double> value =
            memory.values.decode(memory.block(seq, token), kv_head, token % batch.block_size);
        for (size_t d = 0; d < value.size(); ++d) {
            expected[d] += weights[static_cast<size_t>(token - low)] / sum * value[d];
            sizes[d] += weights[static_cast<size_t>(token - low)] / sum * std::abs(value[d]);
        }
    }
    double size = 0;  // a rotation spreads the rounding of one dimension over all of them
    for (const double of : sizes) size = std::max(size, of);
    if (batch.code.value == kCodeInt4) rotate(expected, true);
    for (int d = 0; d < batch.value_dim; ++d)
        CHECK_NEAR(load(memory.out.data(), row * batch.value_dim + d, batch.storage), expected[static_cast<size_t>(d)],
                   size * (batch.storage == kBf16 ? 0x1p-6 : 0x1p-11) +
                       std::abs(expected[static_cast<size_t>(d)]) * rounding(batch.storage),
                   "dimension " + std::to_string(d) + " of head " + std::to_string(head) + " of query " +
                       std::to_string(query) + " of sequence " + std::to_string(seq));
}

TEST(attention_over_codes_agrees_with_float64) {
    for (int i = cases(40); i > 0; --i) {
        set_num_threads(random_int(1, 6));
        const Batch batch;
        const Memory memory(batch);
        AttentionCall call = memory.call();
        call.exact = i % 2 == 0;
        describe_case(batch.describe());
        attend(call);
        for (size_t seq = 0; seq < batch.sequences.size(); ++seq)
            for (int query = 0; query < batch.sequences[seq].queries; ++query)
                for (int head = 0; head < batch.heads(); ++head)
                    if (random_int(0, query + 1 == batch.sequences[seq].queries ? 3 : 30) == 0)
                        check_row(batch, memory, seq, query, head);
    }
}

// Compares the outputs of a call with those of calls for successive parts of its queries, on other numbers of threads.
// Unless exact, a lone token is computed in another way, so parts have at least two tokens.
void check_parts(const Batch& batch, Memory& memory, bool exact, const RecentCopies& copies = {}) {
    const auto attend_part = [&](AttentionCall call) {
        call.exact = exact;
        call.copies = copies;
        attend(call);
    };
    set_num_threads(1);
    attend_part(memory.call());
    const std::vector<char> expected = memory.output();
    std::memset(memory.out.data(), 0xff, static_cast<size_t>(memory.out.size()));
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

TEST(attention_over_codes_has_the_same_bits_in_any_parts_and_on_any_number_of_threads) {
    for (int i = cases(30); i > 0; --i) {
        Batch batch;
        const int context = random_int(0, 3) ? random_int(2, 200) : random_int(1025, 1500);
        batch.sequences = {{context, std::min(context, random_int(2, 60))}};
        Memory memory(batch);
        check_parts(batch, memory, i % 3 != 0);
    }
}

TEST(attention_with_copies_of_recent_blocks_has_the_same_bits_in_any_parts) {
    for (int i = cases(30); i > 0; --i) {
        Batch batch;
        batch.code = kCodes[random_int(3, 4)];
        if (batch.value_dim % 32) batch.value_dim = 64;
        const int context = random_int(0, 3) ? random_int(2, 200) : random_int(1025, 1500);
        batch.sequences = {{context, std::min(context, random_int(2, 60))}};
        Batch in_int8 = batch;
        in_int8.code = kCodes[2];
        Memory memory(batch), copied(in_int8);
        const AttentionCall call = copied.call();
        check_parts(batch, memory, i % 3 != 0,
                    {call.kv, call.block_tables, call.block_table_stride, call.max_blocks, random_int(0, 3),
                     random_int(1, 5)});
    }
}

// Values so small that most sums underflow, to zeros of either sign.
TEST(attention_over_tiny_codes_has_the_same_zeros_in_any_parts) {
    for (int i = cases(20); i > 0; --i) {
        Batch batch;
        batch.code = kCodes[random_int(0, 1)];
        batch.storage = kF32;
        const int context = random_int(2, 100);
        batch.sequences = {{context, std::min(context, random_int(2, 60))}};
        Memory memory(batch);
        memory.values.set_head_scales(std::ldexp(1.0f, batch.code.value == kCodeE4m3 ? -148 : -140));
        check_parts(batch, memory, i % 3 != 0);
    }
}

// The scale is NaN, and belongs to a token that later queries see and earlier ones do not.
TEST(a_scale_that_a_query_does_not_see_leaves_its_bits) {
    for (int i = cases(20); i > 0; --i) {
        Batch batch;
        do batch.code = random_of(kCodes);
        while (is_float8(batch.code.key) || (batch.code.value == kCodeInt4 && batch.value_dim % 32));
        const int context = random_int(2, 200);
        batch.sequences = {{context, random_int(2, std::min(context, 60))}};
        set_num_threads(random_int(1, 3));
        Memory memory(batch);
        attend(memory.call());
        const std::vector<char> sound = memory.output();
        const int queries = batch.sequences[0].queries, token = random_int(context - queries, context - 1);
        describe_case(batch.describe() + ", token " + std::to_string(token));
        for (int head = 0; head < batch.kv_heads; ++head)
            for (Side* side : {&memory.keys, &memory.values})
                side->set_scale(memory.block(0, token), head, token % batch.block_size, random_bool() ? NAN : INFINITY);
        attend(memory.call());
        const int64_t row_bytes = int64_t{batch.heads()} * batch.value_dim * element_bytes(batch.storage);
        for (int query = 0; query < queries; ++query) {
            const int position = context - queries + query;
            if (token <= position && (!batch.window || token > position - batch.window)) continue;
            CHECK(std::memcmp(memory.out.data() + query * row_bytes, &sound[static_cast<size_t>(query * row_bytes)],
                              static_cast<size_t>(row_bytes)) == 0);
        }
    }
}

}  // namespace
}  // namespace octavo::test
