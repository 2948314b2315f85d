// The layout of the codes of 64 tokens (storage/codec/). Keys of 16 tokens are stored together, in units of one or more
// dimensions of a token; values are stored token by token, or with four tokens of one dimension together:
//
//     fp8    K [dim][16 tokens]              V [token][dim]
//     int8   K [dim / 4][16 tokens][4]       V [token / 4][dim][4]
//     int4   K [dim / 8][16 tokens][4]       V [token / 4][dim / 2][4]
#pragma once

#include "level/attention_tile.h"
#include "level/coded_codes.h"

namespace octavo::OCTAVO_LEVEL {

// The factor of a decoded code, besides its scale: e4m3 is decoded as the half whose exponent is 8 less.
constexpr float code_unit(Code code) { return code == kCodeE4m3 ? 256.0f : 1.0f; }

#ifndef OCTAVO_LOADS_FP8_IN_PAIRS
inline void load_e5m2(const uint8_t* p, F16& low, F16& high) {
    low = load_e5m2(p);
    high = load_e5m2(p + 16);
}
inline void load_e4m3(const uint8_t* p, F16& low, F16& high) {
    low = load_e4m3(p);
    high = load_e4m3(p + 16);
}
#endif

// 32 codes of fp8 -> two vectors, in the same order.
template <Code C> inline void decode32(const char* p, F16& low, F16& high) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(p);
    if constexpr (C == kCodeE4m3)
        load_e4m3(bytes, low, high);
    else
        load_e5m2(bytes, low, high);
}

template <Code C> inline F16 decode16(const char* p) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(p);
    if constexpr (C == kCodeE4m3)
        return load_e4m3(bytes);
    else
        return load_e5m2(bytes);
}

struct CodedTile {
    const char* key[kVectors];    // of 16 tokens' first dimension
    const char* value[kVectors];  // of the first of 16 tokens
    const char *key_field[kVectors][2], *value_field[kVectors][2];
    int begin;
};
struct CodedTilePair {
    const CodedTile &now, &next;
};

inline CodedTile locate_coded(const AttendTask& task, int head, int begin, int end_position) {
    const LayerKV& kv = *task.kv;
    CodedTile tile;
    tile.begin = begin;
    head += task.kv_head;
    for (int v = 0; v < kVectors; ++v) {
        const int position = begin + v * 16 < end_position ? begin + v * 16 : begin;  // never past the table
        const int64_t block = task.block_table[position / kv.block_size], offset = position % kv.block_size;
        tile.key[v] =
            kv.key + block * kv.key_block_stride + head * kv.key_head_stride + offset * kv.key_side.code_bytes;
        tile.value[v] =
            kv.value + block * kv.value_block_stride + head * kv.value_head_stride + offset * kv.value_side.code_bytes;
        for (int f = 0; f < 2; ++f) {
            tile.key_field[v][f] = kv.key_side.at(f, block, head, offset);
            tile.value_field[v][f] = kv.value_side.at(f, block, head, offset);
        }
    }
    return tile;
}
// The next head of the same tokens.
inline void next_head(const LayerKV& kv, const CodedTile& tile, CodedTile& next) {
    next.begin = tile.begin;
    for (int v = 0; v < kVectors; ++v) {
        next.key[v] = tile.key[v] + kv.key_head_stride;
        next.value[v] = tile.value[v] + kv.value_head_stride;
        for (int f = 0; f < 2; ++f) {  // a null pointer's stride is 0
            next.key_field[v][f] = tile.key_field[v][f] + kv.key_side.field_head_stride[f];
            next.value_field[v][f] = tile.value_field[v][f] + kv.value_side.field_head_stride[f];
        }
    }
}
inline void ask_fields(const CodedTile& tile, int v) {
    for (int f = 0; f < 2; ++f) {
        if (tile.key_field[v][f]) __builtin_prefetch(tile.key_field[v][f], 0, 2);
        if (tile.value_field[v][f]) __builtin_prefetch(tile.value_field[v][f], 0, 2);
    }
}

inline F16 token_scale(const char* field) { return F16::load(reinterpret_cast<const bf16*>(field)); }

}  // namespace octavo::OCTAVO_LEVEL
