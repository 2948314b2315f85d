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
        const int heads = 4, kv_heads = 2, key_dim = 32, value_dim = 16;
        const float score_cap = random_bool() ? 20.0f : 0.0f, logits_cap = random_bool() ? 5.0f : 0.0f;
        decoder.shape = {storage,   kHiddenWidth, 150,       heads, kv_heads,  key_dim,
                         value_dim, 0.2f,         score_cap, 0.5f,  logits_cap};
        const int64_t element = element_bytes(storage);
        decoder.program.emplace_back(Scale{kResidual, 1.5f});
        const bool norms_after = random_bool(), parallel = random_bool(), gated = random_bool();
        for (int index = 0; index < 3; ++index) {
            add_norm(kResidual, kHidden);
            // Queries, keys and values are separate, as in a GGUF file in which their formats differ.
            add_product({{{matrix(format, heads * key_dim, kHiddenWidth), vector(heads * key_dim, 0.0f)},
                          {matrix(format, kv_heads * key_dim, kHiddenWidth), nullptr},
                          {matrix(format, kv_heads * value_dim, kHiddenWidth), vector(kv_heads * value_dim, 0.0f)}}},
                        kHidden, kQkv);
            Attend attend{static_cast<std::size_t>(index), index == 1 ? -1 : 0, {}, {}, random_bool()};
            if (index == 1) attend.query_norm = norm(key_dim), attend.key_norm = norm(key_dim);
            if (index == 2) add_norm(kQkv, kQkv, heads * key_dim, kv_heads * key_dim);
            decoder.program.emplace_back(attend);
            if (index == 2)
                for (const Register place : {kResidual, kAttended, kHidden})
                    if (place != kHidden || parallel) decoder.program.emplace_back(KeepRows{place});
            const Register branch = parallel ? kBranch : kHidden;
            add_product({{{matrix(format, kHiddenWidth, heads * value_dim), nullptr}}}, kAttended, branch);
            if (norms_after) add_norm(branch, branch);
            if (parallel)
                decoder.program.emplace_back(Add{kResidual, kBranch});
            else
                add_norm(kResidual, kHidden, 0, kHiddenWidth, kHidden);
            const auto activation = static_cast<Activation>(random_int(0, gated ? kNumGates - 1 : kNumActivations - 1));
            add_product({{{matrix(format, (gated ? 2 : 1) * kInnerWidth, kHiddenWidth), nullptr}}}, kHidden, kInner,
                        gated ? static_cast<Epilogue>(kSiluGate + activation) : kPlain);
            if (!gated) decoder.program.emplace_back(Activate{kInner, activation, {0.8f, 0.9f, 0.5f}});
            add_product({{{matrix(format, kHiddenWidth, kInnerWidth), nullptr}}}, kInner, kHidden);
            if (norms_after) add_norm(kHidden, kHidden);
            decoder.program.emplace_back(Add{kResidual, kHidden});
            const int64_t tokens = int64_t{kBlocks} * kBlock * kv_heads;
            decoder.caches.push_back({plain_layer(room(tokens * key_dim * element), room(tokens * value_dim * element),
                                                  kBlocks, kv_heads, key_dim, value_dim, kBlock, storage),
                                      0, index == 2 ? 20 : 0});
        }
        add_norm(kResidual, kHidden);
        if (random_bool())
            decoder.embedding = matrix(format, decoder.shape.vocab, kHiddenWidth);
        else
            decoder.embedding_rows = vector(decoder.shape.vocab * kHiddenWidth, 0.0f);
        decoder.head.parts = {{matrix(format, decoder.shape.vocab, kHiddenWidth), nullptr}};
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
                slots.push_back(table[(begin + i) / kBlock] * kBlock + (begin + i) % kBlock);
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
            const Rotation rotation{angles_.data(), angles_.data() + angles_.size() / 2, decoder.shape.key_dim};
            step.rotations = &rotation;
            step.logits_indices = indices.data();
            step.logits = first.as<float>();
            step.num_tokens = step.num_logits = tokens;
            step.num_seqs = 1;
            step.num_now = now;
            decoder.forward(step);
            CHECK(decoder.num_kept() == tokens);
            decoder.logits(now, tokens - now, rest.as<float>());
            all.insert(all.end(), first.as<float>(), first.as<float>() + now * vocab);
            all.insert(all.end(), rest.as<float>(), rest.as<float>() + (tokens - now) * vocab);
        }
        return all;
    }

  private:
    static constexpr int64_t kHiddenWidth = 64, kInnerWidth = 96;
    std::vector<std::unique_ptr<Buffer>> memory_;
    std::vector<float> angles_;

    NormWeights norm(int64_t width) {
        const auto kind = static_cast<NormKind>(random_int(0, kNumNormKinds - 1));
        const char* bias = kind == kLayerNorm && random_bool() ? vector(width, 0.0f, kF32) : nullptr;
        const char* weight = vector(width, 1.0f, kind == kRmsNorm ? decoder.shape.storage : kF32);
        return {kind, weight, reinterpret_cast<const float*>(bias), 1e-5f};
    }
    void add_norm(Register source, Register target, int64_t first = 0, int64_t width = kHiddenWidth,
                  std::optional<Register> added = {}) {
        decoder.program.emplace_back(Norm{source, target, added, norm(width), first, width});
    }
    void add_product(Linear linear, Register source, Register target, Epilogue epilogue = kPlain) {
        decoder.program.emplace_back(Multiply{std::move(linear), source, target, epilogue});
    }
    char* room(int64_t bytes) { return memory_.emplace_back(std::make_unique<Buffer>(bytes))->data(); }
    const char* vector(int64_t width, float around) { return vector(width, around, decoder.shape.storage); }
    const char* vector(int64_t width, float around, Storage storage) {
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
        std::memset(weight.packed, 0, packed_bytes(format, outputs, inputs));
        pack_rows(weight, rows.data(), row_bytes, outputs, {0, 1});
        return weight;
    }
};

TEST(a_decoders_logits_have_the_same_bits_however_its_prompt_is_cut) {
    constexpr WeightFormat kFormats[] = {WeightFormat::bf16, WeightFormat::q4_0, WeightFormat::q4_1,
                                         WeightFormat::q8_0};
    for (int i = cases(8); i > 0; --i) {
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
