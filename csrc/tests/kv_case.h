// Keys and values for tests, plain or coded: the value of a code by definition, and where it is stored.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "harness.h"
#include "kernels.h"

namespace octavo::test {

struct Codes {
    Code key, value;
    const char* name;
};
inline constexpr Codes kPlain = {kCodePlain, kCodePlain, "plain"}, kE4m3 = {kCodeE4m3, kCodeE4m3, "fp8_e4m3"},
                       kE5m2 = {kCodeE5m2, kCodeE5m2, "fp8_e5m2"}, kInt8 = {kCodeInt8, kCodeInt8, "int8"},
                       kK8V4 = {kCodeInt8, kCodeInt4, "k8v4"}, kInt4 = {kCodeInt4, kCodeInt4, "int4"};
inline constexpr Codes kCodes[] = {kE4m3, kE5m2, kInt8, kK8V4, kInt4};
inline bool is_float8(Code code) { return code == kCodeE4m3 || code == kCodeE5m2; }

inline double decode_float8(Code code, uint8_t bits) {
    const int mantissa_bits = code == kCodeE4m3 ? 3 : 2, bias = code == kCodeE4m3 ? 7 : 15;
    const int exponent = (bits & 0x7f) >> mantissa_bits, fraction = bits & ((1 << mantissa_bits) - 1);
    if (code == kCodeE4m3 ? (bits & 0x7f) == 0x7f : exponent == 31) return NAN;
    const double size = exponent ? std::ldexp((1 << mantissa_bits) + fraction, exponent - bias - mantissa_bits)
                                 : std::ldexp(fraction, 1 - bias - mantissa_bits);
    return bits & 0x80 ? -size : size;
}

// R x, as storage/codec/hadamard.py defines it; R^T x if `back`.
inline void rotate(std::vector<double>& x, bool back) {
    constexpr uint32_t kSigns[] = {0x8A5CD789, 0xD4E9AC3F, 0x2D1B7F46, 0x61E80B95,
                                   0xB7A39E12, 0x0C5D48F6, 0x93F2616B, 0x4E879AD0};
    const auto flip = [&] {
        for (size_t d = 0; d < x.size(); ++d)
            if (kSigns[d / 32] >> d % 32 & 1) x[d] = -x[d];
    };
    if (!back) flip();
    for (size_t begin = 0; begin < x.size();) {
        const size_t size = std::bit_floor(x.size() - begin);
        for (size_t stride = 1; stride < size; stride *= 2)
            for (size_t d = begin; d < begin + size; ++d)
                if (((d - begin) & stride) == 0) {
                    const double low = x[d], high = x[d + stride];
                    x[d] = low + high;
                    x[d + stride] = low - high;
                }
        for (size_t d = begin; d < begin + size; ++d) x[d] /= std::sqrt(static_cast<double>(size));
        begin += size;
    }
    if (back) flip();
}

// A layer's keys or values in dense memory, with those of the fields that their codec has.
inline CodedSide coded_side(Code code, int64_t code_bytes, int heads, int block_size, const char* scales,
                            const char* zeros, const float* head_scales) {
    CodedSide side{};
    if (code == kCodePlain) return side;
    side.code = code;
    side.code_bytes = code_bytes;
    if (is_float8(code)) {
        side.head_scales = head_scales;
        return side;
    }
    const char* fields[] = {scales, code == kCodeInt4 ? zeros : nullptr};
    for (int field = 0; field < 2 && fields[field]; ++field) {
        side.field[field] = fields[field];
        side.field_head_stride[field] = block_size * (field == 0 ? 2 : 1);
        side.field_block_stride[field] = heads * side.field_head_stride[field];
    }
    return side;
}

// The keys or the values of a layer, in buffers of exactly their size: floats, or codes, scales and zero points.
class Side {
  public:
    Side(Code code, Storage storage, bool keys, int64_t blocks, int heads, int dim, int block_size)
        : code_(code),
          storage_(storage),
          keys_(keys),
          heads_(heads),
          dim_(dim),
          block_size_(block_size),
          bytes_(code == kCodePlain  ? dim * element_bytes(storage)
                 : code == kCodeInt4 ? dim / 2
                                     : dim),
          codes(blocks * heads * block_size * bytes_),
          scales(blocks * heads * block_size * 2),
          zeros(blocks * heads * block_size) {
        for (int head = 0; head < heads; ++head) head_scales_.push_back(std::ldexp(1.0f, random_int(-3, 3)) * 1.25f);
    }
    CodedSide side() const {
        return coded_side(code_, bytes_, heads_, block_size_, scales.data(), zeros.data(), head_scales_.data());
    }
    int64_t head_stride() const { return block_size_ * bytes_; }

    // Any codes that an encoder can write: no -128, and no NaN.
    void draw(int64_t block, int head, int offset) {
        if (code_ == kCodePlain) {
            for (int d = 0; d < dim_; ++d) put(random_normal(), block, head, offset, d);
            return;
        }
        for (int d = 0; d < dim_; ++d) {
            uint8_t bits = static_cast<uint8_t>(random_int(0, 255));
            if (code_ == kCodeE4m3 && (bits & 0x7f) == 0x7f) bits ^= 1;
            if (code_ == kCodeE5m2) bits &= random_int(0, 9) ? 0xbf : 0x83;  // below 2, and some subnormals
            if (code_ == kCodeInt8 && bits == 0x80) bits = 0x81;
            set(block, head, offset, d, bits);
        }
        set_scale(block, head, offset, std::ldexp(1.0f + 0.25f * random_int(0, 3), random_int(-9, -5)));
        zeros.as<uint8_t>()[token(block, head, offset)] = static_cast<uint8_t>(random_int(0, 15));
    }
    // Makes a vector of floats, or the scale of one of integers, something that is no number.
    void spoil(int64_t block, int head, int offset, float with) {
        if (code_ != kCodePlain) return set_scale(block, head, offset, with);
        for (int d = 0; d < dim_; ++d) put(with, block, head, offset, d);
    }
    void set_scale(int64_t block, int head, int offset, float scale) {
        scales.as<uint16_t>()[token(block, head, offset)] = float_to_bf16(scale);
    }
    void set_head_scales(float scale) { std::fill(head_scales_.begin(), head_scales_.end(), scale); }
    // One vector, in the rotated space of int4.
    std::vector<double> decode(int64_t block, int head, int offset) const {
        std::vector<double> x;
        for (int d = 0; code_ == kCodePlain && d < dim_; ++d)
            x.push_back(load(codes.data(), element(block, head, offset, d), storage_));
        if (code_ == kCodePlain) return x;
        const double scale =
            is_float8(code_) ? head_scales_[head] : bf16_to_float(scales.as<uint16_t>()[token(block, head, offset)]);
        const int zero = code_ == kCodeInt4 ? zeros.as<uint8_t>()[token(block, head, offset)] : 0;
        for (int d = 0; d < dim_; ++d) {
            const uint8_t bits = get(block, head, offset, d);
            x.push_back(scale * (is_float8(code_)     ? decode_float8(code_, bits)
                                 : code_ == kCodeInt8 ? static_cast<int8_t>(bits)
                                                      : bits - zero));
        }
        return x;
    }
    // Half the distance between codes, at a value of that size.
    double half_step(int64_t block, int head, int offset, double size) const {
        if (code_ == kCodePlain) return 0;
        if (!is_float8(code_)) return 0.5 * bf16_to_float(scales.as<uint16_t>()[token(block, head, offset)]);
        const double scale = head_scales_[head];
        const double least = std::ldexp(scale, code_ == kCodeE4m3 ? -10 : -17);
        return std::max(least, size * (code_ == kCodeE4m3 ? 0x1p-4 : 0x1p-3));
    }

  private:
    int64_t token(int64_t block, int head, int offset) const { return (block * heads_ + head) * block_size_ + offset; }
    // The place of a plain dimension, see LayerKV.
    int64_t element(int64_t block, int head, int offset, int d) const {
        const int pair = storage_ == kBf16 ? 2 : 1;
        const int64_t unit = keys_ ? d / pair * block_size_ + offset : offset / pair * dim_ + d;
        return (block * heads_ + head) * block_size_ * dim_ + unit * pair + (keys_ ? d : offset) % pair;
    }
    void put(float x, int64_t block, int head, int offset, int d) {
        store(x, codes.data(), element(block, head, offset, d), storage_);
    }
    // The byte that holds a dimension; for int4, `shift` selects the nibble.
    int64_t place(int64_t block, int head, int offset, int d, int& shift) const {
        const int64_t base = (block * heads_ + head) * block_size_ * bytes_;
        shift = 0;
        if (!keys_) {
            const int half = dim_ / 2;
            shift = code_ == kCodeInt4 && d >= half ? 4 : 0;
            if (is_float8(code_)) return base + offset * bytes_ + d;
            return base + offset / 4 * 4 * bytes_ + (code_ == kCodeInt4 ? d % half : d) * 4 + offset % 4;
        }
        const int64_t group = base + offset / 16 * 16 * bytes_, lane = offset % 16;
        if (is_float8(code_)) return group + d * 16 + lane;
        if (code_ == kCodeInt8) return group + d / 4 * 64 + lane * 4 + d % 4;
        shift = d % 8 / 4 * 4;
        return group + d / 8 * 64 + lane * 4 + d % 4;
    }
    uint8_t get(int64_t block, int head, int offset, int d) const {
        int shift;
        const uint8_t byte = codes.as<uint8_t>()[place(block, head, offset, d, shift)];
        return code_ == kCodeInt4 ? byte >> shift & 15 : byte;
    }
    void set(int64_t block, int head, int offset, int d, uint8_t bits) {
        int shift;
        uint8_t& byte = codes.as<uint8_t>()[place(block, head, offset, d, shift)];
        byte = code_ == kCodeInt4 ? static_cast<uint8_t>((byte & ~(15 << shift)) | (bits & 15) << shift) : bits;
    }

    Code code_;
    Storage storage_;
    bool keys_;
    int heads_, dim_, block_size_;
    int64_t bytes_;
    std::vector<float> head_scales_;

  public:
    const Buffer codes, scales, zeros;
};

}  // namespace octavo::test
