// The kernels: one table of functions per instruction-set level. They run on the calling thread; ops.cpp,
// ops_linear.cpp and attention.cpp split the work and hand the pieces to threads.
#pragma once

#include <cstdint>

#include "attend_task.h"
#include "isa.h"
#include "layer_kv.h"
#include "product_task.h"
#include "storage.h"

namespace octavo {

// Those before kNumGates have no parameters, and may be gates.
enum Activation { kSilu, kGeluTanh, kGelu, kRelu, kRelu2, kNumGates, kXielu = kNumGates, kNumActivations };
constexpr int kXieluParameters = 3;  // alpha_p, alpha_n, beta

// How a row is normalised: by its root mean square, rounded before weights of the storage type multiply it; the same
// with float weights, rounded once; or to mean 0 and variance 1, with float weights and perhaps a bias, rounded once.
// kNoNorm only rounds it.
enum NormKind { kRmsNorm, kRmsNormRoundedOnce, kLayerNorm, kNoNorm, kNumNormKinds };
struct NormWeights {
    NormKind kind;
    const char* weight;  // null: no norm
    const float* bias;   // of kLayerNorm, or null
    float eps;
};

struct RopeTask {
    char* qkv;  // [tokens][q heads * key_dim | kv heads * key_dim | kv heads * value_dim]; queries rotate in place
    int64_t qkv_stride;  // bytes
    const LayerKV* kv;
    const float *cos, *sin;  // [positions][rotary_dim / 2]; unused if rotary_dim is 0
    const int64_t *positions, *slots;
    NormWeights query_norm, key_norm;  // of each head
    int num_heads, key_dim, rotary_dim;
    bool rotates_first;  // before the norms
    const LayerKV* copies;  // of a coded layer, or null, and their slots
    const int64_t* copies_slots;
    // Where tokens that see sinks apart (AttendTask) have their queries a second time, rotated for other positions, or
    // null. Those with the same position are left out.
    char* sink_queries;
    int64_t sink_stride;
    const int64_t* sink_positions;
};

// Some blocks' bounds for a KV head, see level/bounds.h.
struct BoundsTask {
    const char* bounds;  // of the head in block 0
    int64_t block_stride;  // bytes
    const int32_t* blocks;
    int count;
    const char* query;  // of the KV head's first query head
    int64_t query_head_stride;  // bytes
    int group_size, key_dim;
    float* scores;  // [count]
};

// Consecutive logits of a row: as many as share one maximum, and as many as have their masses summed in float32.
constexpr int kVocabBlock = 64, kVocabChunk = 256;

// Multiplies row groups [group_begin, group_end) with panels [panel_begin, panel_end).
using ProductKernel = void(const ProductTask&, int64_t group_begin, int64_t group_end, int64_t panel_begin,
                           int64_t panel_end);

struct Kernels {
    const char* name;
    void (*attend)(const AttendTask&, AttendScratch&);
    // Merges `count` partial states of one task's rows and writes the output. The states are nodes first_node,
    // first_node + 1, .. of one level of the tree.
    void (*merge)(const AttendTask&, int first_node, int count, AttendScratch&);
    void (*rope_write[kNumStorages])(const RopeTask&, int64_t token_begin, int64_t token_end);
    void (*bound_keys[kNumStorages])(const LayerKV&, int64_t block, int head, char* bounds);
    void (*score_bounds[kNumStorages])(const BoundsTask&);
    // If y is not null, x += y first. By the storage of x and by that of y, out and weights, which a wider x may have.
    void (*normalise[kNumStorages][kNumStorages][kNumNormKinds])(char* x, const char* y, const NormWeights&, char* out,
                                                                 int width);
    void (*gated[kNumStorages][kNumGates])(const char* gate, const char* up, char* out, int64_t width);
    void (*activate[kNumStorages][kNumActivations])(char* x, const float* parameters, int64_t width);
    void (*add[kNumStorages][kNumStorages])(char* x, const char* y, int64_t width);  // by those of x and y
    void (*scale[kNumStorages])(char* x, float factor, int64_t width);
    void (*weighted_sum[kNumStorages])(const char* const* rows, const float* weights, int count, char* out,
                                       int64_t width);
    void (*softcap)(float* x, float cap, int64_t count);  // x = cap * tanh(x / cap)
    // Index of the first NaN of x[0, count) or, if there is none, of the first of the largest.
    int64_t (*argmax[kNumStorages])(const char* x, int64_t count, float* value);
    // See level/vocab.h.
    bool (*block_maxima)(const float* x, int64_t count, float* maxima);
    float (*vocab_masses)(const float* x, int64_t count, float most, float scale, float* masses);
    int64_t (*count_above)(const float* x, int64_t count, float value);
    double (*mass_from)(const float* masses, int64_t count, float least);
    int64_t (*list_between)(const float* x, int64_t count, float least, float beyond, int32_t* places);
    void (*quantise_rows[kNumStorages])(const QuantLayout&, const char* const* rows, int count, int width,
                                        const QuantRows&);
    int quant_rows, gemm_rows;                   // most rows in a group of quants, of floats
    ProductKernel* multiply[kNumWeightFormats];  // quantised weights as integers
    // For levels with tiles (tile_gemm.h), which multiply bf16 in any case.
    void (*pack_tile_rows)(const char* const* rows, int64_t count, int64_t row_bytes, uint32_t* packed) = nullptr;
    ProductKernel* multiply_in_tiles[kNumWeightFormats] = {};
    int tile_units = 1;
    int64_t gemm_quant_rows = 0;  // fewest rows for which quantised weights are multiplied faster in tiles
};

extern const Kernels kKernelsPortable, kKernelsAmxEmulated, kKernelsAvx2, kKernelsAvx2Vnni, kKernelsAvx512,
    kKernelsAvx512Vnni, kKernelsAvx512Bf16, kKernelsAmx, kKernelsNeon, kKernelsNeonBf16;

bool isa_is_supported(Isa isa);  // compiled in, and supported by the CPU
Isa current_isa();
void force_isa(Isa isa);  // must be supported
const Kernels& kernels();  // of the current level

}  // namespace octavo
