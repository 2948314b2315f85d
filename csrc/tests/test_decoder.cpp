// A whole step of a decoder: the same logits however its tokens were cut into steps.
#include <cmath>
#include <memory>
#include <vector>

#include "decoder.h"
#include "harness.h"
#include "thread_pool.h"

namespace octavo::test {
namespace {

// A small random model, its cache, and the memory of both.
class Model {
  public:
    Decoder decoder;
    static constexpr int kBlock = 16, kMaxTokens = 100, kBlocks = 2 + (kMaxTokens + kBlock - 1) / kBlock;

    Model(Storage storage, WeightFormat format) {
        const int64_t hidden = 64, inner = 96, vocab = 150;
        const int heads = 4, kv_heads = 2, key_dim = 32, value_dim = 16;
        decoder.shape = {storage, hidden, inner, vocab, heads, kv_heads, key_dim, value_dim, 1e-5f, kSiluGate};
        const int64_t pair = storage == kBf16 ? 2 : 1, element = element_bytes(storage);
        for (int index = 0; index < 3; ++index) {
            DecoderLayer layer{};
            layer.input_norm = vector(hidden, 1.0f);
            layer.post_attention_norm = vector(hidden, 1.0f);
            if (index == 1) layer.query_norm = vector(key_dim, 1.0f), layer.key_norm = vector(key_dim, 1.0f);
            // Queries, keys and values are separate, as in a GGUF file in which their formats differ.
            layer.qkv.parts = {{matrix(format, heads * key_dim, hidden), vector(heads * key_dim, 0.0f)},
                               {matrix(format, kv_heads * key_dim, hidden), nullptr},
                               {matrix(format, kv_heads * value_dim, hidden), vector(kv_heads * value_dim, 0.0f)}};
            layer.output.parts = {{matrix(format, hidden, heads * value_dim), nullptr}};
            layer.gate_up.parts = {{matrix(format, 2 * inner, hidden), nullptr}};
            layer.down.parts = {{matrix(format, hidden, inner), nullptr}};
            decoder.layers.push_back(layer);
            const int64_t head_key = int64_t{key_dim} * kBlock * element,
                          head_value = int64_t{value_dim} * kBlock * element;
            decoder.caches.push_back({{room(kBlocks * kv_heads * head_key), room(kBlocks * kv_heads * head_value),
                                       kv_heads * head_key, head_key, kv_heads * head_value, head_value, kBlocks,
                                       kv_heads, static_cast<int>(key_dim / pair), value_dim, kBlock, storage},
                                      0,
                                      index == 2 ? 20 : 0});
        }
        if (random_bool())
            decoder.embedding = matrix(format, vocab, hidden);
        else
            decoder.embedding_rows = vector(vocab * hidden, 0.0f);
        decoder.final_norm = vector(hidden, 1.0f);
        decoder.head.parts = {{matrix(format, vocab, hidden), nullptr}};
        for (int i = 0; i < 2 * kMaxTokens * key_dim / 2; ++i) angles_.push_back(random_normal() * 0.5f);
    }

    // The logits of every position of [0, count), in steps of `chunk` tokens.
    std::vector<float> logits(const std::vector<int64_t>& ids, int chunk) {
        const int64_t vocab = decoder.shape.vocab, count = static_cast<int64_t>(ids.size());
        std::vector<float> all;
        std::vector<int32_t> table;
        for (int block = kBlocks - 1; block > 0; --block) table.push_back(block);
        for (int64_t begin = 0; begin < count; begin += chunk) {
            const int64_t tokens = std::min<int64_t>(chunk, count - begin);
            std::vector<int64_t> positions, slots, indices;
            for (int64_t i = 0; i < tokens; ++i) {
                positions.push_back(begin + i);
                slots.push_back(table[static_cast<size_t>((begin + i) / kBlock)] * kBlock + (begin + i) % kBlock);
                indices.push_back(i);
            }
            const int32_t starts[] = {0, static_cast<int32_t>(tokens)},
                          context[] = {static_cast<int32_t>(begin + tokens)};
            const int64_t row = 0;
            const GroupTables groups{table.data(), static_cast<int64_t>(table.size()),
                                     static_cast<int64_t>(table.size()), slots.data()};
            const int64_t now = tokens / 2;
            const Buffer first(now * vocab * 4), rest((tokens - now) * vocab * 4);
            DecoderStep step{};
            step.token_ids = ids.data() + begin;
            step.positions = positions.data();
            step.query_start = starts;
            step.context_lens = context;
            step.table_rows = &row;
            step.groups = &groups;
            step.cos = angles_.data();
            step.sin = angles_.data() + angles_.size() / 2;
            step.logits_indices = indices.data();
            step.logits = first.as<float>();
            step.num_tokens = step.num_logits = tokens;
            step.num_seqs = 1;
            step.num_now = now;
            step.rotary_dim = decoder.shape.key_dim;
            decoder.forward(step);
            CHECK(decoder.num_kept() == tokens);
            decoder.logits(now, tokens - now, rest.as<float>());
            all.insert(all.end(), first.as<float>(), first.as<float>() + now * vocab);
            all.insert(all.end(), rest.as<float>(), rest.as<float>() + (tokens - now) * vocab);
        }
        return all;
    }

  private:
    std::vector<std::unique_ptr<Buffer>> memory_;
    std::vector<float> angles_;

    char* room(int64_t bytes) { return memory_.emplace_back(std::make_unique<Buffer>(bytes))->data(); }
    const char* vector(int64_t width, float around) {
        const Storage storage = decoder.shape.storage;
        char* to = room(width * element_bytes(storage));
        for (int64_t i = 0; i < width; ++i) store(around + 0.1f * random_normal(), to, i, storage);
        return to;
    }
    Weight matrix(WeightFormat format, int64_t outputs, int64_t inputs) {
        const int64_t row_bytes = stored_row_bytes(format, inputs);
        const Buffer rows(outputs * row_bytes);
        if (is_quantised(format)) {
            const uint16_t scale = 0x2000;  // 2^-7
            for (int64_t i = 0; i < rows.size(); ++i) rows.data()[i] = static_cast<char>(random_int(0, 255));
            const int64_t block_bytes = row_bytes / (inputs / 32);
            for (int64_t at = 0; at < rows.size(); at += block_bytes) {
                std::memcpy(rows.data() + at, &scale, 2);
                if (format == WeightFormat::q4_1) std::memset(rows.data() + at + 2, 0, 2);
            }
        } else {
            fill_normal(rows, float_storage(format), 0.1f);
        }
        const Weight weight{room(packed_bytes(format, outputs, inputs)), outputs, inputs, format};
        std::memset(weight.packed, 0, static_cast<size_t>(packed_bytes(format, outputs, inputs)));
        pack_rows(weight, rows.data(), row_bytes, outputs, {0, 1});
        return weight;
    }
};

TEST(a_decoders_logits_have_the_same_bits_however_its_prompt_is_cut) {
    constexpr WeightFormat kFormats[] = {WeightFormat::bf16, WeightFormat::q4_0, WeightFormat::q4_1,
                                         WeightFormat::q8_0};
    for (int i = cases(4); i > 0; --i) {
        const Storage storage = static_cast<Storage>(i % 2);
        const WeightFormat format =
            storage == kF32 && random_bool() ? WeightFormat::f32 : kFormats[random_int(storage == kF32, 3)];
        Model model(storage, format);
        std::vector<int64_t> ids;
        for (int token = random_int(30, Model::kMaxTokens); token > 0; --token)
            ids.push_back(random_int(0, static_cast<int>(model.decoder.shape.vocab) - 1));
        describe_case("format " + std::to_string(static_cast<int>(format)) + ", storage " + std::to_string(storage) +
                      ", " + std::to_string(ids.size()) + " tokens");
        const std::vector<float> whole = model.logits(ids, Model::kMaxTokens);
        for (const float logit : whole) CHECK(std::isfinite(logit));
        for (const int chunk : {1, random_int(2, 20), random_int(21, 60)}) {
            set_num_threads(random_int(1, 5));
            const std::vector<float> cut = model.logits(ids, chunk);
            CHECK(std::memcmp(cut.data(), whole.data(), whole.size() * 4) == 0);
        }
    }
}

}  // namespace
}  // namespace octavo::test
