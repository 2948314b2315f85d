#define OCTAVO_LEVEL neon
#define OCTAVO_NAME "neon"
#define OCTAVO_SIMD "level/simd/neon.h"
#define OCTAVO_TABLE kKernelsNeon
// The intrinsics' headers belong outside the level's namespace.
#include <arm_neon.h>

#include "level/level.inl"
