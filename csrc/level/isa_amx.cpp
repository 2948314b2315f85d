#define OCTAVO_LEVEL amx
#define OCTAVO_NAME "amx"
#define OCTAVO_SIMD "level/simd/avx512.h"
#define OCTAVO_TABLE kKernelsAmx
#define OCTAVO_TILES "level/simd/amx.h"
#define OCTAVO_HAS_VNNI
#define OCTAVO_HAS_BF16
#include "level/level.inl"
