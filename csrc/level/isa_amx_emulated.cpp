#define OCTAVO_LEVEL amx_emulated
#define OCTAVO_NAME "amx_emulated"
#define OCTAVO_SIMD "level/simd/portable.h"
#define OCTAVO_TABLE kKernelsAmxEmulated
#define OCTAVO_TILES "level/simd/amx_emulated.h"
#include "level/level.inl"
