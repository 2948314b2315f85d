// Kernels that work on one row at a time: norms, activations, sums, argmax. Widths need not be multiples of sixteen:
// the last vector is padded with zeros.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "level/simd/types.h"

namespace octavo::OCTAVO_LEVEL {

inline F16 load_partial(const float* p, int64_t count) {
    if (count >= 16) return F16::load(p);
    float padded[16] = {};
    for (int i = 0; i < count; ++i) padded[i] = p[i];
    return F16::load(padded);
}
inline F16 load_partial(const bf16* p, int64_t count) {
    if (count >= 16) return F16::load(p);
    bf16 padded[16] = {};
    for (int i = 0; i < count; ++i) padded[i] = p[i];
    return F16::load(padded);
}
template <class T> inline void store_partial(F16 x, T* p, int64_t count) {
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

// x += y, if not null; then out = the normalised x, rounded where transformers' norms round: see NormKind. An x in
// float32 is rounded once.
template <Storage X, Storage S, NormKind K>
void normalise(char* x_bytes, const char* y_bytes, const NormWeights& norm, char* out_bytes, int width) {
    using T = Element<S>;
    using Weight = std::conditional_t<K == kRmsNorm, T, float>;
    auto* x = reinterpret_cast<Element<X>*>(x_bytes);
    const auto* y = reinterpret_cast<const T*>(y_bytes);
    const auto* weight = reinterpret_cast<const Weight*>(norm.weight);
    auto* out = reinterpret_cast<T*>(out_bytes);
    F16 sums[2] = {F16::zero(), F16::zero()}, squares[2] = {F16::zero(), F16::zero()};
    for (int i = 0; i < width; i += 16) {
        F16 v = load_partial(x + i, width - i);
        if (y) {
            v = round_through<Element<X>>(v + load_partial(y + i, width - i));
            store_partial(v, x + i, width - i);
        }
        if constexpr (K == kNoNorm)
            store_partial(v, out + i, width - i);
        else if constexpr (K == kLayerNorm)
            sums[i / 16 % 2] = sums[i / 16 % 2] + v;
        else
            squares[i / 16 % 2] = fma(v, v, squares[i / 16 % 2]);
    }
    if constexpr (K == kNoNorm) return;
    const F16 mean = F16::set1(reduce_add(sums[0] + sums[1]) / static_cast<float>(width));
    if constexpr (K == kLayerNorm)
        for (int i = 0; i < width; i += 16) {
            F16 v = load_partial(x + i, width - i) - mean;
            if (width - i < 16) v = keep_lanes(v, 0, width - i, F16::zero());
            squares[i / 16 % 2] = fma(v, v, squares[i / 16 % 2]);
        }
    const float variance = reduce_add(squares[0] + squares[1]) / static_cast<float>(width);
    const F16 factor = F16::set1(1.0f / __builtin_sqrtf(variance + norm.eps));
    for (int i = 0; i < width; i += 16) {
        F16 v = load_partial(x + i, width - i);
        if constexpr (K == kLayerNorm) v = v - mean;
        v = v * factor;
        if constexpr (K == kRmsNorm) v = round_through<Element<X>>(v);
        v = v * load_partial(weight + i, width - i);
        if (K == kLayerNorm && norm.bias) v = v + load_partial(norm.bias + i, width - i);
        store_partial(v, out + i, width - i);
    }
}

inline F16 tanh16(F16 x) {
    const F16 e = exp2(min(x, F16::set1(30.0f)) * F16::set1(2 * kLog2E));
    return F16::set1(1.0f) - F16::set1(2.0f) / (e + F16::set1(1.0f));
}

// x Phi(x) = max(x, 0) - |x| Phi(-|x|), with the normal distribution's tail by Abramowitz and Stegun 7.1.26, whose
// absolute error is 8e-8.
inline F16 gelu(F16 x) {
    const F16 size = max(x, F16::zero() - x), scaled = size * F16::set1(0.70710678f);
    const F16 t = F16::set1(1.0f) / fma(scaled, F16::set1(0.3275911f), F16::set1(1.0f));
    constexpr float kTail[] = {-0.7265760135f, 0.7107068705f, -0.142248368f, 0.127414796f};  // halved
    F16 tail = F16::set1(0.5307027145f);
    for (const float coefficient : kTail) tail = fma(tail, t, F16::set1(coefficient));
    tail = tail * t * exp2(scaled * scaled * F16::set1(-kLog2E));
    return max(F16::zero(), x) - min(size, F16::set1(1e30f)) * tail;  // infinity times zero would not be zero
}

template <Activation A> inline F16 activate(F16 x) {
    if constexpr (A == kSilu) return x / (F16::set1(1.0f) + exp2(x * F16::set1(-kLog2E)));
    if constexpr (A == kGelu) return gelu(x);
    if constexpr (A == kRelu) return max(F16::zero(), x);
    if constexpr (A == kRelu2) return max(F16::zero(), x) * max(F16::zero(), x);
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
        const F16 activated = round_through<T>(activate<A>(load_partial(gate + i, width - i)));
        store_partial(activated * load_partial(up + i, width - i), out + i, width - i);
    }
}

// alpha_p x^2 + beta x of positive x, alpha_n (e^x - 1 - x) + beta x of others (Huang & Schlag 2024, arXiv:2411.13010).
inline F16 xielu(F16 x, const float* parameters) {
    const F16 above = max(F16::zero(), x), below = min(x, F16::zero());
    const F16 curve = exp2(below * F16::set1(kLog2E)) - F16::set1(1.0f) - below;
    return fma(F16::set1(parameters[0]) * above, above,
               fma(F16::set1(parameters[1]), curve, F16::set1(parameters[2]) * x));
}

template <Storage S, Activation A> void activate(char* bytes, const float* parameters, int64_t width) {
    auto* x = reinterpret_cast<Element<S>*>(bytes);
    for (int64_t i = 0; i < width; i += 16) {
        const F16 v = load_partial(x + i, width - i);
        if constexpr (A == kXielu)
            store_partial(xielu(v, parameters), x + i, width - i);
        else
            store_partial(activate<A>(v), x + i, width - i);
    }
}

template <Storage X, Storage S> void add(char* x_bytes, const char* y_bytes, int64_t width) {
    auto* x = reinterpret_cast<Element<X>*>(x_bytes);
    const auto* y = reinterpret_cast<const Element<S>*>(y_bytes);
    for (int64_t i = 0; i < width; i += 16)
        store_partial(load_partial(x + i, width - i) + load_partial(y + i, width - i), x + i, width - i);
}

template <Storage S> void scale(char* bytes, float factor, int64_t width) {
    auto* x = reinterpret_cast<Element<S>*>(bytes);
    for (int64_t i = 0; i < width; i += 16)
        store_partial(load_partial(x + i, width - i) * F16::set1(factor), x + i, width - i);
}

// The sum of rows times their weights, in float32 and in their order.
template <Storage S>
void weighted_sum(const char* const* rows, const float* weights, int count, char* out_bytes, int64_t width) {
    using T = Element<S>;
    for (int64_t i = 0; i < width; i += 16) {
        F16 sum = F16::zero();
        for (int j = 0; j < count; ++j)
            sum = fma(load_partial(reinterpret_cast<const T*>(rows[j]) + i, width - i), F16::set1(weights[j]), sum);
        store_partial(sum, reinterpret_cast<T*>(out_bytes) + i, width - i);
    }
}

inline void softcap(float* x, float cap, int64_t count) {
    for (int64_t i = 0; i < count; i += 16)
        store_partial(tanh16(load_partial(x + i, count - i) / F16::set1(cap)) * F16::set1(cap), x + i, count - i);
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
