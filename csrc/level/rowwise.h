// Kernels that work on one row at a time: norms, gated activations, argmax. Widths need not be multiples of sixteen:
// the last vector is padded with zeros.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "level/simd/types.h"

namespace octavo::OCTAVO_LEVEL {

inline F16 load_some(const float* p, int64_t count) {
    if (count >= 16) return F16::load(p);
    float padded[16] = {};
    for (int i = 0; i < count; ++i) padded[i] = p[i];
    return F16::load(padded);
}
inline F16 load_some(const bf16* p, int64_t count) {
    if (count >= 16) return F16::load(p);
    bf16 padded[16] = {};
    for (int i = 0; i < count; ++i) padded[i] = p[i];
    return F16::load(padded);
}
template <class T> inline void store_some(F16 x, T* p, int64_t count) {
    if (count >= 16) return x.store(p);
    T padded[16];
    x.store(padded);
    for (int i = 0; i < count; ++i) p[i] = padded[i];
}
template <class T> inline F16 round_through(F16 x) {
    if constexpr (std::is_same_v<T, float>) return x;
    T rounded[16];
    x.store(rounded);
    return F16::load(rounded);
}

// x += residual, if not null; then out = round(x / sqrt(mean(x^2) + eps)) * weight, rounded where transformers'
// LlamaRMSNorm rounds.
template <Storage S>
void rms_norm(char* x_bytes, const char* residual_bytes, const char* weight_bytes, char* out_bytes, int width,
              float eps) {
    using T = Element<S>;
    auto* x = reinterpret_cast<T*>(x_bytes);
    const auto *residual = reinterpret_cast<const T*>(residual_bytes),
               *weight = reinterpret_cast<const T*>(weight_bytes);
    auto* out = reinterpret_cast<T*>(out_bytes);
    F16 squares[2] = {F16::zero(), F16::zero()};
    for (int i = 0; i < width; i += 16) {
        F16 v = load_some(x + i, width - i);
        if (residual) {
            v = round_through<T>(v + load_some(residual + i, width - i));
            store_some(v, x + i, width - i);
        }
        squares[i / 16 % 2] = fma(v, v, squares[i / 16 % 2]);
    }
    const float mean = reduce_add(squares[0] + squares[1]) / static_cast<float>(width);
    const F16 factor = F16::set1(1.0f / __builtin_sqrtf(mean + eps));
    for (int i = 0; i < width; i += 16) {
        const F16 normal = round_through<T>(load_some(x + i, width - i) * factor);
        store_some(normal * load_some(weight + i, width - i), out + i, width - i);
    }
}

template <Activation A> inline F16 activate(F16 x) {
    if constexpr (A == kSilu) return x / (F16::set1(1.0f) + exp2(x * F16::set1(-kLog2E)));
    // GELU, tanh form (Hendrycks & Gimpel 2016); 0.5 (1 + tanh(u)) = 1 / (1 + e^-2u)
    const F16 u = (x + x * x * x * F16::set1(0.044715f)) * F16::set1(0.7978845608f);
    return x / (F16::set1(1.0f) + exp2(u * F16::set1(-2.0f * kLog2E)));
}

template <Storage S, Activation A>
void gated(const char* gate_bytes, const char* up_bytes, char* out_bytes, int64_t width) {
    using T = Element<S>;
    const auto *gate = reinterpret_cast<const T*>(gate_bytes), *up = reinterpret_cast<const T*>(up_bytes);
    auto* out = reinterpret_cast<T*>(out_bytes);
    for (int64_t i = 0; i < width; i += 16) {
        const F16 activated = round_through<T>(activate<A>(load_some(gate + i, width - i)));
        store_some(activated * load_some(up + i, width - i), out + i, width - i);
    }
}

// Stops at the first NaN.
template <Storage S> int64_t argmax(const char* bytes, int64_t count, float* value) {
    const auto* x = reinterpret_cast<const Element<S>*>(bytes);
    float best = -__builtin_inff();
    int64_t best_index = 0, i = 0;
    // Returns whether to go on after this one.
    const auto consider = [&](int64_t index) {
        float candidate;
        if constexpr (S == kBf16)
            candidate = bf16_to_float(x[index]);
        else
            candidate = x[index];
        if (candidate <= best) return true;
        best = candidate;
        best_index = index;
        return candidate == candidate;
    };
    // A new maximum is rare: whole stretches are only compared with the best so far.
    bool goes_on = true;
    for (; goes_on && i + 64 <= count; i += 64) {
        const F16 known = F16::set1(best);
        bool passed_over = true;
        for (int64_t j = i; j < i + 64; j += 16) passed_over &= all_at_most(F16::load(x + j), known);
        if (!passed_over)
            for (int64_t j = i; goes_on && j < i + 64; ++j) goes_on = consider(j);
    }
    for (; goes_on && i < count; ++i) goes_on = consider(i);
    *value = best;
    return best_index;
}

}  // namespace octavo::OCTAVO_LEVEL
