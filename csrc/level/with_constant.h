// Turns a number known at run time into a template argument.
#pragma once

#include <type_traits>
#include <utility>

#include "level/simd/name.h"

namespace octavo::OCTAVO_LEVEL {

// Calls f with `n`, which is Min to Max, as a std::integral_constant.
template <int Max, int Min = 1, class F> [[gnu::always_inline]] inline void with_constant(int n, const F& f) {
    static_assert(Max >= Min);
    if constexpr (Max > Min)
        if (n < Max) return with_constant<Max - 1, Min>(n, f);
    f(std::integral_constant<int, Max>{});
}

// Calls f with 0 to N - 1, each as a std::integral_constant. f must be inlined: otherwise the vectors that it captures
// are kept in memory.
template <int N, class F> [[gnu::always_inline]] inline void each_constant(const F& f) {
    [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
        (f(std::integral_constant<int, I>{}), ...);
    }(std::make_integer_sequence<int, N>{});
}

// Calls f(first dimension, M) for `dims` dimensions, M vectors of 16 at a time: N, then one at the end.
template <int N, class F> [[gnu::always_inline]] inline void each_vectors(int dims, const F& f) {
    int dim = 0;
    if constexpr (N > 1)
        for (; dim + N * 16 <= dims; dim += N * 16) f(dim, std::integral_constant<int, N>{});
    for (; dim < dims; dim += 16) f(dim, std::integral_constant<int, 1>{});
}

}  // namespace octavo::OCTAVO_LEVEL
