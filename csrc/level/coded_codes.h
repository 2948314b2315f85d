// Shared by the kernels for coded keys and values.
#pragma once

#include "kernels.h"
#include "level/simd/types.h"

namespace octavo::OCTAVO_LEVEL {

constexpr bool is_fp8(Code code) { return code == kCodeE4m3 || code == kCodeE5m2; }

}  // namespace octavo::OCTAVO_LEVEL
