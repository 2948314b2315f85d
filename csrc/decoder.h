// A whole step of a Llama-family decoder in one call.
//
//     ids -> embedding -> residual
//     each layer:   residual -> norm -> | q | k | v | -> rotate, store in blocks -> attention -> output -> +residual
//                            -> norm -> | gate | up | through the activation -> down -> +residual
//     last:         after the attention, only the rows that become logits continue -> norm -> head -> logits
//
// Activations are rounded where the Python decoder (models/decoder.py) rounds them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "kernels.h"
#include "linear.h"

namespace octavo {

// Matrices with the same inputs, whose outputs are concatenated.
struct Linear {
    struct Part {
        Weight weight;
        const char* bias;  // in the model's storage, or null
    };
    std::vector<Part> parts;
    int64_t outputs() const {
        int64_t sum = 0;
        for (const Part& part : parts) sum += part.weight.outputs;
        return sum;
    }
};

struct DecoderLayer {
    const char *input_norm, *post_attention_norm;
    const char *query_norm, *key_norm;  // or null
    Linear qkv, output, gate_up, down;  // gate_up: one part, 16 gates and 16 ups alternating
};

struct LayerCache {
    LayerKV kv;
    int group, window;  // window 0: none
    LayerKV copies{};  // see RecentCopies
    int copies_group = 0, first_blocks = 0, recent_blocks = 0;
};

struct DecoderShape {
    Storage storage;  // of activations, norms, biases and the cache
    int64_t hidden, inner, vocab;
    int num_heads, kv_heads, key_dim, value_dim;
    float eps;
    Epilogue activation;
};

struct GroupTables {
    const int32_t* block_tables;
    int64_t stride, max_blocks;
    const int64_t* slots;
};

struct DecoderStep {
    const int64_t *token_ids, *positions;
    const int32_t *query_start, *context_lens;
    const int64_t* table_rows;  // for each sequence, its row of every group's block_tables
    const GroupTables* groups;
    const float *cos, *sin;
    const int64_t* logits_indices;
    float* logits;  // [num_now][vocab] of the first num_now of num_logits rows; `Decoder::logits` computes the others
    int64_t num_tokens, num_seqs, num_logits, num_now;
    int rotary_dim;
};

class Decoder {
  public:
    DecoderShape shape;
    std::vector<DecoderLayer> layers;
    std::vector<LayerCache> caches;  // one for each layer
    Weight embedding;                // packed; unused if `embedding_rows` is set
    const char* embedding_rows = nullptr;
    const char* final_norm = nullptr;
    Linear head;
    bool exact = true;  // see `linear` and AttentionCall

    // Throws std::invalid_argument if a table names blocks that do not exist; the caller must have checked all else.
    void forward(const DecoderStep& step);

    // Logits [count][vocab] of rows [first, first + count) of the last step, which are kept until the next one.
    int64_t num_kept() const { return num_kept_; }
    void logits(int64_t first, int64_t count, float* out);
    // The head's input, [count][hidden] in float32, for rows of the same range.
    void hidden(int64_t first, int64_t count, float* out) const;

  private:
    using Buffer = StreamBuffer<char>;  // [tokens][width] activations; keeps its memory from step to step
    Buffer residual_, hidden_, qkv_, attended_, gated_;

    int64_t num_kept_ = 0;

    Matrix rows(Buffer& buffer, int64_t count, int64_t width);
    void run(const DecoderStep& step);
    void embed(const DecoderStep& step, const Matrix& residual);
    void attend(const DecoderStep& step, std::size_t layer, const Matrix& hidden, const Matrix& attended);
    RopeTask rotation(const DecoderStep& step, std::size_t layer, const Matrix& qkv) const;
    AttentionCall attention(const DecoderStep& step, std::size_t layer, const Matrix& qkv,
                            const Matrix& attended) const;
    void keep_rows(const DecoderStep& step, Matrix& matrix, Buffer& spare);
    void multiply(const Linear& linear, const Matrix& x, const Matrix& out, Storage storage, Epilogue epilogue);
};

}  // namespace octavo
