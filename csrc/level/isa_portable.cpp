#define OCTAVO_LEVEL portable
#define OCTAVO_NAME "portable"
#define OCTAVO_SIMD "level/simd/portable.h"
#define OCTAVO_TABLE kKernelsPortable
#include "level/level.inl"
