// Turns a number known at run time into a template argument.
#pragma once

#include <type_traits>

#include "level/simd/name.h"

namespace octavo::OCTAVO_LEVEL {

// Calls f with `n`, which is 1 to Max, as a std::integral_constant.
template <int Max, class F> [[gnu::always_inline]] inline void with_constant(int n, const F& f) {
    static_assert(Max >= 1);
    if constexpr (Max > 1)
        if (n < Max) return with_constant<Max - 1>(n, f);
    f(std::integral_constant<int, Max>{});
}

}  // namespace octavo::OCTAVO_LEVEL
