// Writing of new keys and values, which codecs encode.
#include "attention_case.h"
#include "ops.h"

namespace octavo::test {
namespace {

TEST(what_is_written_is_within_half_a_step_of_its_code) {
    for (int i = cases(40); i > 0; --i) {
        const Batch batch(i % 4 == 0);
        const int tokens = random_int(1, 40), block_size = batch.block_size, heads = random_int(1, 3);
        const int64_t blocks = tokens / block_size + 2;
        set_num_threads(random_int(1, 4));
        describe_case(batch.describe() + ", " + std::to_string(tokens) + " tokens");
        const Side keys(batch.code.key, batch.storage, true, blocks, batch.kv_heads, batch.key_dim, block_size),
            values(batch.code.value, batch.storage, false, blocks, batch.kv_heads, batch.value_dim, block_size);
        const int width = (heads + batch.kv_heads) * batch.key_dim + batch.kv_heads * batch.value_dim;
        const Buffer qkv(int64_t{tokens} * width * element_bytes(batch.storage));
        fill_normal(qkv, batch.storage);
        const LayerKV kv = layer_of(batch, keys, values, blocks);
        std::vector<int64_t> slots, positions(static_cast<size_t>(tokens), 0);
        for (int64_t slot = 0; slot < blocks * block_size; ++slot) slots.push_back(slot);
        std::shuffle(slots.begin(), slots.end(), random_engine());
        RopeTask task{};
        task.qkv = qkv.data();
        task.qkv_stride = int64_t{width} * element_bytes(batch.storage);
        task.kv = &kv;
        task.positions = positions.data();
        task.slots = slots.data();
        task.num_heads = heads;
        task.key_dim = batch.key_dim;
        rope_write(batch.storage, task, tokens);
        const auto check = [&](const Side& side, Code code, int token, int head, int first, int dim) {
            const int64_t slot = slots[static_cast<size_t>(token)], block = slot / block_size;
            const int offset = static_cast<int>(slot % block_size);
            const std::vector<double> found = side.decode(block, head, offset);
            std::vector<double> expected;
            for (int d = 0; d < dim; ++d)
                expected.push_back(load(qkv.data(), int64_t{token} * width + first + head * dim + d, batch.storage));
            if (code == kCodeInt4) rotate(expected, false);
            for (size_t d = 0; d < expected.size(); ++d) {
                // The zero point is rounded too, so that one end of int4's range may be cut off by as much again.
                const double step = side.half_step(block, head, offset, std::abs(expected[d]));
                CHECK_NEAR(found[d], expected[d], step * (code == kCodeInt4 ? 2.01 : 1.001), "a decoded dimension");
            }
        };
        for (int token = 0; token < tokens; ++token)
            for (int head = 0; head < batch.kv_heads; ++head) {
                check(keys, batch.code.key, token, head, heads * batch.key_dim, batch.key_dim);
                if (batch.latent) continue;
                check(values, batch.code.value, token, head, (heads + batch.kv_heads) * batch.key_dim, batch.value_dim);
            }
    }
}

// A NaN of either sign, as operations give them, is the largest number of fp8; integers have no codes for what is not
// finite, but a scale.
TEST(what_is_not_finite_is_stored_alike_at_every_level) {
    constexpr float kOdd[] = {NAN, -NAN, INFINITY, -INFINITY};
    for (const Code code : {kCodeE4m3, kCodeE5m2, kCodeInt8})
        for (const float odd : kOdd) {
            constexpr int kDim = 32;
            Batch batch(false);
            batch.code = {code, code, "not finite"};
            batch.storage = kF32;
            batch.key_dim = batch.value_dim = kDim;
            batch.kv_heads = 1;
            batch.block_size = 16;
            const Side keys(code, kF32, true, 1, 1, kDim, 16), values(code, kF32, false, 1, 1, kDim, 16);
            const Buffer qkv(int64_t{3} * kDim * 4);
            fill_normal(qkv, kF32);
            store(odd, qkv.data(), 2 * kDim + 5, kF32);
            const LayerKV kv = layer_of(batch, keys, values, 1);
            const int64_t slot = 3, position = 0;
            RopeTask task{};
            task.qkv = qkv.data();
            task.qkv_stride = 3 * kDim * 4;
            task.kv = &kv;
            task.positions = &position;
            task.slots = &slot;
            task.num_heads = 1;
            task.key_dim = kDim;
            rope_write(kF32, task, 1);
            const std::vector<double> found = values.decode(0, 0, static_cast<int>(slot));
            if (code == kCodeInt8) {
                for (const double x : found) CHECK(std::isnan(x));  // zero, times a scale that is not finite
                continue;
            }
            const double most = code == kCodeE4m3 ? 448.0 : 57344.0;
            CHECK(found[5] == (odd == -INFINITY ? -most : most) * kv.value_side.scale(0));
        }
}

}  // namespace
}  // namespace octavo::test
