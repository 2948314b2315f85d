// The memory of the keys and values of a layer.
#pragma once

#include <cstdint>

#include "storage.h"

namespace octavo {

// How keys or values are coded (storage/codec/); plain means floats.
enum Code { kCodePlain, kCodeE4m3, kCodeE5m2, kCodeInt8, kCodeInt4, kNumCodes };

// The keys or the values of a coded layer. A field holds one number per vector, next to the vector's codes:
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
// Or values are latents, the last value_dim dimensions of keys, and `value` points to these.
struct LayerKV {
    const char *key, *value;
    int64_t key_block_stride, key_head_stride, value_block_stride, value_head_stride;  // bytes
    int64_t num_blocks;
    int kv_heads, key_units, value_dim, block_size;
    Storage storage;
    bool latent;  // never of coded layers
    // For coded layers, laid out as drawn in storage/codec/. There, key_units is the number of key dimensions,
    // and `storage` the type of queries, of new keys and values, and of the output.
    CodedSide key_side{}, value_side{};
    bool coded() const { return key_side.code != kCodePlain; }
    int key_dim() const { return coded() || storage == kF32 ? key_units : key_units * 2; }
};
// Whether codes may be decoded to bf16 before they are multiplied. Layers of float32 stay float32.
inline bool decodes_to_bf16(const LayerKV& kv) { return kv.coded() && kv.storage == kBf16; }
// Whether a coded layer's heads fill whole tiles.
inline bool codes_fill_tiles(const LayerKV& kv) { return kv.key_units % 64 == 0 && kv.value_dim % 64 == 0; }

}  // namespace octavo
