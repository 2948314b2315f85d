#define OCTAVO_LEVEL avx512_bf16
#define OCTAVO_NAME "avx512_bf16"
#define OCTAVO_SIMD "level/simd/avx512.h"
#define OCTAVO_TABLE kKernelsAvx512Bf16
#define OCTAVO_HAS_VNNI
#define OCTAVO_HAS_BF16
#include "level/level.inl"
