#define OCTAVO_LEVEL avx2_vnni
#define OCTAVO_NAME "avx2_vnni"
#define OCTAVO_SIMD "level/simd/avx2.h"
#define OCTAVO_TABLE kKernelsAvx2Vnni
#define OCTAVO_HAS_VNNI
#include "level/level.inl"
