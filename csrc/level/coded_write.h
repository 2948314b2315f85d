// Encodes new keys and values into blocks, in the pass that rotates them, bit for bit as storage/codec/ does.
#pragma once

#include "level/coded_codes.h"
#include "level/hadamard.h"

namespace octavo::OCTAVO_LEVEL {

constexpr float kLeastScale = 0x1p-100f;

// The smallest bf16 that is at least x >= 0; infinities and NaN stay what they are.
inline bf16 ceil_bf16(float x) {
    const uint32_t bits = float_bits(x);
    return static_cast<bf16>((bits >= 0x7f800000 ? bits : bits + 0xffff) >> 16);
}

// Sixteen numbers as e4m3 or e5m2, rounded to nearest, ties to even, saturating; NaN becomes the largest number. Codes
// up to kLeastNormal are multiples of the smallest one: adding kMagic, whose last place has that value, rounds to them.
template <Code C> inline U16 encode_fp8(F16 x) {
    constexpr int kMantissa = C == kCodeE4m3 ? 3 : 2, kBias = C == kCodeE4m3 ? 7 : 15;
    constexpr float kMost = C == kCodeE4m3 ? 448.0f : 57344.0f;
    constexpr float kLeastNormal = C == kCodeE4m3 ? 0x1p-6f : 0x1p-14f;
    constexpr float kMagic = kLeastNormal * static_cast<float>(1 << (23 - kMantissa));
    const U16 bits = as_bits(min(x, F16::set1(kMost)));  // kMost where x is NaN, of either sign
    const U16 sign = shift_right<24>(bits) & U16::set1(0x80);
    const F16 size = min(as_float(bits & U16::set1(0x7fffffff)), F16::set1(kMost));
    constexpr int kDropped = 23 - kMantissa;
    const U16 exact = as_bits(size);
    const U16 odd = shift_right<kDropped>(exact) & U16::set1(1);
    const U16 rounded = shift_right<kDropped>(exact + odd + U16::set1((1u << (kDropped - 1)) - 1));
    const U16 normal = rounded + U16::set1(0u - (static_cast<uint32_t>(127 - kBias) << kMantissa));
    const U16 magic = as_bits(min(size, F16::set1(kLeastNormal)) + F16::set1(kMagic));
    const U16 subnormal = magic + U16::set1(0u - float_bits(kMagic));
    return max(normal, subnormal) | sign;
}

// Codes of one vector, as base.py's `encode` computes them, one per byte in the order of dimensions. Returns the scale;
// sets `zero` for int4.
inline float encode_vector(Code code, float* x, int dim, float head_scale, uint8_t* codes, uint8_t* zero) {
    const U16 size = U16::set1(0x7fffffffu);
    if (is_fp8(code)) {
        const F16 scale = F16::set1(head_scale);
        for (int d = 0; d < dim; d += 16) {
            const F16 scaled = F16::load(x + d) / scale;
            narrow(code == kCodeE4m3 ? encode_fp8<kCodeE4m3>(scaled) : encode_fp8<kCodeE5m2>(scaled), codes + d);
        }
        return head_scale;
    }
    F16 least = F16::zero(), most = F16::zero(), check = F16::zero();
    if (code == kCodeInt4) rotate_head(x, dim);
    for (int d = 0; d < dim; d += 16) {
        const F16 value = F16::load(x + d);
        least = min(value, least);
        most = max(code == kCodeInt4 ? value : as_float(as_bits(value) & size), most);
        check = fma(value, F16::zero(), check);
    }
    const float top = reduce_max(most), bottom = code == kCodeInt4 ? -reduce_max(F16::zero() - least) : 0.0f;
    float scale = code == kCodeInt4 ? (top - bottom) / 15.0f : top / 127.0f;
    // The comparisons above ignore NaN: the scale must not.
    if (reduce_add(check) != 0.0f)
        for (int d = 0; d < dim; ++d)
            if (x[d] != x[d]) scale = x[d];
    scale = bf16_to_float(ceil_bf16(scale < kLeastScale ? kLeastScale : scale));
    auto* rounded = reinterpret_cast<int8_t*>(codes);
    for (int d = 0; d < dim; d += 16) round_to_int8(F16::load(x + d) / F16::set1(scale), rounded + d);
    if (code == kCodeInt4) {
        const float steps = __builtin_rintf(-bottom / scale);
        const int z = steps >= 15.0f ? 15 : steps > 0.0f ? static_cast<int>(steps) : 0;
        *zero = static_cast<uint8_t>(z);
        for (int d = 0; d < dim; ++d) codes[d] = static_cast<uint8_t>(max(0, min(15, rounded[d] + z)));
    }
    return scale;
}

inline void write_fields(const CodedSide& side, int64_t block, int head, int64_t offset, float scale, uint8_t zero) {
    if (side.field[0]) {
        const bf16 bits = float_to_bf16(scale);
        __builtin_memcpy(const_cast<char*>(side.at(0, block, head, offset)), &bits, 2);
    }
    if (side.field[1]) *const_cast<char*>(side.at(1, block, head, offset)) = static_cast<char>(zero);
}

template <class T> inline void widen_head(const T* from, int dim, float* to) {
    for (int d = 0; d < dim; d += 16) F16::load(from + d).store(to + d);
}

template <class T>
void write_coded_key(const LayerKV& kv, const T* key, int dim, int64_t block, int head, int64_t offset) {
    const CodedSide& side = kv.key_side;
    float x[kMaxHeadDim];
    uint8_t codes[kMaxHeadDim], zero = 0;
    widen_head(key, dim, x);
    const float scale = encode_vector(side.code, x, dim, side.scale(head), codes, &zero);
    char* group = const_cast<char*>(kv.key) + block * kv.key_block_stride + head * kv.key_head_stride +
                  offset / 16 * 16 * side.code_bytes;
    const int64_t lane = offset % 16;
    if (is_fp8(side.code)) {
        for (int d = 0; d < dim; ++d) group[d * 16 + lane] = static_cast<char>(codes[d]);
    } else if (side.code == kCodeInt8) {
        for (int d = 0; d < dim; d += 4) __builtin_memcpy(group + d * 16 + lane * 4, codes + d, 4);
    } else {
        for (int d = 0; d < dim; d += 8)
            for (int i = 0; i < 4; ++i)
                group[d * 8 + lane * 4 + i] = static_cast<char>(codes[d + i] | codes[d + 4 + i] << 4);
    }
    write_fields(side, block, head, offset, scale, zero);
}

template <class T> void write_coded_value(const LayerKV& kv, const T* value, int64_t block, int head, int64_t offset) {
    const CodedSide& side = kv.value_side;
    const int dim = kv.value_dim;
    float x[kMaxHeadDim];
    uint8_t codes[kMaxHeadDim], zero = 0;
    widen_head(value, dim, x);
    const float scale = encode_vector(side.code, x, dim, side.scale(head), codes, &zero);
    if (side.code == kCodeInt4)
        for (int d = 0; d < dim / 2; ++d) codes[d] = static_cast<uint8_t>(codes[d] | codes[d + dim / 2] << 4);
    char* base = const_cast<char*>(kv.value) + block * kv.value_block_stride + head * kv.value_head_stride;
    if (is_fp8(side.code)) {
        __builtin_memcpy(base + offset * side.code_bytes, codes, side.code_bytes);
    } else {
        char* quad = base + offset / 4 * 4 * side.code_bytes + offset % 4;
        for (int64_t i = 0; i < side.code_bytes; ++i) quad[i * 4] = static_cast<char>(codes[i]);
    }
    write_fields(side, block, head, offset, scale, zero);
}

}  // namespace octavo::OCTAVO_LEVEL
