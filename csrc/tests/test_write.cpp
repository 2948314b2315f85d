// Rotation and writing of new keys and values, which codecs encode.
#include <numeric>

#include "attention_case.h"
#include "ops.h"

namespace octavo::test {
namespace {

std::vector<int64_t> random_slots(int64_t count) {
    std::vector<int64_t> slots(count);
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), random_engine());
    return slots;
}

// Without norms and rotation.
RopeTask rope_task(const LayerKV& kv, const Buffer& qkv, int64_t stride, const std::vector<int64_t>& positions,
                   const std::vector<int64_t>& slots, int heads) {
    RopeTask task{};
    task.qkv = qkv.data();
    task.qkv_stride = stride;
    task.kv = &kv;
    task.positions = positions.data();
    task.slots = slots.data();
    task.num_heads = heads;
    task.key_dim = kv.key_dim();
    return task;
}

// Queries and keys are rotated, half a head apart, after their norms; values stay as they are.
TEST(rotation_writes_keys_and_values_to_their_slots) {
    constexpr int kBlocks[] = {16, 32, 48}, kDims[] = {16, 48, 64, 80, 128};
    for (int i = cases(30); i > 0; --i) {
        const auto storage = static_cast<Storage>(random_int(0, 1));
        const int key_dim = random_of(kDims), value_dim = random_of(kDims), heads = random_int(1, 5),
                  kv_heads = random_int(1, 3), block_size = random_of(kBlocks), tokens = random_int(0, 50);
        const int rotary = 2 * random_int(0, key_dim / 2), half = rotary / 2, num_positions = 100;
        const int width = (heads + kv_heads) * key_dim + kv_heads * value_dim;
        const int64_t num_blocks = tokens / block_size + 3,
                      stride = (width + random_int(0, 5)) * element_bytes(storage);
        const bool norms = random_bool();
        set_num_threads(random_int(1, 4));
        describe_case("storage " + std::to_string(storage) + " key " + std::to_string(key_dim) + " value " +
                      std::to_string(value_dim) + " rotary " + std::to_string(rotary) + " block " +
                      std::to_string(block_size));
        const Buffer qkv(tokens * stride), before(tokens * stride), cos(num_positions * half * 4),
            sin(num_positions * half * 4), query_norm(key_dim * element_bytes(storage)),
            key_norm(key_dim * element_bytes(storage));
        for (const Buffer* angles : {&cos, &sin}) fill_normal(*angles, kF32);
        for (const Buffer* drawn : {&qkv, &query_norm, &key_norm}) fill_normal(*drawn, storage);
        if (tokens) std::memcpy(before.data(), qkv.data(), before.size());
        const Side keys(kCodePlain, storage, true, num_blocks, kv_heads, key_dim, block_size),
            values(kCodePlain, storage, false, num_blocks, kv_heads, value_dim, block_size);
        const LayerKV kv = plain_layer(keys.codes.data(), values.codes.data(), num_blocks, kv_heads, key_dim, value_dim,
                                       block_size, storage);
        std::vector<int64_t> positions(tokens);
        for (int64_t& position : positions) position = random_int(0, num_positions - 1);
        const std::vector<int64_t> slots = random_slots(num_blocks * block_size);
        RopeTask task = rope_task(kv, qkv, stride, positions, slots, heads);
        task.cos = cos.as<float>();
        task.sin = sin.as<float>();
        task.rotary_dim = rotary;
        if (norms) {
            task.query_norm = {kRmsNorm, query_norm.data(), nullptr, 1e-5f};
            task.key_norm = {kRmsNorm, key_norm.data(), nullptr, 1e-5f};
            task.rotates_first = random_bool();
        }
        rope_write(storage, task, tokens);
        for (int token = 0; token < tokens; ++token) {
            const int64_t block = slots[token] / block_size;
            const int offset = static_cast<int>(slots[token] % block_size);
            const auto old = [&](int column) { return load(before.data() + token * stride, column, storage); };
            for (int head = 0; head < heads + kv_heads; ++head) {
                std::vector<double> x(key_dim), size(key_dim), stored;
                for (int d = 0; d < key_dim; ++d) size[d] = std::abs(x[d] = old(head * key_dim + d));
                const auto normalise = [&] {
                    double squares = 0;
                    for (const double each : x) squares += each * each;
                    for (int d = 0; d < key_dim; ++d) {
                        const double factor = load((head < heads ? query_norm : key_norm).data(), d, storage) /
                                              std::sqrt(squares / key_dim + 1e-5);
                        x[d] *= factor;
                        size[d] *= std::abs(factor);
                    }
                };
                if (norms && !task.rotates_first) normalise();
                for (int d = 0; d < half; ++d) {
                    const int64_t angle = positions[token] * half + d;
                    const double c = cos.as<float>()[angle], s = sin.as<float>()[angle], a = x[d], b = x[half + d];
                    x[d] = a * c - b * s;
                    x[half + d] = b * c + a * s;
                    size[d] = std::abs(a * c) + std::abs(b * s);
                    size[half + d] = std::abs(b * c) + std::abs(a * s);
                }
                if (norms && task.rotates_first) normalise();
                if (head >= heads) stored = keys.decode(block, head - heads, offset);
                for (int d = 0; d < key_dim; ++d) {
                    const float got = load(qkv.data() + token * stride, head * key_dim + d, storage);
                    CHECK(head < heads || stored[d] == got);
                    CHECK_NEAR(got, x[d], size[d] * (4 * rounding(storage) + 1e-6), "a rotated dimension");
                }
            }
            for (int head = 0; head < kv_heads; ++head)
                for (int d = 0; d < value_dim; ++d)
                    CHECK(values.decode(block, head, offset)[d] ==
                          old((heads + kv_heads) * key_dim + head * value_dim + d));
        }
    }
}

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
        const std::vector<int64_t> slots = random_slots(blocks * block_size), positions(tokens, 0);
        const RopeTask task = rope_task(kv, qkv, width * element_bytes(batch.storage), positions, slots, heads);
        rope_write(batch.storage, task, tokens);
        const auto check = [&](const Side& side, Code code, int token, int head, int first, int dim) {
            const int64_t slot = slots[token], block = slot / block_size;
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
            constexpr int kSlot = 3;
            rope_write(kF32, rope_task(kv, qkv, 3 * kDim * 4, {0}, {kSlot}, 1), 1);
            const std::vector<double> found = values.decode(0, 0, kSlot);
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
