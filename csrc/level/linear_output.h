// What is done with a product's sums: bias, gate, rounding.
#pragma once

#include "kernels.h"
#include "level/rowwise.h"
#include "level/with_constant.h"

namespace octavo::OCTAVO_LEVEL {

template <class T> inline void store_sixteen(const LinearOutput& out, int64_t row, int64_t column, F16 sum) {
    const int64_t count = out.width - column;
    if (count <= 0) return;
    if (out.bias) sum = sum + load_partial(reinterpret_cast<const T*>(out.bias) + column, count);
    store_partial(sum, reinterpret_cast<T*>(out.base + row * out.stride) + column, count);
}

// (up + 1) * gate * sigmoid(1.702 gate) of clamped gates and ups, rounded once.
inline F16 clamped_swiglu(F16 gate, F16 up) {
    const F16 limit = F16::set1(7.0f);
    const F16 g = min(gate, limit), u = max(min(up, limit), F16::zero() - limit);
    return (u + F16::set1(1.0f)) * (g / (F16::set1(1.0f) + exp2(g * F16::set1(-1.702f * kLog2E))));
}

// activation(gate) * up, rounded where a product followed by `gated` rounds.
template <class T, Epilogue E>
inline void store_gated(const LinearOutput& out, int64_t row, int64_t pair, F16 gate, F16 up) {
    if (out.bias) {
        const T* bias = reinterpret_cast<const T*>(out.bias) + pair * 32;
        gate = gate + F16::load(bias);
        up = up + F16::load(bias + 16);
    }
    gate = round_through<T>(gate);
    up = round_through<T>(up);
    F16 result;
    if constexpr (E == kClampedSwiGlu)
        result = clamped_swiglu(gate, up);
    else
        result = round_through<T>(activate<static_cast<Activation>(E - kSiluGate)>(gate)) * up;
    result.store(reinterpret_cast<T*>(out.base + row * out.stride) + pair * 16);
}

template <class T, int R> void store_rows(const LinearOutput& out, int64_t row, int64_t pair, const F16 (&sums)[R][2]) {
    if (out.epilogue == kPlain) {
        for (int r = 0; r < R; ++r) {
            store_sixteen<T>(out, row + r, pair * 32, sums[r][0]);
            store_sixteen<T>(out, row + r, pair * 32 + 16, sums[r][1]);
        }
        return;
    }
    with_constant<kClampedSwiGlu>(out.epilogue, [&](auto gate) {
        constexpr auto kGate = static_cast<Epilogue>(gate.value);
        for (int r = 0; r < R; ++r) store_gated<T, kGate>(out, row + r, pair, sums[r][0], sums[r][1]);
    });
}

// Where a row's outputs of a panel are stored.
inline char* output_at(const LinearOutput& out, int64_t row, int64_t pair) {
    const int64_t column = pair * (out.epilogue == kPlain ? 32 : 16);
    return out.base + row * out.stride + column * (out.storage == kBf16 ? 2 : 4);
}
// Prefetches the lines that a tile's outputs go to, for writing, before the tile is computed.
template <int R> inline void prefetch_outputs(const LinearOutput& out, int64_t row, int64_t pair) {
    for (int r = 0; r < R; ++r) prefetch_for_write(output_at(out, row + r, pair));
}

// Stores 32 sums of each of R rows. With a gate, the first 16 are gates and the others the values that they gate.
template <int R> inline void store_rows(const LinearOutput& out, int64_t row, int64_t pair, const F16 (&sums)[R][2]) {
    if (out.storage == kBf16)
        store_rows<bf16>(out, row, pair, sums);
    else
        store_rows<float>(out, row, pair, sums);
}
// The same for any number of rows, whose sums are in memory as [row][32].
template <class T>
void store_panel(const LinearOutput& out, int64_t row, int64_t pair, const float* sums, int64_t rows) {
    const bool as_they_are = out.epilogue == kPlain && !out.bias && pair * 32 + 32 <= out.width;
    for (int64_t r = 0; r < rows; ++r, sums += 32) {
        const F16 both[1][2] = {{F16::load(sums), F16::load(sums + 16)}};
        if (as_they_are)
            store_both(both[0][0], both[0][1], reinterpret_cast<T*>(out.base + (row + r) * out.stride) + pair * 32);
        else
            store_rows<T>(out, row + r, pair, both);
    }
}
inline void store_panel(const LinearOutput& out, int64_t row, int64_t pair, const float* sums, int64_t rows) {
    if (out.storage == kBf16)
        store_panel<bf16>(out, row, pair, sums, rows);
    else
        store_panel<float>(out, row, pair, sums, rows);
}
// The same for sums in registers. Only a copy has its address taken; otherwise they would be kept in memory throughout.
template <int R>
[[gnu::always_inline]] inline void store_sums(const LinearOutput& out, int64_t row, int64_t pair,
                                              const F16 (&sums)[R][2]) {
    F16 copy[R][2];
    OCTAVO_UNROLL for (int r = 0; r < R; ++r) copy[r][0] = sums[r][0], copy[r][1] = sums[r][1];
    store_rows(out, row, pair, copy);
}

}  // namespace octavo::OCTAVO_LEVEL
