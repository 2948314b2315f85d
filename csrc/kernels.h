// The arithmetic of every kernel, one table of functions per instruction-set level. Functions here work on the calling
// thread; ops.cpp and attention.cpp decide how the work is cut and hand the pieces to threads.
#pragma once

#include <cstdint>

namespace octavo {

// From slow to fast. The emulated level multiplies in the tiles of AMX on any machine, for tests; it is never chosen.
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

// How keys or values are coded (storage/codec/); plain: floats.
enum Code { kCodePlain, kCodeE4m3, kCodeE5m2, kCodeInt8, kCodeInt4, kNumCodes };

// The keys or the values of a coded layer. A field is a number beside each vector's codes:
// [block][kv_head][block_size].
struct CodedSide {
    Code code;
    int64_t code_bytes;      // of one vector
    const char* field[2];    // the scale, in bf16, and the zero point, a byte; null where the code has none
    int64_t field_block_stride[2], field_head_stride[2];  // bytes
    const float* head_scales;                             // [kv_heads] of a calibrated code; else null
    const char* at(int index, int64_t block, int64_t head, int64_t offset) const {
        return field[index] ? field[index] + block * field_block_stride[index] + head * field_head_stride[index] +
                                  offset * (index == 0 ? 2 : 1)
                            : nullptr;
    }
    float scale(int head) const { return head_scales ? head_scales[head] : 1.0f; }
};

// One layer's keys and values, as in storage/arena.py. A unit is four bytes: a pair of bf16 or one float.
//   key    [block][kv_head][key_units][block_size] units        key_units = key_dim / pair
//   value  [block][kv_head][block_size / pair][value_dim] units
struct LayerKV {
    const char *key, *value;
    int64_t key_block_stride, key_head_stride, value_block_stride, value_head_stride;  // bytes
    int64_t num_blocks;
    int kv_heads, key_units, value_dim, block_size;
    Storage storage;
    // Of a coded layer, laid out as storage/codec/base.py draws it. Then key_units are its dimensions, and `storage` is
    // what queries, new keys and values, and the output are in.
    CodedSide key_side, value_side;
    bool coded() const { return key_side.code != kCodePlain; }
};

// Attention is cut at these absolute positions, so that the order in which a token's scores are reduced never depends
// on the batch, the chunk or the threads.
constexpr int kTile = 64;         // tokens between two updates of the running maximum
constexpr int kSplit = 512;       // tokens whose state is merged with others' in a binary tree, see StateTree
constexpr int kTreeStates = 24;   // that wait to be merged at most, in 2^31 tokens
constexpr int kMaxTaskRows = 48;  // query rows (tokens x heads) that share one pass over the KV
constexpr int kMaxHeadDim = 256;
constexpr int kRowState = 32;  // floats beside a row's weighted values: their sum in 16 lanes, and their max

// A few query tokens of one sequence, the query heads of some KV heads, over some splits of the context. Rows are
// [kv head][token][query head of the KV head].
struct AttendTask {
    const LayerKV* kv;
    const char* query;  // of the first token and head; bytes below
    char* out;
    int64_t query_token_stride, query_head_stride, out_token_stride, out_head_stride;
    const int32_t* block_table;
    const float* sinks;     // of these query heads; or null
    float* partial;         // null: write `out`; else the state of [row], value_dim + kRowState each
    float scale, softcap;   // softcap 0: none
    int kv_head, kv_heads;  // first and count
    int group_size;         // query heads of each KV head
    int num_tokens, first_position;
    int window;  // a token sees itself and window - 1 before it
    int split_begin, split_end;
    bool exact;  // see AttentionCall
    int rows_per_head() const { return num_tokens * group_size; }
};

// Working memory of one thread. Pages that no context is long enough for are never touched.
struct alignas(64) AttendScratch {
    uint32_t query[kMaxTaskRows * kMaxHeadDim];  // [row / R][unit][R]; in tiles, [row][unit]
    float scores[16 * kTile];
    uint32_t weights[16 * kTile];
    uint32_t values[kTile / 2 * (kMaxHeadDim + 16)];  // of a tile, see tile_attention.h
    float states[kTreeStates * kMaxTaskRows * (kMaxHeadDim + kRowState)];
    float query_scale[kMaxTaskRows];  // of coded_attention.h's integers, and their sums
    int32_t query_zero[kMaxTaskRows * 2];
    // Of tile_coded_attention.h: a tile's keys, sums of rows' queries, what their values are too large by, in lanes.
    alignas(64) uint32_t keys[kTile / 2 * kMaxHeadDim];
    float query_sum[kMaxTaskRows];
    float excess[kMaxTaskRows * 16];
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
};

enum QuantFormat { kQ4_0, kQ4_1, kQ8_0, kNumQuantFormats };
// Bytes of 16 outputs x 32 inputs, see quant.h.
constexpr int quant_block_bytes(QuantFormat format) {
    return format == kQ4_0 ? 32 + 256 : format == kQ4_1 ? 64 + 256 : 32 + 512;
}

constexpr int kPanelOutputs = 32;

// Neighbours in a row of logits: those that share a maximum, and those whose masses are added up in float32.
constexpr int kVocabBlock = 64, kVocabChunk = 256;

// How the rows of a product are dealt into groups of at most `most`, as evenly as they go.
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

// A weight that the codes of coded.h cannot say. Every panel's end with one of a unit that there is not.
struct Escape {
    uint32_t unit;
    uint16_t element, bits;  // of the unit's 64: output * 2 + input
};
constexpr int kCodedPairBytes = 192;  // of two units
// Which byte of a coded unit holds an element.
constexpr int coded_position(int element) { return element % 32 / 8 * 16 + element / 32 * 8 + element % 8; }
struct CodedPanels {
    const uint8_t* tables;        // of 16 codes each: the high bytes' exponent bits, then the low bytes'
    const int32_t* first_escape;  // [panels]
    const Escape* escapes;
};

struct GemmTask {
    const uint32_t* x;   // packed, see gemm.h
    int64_t first_row;   // that lies there
    const char* weight;  // packed
    CodedPanels coded;   // of a coded weight
    RowGroups groups;
    LinearOutput out;
    int units;
    int64_t tiles;  // of sixteen outputs, of a quantised weight
    char* decoded;  // where a weight that is no bf16 panel is decoded: room for two panels of whole tile steps
};
// Quantised activations, see quant.h. A group of R rows lies together.
struct QuantRows {
    uint32_t* quants;     // [rows / R][blocks * 8][R]
    uint32_t* exponents;  // [rows / R][blocks][R]: to be added to those of the weights' scales
    uint32_t* sums;       // [rows / R][blocks][R]: initial integer sum, or the float that multiplies the minimum
    float* scales;        // [rows]
    QuantRows at(int64_t row, int64_t blocks) const {
        return {quants + row * blocks * 8, exponents + row * blocks, sums + row * blocks, scales + row};
    }
};
struct QuantTask {
    const uint8_t* weight;
    QuantRows x;
    int64_t first_row;  // that lies there
    RowGroups groups;
    LinearOutput out;
    int64_t tiles;
    int blocks;
};

struct Kernels {
    const char* name;
    void (*attend[kNumStorages])(const AttendTask&, AttendScratch&);
    void (*attend_coded)(const AttendTask&, AttendScratch&);
    // Merge `count` partial states of one task's rows and write them. They are nodes first_node, first_node + 1, .. of
    // one level of the tree.
    void (*merge[kNumStorages])(const AttendTask&, int first_node, int count, AttendScratch&);
    void (*rope_write[kNumStorages])(const RopeTask&, int64_t token_begin, int64_t token_end);
    // residual may be null; otherwise x += residual first.
    void (*rms_norm[kNumStorages])(char* x, const char* residual, const char* weight, char* out, int width, float eps);
    void (*gated[kNumStorages][kNumActivations])(const char* gate, const char* up, char* out, int64_t width);
    // Index of the largest of x[0, count), the first of equals; of a NaN if there is one.
    int64_t (*argmax[kNumStorages])(const char* x, int64_t count, float* value);
    // See level/vocab.h.
    bool (*block_maxima)(const float* x, int64_t count, float* maxima);
    float (*vocab_masses)(const float* x, int64_t count, float most, float scale, float* masses);
    int64_t (*count_above)(const float* x, int64_t count, float value);
    void (*quantise_rows[kNumStorages])(QuantFormat, const char* const* rows, int count, int width, const QuantRows&);
    void (*quant_linear[kNumQuantFormats])(const QuantTask&, int64_t group_begin, int64_t group_end, int64_t pair_begin,
                                           int64_t pair_end);
    void (*gemm[kNumStorages])(const GemmTask&, int64_t group_begin, int64_t group_end, int64_t panel_begin,
                               int64_t panel_end);
    void (*gemm_coded)(const GemmTask&, int64_t group_begin, int64_t group_end, int64_t panel_begin, int64_t panel_end);
    int quant_rows, gemm_rows[kNumStorages];  // most rows in a group
    // Of a level with tiles (tile_gemm.h); else null, and a step is one unit.
    void (*pack_tile_rows)(const char* const* rows, int64_t count, int64_t row_bytes, uint32_t* packed);
    void (*gemm_quant[kNumQuantFormats])(const GemmTask&, int64_t group_begin, int64_t group_end, int64_t panel_begin,
                                         int64_t panel_end);
    int tile_units;
    int64_t gemm_quant_rows[kNumQuantFormats];  // from how many rows on that is faster than quant_linear
};

extern const Kernels kKernelsPortable, kKernelsAmxEmulated, kKernelsAvx2, kKernelsAvx2Vnni, kKernelsAvx512,
    kKernelsAvx512Vnni, kKernelsAvx512Bf16, kKernelsAmx, kKernelsNeon, kKernelsNeonBf16;

bool isa_is_supported(Isa isa);  // compiled in, and the CPU has it
const char* isa_name(Isa isa);
Isa current_isa();
void force_isa(Isa isa);              // must be supported
Isa isa_from_name(const char* name);  // kNumIsas: unknown
const Kernels& kernels();             // of the current level

}  // namespace octavo
