#define OCTAVO_LEVEL neon_bf16
#define OCTAVO_NAME "neon_bf16"
#define OCTAVO_SIMD "level/simd/neon.h"
#define OCTAVO_TABLE kKernelsNeonBf16
#define OCTAVO_HAS_BF16
#define OCTAVO_HAS_I8MM
#include "level/level.inl"
