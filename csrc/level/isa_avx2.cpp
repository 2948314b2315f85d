#define OCTAVO_LEVEL avx2
#define OCTAVO_NAME "avx2"
#define OCTAVO_SIMD "level/simd/avx2.h"
#define OCTAVO_TABLE kKernelsAvx2
#include "level/level.inl"
