// The instruction-set level of this translation unit, set by level/isa_*.cpp; portable if nothing sets it.
#pragma once

#ifndef OCTAVO_LEVEL
#define OCTAVO_LEVEL portable
#define OCTAVO_SIMD "level/simd/portable.h"
#endif
