#define OCTAVO_LEVEL amx
#define OCTAVO_NAME "amx"
#define OCTAVO_SIMD "level/simd/avx512.h"
#define OCTAVO_TABLE kKernelsAmx
#define OCTAVO_TILES "level/simd/amx.h"
#define OCTAVO_HAS_VNNI
#define OCTAVO_HAS_BF16
// The intrinsics' headers belong outside the level's namespace.
#include <immintrin.h>

#include "level/level.inl"
