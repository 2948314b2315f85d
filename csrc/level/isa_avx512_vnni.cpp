#define OCTAVO_LEVEL avx512_vnni
#define OCTAVO_NAME "avx512_vnni"
#define OCTAVO_SIMD "level/simd/avx512.h"
#define OCTAVO_TABLE kKernelsAvx512Vnni
#define OCTAVO_HAS_VNNI
// The intrinsics' headers belong outside the level's namespace.
#include <immintrin.h>

#include "level/level.inl"
