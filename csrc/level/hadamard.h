// The randomised Hadamard rotation of storage/codec/hadamard.py, bit for bit: that file specifies the order of the
// sums. Dimensions are multiples of 16, and so is every power of two that they are split into.
#pragma once

#include "kernels.h"
#include "level/simd/types.h"

namespace octavo::OCTAVO_LEVEL {

constexpr uint32_t kSignBits[] = {0x8A5CD789, 0xD4E9AC3F, 0x2D1B7F46, 0x61E80B95,
                                  0xB7A39E12, 0x0C5D48F6, 0x93F2616B, 0x4E879AD0};

struct HadamardTables {
    float rows[16][16] = {};   // Sylvester's matrix
    float signs[kMaxHeadDim] = {};
    constexpr HadamardTables() {
        for (int i = 0; i < 16; ++i)
            for (int j = 0; j < 16; ++j)
                rows[i][j] = __builtin_popcount(static_cast<unsigned>(i & j)) % 2 ? -1.0f : 1.0f;
        for (int i = 0; i < kMaxHeadDim; ++i) signs[i] = kSignBits[i / 32 % 8] >> i % 32 & 1 ? -1.0f : 1.0f;
    }
};
constexpr HadamardTables kHadamard;

inline void flip_signs(float* x, int dim) {
    for (int d = 0; d < dim; d += 16) (F16::load(x + d) * F16::load(kHadamard.signs + d)).store(x + d);
}

inline void hadamard(float* x, int dim) {
    while (dim > 0) {
        int size = 16;
        while (size * 2 <= dim) size *= 2;
        for (int d = 0; d < size; d += 16) {
            F16 sum = F16::zero();
            for (int j = 0; j < 16; ++j) sum = fma(F16::set1(x[d + j]), F16::load(kHadamard.rows[j]), sum);
            sum.store(x + d);
        }
        for (int stride = 16; stride < size; stride *= 2)
            for (int first = 0; first < size; first += 2 * stride)
                for (int d = first; d < first + stride; d += 16) {
                    const F16 low = F16::load(x + d), high = F16::load(x + d + stride);
                    (low + high).store(x + d);
                    (low - high).store(x + d + stride);
                }
        const F16 factor = F16::set1(static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(size))));
        for (int d = 0; d < size; d += 16) (F16::load(x + d) * factor).store(x + d);
        x += size;
        dim -= size;
    }
}

inline void rotate_head(float* x, int dim) {
    flip_signs(x, dim);
    hadamard(x, dim);
}
inline void rotate_head_back(float* x, int dim) {
    hadamard(x, dim);
    flip_signs(x, dim);
}

}  // namespace octavo::OCTAVO_LEVEL
