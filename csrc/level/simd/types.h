// The level's vectors, what a storage type's elements are and how pairs of them multiply.
#pragma once

#include "kernels.h"
#include "level/simd/name.h"
#include OCTAVO_SIMD

namespace octavo::OCTAVO_LEVEL {

template <Storage S> [[gnu::always_inline]] inline F16 mac(F16 acc, U16 a, U16 b) {
    if constexpr (S == kBf16)
        return mac_bf16(acc, a, b);
    else
        return mac_f32(acc, a, b);
}
template <Storage S> constexpr int kPair = S == kBf16 ? 2 : 1;
template <Storage S> struct ElementOf { using Type = float; };
template <> struct ElementOf<kBf16> { using Type = bf16; };
template <Storage S> using Element = typename ElementOf<S>::Type;

}  // namespace octavo::OCTAVO_LEVEL
