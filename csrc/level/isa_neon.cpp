#define OCTAVO_LEVEL neon
#define OCTAVO_NAME "neon"
#define OCTAVO_SIMD "level/simd/neon.h"
#define OCTAVO_TABLE kKernelsNeon
#include "level/level.inl"
