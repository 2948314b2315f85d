#define OCTAVO_LEVEL portable
#define OCTAVO_NAME "portable"
#define OCTAVO_SIMD "simd/portable.h"
#define OCTAVO_TABLE kKernelsPortable
#include "level.inl"
