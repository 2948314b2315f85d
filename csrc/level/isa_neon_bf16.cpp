#define OCTAVO_LEVEL neon_bf16
#define OCTAVO_NAME "neon_bf16"
#define OCTAVO_SIMD "level/simd/neon.h"
#define OCTAVO_TABLE kKernelsNeonBf16
#define OCTAVO_HAS_BF16
#define OCTAVO_HAS_I8MM
// The intrinsics' headers belong outside the level's namespace.
#include <arm_neon.h>

#include "level/level.inl"
