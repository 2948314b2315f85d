#define OCTAVO_LEVEL avx512_vnni
#define OCTAVO_NAME "avx512_vnni"
#define OCTAVO_SIMD "level/simd/avx512.h"
#define OCTAVO_TABLE kKernelsAvx512Vnni
#define OCTAVO_HAS_VNNI
#include "level/level.inl"
