// The kernels: one table of functions per instruction-set level. They run on the calling thread; ops.cpp,
// ops_linear.cpp and attention.cpp split the work and hand the pieces to threads.
#pragma once

#include <cstdint>

namespace octavo {

// From slowest to fastest. The emulated level runs AMX's tile arithmetic on any machine, for tests; it is never chosen
// automatically.
// clang-format off
enum Isa {
    kPortable, kAmxEmulated,
    kAvx2, kAvx2Vnni, kAvx512, kAvx512Vnni, kAvx512Bf16, kAmx,  // x86-64
    kNeon, kNeonBf16,                                           // Arm, 64 bits
    kNumIsas
};
// clang-format on
enum Storage { kBf16, kF32, kNumStorages };  // what tensors hold; arithmetic is in float32
enum Activation { kSilu, kGeluTanh, kNumActivations };

// How keys or values are coded (storage/codec/); plain means floats.
enum Code { kCodePlain, kCodeE4m3, kCodeE5m2, kCodeInt8, kCodeInt4, kNumCodes };

// The keys or the values of a coded layer. A field holds one number per vector, beside the vector's codes:
// [block][kv_head][block_size].
struct CodedSide {
    Code code;
    int64_t code_bytes;      // per vector
    const char* field[2];    // the scale (bf16) and the zero point (one byte); null if the code has none
    int64_t field_block_stride[2], field_head_stride[2];  // bytes
    const float* head_scales;                             // [kv_heads] if the code is calibrated, else null
    const char* at(int index, int64_t block, int64_t head, int64_t offset) const {
        return field[index] ? field[index] + block * field_block_stride[index] + head * field_head_stride[index] +
                                  offset * (index == 0 ? 2 : 1)
                            : nullptr;
    }
    float scale(int head) const { return head_scales ? head_scales[head] : 1.0f; }
};

// One layer's keys and values, laid out as in storage/arena.py. A unit is four bytes: a pair of bf16 or one float.
//   key    [block][kv_head][key_units][block_size] units        key_units = key_dim / pair
//   value  [block][kv_head][block_size / pair][value_dim] units
struct LayerKV {
    const char *key, *value;
    int64_t key_block_stride, key_head_stride, value_block_stride, value_head_stride;  // bytes
    int64_t num_blocks;
    int kv_heads, key_units, value_dim, block_size;
    Storage storage;
    // For coded layers, laid out as drawn in storage/codec/base.py. There, key_units is the number of key dimensions,
    // and `storage` the type of queries, of new keys and values, and of the output.
    CodedSide key_side, value_side;
    bool coded() const { return key_side.code != kCodePlain; }
};
// Whether codes may be decoded to bf16 before they are multiplied. Layers of float32 stay float32.
inline bool decodes_to_bf16(const LayerKV& kv) { return kv.coded() && kv.storage == kBf16; }
// Whether a coded layer's heads fill whole tiles.
inline bool codes_fill_tiles(const LayerKV& kv) { return kv.key_units % 64 == 0 && kv.value_dim % 64 == 0; }

// Attention is split at multiples of these absolute positions, so that the order in which a token's scores are reduced
// never depends on the batch, the chunk or the threads.
constexpr int kTile = 64;         // tokens between two updates of the running maximum
constexpr int kSplit = 512;       // tokens per state; states are merged in a binary tree, see StateTree
constexpr int kTreeStates = 24;   // most states waiting to be merged, for 2^31 tokens
constexpr int kMaxTaskRows = 48;  // query rows (tokens x heads) that share one pass over the KV
constexpr int kMaxPromptRows = 384;  // the same for coded keys and values that are decoded once for all rows
constexpr int kMaxHeadDim = 256;
constexpr int kRowState = 32;  // floats after a row's weighted values: the sum of weights in 16 lanes, and the maximum

// Which tokens a query reads in which form, if the first blocks and the most recent ones have copies in more bits
// (storage/recent_kv.py): the copies of both, and the layer's own codes between them.
enum Reads { kReadsAll, kReadsFirst, kReadsBetween, kReadsRecent };

// Some query tokens of one sequence, with the query heads of some KV heads, over some splits of the context. Rows are
// [kv head][token][query head of the KV head].
struct AttendTask {
    const LayerKV* kv;
    const char* query;  // of the first token and head; strides are in bytes
    char* out;
    int64_t query_token_stride, query_head_stride, out_token_stride, out_head_stride;
    const int32_t* block_table;
    const float* sinks;     // one per query head of the task, or null
    float* partial;         // null: write `out`; otherwise write the state here, [row][value_dim + kRowState]
    float scale, softcap;   // softcap 0: none
    int kv_head, kv_heads;  // first and count
    int group_size;         // query heads of each KV head
    int num_tokens, first_position;
    int window;  // a token sees itself and the window - 1 tokens before it
    int split_begin, split_end;
    bool exact;   // see AttentionCall
    bool prompt;  // the sequence has several new tokens, though the task may have only one of them
    Reads reads;
    int first_tokens, recent_blocks;  // unless it reads all
    const LayerKV* copies;            // or null; the task then reads between, and adds what it reads of the copies
    const int32_t* copies_table;
    int states;  // where in AttendScratch its states begin, in floats
    int rows_per_head() const { return num_tokens * group_size; }

    // The first of the most recent tokens of the query at `position`.
    int recent_token(int position) const {
        const int block = position / kv->block_size - recent_blocks + 1;
        return block > 0 ? block * kv->block_size : 0;
    }
    // The tokens that the query at `position` reads are [first_read, end_read). Neither end decreases with positions.
    int first_read(int position) const {
        const int seen = position - window + 1 > 0 ? position - window + 1 : 0;
        if (reads == kReadsAll || reads == kReadsFirst) return seen;
        const int from = reads == kReadsBetween ? first_tokens : recent_token(position);
        return seen > from ? seen : from;
    }
    int end_read(int position) const {
        if (reads == kReadsAll || reads == kReadsRecent) return position + 1;
        const int recent = recent_token(position);
        return reads == kReadsFirst && first_tokens < recent ? first_tokens : recent;
    }
    // Sets the splits that hold what its tokens read; there may be none.
    void set_splits() {
        const int begin = first_read(first_position), end = end_read(first_position + num_tokens - 1);
        split_begin = begin / kSplit;
        split_end = end > begin ? (end + kSplit - 1) / kSplit : split_begin;
    }
};

// Working memory of one thread. Pages that only longer contexts would need are never touched.
struct alignas(64) AttendScratch {
    uint32_t query[kMaxPromptRows * kMaxHeadDim];  // [row / R][unit][R]; for tiles, [row][unit]
    float scores[16 * kTile];
    uint32_t weights[16 * kTile];
    uint32_t values[kTile / 2 * (kMaxHeadDim + 16)];  // of one tile, see tile_attention.h
    float states[kTreeStates * kMaxPromptRows * (kMaxHeadDim + kRowState)];
    float query_scale[kMaxTaskRows];  // of the integer queries of coded_scores.h, and their sums
    int32_t query_zero[kMaxTaskRows * 2];
    // For tile_coded_attention.h, a decoded split and its tokens' scales; for decoded_attention.h, a decoded tile and
    // its.
    alignas(64) uint32_t keys[kSplit / 2 * kMaxHeadDim], decoded[kSplit / 2 * kMaxHeadDim];
    float factors[kSplit * 2];
};

struct RopeTask {
    char* qkv;  // [tokens][q heads * key_dim | kv heads * key_dim | kv heads * value_dim]; queries rotate in place
    int64_t qkv_stride;  // bytes
    const LayerKV* kv;
    const float *cos, *sin;  // [positions][rotary_dim / 2]
    const int64_t *positions, *slots;
    const char *query_norm, *key_norm;  // [key_dim] weights in the storage type, or null
    float norm_eps;
    int num_heads, key_dim, rotary_dim;
    const LayerKV* copies;  // of a coded layer, or null, and their slots
    const int64_t* copies_slots;
};

enum QuantFormat { kQ4_0, kQ4_1, kQ8_0, kNumQuantFormats };
constexpr int kPanelOutputs = 32;
// Bytes of a panel's outputs x 32 inputs, see quant.h.
constexpr int quant_block_bytes(QuantFormat format) {
    return format == kQ4_0 ? 64 + 512 : format == kQ4_1 ? 128 + 512 : 64 + 1024;
}

// Consecutive logits of a row: as many as share one maximum, and as many as have their masses summed in float32.
constexpr int kVocabBlock = 64, kVocabChunk = 256;

// Splits the rows of a product into groups of at most `most` rows, as evenly as possible.
struct RowGroups {
    int64_t rows, count;
    RowGroups() = default;
    RowGroups(int64_t rows, int64_t most) : rows(rows), count((rows + most - 1) / most) {}
    int64_t begin(int64_t group) const { return rows * group / count; }
};

enum Epilogue { kPlain, kSiluGate, kGeluGate };  // a gate turns pairs of 16 sums, | gate | up |, into 16 outputs

struct LinearOutput {
    char* base;
    int64_t stride;  // bytes
    int64_t width;
    const char* bias;  // [sums] in `storage`, or null
    Storage storage;
    Epilogue epilogue;
};

// A weight that the codes of coded.h cannot represent. Each panel's list ends with an escape for a unit that does not
// exist.
struct Escape {
    uint32_t unit;
    uint16_t element, bits;  // which of the unit's 64 elements: output * 2 + input
};
constexpr int kCodedPairBytes = 192;  // for two units
// Which byte of a coded unit holds an element.
constexpr int coded_position(int element) { return element % 32 / 8 * 16 + element / 32 * 8 + element % 8; }
struct CodedPanels {
    const uint8_t* tables;        // exponent bits of the high bytes by code (16), then of the low bytes (16)
    const int32_t* first_escape;  // [panels]
    const Escape* escapes;
};

struct GemmTask {
    const uint32_t* x;   // packed, see gemm.h
    int64_t first_row;   // the row that x begins with
    const char* weight;  // packed
    CodedPanels coded;   // if the weight is coded
    RowGroups groups;
    LinearOutput out;
    int64_t skipped;     // panels between the task's and those that its thread is likely to multiply next
    int units;
    char* decoded;  // room for two panels of whole tile steps, to decode weights that are not bf16 panels
};
// Quantised activations, see quant.h. The R rows of a group are interleaved.
struct QuantRows {
    uint32_t* quants;  // [rows / R][blocks * 8][R]
    float* scales;     // [rows / R][blocks][R]
    uint32_t* sums;    // [rows / R][blocks][R]: initial integer sum, or the float that multiplies the minimum
    QuantRows at(int64_t row, int64_t blocks) const {
        return {quants + row * blocks * 8, scales + row * blocks, sums + row * blocks};
    }
};
struct QuantTask {
    const uint8_t* weight;
    QuantRows x;
    int64_t first_row;  // the row that x begins with
    RowGroups groups;
    LinearOutput out;
    int64_t skipped;  // panels between the task's and those that its thread is likely to multiply next
    int blocks;
};

struct Kernels {
    const char* name;
    void (*attend[kNumStorages])(const AttendTask&, AttendScratch&);
    void (*attend_coded)(const AttendTask&, AttendScratch&);
    // Merges `count` partial states of one task's rows and writes the output. The states are nodes first_node,
    // first_node + 1, .. of one level of the tree.
    void (*merge[kNumStorages])(const AttendTask&, int first_node, int count, AttendScratch&);
    void (*rope_write[kNumStorages])(const RopeTask&, int64_t token_begin, int64_t token_end);
    // If residual is not null, x += residual first.
    void (*rms_norm[kNumStorages])(char* x, const char* residual, const char* weight, char* out, int width, float eps);
    void (*gated[kNumStorages][kNumActivations])(const char* gate, const char* up, char* out, int64_t width);
    // Index of the first NaN of x[0, count) or, if there is none, of the first of the largest.
    int64_t (*argmax[kNumStorages])(const char* x, int64_t count, float* value);
    // See level/vocab.h.
    bool (*block_maxima)(const float* x, int64_t count, float* maxima);
    float (*vocab_masses)(const float* x, int64_t count, float most, float scale, float* masses);
    int64_t (*count_above)(const float* x, int64_t count, float value);
    void (*quantise_rows[kNumStorages])(QuantFormat, const char* const* rows, int count, int width, const QuantRows&);
    void (*quant_linear[kNumQuantFormats])(const QuantTask&, int64_t group_begin, int64_t group_end,
                                           int64_t panel_begin, int64_t panel_end);
    void (*gemm[kNumStorages])(const GemmTask&, int64_t group_begin, int64_t group_end, int64_t panel_begin,
                               int64_t panel_end);
    void (*gemm_coded)(const GemmTask&, int64_t group_begin, int64_t group_end, int64_t panel_begin, int64_t panel_end);
    int quant_rows, gemm_rows[kNumStorages];  // most rows in a group
    // For levels with tiles (tile_gemm.h); otherwise null, and tile_units is 1.
    void (*pack_tile_rows)(const char* const* rows, int64_t count, int64_t row_bytes, uint32_t* packed);
    void (*gemm_quant[kNumQuantFormats])(const GemmTask&, int64_t group_begin, int64_t group_end, int64_t panel_begin,
                                         int64_t panel_end);
    int tile_units;
    int64_t gemm_quant_rows;  // fewest rows for which gemm_quant is faster than quant_linear
};

extern const Kernels kKernelsPortable, kKernelsAmxEmulated, kKernelsAvx2, kKernelsAvx2Vnni, kKernelsAvx512,
    kKernelsAvx512Vnni, kKernelsAvx512Bf16, kKernelsAmx, kKernelsNeon, kKernelsNeonBf16;

bool isa_is_supported(Isa isa);  // compiled in, and supported by the CPU
const char* isa_name(Isa isa);
Isa current_isa();
void force_isa(Isa isa);              // must be supported
Isa isa_from_name(const char* name);  // kNumIsas: unknown
const Kernels& kernels();             // of the current level

}  // namespace octavo
