#define OCTAVO_LEVEL avx512
#define OCTAVO_NAME "avx512"
#define OCTAVO_SIMD "level/simd/avx512.h"
#define OCTAVO_TABLE kKernelsAvx512
#include "level/level.inl"
