// A whole step of a decoder in one call: a program over registers, which models/program.py has written.
//
//     ids -> embedding -> residual
//     each layer, usually:     residual -> norm -> multiply | q | k | v | -> attend: rotate, store in blocks, attention
//                                       -> multiply -> norm of residual + hidden -> multiply, through the activation
//                                       -> multiply
//     last:                    after the attention, only the rows that become logits continue; norm -> head -> logits
//
// Activations are rounded where the Python decoder (models/decoder.py) rounds them. The residual is in float32: what
// rounding takes from it is lost to all later layers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "experts.h"
#include "kernels.h"
#include "linear.h"
#include "ranks.h"

namespace octavo {

// Matrices with the same inputs, whose outputs are concatenated; biases are in the storage of the outputs. A gated
// product has one, of 16 gates and 16 ups alternating.
struct Linear {
    std::vector<BiasedWeight> parts;
    int64_t outputs() const {
        int64_t sum = 0;
        for (const BiasedWeight& part : parts) sum += part.weight.outputs;
        return sum;
    }
};

// Buffers of activations, [tokens][width]. A program begins with the embeddings in kResidual and ends with the head's
// input in kHidden.
enum Register { kResidual, kHidden, kBranch, kQkv, kAttended, kInner, kNumRegisters };

// The instructions, as models/program.py documents them.
struct Norm {  // in place, columns [first, first + width) may be normalised alone; the target is not kResidual
    Register source, target;
    std::optional<Register> added;
    NormWeights weights;
    int64_t first, width;
};
struct Add {
    Register target, source;
};
struct Scale {
    Register place;
    float factor;
};
struct Multiply {
    Linear linear;
    Register source, target;
    Epilogue epilogue;
    std::optional<Columns> columns;  // of the target, if other ranks compute the others
};
// Of each head of the source, the first `kept` columns as they are, and the product of the others with its own weight.
struct MultiplyHeads {
    std::vector<BiasedWeight> heads;  // all of the same shape
    Register source, target;
    int64_t kept;
    std::optional<Register> latent;  // appended whole, and again without its first `kept` columns
};
struct Activate {
    Register place;
    Activation activation;
    std::array<float, kXieluParameters> parameters;  // of kXielu
};
struct Attend {
    std::size_t layer;
    int rotation;  // index of the step's rotations; -1: none
    NormWeights query_norm, key_norm;
    bool rotates_first;  // before the norms
    const float* sinks;  // of each head, or null
    std::optional<Columns> columns;
};
struct ScaleBySigmoid {  // by the sigmoid of a product with one output
    Linear linear;
    Register source, place;
};
struct Mix {
    Linear router;
    const float* bias;  // of the router, or null
    ExpertChoice choice;
    std::vector<BiasedWeight> gate_up, down;  // of each expert
    Register source, target;
    Epilogue epilogue;
    std::optional<Columns> inner, columns;
};
struct KeepRows {  // and forgets kQkv
    Register place;
};
struct Gather {  // all ranks' columns, from here on
    Register place;
};
using Instruction = std::variant<Norm, Add, Scale, Multiply, MultiplyHeads, Activate, Attend, ScaleBySigmoid, Mix,
                                 KeepRows, Gather>;

struct LayerCache {
    LayerKV kv;
    int group, window;  // window 0: none
    LayerKV copies{};  // see RecentCopies
    int copies_group = 0, first_blocks = 0, recent_blocks = 0;
    SparseReads bounds{};  // where the bounds of its keys are; the rest is each step's
    int64_t bounds_index = 0;  // how many layers before it have bounds
};

struct DecoderShape {
    Storage storage;  // of activations but the residual, and of the cache
    int64_t hidden, vocab;
    int num_heads, kv_heads, key_dim, value_dim;
    float attention_scale, attention_softcap, logits_scale, logits_softcap;  // softcaps 0: none
    int64_t qkv_width() const { return int64_t{num_heads + kv_heads} * key_dim + int64_t{kv_heads} * value_dim; }
    int64_t attended_width() const { return int64_t{num_heads} * value_dim; }
};

struct GroupTables {
    const int32_t* block_tables;
    int64_t stride, max_blocks;
    const int64_t* slots;
    const int32_t* completed;  // see SparseReads
    int64_t num_completed;
    const int32_t* context_lens;  // of each sequence, the tokens in its table; null: all of the step's
    int64_t* mass;                // see MassReads
};

struct Rotation {
    const float *cos, *sin;  // [positions][dim / 2]
    int dim;
};

struct DecoderStep {
    const int64_t *token_ids, *positions;
    const int32_t *query_start, *context_lens;
    const int64_t* table_rows;  // for each sequence, its row of every group's block_tables
    const GroupTables* groups;
    const Rotation* rotations;
    const int64_t* logits_indices;
    float* logits;  // [num_now][vocab] of the first num_now of num_logits rows; `Decoder::logits` computes the others
    int64_t num_tokens, num_seqs, num_logits, num_now, num_rotations;
    // Of steps with sequences that keep the first tokens and the last ones (AttendTask), else null: the budget of each
    // sequence, and for each token, the position for which its queries of the sinks are rotated; its own if it sees
    // none apart.
    const int32_t* budgets;
    const int64_t* sink_positions;
    int sink_tokens;
    // See SparseReads: [layers with bounds][num_seqs] and [num_seqs]; null: all read everything.
    const int32_t *num_read, *num_recent;
    const int64_t* mass_begins;  // see MassReads; null: no attention is measured
};

class Decoder {
  public:
    DecoderShape shape;
    std::vector<Instruction> program;
    std::vector<LayerCache> caches;  // one for each layer that attends
    Weight embedding;                // packed; unused if `embedding_rows` is set
    const char* embedding_rows = nullptr;
    Linear head;
    bool exact = true;       // see `linear` and AttentionCall
    Ranks* ranks = nullptr;  // null if this process has the whole model
    Columns ids;             // of ranks: the vocabulary as columns of the logits; a rank's are its head's outputs
    int group = 0;           // of ranks: the query heads of a KV head that they have together

    // Throws std::invalid_argument if a table names blocks that do not exist; the caller must have checked all else.
    void forward(const DecoderStep& step);

    // Logits [count][vocab] of rows [first, first + count) of the last step, which are kept until the next one. Only
    // rank 0 has room for them.
    int64_t num_kept() const { return num_kept_; }
    void logits(int64_t first, int64_t count, float* out);
    // The head's input, [count][hidden] in float32, for rows of the same range.
    void hidden(int64_t first, int64_t count, float* out) const;

  private:
    using Buffer = StreamBuffer<char>;  // keeps its memory from step to step

    Matrix rows_[kNumRegisters] = {}, whole_[kNumRegisters] = {};
    const Columns* columns_[kNumRegisters] = {};  // of whole_
    bool is_shared_[kNumRegisters] = {};  // whether ranks read rows_ too, so that they must not be changed in place
    Buffer memory_[kNumRegisters], pairs_memory_, sink_memory_;
    Matrix sink_queries_ = {};  // [tokens][heads * key_dim]
    StreamBuffer<float> scores_;
    ExpertPairs pairs_;
    std::vector<int32_t> head_rows_;
    std::vector<int64_t> head_begins_;
    int64_t num_kept_ = 0;

    Storage storage_of(Register place) const { return place == kResidual ? kF32 : shape.storage; }
    Matrix room(Buffer& buffer, int64_t count, int64_t width, Storage storage) const;
    const Matrix& make(Register place, int64_t count, int64_t width, const std::optional<Columns>& columns = {});
    int64_t first_id() const { return ranks ? ids.begins[ranks->place().in_all()] : 0; }
    Matrix share(int slot, int64_t count, int64_t width, int64_t element);
    Matrix gathered(Register place);
    const Matrix& own(Register place);
    float* scores(const Linear& linear, const Matrix& x);
    void embed(const DecoderStep& step, const Matrix& residual) const;
    void execute(const DecoderStep& step, const Norm& norm);
    void execute(const DecoderStep& step, const Add& add);
    void execute(const DecoderStep& step, const Scale& scale);
    void execute(const DecoderStep& step, const Multiply& multiply);
    void execute(const DecoderStep& step, const MultiplyHeads& multiply);
    void execute(const DecoderStep& step, const Activate& activate);
    void execute(const DecoderStep& step, const Attend& attend);
    void execute(const DecoderStep& step, const ScaleBySigmoid& scaled);
    void execute(const DecoderStep& step, const Mix& mix);
    void execute(const DecoderStep& step, const KeepRows& keep);
    void execute(const DecoderStep& step, const Gather& gather);
    RopeTask rotation(const DecoderStep& step, const Attend& attend) const;
    AttentionCall attention(const DecoderStep& step, const Attend& attend) const;
    void multiply(const Linear& linear, const Matrix& x, const Matrix& out, Storage storage, Epilogue epilogue) const;
};

}  // namespace octavo
