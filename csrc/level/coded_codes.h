// Shared by the kernels for coded keys and values.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "level/simd/types.h"

namespace octavo::OCTAVO_LEVEL {

constexpr bool is_fp8(Code code) { return code == kCodeE4m3 || code == kCodeE5m2; }

// Calls f with a code, which is not plain, as a std::integral_constant.
template <class F> [[gnu::always_inline]] inline void with_code(Code code, const F& f) {
    switch (code) {
        case kCodeE4m3: return f(std::integral_constant<Code, kCodeE4m3>{});
        case kCodeE5m2: return f(std::integral_constant<Code, kCodeE5m2>{});
        case kCodeInt8: return f(std::integral_constant<Code, kCodeInt8>{});
        default: return f(std::integral_constant<Code, kCodeInt4>{});
    }
}

}  // namespace octavo::OCTAVO_LEVEL
